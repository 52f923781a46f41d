"""An engine that replays token ids instead of computing them: for tests and for people who build clients.

Speaks the same channel as the real engine and imports no torch. One line of the script answers one request; after
the last line the first comes again. Knows no text: `rose serve --scripted` turns text into ids before.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from rose.engine.admission import duplicate_id, queue_full, refusal, timed_out
from rose.protocol.channel import EngineEndpoint
from rose.protocol.event import (
    EngineStatus,
    ErrorCode,
    ErrorEvent,
    FinishedEvent,
    FinishReason,
    FromEngine,
    TokenLogprobs,
    TokensEvent,
)
from rose.protocol.grammar import Vocabulary
from rose.protocol.request import Abort, Request, StatusQuery, ToEngine
from rose.utils.errors import ConfigError

IDLE_MS = 200
STATUS_SECONDS = 1.0
DEATH_EXIT_CODE = 70
UNLIKELY = -100.0
"""Log-probability of what the script does not say."""


class ScriptError(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A failure to play."""

    message: str
    code: ErrorCode = "engine_failed"


class ScriptLine(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one request is answered with."""

    tokens: list[int] = []
    finish_reason: FinishReason | None = None
    """None: stop after the last token, or length where the request's limit comes first."""
    delay_ms: float = 0.0
    """Between two events, and the most before the first: requests of one delay take their steps together, as in the
    batch of an engine."""
    tokens_per_event: int = 1
    cached_tokens: int = 0
    error: ScriptError | str | None = None
    """Sent after the tokens, in place of the end."""
    needs: list[list[int]] = []
    """Token sequences. The line answers every request whose prompt holds all of them, before the lines without."""
    is_fatal: bool = False
    """After the tokens the engine's process ends."""


class ScriptConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything a scripted engine is started with."""

    address: str
    model: str
    lines: list[ScriptLine]
    context_tokens: int = 131_072
    vocab_size: int = 201_088
    max_running: int = 256
    """More requests at once are refused with queue_full."""


@dataclass(slots=True)
class _Play:
    """One request while it is answered."""

    request: Request
    line: ScriptLine
    due: float
    deadline: float | None = None
    num_sent: int = 0

    @property
    def next_moment(self) -> float:
        return self.due if self.deadline is None else min(self.due, self.deadline)

    @property
    def num_tokens(self) -> int:
        return min(len(self.line.tokens), self.request.max_tokens)


class ScriptedEngine:
    """Requests in, events out, at the times the script says."""

    def __init__(self, config: ScriptConfig) -> None:
        if not config.lines:
            raise ConfigError(
                "the script has no lines; allowed: one JSON object per line and request; see docs/api.md"
            )
        self._config = config
        self._asked = [line for line in config.lines if line.needs]
        self._lines = itertools.cycle([line for line in config.lines if not line.needs])
        self._plays: dict[str, _Play] = {}
        self._status_due = 0.0
        self._vocabularies: list[str] = []
        self._num_prompt_tokens = 0
        self._num_output_tokens = 0
        self._num_steps = 0

    def take(self, message: ToEngine, now: float) -> list[FromEngine]:
        """Take one message; return what is answered at once."""
        if isinstance(message, StatusQuery):
            return [self.status()]
        if isinstance(message, Vocabulary):
            self._vocabularies = [message.key]
            return []
        if isinstance(message, Abort):
            play = self._plays.pop(message.request_id, None)
            return [] if play is None else [_finished(play, "abort")]
        problem = self._refusal(message)
        if problem is not None:
            return [problem]
        line = self._line(message)
        if line is None:
            text = "no line of the script is for this prompt: add one without `needs`, or with needs that it holds"
            return [ErrorEvent(request_id=message.request_id, code="invalid_request", message=text)]
        step_s = line.delay_ms / 1000
        due = (now // step_s + 1) * step_s if step_s else now
        deadline = None if message.timeout_s is None else now + message.timeout_s
        self._plays[message.request_id] = _Play(message, line, due, deadline)
        self._num_prompt_tokens += len(message.prompt_token_ids)
        return []

    def step(self, now: float) -> list[FromEngine]:
        """Return the events that are due."""
        events: list[FromEngine] = []
        for request_id, play in list(self._plays.items()):
            if play.deadline is not None and play.deadline <= now:
                found = f"had {play.num_sent} tokens generated"
                events.append(timed_out(request_id, play.request.timeout_s or 0.0, found))
                del self._plays[request_id]
            elif play.due <= now:
                events += self._advance(play)
                if not isinstance(events[-1], TokensEvent):
                    del self._plays[request_id]
        self._num_steps += bool(events)
        if now >= self._status_due:
            self._status_due = now + STATUS_SECONDS
            events.append(self.status())
        return events

    def wait_ms(self, now: float) -> int:
        """Return how long nothing will be due."""
        due = min((play.next_moment for play in self._plays.values()), default=now + 1)
        return max(0, min(IDLE_MS, int((due - now) * 1000)))

    def status(self) -> EngineStatus:
        """Return the engine's state."""
        return EngineStatus(
            is_ready=True,
            model=self._config.model,
            context_tokens=self._config.context_tokens,
            vocab_size=self._config.vocab_size,
            num_running=len(self._plays),
            num_steps=self._num_steps,
            num_prompt_tokens=self._num_prompt_tokens,
            num_output_tokens=self._num_output_tokens,
            vocabularies=self._vocabularies,
        )

    def _line(self, request: Request) -> ScriptLine | None:
        prompt = _searchable(request.prompt_token_ids)
        for line in self._asked:
            if all(_searchable(tokens) in prompt for tokens in line.needs):
                return line
        return next(self._lines, None)

    def _refusal(self, request: Request) -> ErrorEvent | None:
        config = self._config
        if request.request_id in self._plays:
            return duplicate_id(request)
        error = refusal(
            request,
            context_tokens=config.context_tokens,
            kv_tokens=config.context_tokens,
            vocab_size=config.vocab_size,
        )
        if error is None and len(self._plays) >= config.max_running:
            found = f"{len(self._plays)} requests run, which is the most this scripted engine takes"
            return queue_full(request, found)
        return error

    def _advance(self, play: _Play) -> list[FromEngine]:
        if play.num_sent >= play.num_tokens:
            return [self._end(play)]
        first = play.num_sent
        play.num_sent = min(first + max(1, play.line.tokens_per_event), play.num_tokens)
        play.due += play.line.delay_ms / 1000
        self._num_output_tokens += play.num_sent - first
        events: list[FromEngine] = [
            TokensEvent(
                request_id=play.request.request_id,
                token_ids=play.line.tokens[first : play.num_sent],
                num_cached_tokens=play.line.cached_tokens if first == 0 else 0,
                logprobs=_made_up_logprobs(play, first),
            )
        ]
        if play.num_sent == play.num_tokens and not play.line.is_fatal:
            events.append(self._end(play))
        return events

    def _end(self, play: _Play) -> FromEngine:
        request_id, line = play.request.request_id, play.line
        is_cut = len(line.tokens) > play.num_tokens
        if line.is_fatal and not is_cut:
            os._exit(DEATH_EXIT_CODE)  # a crash: nothing is closed, nobody is told
        if line.error is not None and not is_cut:
            error = ScriptError(message=line.error) if isinstance(line.error, str) else line.error
            return ErrorEvent(request_id=request_id, code=error.code, message=error.message)
        return _finished(play, "length" if is_cut else line.finish_reason or "stop")


def _finished(play: _Play, reason: FinishReason) -> FinishedEvent:
    return FinishedEvent(
        request_id=play.request.request_id,
        reason=reason,
        num_prompt_tokens=len(play.request.prompt_token_ids),
        num_output_tokens=play.num_sent,
    )


def _searchable(token_ids: Sequence[int]) -> str:
    """Return tokens as text in which a sequence of them can be found."""
    return f" {' '.join(map(str, token_ids))} "


def _made_up_logprobs(play: _Play, first: int) -> list[TokenLogprobs] | None:
    """Return log-probabilities where the request asks for them: a script is certain of its tokens.

    The other places of the best tokens go to the lowest ids, with UNLIKELY each.
    """
    num_top = play.request.sampling.logprobs
    if num_top is None:
        return None
    found = []
    for token in play.line.tokens[first : play.num_sent]:
        ids = [token, *(i for i in range(num_top) if i != token)][:num_top]
        found.append(TokenLogprobs(0.0, ids, [0.0 if i == token else UNLIKELY for i in ids]))
    return found


def serve(engine: ScriptedEngine, endpoint: EngineEndpoint) -> None:
    """Answer messages until the process is ended."""
    while True:
        message = endpoint.receive(engine.wait_ms(time.monotonic()))
        events: list[FromEngine] = []
        while message is not None:
            events += engine.take(message, time.monotonic())
            message = endpoint.receive()
        events += engine.step(time.monotonic())
        if events:
            endpoint.send(events)
        text = "events of this request were lost; send it again"
        for request_id in endpoint.take_lost():
            engine.take(Abort(request_id=request_id), time.monotonic())
            endpoint.send([ErrorEvent(request_id=request_id, code="engine_failed", message=text)])


def decode_config(raw: bytes) -> ScriptConfig:
    """Read a ScriptConfig from JSON.

    Raises  ConfigError where it is none.
    """
    try:
        return msgspec.json.decode(raw, type=ScriptConfig)
    except msgspec.MsgspecError as error:
        raise ConfigError(
            f"the scripted engine's configuration cannot be read: {error}; needed: a ScriptConfig as JSON; "
            "use `rose serve --scripted FILE`"
        ) from error


def main(arguments: Sequence[str]) -> int:
    """Run the engine whose configuration stands in the file named first."""
    from pathlib import Path

    config = decode_config(Path(arguments[0]).read_bytes())
    endpoint = EngineEndpoint(config.address)
    try:
        serve(ScriptedEngine(config), endpoint)
    except KeyboardInterrupt:
        return 0
    finally:
        endpoint.close()
    return 0


if __name__ == "__main__":
    import sys

    sys.exit(main(sys.argv[1:]))
