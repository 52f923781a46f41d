"""The engine is killed, stopped or told to end under load: everybody gets an answer or an error, and it comes back."""

from __future__ import annotations

import json
import os
import signal
import threading
import time

import httpx
import pytest

from fakes.servers import RunningServer

WORDS = "<|channel|>final<|message|>" + "word " * 4000
CHAT = {"messages": [{"role": "user", "content": "2+2?"}], "temperature": 1.0}
PATIENCE_S = 5.0
"""No client may wait longer for an answer or an error."""


class Client(threading.Thread):
    """One request and what came of it; `longest_s` is the longest time in which nothing came."""

    def __init__(self, url, body):
        super().__init__(daemon=True)
        self._url, self._body = url, body
        self.status, self.error, self.done = None, None, False
        self.has_begun = threading.Event()
        self.longest_s = 0.0
        self.start()

    def run(self):
        last = time.monotonic()
        limits = httpx.Timeout(30)
        with httpx.stream(
            "POST", f"{self._url}/v1/chat/completions", json=self._body, timeout=limits
        ) as response:
            self.status = response.status_code
            text = ""
            for part in response.iter_text():
                now = time.monotonic()
                if self.has_begun.is_set():
                    self.longest_s = max(self.longest_s, now - last)
                last, text = now, text + part
                self.has_begun.set()
        for line in text.splitlines():
            found = json.loads(line.removeprefix("data: ")) if "{" in line else {}
            self.error = found.get("error", self.error)
        is_stream = self._body.get("stream", False) and self.status == 200
        self.done = text.rstrip().endswith("data: [DONE]" if is_stream else "}")
        self.ended = time.monotonic()


def _until(condition, seconds, what):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.02)


def _status(server, path):
    return server.http.get(path).status_code


def _is_ready(server):
    return _status(server, "/ready") == 200


@pytest.fixture(scope="module")
def embedded():
    """The embedded model, two sequences at a time: whoever comes third waits."""
    pytest.importorskip("torch", reason="the engine needs torch")
    server = RunningServer("--device", "cpu", "--max-sequences", "2")
    with httpx.Client(base_url=server.url, timeout=30) as server.http:
        [model] = server.http.get("/v1/models").json()["data"]
        server.body = {**CHAT, "model": model["id"], "ignore_eos": True}
        yield server
    server.stop()


def _load(server, num_streams=2, num_waiting=3):
    """Start streams that run for long, wait until they do, then requests that have to wait."""
    endless = {**server.body, "stream": True, "max_tokens": 3000}
    streams = [Client(server.url, endless) for _ in range(num_streams)]
    for stream in streams:
        assert stream.has_begun.wait(10)
    short = {**server.body, "max_tokens": 4}
    waiting = [Client(server.url, {**short, "stream": i % 2 == 0}) for i in range(num_waiting)]
    _until(lambda: _gauge(server, "rose_requests_waiting") == num_waiting, 5, "nobody waits")
    return streams, waiting


def _gauge(server, name):
    text = server.http.get("/metrics").text
    return float(text.split(f"\n{name} ")[1].split("\n")[0])


def _check_everybody_was_told(streams, waiting, begin, seconds, word):
    for client in streams + waiting:
        client.join(20)
        assert not client.is_alive(), "a client still waits"
    waits = [f"{client.ended - begin:.2f} s ({client.status})" for client in streams + waiting]
    print(f"{word}: told after {', '.join(waits)}")
    for stream in streams:
        assert stream.done
        assert stream.ended - begin < seconds
        assert stream.error["code"] == "engine_failed"
        assert word in stream.error["message"]
    for client in waiting:
        assert client.done
        assert client.ended - begin < PATIENCE_S
        # Begun by nobody: answered by the next engine if that came in time, else told to come again.
        told = {200: (None,), 503: ("engine_unavailable",)}[client.status]
        assert client.error is None or client.error["code"] in told


