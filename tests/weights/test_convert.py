"""Conversion: every format from every layout, killed and resumed, verified, answered where it cannot be."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch

from fakes import checkpoints
from rose.config.quant import QuantConfig
from rose.kernels.formats import decode
from rose.models.gpt_oss import weights
from rose.models.gpt_oss.convert import TARGET_LAYOUTS, convert, verify_copy
from rose.utils.errors import CheckpointError
from rose.weights import folders as folder_rules
from rose.weights import writer
from rose.weights.convert import JOURNAL_NAME
from rose.weights.reader import CheckpointReader

LAYOUTS = ("mxfp4", "bf16", "original")


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    c, root = checkpoints.config(), tmp_path_factory.mktemp("sources")
    original = checkpoints.numbers(c)
    folders = {n: checkpoints.write_layout(root / n, c, original, n) for n in LAYOUTS}
    for folder in folders.values():
        (folder / "tokenizer.json").write_text("{}")
        (folder / "notes.tmp").write_text("not for copying")
    return folders


def _load(folder, name="float32", **cut):
    quant = QuantConfig(weights=name, activations="float32")
    return weights.load(folder, weights.read_config(folder), quant, **cut)


def _experts(parameters):
    stacks = [e for layer in parameters.layers for e in (layer.experts.gate_up, layer.experts.down)]
    return [decode(stack) for stack in stacks]


@pytest.mark.parametrize("source", LAYOUTS)
@pytest.mark.parametrize("name", TARGET_LAYOUTS)
def test_every_layout_converts_to_every_format(sources, tmp_path, source, name):
    done = convert(sources[source], tmp_path / "out", name, shard_bytes=300_000)
    assert done.num_shards > 2
    assert weights.checkpoint_format(tmp_path / "out") == name
    assert weights.read_config(tmp_path / "out") == weights.read_config(sources[source])
    before, after = _load(sources[source]), _load(tmp_path / "out")
    for a, b in zip(_experts(before), _experts(after), strict=True):
        assert torch.equal(a, b), "these numbers fit every format"
    if name != "fp8_block_all":
        assert torch.equal(before.layers[1].qkv.matrix.values, after.layers[1].qkv.matrix.values)
        assert torch.equal(before.head.matrix.values, after.head.matrix.values)
    assert torch.equal(before.layers[0].out.bias_N, after.layers[0].out.bias_N)
    names = {p.name for p in (tmp_path / "out").iterdir()}
    assert {"config.json", "generation_config.json", "tokenizer.json"} <= names
    assert not names & {JOURNAL_NAME, "notes.tmp"}
    assert not [n for n in names if n.endswith(".partial")]


@pytest.mark.parametrize("name", TARGET_LAYOUTS)
def test_the_configuration_says_what_the_copy_is(sources, tmp_path, name):
    convert(sources["original"], tmp_path / "out", name)
    values = json.loads((tmp_path / "out" / "config.json").read_text())
    quantization = values.get("quantization_config", {})
    method = {"mxfp4": "mxfp4", "bf16": None}.get(name, "fp8")
    assert quantization.get("quant_method") == method
    if method == "fp8":
        assert quantization["weight_block_size"] == [128, 128]
        assert quantization["rose_format"] == name


@pytest.mark.parametrize("name", ["fp8_block", "fp8_block_all"])
def test_a_converted_checkpoint_loads_as_it_is_and_in_shares(sources, tmp_path, name):
    convert(sources["mxfp4"], tmp_path / "out", name)
    whole = _load(tmp_path / "out", name)
    assert whole.layers[0].experts.gate_up.format.name == "fp8_block"
    assert (whole.head.matrix.format.name == "fp8_block") == (name == "fp8_block_all")
    shares = [_load(tmp_path / "out", name, rank=r, size=2) for r in range(2)]
    joined = torch.cat([decode(s.layers[0].experts.down) for s in shares])
    assert torch.equal(joined, decode(whole.layers[0].experts.down))
    columns = torch.cat([decode(s.layers[0].out.matrix) for s in shares], dim=1)
    # fp8_block_all: a cut at column 96 runs through a tile; its halves get scales of their own, so numbers that
    # were subnormal in the shared scale stay as they are and none gets worse.
    assert torch.equal(columns, decode(whole.layers[0].out.matrix))


def test_transformers_reads_the_bf16_copy(sources, tmp_path):
    transformers = pytest.importorskip("transformers")
    convert(sources["mxfp4"], tmp_path / "out", "bf16")
    model = transformers.GptOssForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    ours = _load(sources["mxfp4"])
    state = model.state_dict()
    for n, layer in enumerate(ours.layers):
        at = f"model.layers.{n}.mlp.experts."
        assert torch.equal(state[at + "down_proj"].mT, layer.experts.down.values)
        assert torch.equal(state[at + "gate_up_proj"].mT, layer.experts.gate_up.values)


def test_verify_reports_exactness_span_and_error(sources, tmp_path):
    convert(sources["mxfp4"], tmp_path / "out", "fp8_block_all")
    reports = {r.name: r for r in verify_copy(sources["mxfp4"], tmp_path / "out")}
    down = reports["model.layers.0.mlp.experts.down_proj_fp8"]
    assert (down.is_exact, down.span, down.largest_error) == (True, 2, 0.0)
    head = reports["lm_head.weight"]
    assert not head.is_exact
    assert 0 < head.largest_error <= head.largest_magnitude / 16
    assert reports["model.norm.weight"].is_exact
    assert all(r.is_as_promised for r in reports.values())


def test_verify_tells_wide_exponents_from_damage(tmp_path):
    c = checkpoints.config(num_layers=1)
    original = checkpoints.numbers(c, span=2)
    scales = original["block.0.mlp.mlp2_weight.scales"]
    scales[0, :20, 0] = 100  # 21 below the others in its tile
    source = checkpoints.write_layout(tmp_path / "src", c, original, "original")
    convert(source, tmp_path / "out", "fp8_block")
    reports = {r.name.split(".")[-1]: r for r in verify_copy(source, tmp_path / "out")}
    down = reports["down_proj_fp8"]
    assert (down.is_exact, down.span, down.num_wide_tiles) == (False, 21, 1)
    assert down.is_as_promised
    assert reports["gate_up_proj_fp8"].is_exact

    with CheckpointReader(tmp_path / "out") as reader:
        entry = reader.entries["model.layers.0.mlp.experts.gate_up_proj_fp8"]
    with entry.file.open("r+b") as stream:
        stream.seek(entry.offset + 5000)
        byte = stream.read(1)[0]
        stream.seek(entry.offset + 5000)
        stream.write(bytes([byte ^ 0x10]))
    reports = {r.name.split(".")[-1]: r for r in verify_copy(source, tmp_path / "out")}
    assert not reports["gate_up_proj_fp8"].is_as_promised


def _same_files(a, b):
    names = sorted(p.name for p in a.iterdir())
    assert names == sorted(p.name for p in b.iterdir())
    for name in names:
        assert (a / name).read_bytes() == (b / name).read_bytes(), name


class _KilledError(Exception):
    pass


def _kill_after(num_calls):
    calls = iter(range(num_calls))

    def progress(*_):
        if next(calls, None) is None:
            raise _KilledError

    return progress


@pytest.mark.parametrize("num_calls", [0, 1, 9, 23])
def test_an_interrupted_conversion_goes_on_where_it_was(sources, tmp_path, num_calls):
    options = {"shard_bytes": 300_000}
    convert(sources["mxfp4"], tmp_path / "whole", "fp8_block", **options)
    with pytest.raises(_KilledError):
        convert(
            sources["mxfp4"], tmp_path / "cut", "fp8_block",
            progress=_kill_after(num_calls), **options,
        )  # fmt: skip
    finished = json.loads((tmp_path / "cut" / JOURNAL_NAME).read_text())["shards"]
    done = convert(sources["mxfp4"], tmp_path / "cut", "fp8_block", **options)
    assert set(done.kept_shards) == set(finished)
    _same_files(tmp_path / "whole", tmp_path / "cut")


def test_finished_files_are_checked_byte_for_byte_on_resuming(sources, tmp_path):
    options = {"shard_bytes": 300_000}
    convert(sources["mxfp4"], tmp_path / "whole", "fp8_block", **options)
    with pytest.raises(_KilledError):
        convert(
            sources["mxfp4"], tmp_path / "cut", "fp8_block", progress=_kill_after(23), **options
        )
    finished = sorted(json.loads((tmp_path / "cut" / JOURNAL_NAME).read_text())["shards"])
    assert len(finished) >= 2
    damaged = tmp_path / "cut" / finished[0]
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 1
    damaged.write_bytes(content)
    done = convert(sources["mxfp4"], tmp_path / "cut", "fp8_block", **options)
    assert set(done.kept_shards) == set(finished[1:])
    _same_files(tmp_path / "whole", tmp_path / "cut")


def test_a_killed_process_leaves_what_can_be_resumed(sources, tmp_path):
    """SIGKILL at a random moment: no clean-up of any kind runs."""
    program = (
        "import sys, time; from pathlib import Path\n"
        "from rose.models.gpt_oss.convert import convert\n"
        "convert(Path(sys.argv[1]), Path(sys.argv[2]), 'fp8_block', shard_bytes=300_000,\n"
        "        progress=lambda *_: time.sleep(0.02))\n"
    )
    out = tmp_path / "cut"
    process = subprocess.Popen([sys.executable, "-c", program, str(sources["mxfp4"]), str(out)])
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not list(out.glob("model-00002-*")):
        assert process.poll() is None, "it ended before it could be killed"
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    done = convert(sources["mxfp4"], out, "fp8_block", shard_bytes=300_000)
    assert done.kept_shards
    convert(sources["mxfp4"], tmp_path / "whole", "fp8_block", shard_bytes=300_000)
    _same_files(tmp_path / "whole", out)


def test_two_processes_do_not_write_into_one_folder(sources, tmp_path):
    """The second would remove or truncate what the first is writing."""
    told = []

    def begin_another(*_):
        if not told:
            with pytest.raises(CheckpointError, match="another process is writing into") as caught:
                convert(sources["mxfp4"], tmp_path / "out", "fp8_block")
            told.append(caught.value)

    convert(sources["mxfp4"], tmp_path / "out", "fp8_block", progress=begin_another)
    assert told
    assert all(r.is_as_promised for r in verify_copy(sources["mxfp4"], tmp_path / "out"))


@pytest.mark.parametrize("shards", [[1], None, "all null", "all text", "crcs in a list"])
def test_a_damaged_journal_keeps_nothing_and_breaks_nothing(sources, tmp_path, shards):
    options = {"shard_bytes": 300_000}
    out = tmp_path / "cut"
    with pytest.raises(_KilledError):
        convert(sources["mxfp4"], out, "fp8_block", progress=_kill_after(23), **options)
    journal = json.loads((out / JOURNAL_NAME).read_text())
    entry = {"all null": None, "all text": "x", "crcs in a list": {"bytes": 1, "crcs": [1]}}
    journal["shards"] = (
        dict.fromkeys(journal["shards"], entry[shards]) if isinstance(shards, str) else shards
    )
    (out / JOURNAL_NAME).write_text(json.dumps(journal))
    assert convert(sources["mxfp4"], out, "fp8_block", **options).kept_shards == ()
    assert all(r.is_as_promised for r in verify_copy(sources["mxfp4"], out))


def test_a_folder_that_cannot_be_is_answered(sources, tmp_path):
    with pytest.raises(CheckpointError, match="cannot be made"):
        convert(sources["mxfp4"], tmp_path / ("n" * 300), "fp8_block")


def test_another_conversion_does_not_continue_this_one(sources, tmp_path):
    with pytest.raises(_KilledError):
        convert(sources["mxfp4"], tmp_path / "cut", "fp8_block", progress=_kill_after(3))
    with pytest.raises(CheckpointError, match="differs in format"):
        convert(sources["mxfp4"], tmp_path / "cut", "bf16")
    with pytest.raises(CheckpointError, match="differs in source"):
        convert(sources["original"], tmp_path / "cut", "fp8_block")


def test_a_folder_that_is_not_empty_is_left_alone(sources, tmp_path):
    (tmp_path / "precious.txt").write_text("x")
    with pytest.raises(CheckpointError, match=r"is not empty \(found: precious\.txt\)"):
        convert(sources["mxfp4"], tmp_path, "fp8_block")
    assert [p.name for p in tmp_path.iterdir()] == ["precious.txt"]
    with pytest.raises(CheckpointError, match="is a file"):
        convert(sources["mxfp4"], tmp_path / "precious.txt", "fp8_block")


def test_a_full_disk_is_foreseen(sources, tmp_path, monkeypatch):
    class Usage:
        free = folder_rules.SPARE_BYTES

    monkeypatch.setattr(folder_rules.shutil, "disk_usage", lambda _: Usage)
    with pytest.raises(CheckpointError, match=r"needs .* of disk, 64\.00 MiB are free"):
        convert(sources["mxfp4"], tmp_path / "out", "fp8_block")
    assert not list((tmp_path / "out").glob("model*"))


def test_a_disk_that_fills_up_anyway_is_answered(sources, tmp_path, monkeypatch):
    calls = iter(range(5))
    pwrite = os.pwrite

    def fills_up(*arguments):
        if next(calls, None) is None:
            raise OSError(28, "No space left on device")
        return pwrite(*arguments)

    monkeypatch.setattr(writer.os, "pwrite", fills_up)
    with pytest.raises(CheckpointError, match="No space left on device"):
        convert(sources["mxfp4"], tmp_path / "out", "fp8_block")
    monkeypatch.undo()
    convert(sources["mxfp4"], tmp_path / "out", "fp8_block")
    assert weights.checkpoint_format(tmp_path / "out") == "fp8_block"


def test_everything_wrong_with_the_source_is_reported_before_writing(tmp_path):
    c = checkpoints.config()
    tensors = checkpoints.numbers(c)
    del tensors["block.1.attn.sinks"]
    tensors["block.0.extra"] = torch.zeros(1)
    tensors["norm.scale"] = torch.zeros(3)
    source = checkpoints.write(tmp_path / "src", tensors, checkpoints.original_json(c))
    with pytest.raises(CheckpointError) as caught:
        convert(source, tmp_path / "out", "fp8_block")
    assert len(caught.value.problems) == 3
    assert not (tmp_path / "out").exists()


def test_weights_that_are_no_numbers_are_refused_by_name(tmp_path):
    c = checkpoints.config(num_layers=1)
    tensors = checkpoints.hugging_face(c, checkpoints.numbers(c), is_expanded=True)
    tensors["model.layers.0.mlp.experts.down_proj"][2, 5, 7] = float("nan")
    source = checkpoints.write(tmp_path / "src", tensors, checkpoints.hugging_face_json(c))
    message = r"layers\.0\.mlp\.experts\.down_proj: weights .* NaN"
    with pytest.raises(CheckpointError, match=message):
        convert(source, tmp_path / "out", "fp8_block")
    with pytest.raises(CheckpointError, match=message):
        _load(source, "mxfp4")


def test_unknown_formats_are_refused_with_the_known_ones(sources, tmp_path):
    with pytest.raises(
        CheckpointError, match="'int4' is not known; allowed: mxfp4, bf16, fp8_block"
    ):
        convert(sources["mxfp4"], tmp_path / "out", "int4")
