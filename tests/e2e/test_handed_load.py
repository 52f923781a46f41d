"""The load cases of tests/data/handed.jsonl on the embedded model: a client that leaves, an engine that is killed."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from fakes.servers import RunningServer

CASES = {
    case["id"]: case
    for case in map(
        json.loads, (Path(__file__).parents[1] / "data" / "handed.jsonl").read_text().splitlines()
    )
    if case["kind"] == "load"
}
LONG_TOKENS = 4000
STATUS_AGE_S = 1.0
"""How old the engine's state may be in /metrics."""


def test_these_are_all_the_load_cases():
    assert set(CASES) == {"load-disconnect", "load-engine-dead"}


@pytest.fixture(scope="module")
def server():
    pytest.importorskip("torch", reason="the engine needs torch")
    server = RunningServer("--device", "cpu", "--kv-tokens", "8192")
    with httpx.Client(base_url=server.url, timeout=30) as server.http:
        [model] = server.http.get("/v1/models").json()["data"]
        server.body = {
            "model": model["id"],
            "messages": [{"role": "user", "content": "Count."}],
            "ignore_eos": True,
        }
        yield server
    server.stop()


def _gauge(server, name):
    text = server.http.get("/metrics").text
    return float(text.split(f"\n{name} ")[1].split("\n")[0])


def _until(condition, seconds, what):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.02)


def _short_answer(server):
    body = {**server.body, "max_completion_tokens": 2}
    return server.http.post("/v1/chat/completions", json=body)


@pytest.mark.parametrize("stream", [True, False])
def test_load_disconnect(server, stream):
    expected = CASES["load-disconnect"]["expected"]
    time.sleep(1.5 * STATUS_AGE_S)  # what a test before this one held is told of no longer
    before = _gauge(server, "rose_kv_pages_used")
    where = urlsplit(server.url)
    raw = json.dumps({**server.body, "stream": stream, "max_completion_tokens": LONG_TOKENS})
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: {where.netloc}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(raw)}\r\n\r\n"
    )
    with socket.create_connection((where.hostname, where.port), timeout=10) as connection:
        connection.sendall((head + raw).encode())
        if stream:
            seen = b""
            while b'"content":"' not in seen and b'"reasoning' not in seen:
                seen += connection.recv(65536)
        _until(lambda: _gauge(server, "rose_requests_running") == 1, 10, "it never ran")
    left = time.monotonic()
    limit_s = expected["within_seconds"] + STATUS_AGE_S
    _until(
        lambda: (
            _gauge(server, "rose_requests_running") == expected["running_requests"]
            and _gauge(server, "rose_kv_pages_used") == before
        ),
        limit_s,
        "the work goes on",
    )
    assert time.monotonic() - left < limit_s
    assert (_short_answer(server).status_code == 200) is expected["next_request_ok"]


def test_load_engine_dead(server):
    expected = CASES["load-engine-dead"]["expected"]
    body = {**server.body, "stream": True, "max_completion_tokens": LONG_TOKENS}
    with server.http.stream("POST", "/v1/chat/completions", json=body) as response:
        lines = response.iter_lines()
        while '"delta"' not in next(lines):
            pass
        killed = time.monotonic()
        os.kill(server.engine_pid(), signal.SIGKILL)
        rest = [line for line in lines if line]
        ended = time.monotonic()
    _until(
        lambda: server.http.get("/health").status_code == expected["health_status"],
        0.5,
        "health stays green",
    )
    assert _short_answer(server).status_code in expected["new_request_status_in"]
    assert ended - killed < expected["within_seconds"]
    assert "error" in json.loads(rest[-2].removeprefix("data: "))
    assert not any('"finish_reason":"stop"' in line for line in rest)
    _until(lambda: server.http.get("/ready").status_code == 200, 60, "it does not come back")
    assert _short_answer(server).status_code == 200
