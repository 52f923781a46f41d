"""Stream tensors of a safetensors checkpoint by name, whatever the number and the names of its files.

Headers are read and checked when the reader is made; data is read on demand, any range of rows, into fresh host
memory (no memory map: what is resident is what was asked for). Knows no model.
"""

from __future__ import annotations

import json
import math
import os
import re
import struct
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rose.utils.errors import CheckpointError
from rose.weights.folders import some

INDEX_NAME = "model.safetensors.index.json"
_HEADER_LIMIT_BYTES = 100_000_000  # the limit of the safetensors format
_READ_LIMIT_BYTES = 1 << 30  # Linux reads at most 2 GiB - 4 KiB at once
DTYPES: dict[str, tuple[torch.dtype, int]] = {
    "F64": (torch.float64, 8),
    "F32": (torch.float32, 4),
    "F16": (torch.float16, 2),
    "BF16": (torch.bfloat16, 2),
    "F8_E4M3": (torch.float8_e4m3fn, 1),
    "U8": (torch.uint8, 1),
    "I8": (torch.int8, 1),
    "I32": (torch.int32, 4),
    "I64": (torch.int64, 8),
    "BOOL": (torch.bool, 1),
}
"""safetensors name -> torch dtype, bytes per element."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """One tensor: where it lies and what it is."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    """Bytes from the start of the file."""
    num_bytes: int


def locate(folder: Path) -> Path:
    """Return the folder that holds the tensors: `folder` itself, or its `original` where only that has any.

    Raises  CheckpointError where there is no folder or no safetensors file.
    """
    if not folder.is_dir():
        found = "a file" if folder.exists() else "nothing"
        raise CheckpointError(
            f"model folder {folder} was asked for, but there is {found}; needed: a folder with config.json and "
            "*.safetensors; check the path"
        )
    for candidate in (folder, folder / "original"):
        if any(candidate.glob("*.safetensors")) or (candidate / INDEX_NAME).exists():
            return candidate
    names = sorted(p.name + "/" * p.is_dir() for p in folder.iterdir())
    raise CheckpointError(
        f"{folder} holds no *.safetensors file (found: {some(names) or 'nothing'}); only safetensors "
        "checkpoints are read; download them or save them in that format"
    )


def config_path(folder: Path) -> Path:
    """Return where config.json is, or should be: beside the tensors, else in the model folder itself.

    Raises  CheckpointError where there is no folder or no safetensors file.
    """
    beside, above = locate(folder) / "config.json", folder / "config.json"
    return above if above.exists() and not beside.exists() else beside


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises  CheckpointError where it is missing or damaged.
    """
    try:
        value = json.loads(path.read_text())
    except FileNotFoundError:
        raise CheckpointError(
            f"{path} is missing; a checkpoint needs it; restore it from the checkpoint's source"
        ) from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise CheckpointError(
            f"{path} cannot be read as JSON ({error}); a JSON object is needed; fetch the file again"
        ) from None
    if not isinstance(value, dict):
        raise CheckpointError(
            f"{path} holds a JSON {type(value).__name__}; an object is needed; fetch the file again"
        )
    return value


