"""Real servers in processes of their own, over real HTTP."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time

import httpx

START_SECONDS = 60


def _command(pid: int) -> bytes:
    with open(f"/proc/{pid}/cmdline", "rb") as file:  # noqa: PTH123
        return file.read()


class RunningServer:
    """`rose serve` in a process; what it prints is collected line by line."""

    def __init__(self, *arguments: str):
        command = [sys.executable, "-m", "rose.cli.main", "serve", "--port", "0", *arguments]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ)
        self.lines: list[str] = []
        self._new: queue.Queue = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()
        self.url = self._wait_for(r"listening on (\S+)")
        self._wait_for(r"ready: (.+)")

    def _read(self):
        for line in self.process.stderr:
            self.lines.append(line.rstrip())
            self._new.put(line)
        self._new.put(None)

    def _wait_for(self, pattern: str) -> str:
        end = time.monotonic() + START_SECONDS
        while True:
            line = self._new.get(timeout=max(0.1, end - time.monotonic()))
            assert line is not None, f"the server ended: {self.lines}"
            found = re.search(pattern, line)
            if found:
                return found[1]

    def engine_pid(self) -> int:
        children = f"/proc/{self.process.pid}/task/{self.process.pid}/children"
        with open(children) as file:  # noqa: PTH123
            pids = [int(word) for word in file.read().split()]
        # beside the engine there are processes that read schemas, that answer, and that clear up
        [pid] = [pid for pid in pids if b"rose.server." in _command(pid)]
        return pid

    def stop(self) -> int:
        """End it as Ctrl-C does and return the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        try:
            return self.process.wait(20)
        finally:
            self.process.kill()


@contextlib.contextmanager
def scripted_server(folder, lines, *options):
    path = folder / "script.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    server = RunningServer("--scripted", str(path), "--served-model-name", "m", *options)
    try:
        with httpx.Client(base_url=server.url, timeout=30) as server.http:
            yield server
    finally:
        server.stop()
