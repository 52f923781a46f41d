"""Headers are checked before any data is read; data comes by name, whatever the files are called."""

import json
import os
import struct

import pytest
import torch
from safetensors.torch import save_file

from fakes import checkpoints
from rose.utils.errors import CheckpointError
from rose.weights.reader import INDEX_NAME, CheckpointReader

TENSORS = {
    "a": torch.arange(12).float().view(3, 4),
    "b": torch.arange(6).bfloat16().view(6, 1),
    "c": torch.arange(256).to(torch.uint8).view(2, 8, 16),
    "d": torch.randn(5, 3).to(torch.float8_e4m3fn),
    "scalar": torch.tensor(3.0),
}


def _write(folder, **options):
    return checkpoints.write(folder, TENSORS, {}, **options)


@pytest.mark.parametrize("naming", ["one", "zero", "dashes"])
@pytest.mark.parametrize("with_index", [True, False])
@pytest.mark.parametrize("num_files", [1, 3])
def test_tensors_are_found_under_any_numbering(tmp_path, naming, with_index, num_files):
    folder = _write(tmp_path, naming=naming, with_index=with_index, num_files=num_files)
    with CheckpointReader(folder) as reader:
        assert reader.entries.keys() == TENSORS.keys()
        for name, tensor in TENSORS.items():
            got = reader.read(name)
            assert got.dtype == tensor.dtype
            assert got.shape == tensor.shape
            assert torch.equal(got.float(), tensor.float())


def test_ranges_of_rows_are_read_alone(tmp_path):
    with CheckpointReader(_write(tmp_path)) as reader:
        assert torch.equal(reader.read("a", 1, 3), TENSORS["a"][1:])
        assert torch.equal(reader.read("c", 1, 2), TENSORS["c"][1:])
        assert reader.read("a", 2, 2).shape == (0, 4)


def test_the_original_subfolder_is_found(tmp_path):
    _write(tmp_path / "original", naming="dashes", num_files=2, with_index=False)
    with CheckpointReader(tmp_path) as reader:
        assert reader.folder.name == "original"


def _problems(folder):
    with pytest.raises(CheckpointError) as caught:
        CheckpointReader(folder)
    return caught.value.problems


def test_a_truncated_shard_is_named_with_what_is_cut_off(tmp_path):
    folder = _write(tmp_path, num_files=3, naming="zero")
    file = folder / "model-00001-of-00002.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[:-1])
    problems = _problems(folder)
    assert f"{file} has {len(data) - 1} bytes, its header describes {len(data)}" in problems[0]
    assert "fetch it again" in problems[0]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x01\x02",
        struct.pack("<Q", 1 << 60),
        struct.pack("<Q", 4) + b"{{{{",
        struct.pack("<Q", 2) + b"[]",
    ],
)
def test_files_that_are_no_safetensors_are_named(tmp_path, content):
    (tmp_path / "model.safetensors").write_bytes(content)
    assert "model.safetensors" in _problems(tmp_path)[0]


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"dtype": "F99", "shape": [1], "data_offsets": [0, 4]}, "stored as F99"),
        ({"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}, "spans 4 bytes"),
        ({"dtype": "F32", "shape": [-1], "data_offsets": [4, 0]}, "spans -4 bytes"),
        ({"dtype": "F32"}, "malformed"),
        (7, "malformed"),
    ],
)
def test_contradictory_headers_are_named(tmp_path, entry, message):
    text = json.dumps({"x": entry}).encode()
    content = struct.pack("<Q", len(text)) + text + bytes(8)
    (tmp_path / "model.safetensors").write_bytes(content)
    assert message in _problems(tmp_path)[0]


def test_a_missing_shard_is_named_and_counted(tmp_path):
    folder = _write(tmp_path, num_files=3, naming="zero")
    (folder / "model-00002-of-00002.safetensors").unlink()
    (problem,) = _problems(folder)
    assert (
        "model-00002-of-00002.safetensors is missing; the index expects 1 tensors in it" in problem
    )


