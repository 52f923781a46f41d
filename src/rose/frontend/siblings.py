"""Counts of several frontends of one server added up: each writes its own to a folder once a second, each reads all.

So every process answers /metrics for the whole server, at most a second late for the others. What a process counted
that has ended stays in the sums; what it had open does not. Knows families of samples, not what they mean.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec
from prometheus_client.core import Metric
from prometheus_client.samples import Sample

from rose.utils.log import get_logger

PUBLISH_SECONDS = 1.0
SUMMED_GAUGES = frozenset({"rose_http_requests_open", "rose_responses_in_background"})
"""Other gauges tell of what the processes share."""
_Row = tuple[str, dict[str, str], float]

logger = get_logger(__name__)


def counts_path(folder: Path, pid: int) -> Path:
    """Return where a process publishes; the file gets another time about every second while its loop turns."""
    return folder / f"counts-{pid}"


class Siblings:
    """The other frontends' counts."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._own = counts_path(folder, os.getpid())

    async def keep_publishing(self, families: Callable[[], Iterable[Metric]]) -> None:
        """Publish once a second; never returns. Where the folder cannot be written, the others see older counts."""
        problem = ""
        while True:
            try:
                self.publish(families())
                problem = ""
            except OSError as error:
                if str(error) != problem:  # told once, not every second
                    logger.error("counts of this frontend cannot be published: %s", error)
                problem = str(error)
                self._touch()
            await asyncio.sleep(PUBLISH_SECONDS)

    def _touch(self) -> None:
        """Tell that this process lives, which takes no room on the disk."""
        with contextlib.suppress(OSError):
            os.utime(self._own)

    def publish(self, families: Iterable[Metric]) -> None:
        """Write this process's counts where the others find them."""
        rows: list[_Row] = [
            (sample.name, sample.labels, sample.value)
            for family in families
            if _is_summed(family)
            for sample in family.samples
        ]
        draft = self._own.with_suffix(".draft")
        draft.write_bytes(msgspec.msgpack.encode(rows))
        draft.replace(self._own)

    def add_to(self, families: Iterable[Metric]) -> None:
        """Add the others' counts to families of this process, in place."""
        others = self._others()
        for family in families:
            if not _is_summed(family):
                continue
            mine = {(s.name, tuple(sorted(s.labels.items()))): s for s in family.samples}
            names = {sample.name for sample in family.samples} | _names_of(family)
            for key, (labels, value) in others.items():
                if key in mine:
                    mine[key] = mine[key]._replace(value=mine[key].value + value)
                elif key[0] in names:
                    mine[key] = Sample(key[0], labels, value)
            family.samples = list(mine.values())

    def _others(self) -> dict[tuple, tuple[dict[str, str], float]]:
        sums: dict[tuple, tuple[dict[str, str], float]] = {}
        for path in self._folder.glob("counts-*"):
            if path == self._own or path.suffix:
                continue
            has_ended = not _is_running(int(path.name.removeprefix("counts-")))
            for name, labels, value in msgspec.msgpack.decode(path.read_bytes(), type=list[_Row]):
                if has_ended and name in SUMMED_GAUGES:
                    continue
                key = (name, tuple(sorted(labels.items())))
                sums[key] = (labels, sums.get(key, (labels, 0.0))[1] + value)
        return sums


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def _is_summed(family: Metric) -> bool:
    return family.type in ("counter", "histogram") or family.name in SUMMED_GAUGES


def _names_of(family: Metric) -> set[str]:
    """Return the names that samples of a family may have, where this process has none yet."""
    if family.type == "counter":
        return {f"{family.name}_total"}
    if family.type == "histogram":
        return {f"{family.name}_{part}" for part in ("bucket", "count", "sum")}
    return {family.name}
