"""Connections of the HTTP server: waiting tokens leave in one write, and a client that does not read is waited for."""

from __future__ import annotations

import asyncio
import json
import re
import time

import pytest
import uvicorn
from uvicorn.server import ServerState

from rose.frontend.formatters.registry import build_formatter
from rose.frontend.http import HeldWrites, HttpProtocol
from rose.frontend.stream import MAX_PARTS

LIMIT_BYTES = 4096
MOST_PART_BYTES = 400
"""Of these answers; checked below."""
NUM_WORDS = 600


class Connection(asyncio.Transport):
    """A transport whose client takes bytes when the test says so; more than LIMIT_BYTES pause the protocol."""

    def __init__(self):
        super().__init__()
        self.writes, self.num_waiting, self.most_waiting = [], 0, 0
        self.protocol, self.is_paused, self.num_pauses = None, False, 0
        self.limit, self.is_closed = LIMIT_BYTES, False

    def write(self, data):
        self.writes.append(bytes(data))
        self.num_waiting += len(data)
        self.most_waiting = max(self.most_waiting, self.num_waiting)
        self._pause_if_too_many()

    def take(self):
        self.num_waiting = 0
        if self.is_paused:
            self.is_paused = False
            self.protocol.resume_writing()

    def get_write_buffer_size(self):
        return self.num_waiting

    def set_write_buffer_limits(self, high=LIMIT_BYTES):
        self.limit = high
        self._pause_if_too_many()

    def _pause_if_too_many(self):
        if self.num_waiting > self.limit and not self.is_paused:
            self.is_paused = True
            self.num_pauses += 1
            self.protocol.pause_writing()

    def is_done(self):
        return bool(self.writes) and self.writes[-1].endswith(b"0\r\n\r\n")

    def has_all(self, is_stream):
        return self.is_done() if is_stream else b"".join(self.writes).endswith(b"}}")

    def get_extra_info(self, name, default=None):
        return default

    def is_closing(self):
        return self.is_closed

    def close(self):
        """Let the client take what waits, and end."""
        if not self.is_closed:
            self.is_closed = True
            self.take()
            self.protocol.connection_lost(None)

    def resume_reading(self):
        pass

    pause_reading = resume_reading


def _ask(app, body, *, is_last=False):
    """Return a connection on which a request has arrived; `is_last`: after which it is to end."""
    connection = Connection()
    config = uvicorn.Config(app, log_config=None, lifespan="off")
    config.load()
    protocol = HttpProtocol(config, ServerState(), {}, asyncio.get_running_loop())
    connection.protocol = protocol
    protocol.connection_made(connection)
    raw = json.dumps(body).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: rose\r\ncontent-length: {len(raw)}\r\n"
    head += "connection: close\r\n\r\n" if is_last else "\r\n"
    protocol.data_received(head.encode() + raw)
    return connection


def _in_bursts(engine, num_steps):
    """Have an engine that is ahead: what is read of it are many steps at once."""
    one_step = engine.receive

    async def receive():
        events = await one_step()
        for _ in range(num_steps):
            events = events + engine.scripted.step(time.monotonic())
        return events

    engine.receive = receive


def _body(written):
    """Return what the HTTP chunks hold, without what differs from answer to answer."""
    head, _, rest = written.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200")
    parts = []
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        parts.append(rest[: int(size, 16)])
        rest = rest[int(size, 16) + 2 :]
    assert parts[-1] == b""
    text = b"".join(parts).decode()
    return re.sub(r'"(id|created)":("[^"]*"|\d+)', "", text), list(map(len, parts))


@pytest.mark.parametrize("reads", ["at once", "late"])
def test_tokens_that_wait_leave_in_few_writes_and_no_more_than_the_client_takes(lab, o200k, reads):
    harmony = build_formatter("harmony", o200k)
    tokens = o200k.encode_with_control("<|channel|>final<|message|>" + " word" * NUM_WORDS)
    body = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "stream": True}

    async def scenario():
        async with lab.serving(lab.line(tokens), formatter=harmony) as server:
            slow = _ask(server.app, body)
            while not slow.is_done():
                slow.take()
                await asyncio.sleep(0.001)
            expected, sizes = _body(b"".join(slow.writes))
            assert len(sizes) > NUM_WORDS
            assert max(sizes) <= MOST_PART_BYTES

            _in_bursts(server.engine, 100)
            connection = _ask(server.app, body)
            while not connection.is_done():
                if reads == "at once" or connection.is_paused:
                    connection.take()
                await asyncio.sleep(0.001 if reads == "at once" else 0.003)
            assert _body(b"".join(connection.writes))[0] == expected
            assert len(connection.writes) < len(sizes) / 10
            assert connection.num_pauses > 5
            assert connection.most_waiting <= LIMIT_BYTES + MAX_PARTS * MOST_PART_BYTES

    lab.run(scenario)


@pytest.mark.parametrize(
    ("stream", "takes", "num_left"),
    [
        (True, "what fits", 1),  # the engine is done, the answer is written in part
        (True, "all but the end", 1),
        (True, "all", 0),
        (False, "nothing", 1),  # all is written, none of it has left
        (False, "all", 0),
        (False, "all, at once", 0),  # the connection ends with the answer, and takes all at once
    ],
)
def test_a_client_that_leaves_before_it_has_all_is_counted_once(
    lab, o200k, stream, takes, num_left
):
    harmony = build_formatter("harmony", o200k)
    tokens = o200k.encode_with_control("<|channel|>final<|message|>" + " word" * NUM_WORDS)
    body = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "stream": stream}

    async def count(server, name):
        lines = (await server.http.get("/metrics")).text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(name))

    async def scenario():
        async with lab.serving(lab.line(tokens), formatter=harmony) as server:
            _in_bursts(server.engine, NUM_WORDS)
            connection = _ask(server.app, body, is_last=takes == "all, at once")
            if takes == "what fits":
                while not connection.is_paused or server.engine.scripted.status().num_running:
                    await asyncio.sleep(0.001)
            else:
                while not connection.has_all(stream):
                    if takes != "nothing":
                        connection.take()
                    await asyncio.sleep(0.001)
            if takes == "all":
                connection.take()
                assert connection.limit == LIMIT_BYTES
            if not connection.is_closing():
                connection.protocol.connection_lost(ConnectionResetError())
            # Rounds of the loop, not a time: a busy machine may do two of them in 20 ms.
            for _ in range(100):
                await asyncio.sleep(0)
            assert await count(server, "rose_requests_total") == 1
            return await count(server, "rose_client_disconnects_total")

    assert lab.run(scenario) == num_left


def test_what_is_written_outside_of_a_hold_goes_straight_through():
    class Paused:
        def pause_writing(self):
            pass

    connection = Connection()
    connection.protocol = Paused()
    writes = HeldWrites(connection)
    writes.write(b"a")
    with writes:
        writes.write(b"b")
        writes.write(b"c")
        assert connection.writes == [b"a"]
    with writes:
        pass
    writes.write(b"d")
    assert connection.writes == [b"a", b"bc", b"d"]