class CheckpointReader:
    """The tensors of one folder, by name."""

    def __init__(self, folder: Path) -> None:
        """Read and check every header.

        Raises  CheckpointError listing every truncated, missing or contradictory file.
        """
        self.folder = locate(folder)
        self.entries: dict[str, TensorEntry] = {}
        self._descriptors: dict[Path, int] = {}
        self._lock = threading.Lock()
        problems: list[str] = []
        weight_map = _read_index(self.folder, problems)
        self.files = _list_files(self.folder, weight_map, problems)
        whole = {file.name for file in self.files if self._add_file(file, problems)}
        if weight_map is not None:
            _check_index(weight_map, self.entries, whole, problems)
        if problems:
            raise CheckpointError(problems)

    def _add_file(self, file: Path, problems: list[str]) -> bool:
        try:
            entries = read_header(file)
        except CheckpointError as error:
            problems.extend(error.problems)
            return False
        for entry in entries:
            other = self.entries.setdefault(entry.name, entry)
            if other is not entry:
                problems.append(
                    f"tensor {entry.name} is in both {other.file.name} and {file.name}; each may be stored once; "
                    f"remove the stale file from {self.folder}"
                )
        return True

    def __contains__(self, name: str) -> bool:
        return name in self.entries

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(entry.num_bytes for entry in self.entries.values())

    def read(
        self, name: str, start: int = 0, stop: int | None = None, *, is_pinned: bool = False
    ) -> Tensor:
        """Read rows start..stop of a tensor's first axis into fresh host memory; threads may share a reader.

        Pinned memory makes the copy to a CUDA device several times faster.
        Raises  CheckpointError where the file has shrunk since its header was read.
        """
        entry = self.entries[name]
        dtype, width = DTYPES[entry.dtype]
        if not entry.shape:
            return self._read_bytes(entry, 0, width, is_pinned).view(dtype).reshape(())
        stop = entry.shape[0] if stop is None else stop
        row_bytes = math.prod(entry.shape[1:]) * width
        raw = self._read_bytes(entry, start * row_bytes, (stop - start) * row_bytes, is_pinned)
        return raw.view(dtype).view(stop - start, *entry.shape[1:])

    def _read_bytes(
        self, entry: TensorEntry, start: int, num_bytes: int, is_pinned: bool
    ) -> Tensor:
        raw = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=is_pinned)
        view = raw.numpy().data
        done = 0
        while done < num_bytes:
            part = view[done : done + _READ_LIMIT_BYTES]
            got = os.preadv(self._descriptor(entry.file), [part], entry.offset + start + done)
            if got == 0:
                raise CheckpointError(
                    f"{entry.file} ended while {entry.name} was read; it was whole when opened; "
                    "do not change a checkpoint in use"
                )
            done += got
        return raw

    def _descriptor(self, file: Path) -> int:
        with self._lock:
            if file not in self._descriptors:
                self._descriptors[file] = os.open(file, os.O_RDONLY)
            return self._descriptors[file]

    def close(self) -> None:
        """Close the files; later reads open them again."""
        with self._lock:
            for descriptor in self._descriptors.values():
                os.close(descriptor)
            self._descriptors.clear()

    def __enter__(self) -> CheckpointReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_header(file: Path) -> list[TensorEntry]:
    """Read the header of one safetensors file and check it against the file's size.

    Raises  CheckpointError listing what is wrong with this file.
    """
    again = "the file is truncated or damaged; fetch it again"
    if file.exists() and not file.is_file():
        # A pipe would be waited for for ever.
        raise CheckpointError(
            f"{file} is no regular file; a safetensors file is needed; fetch it again"
        )
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            head = stream.read(8)
            length = struct.unpack("<Q", head)[0] if len(head) == 8 else -1
            if length < 0 or length > min(_HEADER_LIMIT_BYTES, size - 8):
                raise CheckpointError(
                    f"{file} has {size} bytes and announces a header of {max(length, 0)}; a safetensors file begins "
                    f"with its header's length; {again}"
                )
            header = json.loads(stream.read(length))
    except FileNotFoundError:
        raise CheckpointError(f"{file} is missing; fetch it from the checkpoint's source") from None
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read ({error}); check it and its owner") from None
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError):
        raise CheckpointError(f"{file} has a header that is not JSON; {again}") from None
    if not isinstance(header, dict):
        raise CheckpointError(f"{file} has a header that is no JSON object; {again}")
    header.pop("__metadata__", None)
    problems: list[str] = []
    entries = [_entry(file, 8 + length, name, value, problems) for name, value in header.items()]
    found = [entry for entry in entries if entry is not None]
    end = max((entry.offset + entry.num_bytes for entry in found), default=8 + length)
    if end > size:
        cut = sorted(e.name for e in found if e.offset + e.num_bytes > size)
        problems.append(
            f"{file} has {size} bytes, its header describes {end}; {len(cut)} tensors are cut off, first {cut[0]}; "
            f"{again}"
        )
    problems += _gaps(file, 8 + length, size, found)
    if problems:
        raise CheckpointError(problems)
    return found


def _gaps(file: Path, base: int, size: int, entries: list[TensorEntry]) -> list[str]:
    """Find tensors that share bytes and bytes of no tensor: the format allows neither, so offsets are wrong."""
    at, before = base, "the header"
    for entry in sorted(entries, key=lambda e: (e.offset, e.num_bytes)):
        if entry.offset != at:
            what = "overlaps" if entry.offset < at else "does not follow"
            return [
                f"{file}: {entry.name} begins at byte {entry.offset} and {what} {before}, which ends at {at}; tensors "
                "lie end to end; the header is damaged; fetch the file again"
            ]
        at, before = entry.offset + entry.num_bytes, entry.name
    if at < size:
        return [
            f"{file} has {size} bytes, its tensors end at {at}; nothing may follow; the file is damaged; "
            "fetch it again"
        ]
    return []


