"""Write safetensors files in pieces: the header first, then every tensor at its place, in bounded memory.

A file is written beside its final name and renamed when it is whole, so that what has its name is complete. A CRC per
tensor is kept on the way, for the journal of whoever resumes.
"""

from __future__ import annotations

import json
import math
import os
import struct
import zlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from rose.utils.errors import CheckpointError
from rose.weights.reader import DTYPES, INDEX_NAME

PARTIAL_SUFFIX = ".partial"
_CHECK_BYTES = 16 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """A tensor that will be written."""

    name: str
    dtype: str
    """As safetensors names it."""
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of its data."""
        return math.prod(self.shape) * DTYPES[self.dtype][1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """One file and the tensors in it."""

    file_name: str
    tensors: tuple[TensorSpec, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensors, without the header."""
        return sum(spec.num_bytes for spec in self.tensors)


class ShardWriter:
    """One file while it is written; each tensor is given front to back, tensors in any order."""

    def __init__(self, folder: Path, shard: Shard) -> None:
        """Create the partial file with its header.

        Raises  CheckpointError where the disk refuses.
        """
        self._path = folder / shard.file_name
        self._partial = folder / (shard.file_name + PARTIAL_SUFFIX)
        header, self._begins, end = _header(shard)
        self._written = {spec.name: 0 for spec in shard.tensors}
        self._sizes = {spec.name: spec.num_bytes for spec in shard.tensors}
        self.crcs = {spec.name: 0 for spec in shard.tensors}
        with self._answered():
            self._file = self._partial.open("wb", buffering=0)
            self._file.truncate(end)
        self._write_at(0, header)

    def append(self, name: str, values: Tensor) -> None:
        """Write the next elements of a tensor."""
        raw = values.detach().cpu().contiguous().view(torch.uint8).numpy().reshape(-1).data
        at = self._written[name]
        assert at + raw.nbytes <= self._sizes[name], f"{name} gets more data than its header says"
        self._write_at(self._begins[name] + at, raw)
        self.crcs[name] = zlib.crc32(raw, self.crcs[name])
        self._written[name] = at + raw.nbytes

    def finish(self) -> None:
        """Flush to the disk and give the file its name."""
        short = [n for n, size in self._sizes.items() if self._written[n] != size]
        assert not short, f"not all data was given: {short}"
        with self._answered():
            os.fsync(self._file.fileno())
            self._file.close()
            self._partial.replace(self._path)

    def _write_at(self, offset: int, data: bytes | memoryview) -> None:
        view, done = memoryview(data), 0
        with self._answered():
            while done < len(view):
                done += os.pwrite(self._file.fileno(), view[done:], offset + done)

    def _answered(self) -> AbstractContextManager[None]:
        return disk_errors_answered(self._partial)

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self._file.closed:
            self._file.close()


def _header(shard: Shard) -> tuple[bytes, dict[str, int], int]:
    """Return the header's bytes, each tensor's place in the file, and the length of the file."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offsets, at = {}, 0
    # Widest elements first keeps every tensor aligned to its element, which readers that map files rely on.
    for spec in sorted(shard.tensors, key=lambda s: -DTYPES[s.dtype][1]):
        offsets[spec.name] = at
        entries[spec.name] = {
            "dtype": spec.dtype,
            "shape": list(spec.shape),
            "data_offsets": [at, at + spec.num_bytes],
        }
        at += spec.num_bytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    base = 8 + len(text)
    return struct.pack("<Q", len(text)) + text, {n: base + o for n, o in offsets.items()}, base + at


@contextmanager
def disk_errors_answered(path: Path) -> Iterator[None]:
    """Turn what the disk refuses into a CheckpointError that names the file."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"{path} could not be written ({error.strerror}); what is finished is kept; free space and permission "
            "to write are needed; then run the same command again"
        ) from None


def crc_of(path: Path, offset: int, num_bytes: int) -> int:
    """Return the CRC of a range of a file."""
    crc = 0
    with path.open("rb") as stream:
        stream.seek(offset)
        while num_bytes > 0:
            part = stream.read(min(num_bytes, _CHECK_BYTES))
            if not part:
                break
            crc = zlib.crc32(part, crc)
            num_bytes -= len(part)
    return crc


def write_json(path: Path, value: object) -> None:
    """Write a JSON file under a passing name and rename it, so that it is never half there."""
    partial = path.with_name(path.name + PARTIAL_SUFFIX)
    with disk_errors_answered(partial):
        partial.write_text(json.dumps(value, indent=2) + "\n")
        partial.replace(path)


def write_index(folder: Path, shards: list[Shard]) -> None:
    """Write the index that says which file holds which tensor."""
    weight_map = {spec.name: shard.file_name for shard in shards for spec in shard.tensors}
    total = sum(shard.num_bytes for shard in shards)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    write_json(folder / INDEX_NAME, index)
