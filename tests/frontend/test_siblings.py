"""Counts of several frontends: what a process leaves behind when it ends."""

from __future__ import annotations

import subprocess
import sys

import msgspec
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

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
