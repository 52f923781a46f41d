"""10,000 malformed requests to a server over real HTTP: 4xx each, memory flat, and it still answers."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fakes import malformed
from fakes.servers import scripted_server

NUM_REQUESTS = 10_000
MAX_GROWTH_BYTES = 16 << 20
"""Between the first fifth, in which caches and arenas fill, and the end. Each request leaves less than 2 KB."""


@pytest.mark.slow
def test_ten_thousand_malformed_requests(tmp_path):
    lines = [{"text": "<|channel|>final<|message|>Hi.<|return|>"}]
    with scripted_server(tmp_path, lines, "--no-log-requests") as server:
        right = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
        for number, request in enumerate(malformed.malformed(2026, NUM_REQUESTS)):
            if number == NUM_REQUESTS // 5:
                before = _resident_bytes(server.process.pid)
            response = server.http.post(request.path, content=request.body)
            assert 400 <= response.status_code < 500, (request, response.text)
            assert set(response.json()["error"]) == {"message", "type", "param", "code"}
        grown = _resident_bytes(server.process.pid) - before
        assert grown < MAX_GROWTH_BYTES, grown
        assert server.http.post("/v1/chat/completions", json=right).status_code == 200
        metrics = server.http.get("/metrics").text
        assert 'status="500"' not in metrics


def _resident_bytes(pid):
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