def _entry(file: Path, base: int, name: str, value: Any, problems: list[str]) -> TensorEntry | None:
    try:
        dtype, shape = str(value["dtype"]), tuple(value["shape"])
        begin, end = value["data_offsets"]
        if not all(type(n) is int for n in (*shape, begin, end)):
            raise TypeError("sizes are whole numbers")
    except (KeyError, TypeError, ValueError):
        problems.append(f"{file}: the header's entry of {name} is malformed; fetch the file again")
        return None
    if dtype not in DTYPES:
        problems.append(
            f"{file}: {name} is stored as {dtype}; known: {', '.join(DTYPES)}; convert it to one of them"
        )
        return None
    if min((begin, *shape)) < 0 or end - begin != math.prod(shape) * DTYPES[dtype][1]:
        problems.append(
            f"{file}: {name} is {dtype} {list(shape)} but its data spans {end - begin} bytes; "
            "the header is damaged; fetch the file again"
        )
        return None
    return TensorEntry(
        name=name, file=file, dtype=dtype, shape=shape, offset=base + begin, num_bytes=end - begin
    )


def _read_index(folder: Path, problems: list[str]) -> dict[str, str] | None:
    path = folder / INDEX_NAME
    if not path.exists():
        return None
    try:
        weight_map = read_json(path).get("weight_map")
    except CheckpointError as error:
        problems.extend(error.problems)
        return None
    if not isinstance(weight_map, dict) or not all(isinstance(f, str) for f in weight_map.values()):
        problems.append(
            f"{path} has no weight_map from tensor names to file names; fetch the file again or delete it "
            "(without an index every *.safetensors file is read)"
        )
        return None
    return weight_map


def _list_files(folder: Path, weight_map: dict[str, str] | None, problems: list[str]) -> list[Path]:
    if weight_map is None:
        files = sorted(folder.glob("*.safetensors"))
        problems.extend(_missing_numbers(folder, [f.name for f in files]))
        return files
    names = sorted(set(weight_map.values()))
    outside = [n for n in names if Path(n).name != n or not n or "\0" in n or len(n) > 255]
    if outside:
        problems.append(
            f"{folder / INDEX_NAME} points outside its folder: {', '.join(map(repr, outside))[:400]}; file names "
            "without a path are allowed; fetch the index again"
        )
    missing = [n for n in names if n not in outside and not (folder / n).exists()]
    for name in missing:
        held = sum(1 for f in weight_map.values() if f == name)
        problems.append(
            f"{folder / name} is missing; the index expects {held} tensors in it; "
            "fetch it from the checkpoint's source"
        )
    return [folder / n for n in names if n not in missing and n not in outside]


def _missing_numbers(folder: Path, names: list[str]) -> list[str]:
    """Find gaps in `x-00001-of-00003` names where no index says what there should be.

    Numbers run 1..T, or 0..T with T + 1 files (the published gpt-oss checkpoints), or 0..T-1.
    """
    groups: dict[tuple[str, int], set[int]] = {}
    for name in names:
        match = re.fullmatch(r"(.*?)-+(\d+)-of-(\d+)\.safetensors", name)
        if match:
            groups.setdefault((match[1], int(match[3])), set()).add(int(match[2]))
    problems = []
    for (stem, total), numbers in groups.items():
        first = 0 if 0 in numbers else 1
        last = total - 1 if first == 0 and total not in numbers else total
        absent = sorted(set(range(first, last + 1)) - numbers)
        if absent:
            problems.append(
                f"{folder} lacks shard {', '.join(map(str, absent))} of {stem}-*-of-{total:05d}.safetensors "
                f"(found: {', '.join(map(str, sorted(numbers)))}); fetch the missing files"
            )
    return problems


def _check_index(
    weight_map: dict[str, str],
    entries: dict[str, TensorEntry],
    whole_files: set[str],
    problems: list[str],
) -> None:
    for name, file in weight_map.items():
        if file not in whole_files:
            continue  # reported with its file
        if name not in entries:
            problems.append(
                f"tensor {name} should be in {file} says the index, but is not; fetch that file again"
            )
        elif entries[name].file.name != file:
            problems.append(
                f"tensor {name} is in {entries[name].file.name}, the index says {file}; fetch the index again"
            )
