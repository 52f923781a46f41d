"""Streams of the frontend alone beside a bare uvicorn application that makes the same sends with the same bytes.

One frontend process in front of the scripted engine, 64 streams at once, half of them reasoning, half tool arguments,
one token per event, the tokens of all streams in one frame per step. The bare application knows its bytes beforehand
and makes the same sends (one per token) through the same uvicorn, uvloop and httptools. They alternate, in two modes:
    saturated  all requests are read and all of their tokens wait: the frontend is stopped (SIGSTOP) until the engine
               has made them, and timed from when it goes on. Beside it the bare application in two readings of "the
               same sends": `bare` sends in turns, one send per stream and turn of its event loop, as tokens come;
               `bare_without_turns` sends a whole stream in one loop, without a pause
    paced      a step every --step-ms for both: what a send costs where the server keeps up
Run it as
    PYTHONPATH=src python benchmarks/frontend_stream.py [--streams 64] [--tokens 1500] [--rounds 5] [--json FILE]
(--api responses: the Responses API instead of chat)
and it prints one JSON line: sends per second of wall clock and per second of the server's CPU time (which counts where
other programs share the cores), medians over the rounds, and ours as a share of the bare application's, round by round.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import platform
import selectors
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

SOURCE = Path(__file__).parents[1] / "src"
TICKS = os.sysconf("SC_CLK_TCK")
FUNCTION = {"name": "f", "parameters": {"type": "object"}}
ASKED = {"model": "scripted", "stream": True}
APIS = {
    "chat": (
        "/v1/chat/completions",
        ASKED
        | {
            "messages": [{"role": "user", "content": "Hi"}],
            "tools": [{"type": "function", "function": FUNCTION}],
        },
        "data: [DONE]\n\n",
    ),
    "responses": (
        "/v1/responses",
        ASKED | {"input": "Hi", "store": False, "tools": [{"type": "function", **FUNCTION}]},
        "}}\n\n",
    ),
}
"""Path, body, and how the last send ends."""
BARE_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
    (b"x-request-id", b"req_" + b"0" * 32),
    (b"openai-processing-ms", b"1"),
]


def script(num_tokens: int, step_ms: float) -> list[dict]:
    """Return what the engine answers in turn: thoughts, and a call with long arguments."""
    call = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>"
    texts = [
        "<|channel|>analysis<|message|>" + " word" * num_tokens + "<|end|>",
        call + " word" * num_tokens + "<|call|>",
    ]
    return [{"text": text, "delay_ms": step_ms} for text in texts]


class Clock:
    """Wakes all who wait at every step."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._waiting: list[asyncio.Future[None]] = []
        self._due = time.monotonic()
        self._is_running = False

    async def step(self) -> None:
        loop = asyncio.get_running_loop()
        if not self._is_running:
            self._is_running = True
            self._due = time.monotonic()
            loop.call_soon(self._ring)
        future = loop.create_future()
        self._waiting.append(future)
        await future

    def _ring(self) -> None:
        waiting, self._waiting = self._waiting, []
        for future in waiting:
            future.set_result(None)
        self._due += self._step_s
        loop = asyncio.get_running_loop()
        loop.call_later(max(0.0, self._due - time.monotonic()), self._ring)


def bare(listener: socket.socket, sends: list[list[str]], *, mode: str, step_s: float) -> None:
    """Serve the recorded sends, stream by stream in turn, until the process is ended."""
    import uvicorn
    import uvloop

    bodies = [[text.encode() for text in stream] for stream in sends]
    turns = iter(range(10**9))
    clock = Clock(step_s)

    async def app(scope, receive, send) -> None:
        if scope["type"] != "http":
            return
        while (await receive()).get("more_body"):
            pass
        parts = bodies[next(turns) % len(bodies)]
        await send({"type": "http.response.start", "status": 200, "headers": BARE_HEADERS})
        for part in parts:
            await send({"type": "http.response.body", "body": part, "more_body": True})
            if mode == "bare":
                await asyncio.sleep(0)
            elif mode == "bare_paced":
                await clock.step()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    config = uvicorn.Config(app, log_config=None, access_log=False, lifespan="off")
    uvloop.run(uvicorn.Server(config).serve(sockets=[listener]))