@pytest.mark.parametrize(("naming", "gone"), [("one", 2), ("one", 3), ("zero", 1), ("dashes", 1)])
def test_without_an_index_gaps_in_the_numbers_are_found(tmp_path, naming, gone):
    folder = _write(tmp_path, num_files=3, naming=naming, with_index=False)
    next(folder.glob(f"*-{gone:05d}-of-*")).unlink()
    assert f"lacks shard {gone}" in _problems(folder)[0]


def test_a_tensor_in_two_files_is_an_error(tmp_path):
    save_file({"a": torch.ones(1)}, tmp_path / "x.safetensors")
    save_file({"a": torch.ones(1)}, tmp_path / "y.safetensors")
    assert "tensor a is in both x.safetensors and y.safetensors" in _problems(tmp_path)[0]


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("not json", "cannot be read as JSON"),
        ("[]", "an object is needed"),
        ("{}", "no weight_map"),
        ('{"weight_map": {"a": "../../etc/passwd"}}', "points outside its folder"),
        ('{"weight_map": {"zz": "model.safetensors"}}', "tensor zz should be in"),
    ],
)
def test_damaged_indices_are_answered(tmp_path, index, message):
    folder = _write(tmp_path, with_index=False)
    (folder / INDEX_NAME).write_text(index)
    assert any(message in problem for problem in _problems(folder))


def test_folders_without_weights_are_answered(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    assert "holds no *.safetensors file (found: pytorch_model.bin)" in _problems(tmp_path)[0]
    assert "there is nothing" in _problems(tmp_path / "absent")[0]
    assert "there is a file" in _problems(tmp_path / "pytorch_model.bin")[0]
    (tmp_path / "empty").mkdir()
    assert "(found: nothing)" in _problems(tmp_path / "empty")[0]
    for name in (".hidden", "notes", "x.conf"):
        (tmp_path / name).touch()
    found = "(found: .hidden, empty/, notes, pytorch_model.bin and 1 more)"
    assert found in _problems(tmp_path)[0]


def test_every_problem_is_reported_at_once(tmp_path):
    folder = _write(tmp_path, num_files=3, naming="zero")
    (folder / "model-00000-of-00002.safetensors").unlink()
    (folder / "model-00001-of-00002.safetensors").write_bytes(b"")
    assert len(_problems(folder)) == 2


def _with_header(file, change, tail=b""):
    """Rewrite a file's header; the data stays where it is, `tail` follows it."""
    raw = file.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + length :] + tail)


def _same_bytes(header):
    header["b"]["data_offsets"] = header["a"]["data_offsets"]


def _fractions(header):
    header["a"]["shape"] = [2.5, 2]


def _infinite(header):
    header["a"]["shape"] = [float("inf")]


@pytest.mark.parametrize(
    ("change", "tail", "message"),
    [
        (_same_bytes, b"", "b begins at byte .* and overlaps a"),
        (_fractions, b"", "entry of a is malformed"),
        (_infinite, b"", "entry of a is malformed"),
        (lambda header: header.pop("a"), b"", "b begins at byte .* and does not follow the header"),
        (lambda _: None, b"xyz", "nothing may follow"),
    ],
)
def test_headers_that_would_give_wrong_numbers_are_refused(tmp_path, change, tail, message):
    file = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(2, 2), "b": torch.zeros(2, 2)}, file)
    _with_header(file, change, tail)
    with pytest.raises(CheckpointError, match=message):
        CheckpointReader(tmp_path)


def test_a_pipe_in_place_of_a_file_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="no regular file"):
        CheckpointReader(tmp_path)


@pytest.mark.parametrize("name", ["a\0b", "", "..", "n" * 5000])
def test_an_index_that_names_no_file_is_answered(tmp_path, name):
    save_file({"a": torch.ones(2)}, tmp_path / "model.safetensors")
    (tmp_path / INDEX_NAME).write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(CheckpointError, match=r"points outside its folder|no regular file"):
        CheckpointReader(tmp_path)
