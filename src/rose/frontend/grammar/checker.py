"""The grammar library in a process of its own, which can be killed: some schemas take it longer than anyone can wait.

The frontend's side is `Checker`: for threads, one check at a time each. The process reads one JSON list of texts per
line and answers with a list of problems; it ends with its standard input, so it never outlives the frontend.
"""

from __future__ import annotations

import queue
import select
import subprocess
import sys
import time
from typing import Literal

import msgspec

MAX_MEMORY_BYTES = 2 << 30
"""Address space of the process; a schema that needs more has failed."""
MAX_MESSAGE = 500
"""Characters of the library's words that are passed on."""
START_SECONDS = 30.0
"""A process has read the library after 0.2 s, on a machine that is busy after a few seconds."""
_READ_BYTES = 1 << 16


class Text(msgspec.Struct, array_like=True):
    """Something for the library to read."""

    kind: Literal["schema", "grammar"]
    text: str


class CheckTimeout(Exception):
    """A check took too long; its process is gone."""


class CheckerUnavailable(Exception):
    """No process could be started."""


class Checker:
    """Checks texts in up to `num_processes` processes, started when first needed."""

    def __init__(self, *, num_processes: int, seconds: float) -> None:
        self._seconds = seconds
        self._idle: queue.SimpleQueue[_Process] = queue.SimpleQueue()
        self._all = [_Process() for _ in range(num_processes)]
        for process in self._all:
            self._idle.put(process)

    def problems(self, texts: list[Text]) -> list[str | None]:
        """Return, per text, why the library does not take it; None where it does.

        Raises  CheckTimeout after the limit, counted from when a process is free; CheckerUnavailable
        """
        process = self._idle.get()
        try:
            return process.ask(texts, self._seconds)
        finally:
            self._idle.put(process)

    def close(self) -> None:
        """End the processes."""
        for process in self._all:
            process.kill()


class _Process:
    """One process, started again after it was killed or has died."""

    def __init__(self) -> None:
        self._child: subprocess.Popen[bytes] | None = None

    def ask(self, texts: list[Text], seconds: float) -> list[str | None]:
        child = self._child if self._child is not None and self._child.poll() is None else None
        if child is None:
            child = self._start()
        assert child.stdin is not None, "it was opened with a pipe"
        try:
            child.stdin.write(msgspec.json.encode(texts) + b"\n")
            child.stdin.flush()
            answer = self._read(child, time.monotonic() + seconds)
        except BrokenPipeError:
            answer = b""
        if not answer:
            self.kill()
            return ["the grammar library gave up on it (too much memory)"] * len(texts)
        return msgspec.json.decode(answer, type=list[str | None])

    def _start(self) -> subprocess.Popen[bytes]:
        """Start a process, and wait until it has read the library, which is not part of any check."""
        try:
            self._child = child = subprocess.Popen(
                [sys.executable, "-m", __name__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,  # a Ctrl-C is for the server, which ends it
            )
            answer = self._read(child, time.monotonic() + START_SECONDS)
        except OSError as error:
            raise CheckerUnavailable(f"the process for it cannot be started: {error}") from error
        except CheckTimeout:
            text = f"the process for it was not ready after {START_SECONDS:g} s"
            raise CheckerUnavailable(text) from None
        if not answer:
            self.kill()
            raise CheckerUnavailable("the process for it ended at once")
        return child

    def _read(self, child: subprocess.Popen[bytes], deadline: float) -> bytes:
        """Return a line; empty where the process has ended."""
        assert child.stdout is not None, "it was opened with a pipe"
        line = b""
        while not line.endswith(b"\n"):
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([child.stdout], [], [], left)[0]:
                self.kill()
                raise CheckTimeout
            part = child.stdout.read1(_READ_BYTES)  # pyright: ignore[reportAttributeAccessIssue]
            if not part:
                return b""
            line += part
        return line

    def kill(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.kill()
            child.communicate()


def main() -> None:
    """Answer until standard input ends."""
    import resource

    from llguidance import LLMatcher

    def problem(item: Text) -> str | None:
        is_schema = item.kind == "schema"
        read = LLMatcher.grammar_from_json_schema if is_schema else LLMatcher.grammar_from_lark
        is_error, messages = LLMatcher.validate_grammar_with_warnings(read(item.text))
        # A grammar names tokens by id, of which the library warns that it cannot check them here.
        is_wrong = is_error or (is_schema and messages)
        return " ".join("; ".join(messages).split())[:MAX_MESSAGE] if is_wrong else None

    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    sys.stdout.buffer.write(b"ready\n")
    sys.stdout.buffer.flush()
    for line in sys.stdin.buffer:
        problems = [problem(item) for item in msgspec.json.decode(line, type=list[Text])]
        sys.stdout.buffer.write(msgspec.json.encode(problems) + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
