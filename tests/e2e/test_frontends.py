"""Several frontend processes in front of one engine: requests spread, one server to the outside."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import pytest

from fakes.servers import RunningServer

ANSWER = "<|channel|>final<|message|>The sum is 4.<|return|>"
CHAT = {"model": "m", "messages": [{"role": "user", "content": "2+2?"}]}
NUM_FRONTENDS = 3
PATIENCE_S = 5.0
"""No client may wait longer for an answer or an error."""


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    script = tmp_path_factory.mktemp("script") / "script.jsonl"
    script.write_text(json.dumps({"text": ANSWER, "delay_ms": 1}))
    options = ("--served-model-name", "m", "--frontends", str(NUM_FRONTENDS))
    server = RunningServer("--scripted", str(script), *options)
    _wait_for(lambda: len(_counts(server)) == NUM_FRONTENDS)
    yield server
    if server.process.poll() is None:
        server.stop()


def _wait_for(is_so, seconds=30):
    end = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.05)


def _children(server):
    """Return the command lines of the server's children, by process id."""
    pids = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text()
    found = {}
    for pid in map(int, pids.split()):
        with suppress(FileNotFoundError, ProcessLookupError):  # ended since
            found[pid] = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    return found


def _frontends(server):
    return {p: words for p, words in _children(server).items() if "rose.cli.frontends" in words}


def _counts(server):
    """Return the requests that each frontend has counted as answered with 200."""
    words = next(iter(_frontends(server).values()), None)
    if words is None:
        return {}
    counts = {}
    for path in Path(words[3]).parent.glob("counts-*"):
        if not path.suffix:
            rows = msgspec.msgpack.decode(path.read_bytes())
            done = [v for name, labels, v in rows if labels.get("status") == "200"]
            counts[path.name] = sum(done)
    return counts


def _open_requests(server):
    """Return how many requests each frontend has open."""
    folder = Path(next(iter(_frontends(server).values()))[3]).parent
    found = []
    for path in folder.glob("counts-*"):
        if not path.suffix:
            rows = msgspec.msgpack.decode(path.read_bytes())
            found.append(sum(v for name, _, v in rows if name == "rose_http_requests_open"))
    return found


class Stream(threading.Thread):
    """A stream that is read to its end, on a connection of its own."""

    def __init__(self, server):
        super().__init__(daemon=True)
        self._server = server
        self.has_begun = threading.Event()
        self.text, self.ended = "", None
        self.start()

    def run(self):
        body = {**CHAT, "stream": True, "max_tokens": 4000}
        address = urlsplit(self._server.url)
        connection = http.client.HTTPConnection(address.hostname, address.port, timeout=60)
        with contextlib.closing(connection):
            connection.request(
                "POST",
                "/v1/chat/completions",
                json.dumps(body),
                {"content-type": "application/json"},
            )
            response = connection.getresponse()
            while part := response.read1():
                self.text += part.decode()
                self.has_begun.set()
        self.ended = time.monotonic()

    def blocks(self):
        return self.text.split("\n\n")[:-1]


def _ask(server, path="/v1/chat/completions", body=CHAT):
    """Ask on a connection of its own, so that any of the processes may take it; return status and text."""
    address = urlsplit(server.url)
    connection = http.client.HTTPConnection(address.hostname, address.port, timeout=30)
    with contextlib.closing(connection):
        if body is None:
            connection.request("GET", path)
        else:
            headers = {"content-type": "application/json"}
            connection.request("POST", path, json.dumps(body), headers)
        response = connection.getresponse()
        return response.status, response.read().decode()


def test_requests_spread_over_processes_and_are_counted_together(server):
    for number in range(60):
        status, text = _ask(server, body={**CHAT, "stream": number % 2 == 0})
        assert status == 200
        assert "The sum is 4." in text or "data: [DONE]" in text
    _wait_for(lambda: sum(_counts(server).values()) == 60)
    assert sum(count > 0 for count in _counts(server).values()) > 1
    for _ in range(6):  # whoever is asked
        _, page = _ask(server, "/metrics", None)
        [line] = [x for x in page.splitlines() if x.startswith("rose_requests_total{")]
        assert 'endpoint="chat"' in line
        assert float(line.split()[-1]) == 60
        assert page.count("# TYPE rose_engine_ready ") == 1
        assert "rose_engine_ready 1.0" in page


def test_what_one_process_keeps_the_others_find(server):
    _, text = _ask(server, "/v1/responses", {"model": "m", "input": "2+2?"})
    response = json.loads(text)
    for _ in range(12):
        status, found = _ask(server, f"/v1/responses/{response['id']}", None)
        assert status == 200
        assert json.loads(found)["output"] == response["output"]


def test_a_frontend_that_dies_is_replaced(server):
    victim = next(iter(_frontends(server)))
    os.kill(victim, signal.SIGKILL)
    _wait_for(lambda: victim not in _children(server))
    for _ in range(10):
        assert _ask(server)[0] == 200
    _wait_for(lambda: len(_frontends(server)) == NUM_FRONTENDS - 1)
    assert "frontend lost: its process was killed by SIGKILL; starting it again" in server.lines


def test_an_engine_that_dies_is_replaced_for_all(server):
    engine = server.engine_pid()
    os.kill(engine, signal.SIGKILL)
    _wait_for(lambda: engine not in _children(server))

    def all_answer():
        return all(_ask(server)[0] == 200 for _ in range(12))

    _wait_for(all_answer)


def test_open_streams_of_all_processes_are_told_when_the_engine_dies(tmp_path):
    script = tmp_path / "script.jsonl"
    words = "<|channel|>final<|message|>" + " word" * 4000
    script.write_text(json.dumps({"text": words, "delay_ms": 20}))
    options = ("--served-model-name", "m", "--frontends", str(NUM_FRONTENDS))
    server = RunningServer("--scripted", str(script), *options)
    try:
        _wait_for(lambda: len(_counts(server)) == NUM_FRONTENDS)
        streams = [Stream(server) for _ in range(24)]
        assert all(stream.has_begun.wait(30) for stream in streams)
        _wait_for(lambda: sum(_open_requests(server)) == len(streams))
        assert sum(count > 0 for count in _open_requests(server)) > 1, "one process has them all"
        engine = server.engine_pid()
        begin = time.monotonic()
        os.kill(engine, signal.SIGKILL)
        for stream in streams:
            stream.join(30)
            assert stream.ended is not None, "a stream was left open"
            assert stream.ended - begin < PATIENCE_S
            *pieces, error, done = stream.blocks()
            assert done == "data: [DONE]"
            found = json.loads(error.removeprefix("data: "))["error"]
            assert found["code"] == "engine_failed"
            # The same words whichever process tells it, and though the next engine is there at once.
            killed = "the answer was cut off: the engine's process was killed by SIGKILL"
            assert found["message"] == killed
            # What came before is whole, and in its order.
            texts = [json.loads(p.removeprefix("data: "))["choices"][0]["delta"] for p in pieces]
            assert "".join(t.get("content", "") for t in texts) == " word" * (len(texts) - 1)

        def all_answer():  # each process finds the next engine in its own time
            return all(_ask(server, body={**CHAT, "max_tokens": 3})[0] == 200 for _ in range(12))

        _wait_for(all_answer)
        _wait_for(lambda: sum(_open_requests(server)) == 0)
    finally:
        server.stop()


def test_a_signal_ends_all_of_them(server):
    children = list(_children(server))
    assert server.stop() == 0
    _wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in children))