@pytest.mark.slow
def test_a_killed_engine_is_told_at_once_and_comes_back(embedded):
    streams, waiting = _load(embedded)
    begin = time.monotonic()
    os.kill(embedded.engine_pid(), signal.SIGKILL)
    _until(lambda: _status(embedded, "/health") == 503, 2, "health stays green")
    assert _status(embedded, "/ready") == 503
    refused = embedded.http.post("/v1/chat/completions", json={**embedded.body, "max_tokens": 4})
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "engine_unavailable"
    assert int(refused.headers["retry-after"]) > 0
    _check_everybody_was_told(streams, waiting, begin, 2.0, "SIGKILL")
    _until(lambda: _is_ready(embedded), 30, "the engine does not come back")
    _until(lambda: _status(embedded, "/health") == 200, 1, "health stays red")
    answer = embedded.http.post("/v1/chat/completions", json={**embedded.body, "max_tokens": 4})
    assert answer.status_code == 200
    assert any("SIGKILL" in line and "1 of 5" in line for line in embedded.lines)


@pytest.mark.slow
def test_a_stopped_engine_is_noticed_and_replaced(embedded):
    _until(lambda: _is_ready(embedded), 30, "the engine is not back")
    streams, waiting = _load(embedded)
    begin = time.monotonic()
    os.kill(embedded.engine_pid(), signal.SIGSTOP)
    _check_everybody_was_told(streams, waiting, begin, PATIENCE_S, "no progress")
    _until(lambda: _is_ready(embedded), 30, "the engine does not come back")
    answer = embedded.http.post("/v1/chat/completions", json={**embedded.body, "max_tokens": 4})
    assert answer.status_code == 200


def test_a_hanging_engine_is_killed_and_replaced(scripted):
    options = ("--engine-timeout-s", "1")
    with scripted([{"text": WORDS, "delay_ms": 20}], *options) as server:
        body = {**CHAT, "model": "m", "stream": True, "max_tokens": 4000}
        stream = Client(server.url, body)
        assert stream.has_begun.wait(10)
        pid = server.engine_pid()
        os.kill(pid, signal.SIGSTOP)
        _until(lambda: _status(server, "/health") == 503, 5, "health stays green")
        stream.join(5)
        assert stream.error["code"] == "engine_failed"
        _until(lambda: _is_ready(server), 10, "the engine does not come back")
        assert server.engine_pid() != pid
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_what_an_engine_had_not_begun_is_answered_by_the_next(scripted):
    with scripted([{"text": WORDS, "delay_ms": 1}]) as server:
        pid = server.engine_pid()
        os.kill(pid, signal.SIGSTOP)  # takes the request, and does nothing
        early = Client(server.url, {**CHAT, "model": "m", "stream": True, "max_tokens": 4})
        _until(lambda: _gauge(server, "rose_http_requests_open") == 2, 5, "it never came")
        time.sleep(0.2)  # nothing tells when the frontend has handed it over
        begin = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        early.join(10)
        assert (early.status, early.error, early.done) == (200, None, True)
        assert time.monotonic() - begin < PATIENCE_S
        assert _gauge(server, "rose_requests_sent_again_total") == 1
        assert _gauge(server, "rose_engine_restarts_total") == 1


def test_an_engine_that_dies_again_and_again_is_given_up(scripted):
    options = ("--max-engine-restarts", "1", "--linger-s", "2")
    with scripted([{"text": WORDS}], *options) as server:
        for _ in range(2):
            _until(lambda: _is_ready(server), 10, "the engine does not come back")
            os.kill(server.engine_pid(), signal.SIGKILL)
            _until(lambda: not _is_ready(server), 5, "still ready")
        assert server.process.wait(10) == 1
        last = server.lines[-1]
        assert last.startswith("error: ")
        assert "started again once" in last


def test_sigterm_lets_streams_end_and_refuses_new_requests(scripted):
    with scripted([{"text": WORDS, "delay_ms": 50}], "--shutdown-timeout-s", "10") as server:
        body = {**CHAT, "model": "m", "stream": True, "max_tokens": 60}
        stream = Client(server.url, body)
        assert stream.has_begun.wait(10)
        server.process.send_signal(signal.SIGTERM)
        _until(lambda: _status(server, "/ready") == 503, 2, "still ready")
        assert server.http.get("/ready").json()["status"] == "draining"
        assert _status(server, "/health") == 200
        refused = server.http.post("/v1/chat/completions", json=body)
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "shutting_down"
        assert refused.headers["connection"] == "close"
        assert int(refused.headers["retry-after"]) > 0
        stream.join(10)
        assert (stream.error, stream.done) == (None, True)
        assert server.process.wait(10) == 0
