"""rose synth, inspect and convert on the command line: what they print and how they end."""

import json
import subprocess
import sys

import pytest

from fakes import checkpoints
from rose.cli.main import run


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    c = checkpoints.config()
    root = tmp_path_factory.mktemp("model")
    return checkpoints.write_layout(root / "m", c, checkpoints.numbers(c), "mxfp4")


def test_convert_and_verify_end_well(folder, tmp_path, capsys):
    arguments = ["convert", str(folder), str(tmp_path / "out"), "--format", "fp8_block", "--verify"]
    assert run(arguments) == 0
    printed = capsys.readouterr().out
    assert "hugging_face mxfp4 to fp8_block" in printed
    assert "down_proj_fp8: mxfp4 to fp8_block: bit-exact" in printed
    assert "verified: 37 of 37 tensors bit-exact" in printed
    assert "largest exponent span 2" in printed


def test_inspect_counts_tensors_and_bytes(folder, capsys):
    assert run(["inspect", str(folder), "--tp", "1,2,3", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["format"], report["num_tensors"], report["num_files"]) == ("mxfp4", 41, 3)
    one, two, three = report["memory"]
    # 2 kv heads x 32 x k and v x 2 bytes in the one full layer; 128 + 64 positions in the sliding one
    assert one["kv_bytes_per_token"] == 256
    assert two["kv_bytes_per_sequence"] == (128 + 64) * 128
    assert one["weight_bytes"]["mxfp4"] < one["weight_bytes"]["fp8_block"]
    assert one["weight_bytes"]["bf16"] == pytest.approx(2 * report["num_parameters"], rel=0.01)
    assert "cannot share" in three["problem"]


def test_inspect_of_published_sizes_agrees_with_arithmetic():
    """20b: 9,555,148,800 + 597,196,800 bytes of experts and 3,608,919,168 of bf16; norms and sinks go to float32."""
    from rose.config.quant import QuantConfig
    from rose.models.gpt_oss import weights
    from rose.models.gpt_oss.config import published
    from rose.quant.scheme import scheme
    from rose.weights.inspect import resident_bytes
    from rose.weights.pieces import WHOLE

    layout = weights.Layout(naming="hugging_face", experts="mxfp4")
    formats = scheme(QuantConfig(weights="mxfp4", activations="bf16"))
    widened = 2 * (24 * (2 * 2880 + 64) + 2880)
    found = resident_bytes(weights.rules(published("20b"), layout), formats.of_role, cut=WHOLE)
    assert found == 13_761_264_768 + widened


def test_inspect_prints_what_is_missing_and_fails(folder, tmp_path, capsys):
    c = checkpoints.config()
    tensors = checkpoints.hugging_face(c, checkpoints.numbers(c))
    del tensors["lm_head.weight"]
    bad = checkpoints.write(tmp_path / "bad", tensors, checkpoints.hugging_face_json(c))
    assert run(["inspect", str(bad)]) == 1
    printed = capsys.readouterr().out
    assert "1 tensors are missing: lm_head.weight" in printed
    assert "NOT complete" in printed


def test_synth_writes_what_inspect_finds_complete(tmp_path, capsys):
    assert run(["synth", str(tmp_path / "m"), "--size", "tiny", "--layers", "1"]) == 0
    assert "gpt-oss tiny, 1 layers" in capsys.readouterr().out
    assert run(["inspect", str(tmp_path / "m"), "--device", "cpu"]) == 0
    printed = capsys.readouterr().out
    assert "complete: every tensor is in its place" in printed
    assert "relayouts included: copies in float32 for a CPU's kernels" in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["convert", "{m}", "{out}", "--format", "int4"], "format 'int4' is not known"),
        (["convert", "{out}", "{out}2", "--format", "bf16"], "there is nothing"),
        (["convert", "{m}", "{m}", "--format", "bf16"], "is not empty"),
        (["inspect", "{out}"], "there is nothing"),
        (["inspect", "{m}", "--tp", "two"], "whole numbers of at least 1"),
        (["synth", "{out}", "--size", "7b"], "size '7b' is not known"),
        (["synth", "{m}"], "is not empty"),
    ],
)
def test_mistakes_are_answered_in_words(folder, tmp_path, capsys, arguments, message):
    words = [word.format(m=folder, out=tmp_path / "out") for word in arguments]
    assert run(words) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error


def test_damaged_checkpoints_are_answered_in_words(tmp_path, capsys):
    c = checkpoints.config()
    bad = checkpoints.write_layout(tmp_path / "bad", c, checkpoints.numbers(c), "mxfp4")
    file = bad / "model-00002-of-00002.safetensors"
    file.write_bytes(file.read_bytes()[:-7])
    for words in (["inspect"], ["convert", str(tmp_path / "out"), "--format", "bf16"]):
        assert run([words[0], str(bad), *words[1:]]) == 2
        assert "model-00002-of-00002.safetensors has" in capsys.readouterr().err
    (bad / "config.json").write_text('{"model_type": "llama"}')
    assert run(["inspect", str(bad)]) == 2
    assert "gpt_oss" in capsys.readouterr().err


def test_help_needs_no_torch():
    program = (
        "import sys; sys.modules['torch'] = None\n"
        "from rose.cli.main import run\n"
        "sys.exit(any(run([c, '--help']) for c in ('convert', 'inspect', 'synth')))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "--verify" in done.stdout
