"""Turn a checkpoint into another format, file by file, in bounded memory, and go on after a kill.

Rules of the source and rules of the destination are joined by what they fill; each tensor then streams through one
expert or some rows at a time. A journal in the destination lists finished files; on resuming they are checked again.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rose.kernels.formats import FormattedTensor
from rose.quant.encode import requantize
from rose.utils.errors import CheckpointError
from rose.weights.accounts import require_clean
from rose.weights.folders import make, only_writer, require_empty, require_space
from rose.weights.loader import Progress, ignore_progress
from rose.weights.pieces import Piece, naming, split, stream
from rose.weights.reader import CheckpointReader, read_header, read_json
from rose.weights.rules import WeightRule
from rose.weights.writer import (
    PARTIAL_SUFFIX,
    Shard,
    ShardWriter,
    TensorSpec,
    crc_of,
    disk_errors_answered,
    write_index,
    write_json,
)

JOURNAL_NAME = ".rose-convert.json"
SHARD_BYTES = 4_500_000_000
COMPANIONS = (
    "tokenizer*",
    "special_tokens_map.json",
    "chat_template*",
    "*.tiktoken",
    "generation_config.json",
    "LICENSE*",
    "USAGE_POLICY*",
)
"""Files beside the weights that a copy needs, as patterns."""
_JOURNAL_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """One part of the model: how it is read and how it is written."""

    source: WeightRule
    target: WeightRule

    def specs(self) -> list[TensorSpec]:
        """Return the tensors it becomes; plain ones are bf16."""
        return [
            TensorSpec(name=name, dtype=dtypes[0], shape=shape)
            for name, shape, dtypes in self.target.tensors()
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """Everything that is needed to convert; made by `plan`."""

    reader: CheckpointReader
    folder: Path
    moves: tuple[Move, ...]
    shards: tuple[Shard, ...]
    identity: dict[str, Any]
    """What a journal must agree with to be continued."""


def plan(
    reader: CheckpointReader,
    folder: Path,
    *,
    source_rules: Iterable[WeightRule],
    target_rules: Iterable[WeightRule],
    format_name: str,
    shard_bytes: int = SHARD_BYTES,
) -> Conversion:
    """Decide every file and tensor of the destination; nothing is written yet.

    Raises  CheckpointError listing all that is missing, unused or misshapen in the source.
    """
    source_rules = list(source_rules)
    require_clean(reader, source_rules)
    by_place = {(rule.target, rule.part): rule for rule in source_rules}
    moves = tuple(
        Move(source=by_place[rule.target, rule.part], target=rule) for rule in target_rules
    )
    assert len(moves) == len(by_place), "source and destination must have the same places"
    return Conversion(
        reader=reader,
        folder=folder,
        moves=moves,
        shards=tuple(_cut_into_shards(moves, shard_bytes)),
        identity={
            "version": _JOURNAL_VERSION,
            "format": format_name,
            "shard_bytes": shard_bytes,
            "source": fingerprint(reader),
        },
    )


def run(
    conversion: Conversion, *, device: str = "cpu", progress: Progress = ignore_progress
) -> list[str]:
    """Write every file that is not there yet, then the index; returns the names of files kept from before.

    The journal stays until `close` removes it.
    Raises  CheckpointError where the folder is not empty, belongs to another conversion, or the disk is too small.
    """
    finished = _open_journal(conversion)
    kept = [shard for shard in conversion.shards if _is_intact(conversion.folder, shard, finished)]
    todo = [shard for shard in conversion.shards if shard not in kept]
    _remove_partials(conversion.folder)
    require_space(conversion.folder, sum(shard.num_bytes for shard in todo))
    finished = {shard.file_name: finished[shard.file_name] for shard in kept}
    total = sum(shard.num_bytes for shard in conversion.shards)
    done = sum(shard.num_bytes for shard in kept)
    for shard in todo:
        finished[shard.file_name] = _write_shard(conversion, shard, device, progress, done, total)
        _save_journal(conversion, finished)
        done += shard.num_bytes
    write_index(conversion.folder, list(conversion.shards))
    return [shard.file_name for shard in kept]


@contextmanager
def alone(conversion: Conversion) -> Iterator[None]:
    """Hold the destination, made where it is missing, against a second conversion from `run` to `close`.

    Raises  CheckpointError
    """
    make(conversion.folder, because="a conversion")
    with only_writer(conversion.folder):
        yield


def close(conversion: Conversion) -> None:
    """Remove the journal: the conversion is complete and will not be continued."""
    (conversion.folder / JOURNAL_NAME).unlink(missing_ok=True)


def copy_companions(source: Path, folder: Path) -> list[str]:
    """Copy tokenizer, template and licence files as they are; returns their names."""
    names = []
    for pattern in COMPANIONS:
        for path in sorted(source.glob(pattern)):
            if path.is_file() and path.name not in names:
                with disk_errors_answered(folder / path.name):
                    shutil.copyfile(path, folder / path.name)
                names.append(path.name)
    return names


def fingerprint(reader: CheckpointReader) -> str:
    """Return a hash over names, shapes, places, file sizes and times of a checkpoint; data is not read."""
    parts = [
        [e.name, e.dtype, list(e.shape), e.file.name, e.offset]
        for _, e in sorted(reader.entries.items())
    ]
    stats = [(f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in reader.files]
    return hashlib.sha256(json.dumps([parts, stats]).encode()).hexdigest()


def _cut_into_shards(moves: tuple[Move, ...], shard_bytes: int) -> list[Shard]:
    groups: list[list[TensorSpec]] = [[]]
    held = 0
    for move in moves:
        specs = move.specs()
        size = sum(spec.num_bytes for spec in specs)
        if groups[-1] and held + size > shard_bytes:
            groups.append([])
            held = 0
        groups[-1] += specs
        held += size
    if len(groups) == 1:
        return [Shard(file_name="model.safetensors", tensors=tuple(groups[0]))]
    return [
        Shard(file_name=f"model-{i + 1:05d}-of-{len(groups):05d}.safetensors", tensors=tuple(group))
        for i, group in enumerate(groups)
    ]


def _write_shard(
    conversion: Conversion,
    shard: Shard,
    device: str,
    progress: Progress,
    done: int,
    total: int,
) -> dict[str, Any]:
    names = {spec.name for spec in shard.tensors}
    moves = {m.source.target + str(m.source.part): m for m in conversion.moves}
    here = [move for move in moves.values() if move.target.values_name in names]
    pieces = [piece for move in here for piece in split(move.source)]
    with ShardWriter(conversion.folder, shard) as writer:
        for piece, matrix in stream(conversion.reader, pieces):
            move = moves[piece.rule.target + str(piece.rule.part)]
            done += _append(writer, move, piece, matrix.to(device))
            progress(done, total, move.target.source)
        writer.finish()
    return {"bytes": shard.num_bytes, "crcs": writer.crcs}


def _append(writer: ShardWriter, move: Move, piece: Piece, matrix: FormattedTensor) -> int:
    """Convert and write one piece; returns its bytes. Pieces come in order, so each lands after the one before."""
    storage = move.target.storage
    with naming(piece.rule):
        new = requantize(matrix, storage.format)
    values = new.values.transpose(-1, -2) if storage.is_transposed else new.values
    writer.append(move.target.values_name, values)
    if move.target.scales_name is not None and new.scales is not None:
        writer.append(move.target.scales_name, new.scales)
    return new.num_bytes


def _open_journal(conversion: Conversion) -> dict[str, Any]:
    """Return the finished files of an interrupted conversion, or start one in an empty folder."""
    path = conversion.folder / JOURNAL_NAME
    if not path.exists():
        require_empty(conversion.folder, because="a conversion")
        _save_journal(conversion, {})
        return {}
    journal = read_json(path)
    different = [k for k, v in conversion.identity.items() if journal.get(k) != v]
    if different:
        raise CheckpointError(
            f"{conversion.folder} holds an interrupted conversion that differs in {', '.join(different)} "
            f"(there: {journal.get(different[0])!r}, asked: {conversion.identity[different[0]]!r}); only the same "
            "conversion can go on; choose another folder or remove this one"
        )
    shards = journal.get("shards")
    return dict(shards) if isinstance(shards, dict) else {}


def _save_journal(conversion: Conversion, finished: dict[str, Any]) -> None:
    write_json(conversion.folder / JOURNAL_NAME, {**conversion.identity, "shards": finished})


def _is_intact(folder: Path, shard: Shard, finished: dict[str, Any]) -> bool:
    """Check a file from before against the plan and, byte for byte, against its CRCs."""
    entry = finished.get(shard.file_name)
    crcs = entry.get("crcs") if isinstance(entry, dict) else None
    if not isinstance(crcs, dict):
        return False
    try:
        found = {e.name: e for e in read_header(folder / shard.file_name)}
    except CheckpointError:
        return False
    planned = {spec.name: spec for spec in shard.tensors}
    if found.keys() != planned.keys():
        return False
    return all(
        (e.dtype, e.shape) == (planned[name].dtype, planned[name].shape)
        and crc_of(e.file, e.offset, e.num_bytes) == crcs.get(name)
        for name, e in found.items()
    )


def _remove_partials(folder: Path) -> None:
    for partial in folder.glob("*" + PARTIAL_SUFFIX):
        partial.unlink()