class Server:
    """A server in a process of its own; `is_held`: it begins to send when all of its tokens wait for it."""

    def __init__(
        self, command: list[str], url: str | None = None, *, is_held: bool = False
    ) -> None:
        self.is_held = is_held
        self._process = subprocess.Popen(
            [sys.executable, *command], stderr=subprocess.PIPE, text=True
        )
        self.address = urlsplit(url or self._wait_for_url())

    def _wait_for_url(self) -> str:
        url = ""
        assert self._process.stderr is not None
        for line in self._process.stderr:
            words = line.split()
            url = next((word for word in words if word.startswith("http://")), url)
            if "ready:" in words:
                # Read on: a full pipe would stop the server at the next line of its log.
                threading.Thread(target=self._process.stderr.read, daemon=True).start()
                return url
        raise SystemExit("the server ended before it was ready")

    def cpu_seconds(self) -> float:
        """Return the CPU time of the process, its children left out."""
        return _cpu_seconds(self._process.pid)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Take the requests of the block, and send nothing until the engine, a child, has answered them all."""
        pid = self._process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        # Beside the engine there are processes that read schemas and that clear up.
        [engine] = [
            int(child)
            for child in children
            if b"rose.server." in Path(f"/proc/{child}/cmdline").read_bytes()
        ]
        os.kill(engine, signal.SIGSTOP)
        yield
        _wait_until_quiet(pid)
        os.kill(pid, signal.SIGSTOP)
        os.kill(engine, signal.SIGCONT)
        _wait_until_quiet(engine)

    def go_on(self) -> None:
        """Let the process run again."""
        os.kill(self._process.pid, signal.SIGCONT)

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(20)


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def _wait_until_quiet(pid: int) -> None:
    before, now = -1.0, _cpu_seconds(pid)
    while now - before > QUIET_CPU_S:
        time.sleep(QUIET_S)
        before, now = now, _cpu_seconds(pid)


def request(address, api: str) -> bytes:
    path, body, _ = APIS[api]
    raw = json.dumps(body).encode()
    return (
        f"POST {path} HTTP/1.1\r\nHost: {address.netloc}\r\nConnection: keep-alive\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(raw)}\r\n\r\n"
    ).encode() + raw


class Streams:
    """Streams that are open at once."""

    def __init__(self, address, num_streams: int, api: str) -> None:
        self._waiting = selectors.DefaultSelector()
        self.received = [bytearray() for _ in range(num_streams)]
        message = request(address, api)
        for stream in self.received:
            connection = socket.create_connection((address.hostname, address.port))
            connection.sendall(message)
            connection.setblocking(False)
            self._waiting.register(connection, selectors.EVENT_READ, stream)

    def read(self) -> list[bytearray]:
        """Read each to its end."""
        while self._waiting.get_map():
            for key, _ in self._waiting.select():
                connection, stream = key.fileobj, key.data
                part = connection.recv(1 << 20)
                assert part, "the server hung up"
                stream += part
                if stream.endswith(b"\r\n0\r\n\r\n"):
                    self._waiting.unregister(connection)
                    connection.close()
        return self.received


def sends_of(stream: bytearray, api: str) -> list[str]:
    """Return the bodies of the HTTP chunks, each of which is one send."""
    head, _, body = bytes(stream).partition(b"\r\n\r\n")
    assert b" 200 " in head.split(b"\r\n")[0], head
    found, place = [], 0
    while (end := body.find(b"\r\n", place)) >= 0:
        length, place = int(body[place:end], 16), end + 2
        if length:
            found.append(body[place : place + length].decode())
        place += length + 2
    assert found[-1].endswith(APIS[api][2]), found[-1]
    return found


def timed(server: Server, num_streams: int, api: str) -> tuple[float, float, list[bytearray]]:
    """Return wall-clock seconds, CPU seconds of the server, and what was read."""
    if server.is_held:
        with server.held():
            streams = Streams(server.address, num_streams, api)
        cpu, began = server.cpu_seconds(), time.perf_counter()
        server.go_on()
    else:
        cpu, began = server.cpu_seconds(), time.perf_counter()
        streams = Streams(server.address, num_streams, api)
    received = streams.read()
    return time.perf_counter() - began, server.cpu_seconds() - cpu, received


def spread(values: list[float]) -> dict[str, float]:
    return {
        "median": round(statistics.median(values), 3),
        "min": round(min(values), 3),
        "max": round(max(values), 3),
    }


PAIRS = (("rose", "bare"), ("rose", "bare_without_turns"), ("rose_paced", "bare_paced"))
QUIET_S, QUIET_CPU_S = 0.3, 0.02
"""A process that takes so little CPU time in so much time has nothing left to do."""


def measure(arguments: argparse.Namespace, folder: Path) -> dict:
    with contextlib.ExitStack() as stack:
        servers = {}
        for name, step_ms in (("rose", 0.0), ("rose_paced", arguments.step_ms)):
            path = folder / f"{name}.jsonl"
            lines = script(arguments.tokens, step_ms)
            path.write_text("".join(json.dumps(line) + "\n" for line in lines))
            servers[name] = Server(
                ["-m", "rose.cli.main", "serve", "--port", "0", "--scripted", str(path)],
                is_held=name == "rose",
            )
            stack.callback(servers[name].close)
        api = arguments.api
        streams = Streams(servers["rose"].address, 2, api)
        pair = [sends_of(stream, api) for stream in streams.read()]
        Streams(servers["rose_paced"].address, 2, api).read()
        (folder / "sends.json").write_text(json.dumps(pair))
        for name in ("bare", "bare_without_turns", "bare_paced"):
            servers[name] = _start_bare(stack, folder / "sends.json", name, arguments.step_ms)
        samples: dict[str, list[tuple[float, float]]] = {name: [] for name in servers}
        for _ in range(1 + arguments.rounds):
            for name, server in servers.items():
                wall, cpu, received = timed(server, arguments.streams, api)
                samples[name].append((wall, cpu))
                counts = sorted(len(sends_of(stream, api)) for stream in received)
                half = arguments.streams // 2
                assert counts == sorted([*map(len, pair * half)]), f"{name}: other sends {counts}"
    num_sends = sum(map(len, pair)) * arguments.streams // 2
    return _line(arguments, num_sends, {name: found[1:] for name, found in samples.items()})


def _start_bare(stack: contextlib.ExitStack, sends: Path, name: str, step_ms: float) -> Server:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = Server(
        [__file__, "--serve", name, str(sends), str(port), "--step-ms", str(step_ms)],
        f"http://127.0.0.1:{port}",
    )
    stack.callback(server.close)
    for _ in range(500):
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
            return server
        time.sleep(0.02)
    raise SystemExit("the bare application did not start")


def _line(arguments, num_sends: int, samples: dict[str, list[tuple[float, float]]]) -> dict:
    line = {
        "bench": "frontend_stream",
        "api": arguments.api,
        "streams": arguments.streams,
        "tokens_per_stream": arguments.tokens,
        "sends": num_sends,
        "rounds": arguments.rounds,
        "step_ms": arguments.step_ms,
    }
    for name, found in samples.items():
        line[name] = {
            "sends_per_wall_s": round(num_sends / statistics.median(w for w, _ in found)),
            "sends_per_cpu_s": round(num_sends / statistics.median(c for _, c in found)),
        }
    for ours, theirs in PAIRS:
        for place, kind in enumerate(("wall", "cpu")):
            shares = [
                bare[place] / rose[place]
                for rose, bare in zip(samples[ours], samples[theirs], strict=True)
            ]
            line[f"{ours}_of_{theirs}_{kind}"] = spread(shares)
    names = ("api", "streams", "tokens", "rounds")
    options = " ".join(f"--{name} {getattr(arguments, name)}" for name in names)
    commit = ["git", "-C", str(SOURCE), "rev-parse", "--short", "HEAD"]
    return {
        **line,
        "device": f"{_cpu()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}",
        "python": platform.python_version(),
        "commit": subprocess.run(commit, capture_output=True, text=True).stdout.strip(),
        "date": time.strftime("%Y-%m-%d"),
        "command": f"python benchmarks/frontend_stream.py {options} --step-ms {arguments.step_ms}",
    }


def _cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--api", choices=list(APIS), default="chat")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=1500)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--step-ms", type=float, default=4.0, help="of the paced mode")
    parser.add_argument("--json", type=Path, help="append the line to this file")
    parser.add_argument("--serve", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        name, sends, port = arguments.serve
        listener = socket.socket()
        listener.bind(("127.0.0.1", int(port)))
        bodies = json.loads(Path(sends).read_text())
        bare(listener, bodies, mode=name, step_s=arguments.step_ms / 1000)
        return
    if arguments.streams < 2 or arguments.streams % 2:
        raise SystemExit(f"--streams {arguments.streams}: needs an even number, half of each kind")
    with tempfile.TemporaryDirectory() as folder:
        line = measure(arguments, Path(folder))
    print(json.dumps(line))
    if arguments.json is not None:
        with arguments.json.open("a") as file:
            file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
