"""The account of a checkpoint: every tensor that rules want and every tensor that is there, compared at once."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass

from rose.utils.errors import CheckpointError
from rose.weights.reader import CheckpointReader
from rose.weights.rules import WeightRule

FOR_DECODERS = ("model.mtp.",)
"""Tensors that a checkpoint may hold beside the model: heads that a decoder reads, and the model alone does not."""
_SHOWN = 8
"""Names listed per kind of problem before the rest is counted only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """What does not add up; all empty means every tensor has its place."""

    missing: tuple[str, ...]
    unused: tuple[str, ...]
    misshapen: tuple[str, ...]
    """`name: found ..., needed ...` lines."""

    @property
    def is_clean(self) -> bool:
        """Whether every tensor is wanted and every wanted tensor is right."""
        return not (self.missing or self.unused or self.misshapen)

    def problems(self) -> list[str]:
        """Return one message per kind of problem, names included."""
        lines = []
        if self.missing:
            near = _near(self.missing, self.unused)
            lines.append(
                f"{len(self.missing)} tensors are missing: {_list(self.missing)}{near}; the configuration asks for "
                "them; fetch the shards that hold them or correct config.json"
            )
        if self.unused:
            lines.append(
                f"{len(self.unused)} tensors belong to nothing: {_list(self.unused)}; every tensor of a checkpoint "
                "must be used; remove the files that do not belong here or correct config.json"
            )
        if self.misshapen:
            lines.append(
                f"{len(self.misshapen)} tensors have a wrong shape or element type: {_list(self.misshapen, '; ')}; "
                "correct config.json or fetch the right checkpoint"
            )
        return lines


def account(reader: CheckpointReader, rules: Iterable[WeightRule]) -> Account:
    """Compare a checkpoint with the rules that are to read it."""
    wanted: dict[str, tuple[tuple[int, ...], tuple[str, ...]]] = {}
    for rule in rules:
        for name, shape, dtypes in rule.tensors():
            wanted[name] = (shape, dtypes)
    misshapen = []
    for name, (shape, dtypes) in wanted.items():
        entry = reader.entries.get(name)
        if entry is not None and (entry.shape != shape or entry.dtype not in dtypes):
            misshapen.append(
                f"{name}: found {entry.dtype} {list(entry.shape)}, needed {' or '.join(dtypes)} {list(shape)}"
            )
    return Account(
        missing=tuple(name for name in wanted if name not in reader),
        unused=tuple(
            sorted(
                name
                for name in reader.entries
                if name not in wanted and not name.startswith(FOR_DECODERS)
            )
        ),
        misshapen=tuple(misshapen),
    )


def require_clean(reader: CheckpointReader, rules: Iterable[WeightRule]) -> None:
    """Raise a CheckpointError with everything that does not add up."""
    found = account(reader, rules)
    if not found.is_clean:
        raise CheckpointError([f"{reader.folder}: {line}" for line in found.problems()])


def _list(names: tuple[str, ...], separator: str = ", ") -> str:
    rest = len(names) - _SHOWN
    return separator.join(names[:_SHOWN]) + (f" and {rest} more" if rest > 0 else "")


def _near(missing: tuple[str, ...], unused: tuple[str, ...]) -> str:
    close = difflib.get_close_matches(missing[0], unused[:2000], n=1, cutoff=0.8)
    return f" (like {missing[0]} there is {close[0]})" if close else ""
