"""Counts of several frontends: what a process leaves behind when it ends."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys

import msgspec
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from rose.frontend import siblings
from rose.frontend.siblings import Siblings


def _families(count, num_open):
    return [
        CounterMetricFamily("rose_requests", "", value=count),
        GaugeMetricFamily("rose_http_requests_open", "", value=num_open),
    ]


def test_a_process_that_ended_keeps_its_counts_and_has_nothing_open(tmp_path):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    rows = [(s.name, s.labels, s.value) for f in _families(5, 3) for s in f.samples]
    for pid in (ended.pid, 1):  # the other one runs
        (tmp_path / f"counts-{pid}").write_bytes(msgspec.msgpack.encode(rows))
    families = _families(2, 1)
    Siblings(tmp_path).add_to(families)
    assert [f.samples[0].value for f in families] == [12, 4]


def test_a_folder_that_cannot_be_written_stops_the_counts_only_as_long_as_it_is_so(
    tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr(siblings, "PUBLISH_SECONDS", 0.01)
    folder = tmp_path / "gone"
    counts = Siblings(folder)

    async def scenario():
        task = asyncio.create_task(counts.keep_publishing(lambda: _families(2, 1)))
        await asyncio.sleep(0.1)
        assert not task.done()
        folder.mkdir()
        while not list(folder.glob("counts-*")):
            await asyncio.sleep(0.01)
        task.cancel()

    with caplog.at_level(logging.ERROR):
        asyncio.run(asyncio.wait_for(scenario(), 10))
    assert [r.message[:44] for r in caplog.records] == [
        "counts of this frontend cannot be published:"
    ]
