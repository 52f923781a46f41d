"""Channel <-> engine: the loop of the engine service. Knows no process, no signal and no model."""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec

from rose.engine.engine import LLMEngine
from rose.protocol.channel import EngineEndpoint
from rose.protocol.codec import ProtocolError
from rose.protocol.event import ErrorCode, ErrorEvent, FromEngine
from rose.protocol.grammar import Vocabulary
from rose.protocol.request import Abort, Request, StatusQuery
from rose.utils.errors import RoseError
from rose.utils.log import get_logger

IDLE_MS = 100
"""Longest wait for a message without work; also how late a stop is noticed."""
STATUS_SECONDS = 1.0
LEARN_SECONDS = 2.0
"""Bound of learning a vocabulary: 0.8 s for 200,000 tokens, and 3 s were seen with twenty processes on two cores."""
BEAT_SECONDS = 0.5
"""Without another frame for so long, the start of a step is told by itself."""
LONG_STEP_SECONDS = 0.5
"""Steps that may take longer are told before they start, each."""
STUCK_SECONDS = 10.0
"""Work without a step for so long is a fault of ours; waiting for the building of a grammar does not count."""
NOT_BEGUN: ErrorCode = "engine_unavailable"
MESSAGES_PER_STEP = 256
"""More wait for the next step, so that a flood of requests does not hold up those that run."""

_logger = get_logger(__name__)


class EngineService:
    """Serves its frontends until stopped or failed."""

    def __init__(self, engine: LLMEngine, endpoint: EngineEndpoint) -> None:
        self.engine = engine
        self.endpoint = endpoint
        self._next_status = 0.0
        self._last_frame = 0.0
        self._told_bound_s = 0.0
        self._num_steps = 0
        self._idle_since = 0.0
        engine.on_begin = self._beat

    def serve(self, is_stopping: Callable[[], bool]) -> int:
        """Answer until `is_stopping`; every request gets its last event, whatever happens.

        Returns  the exit status of the process: 0 when stopped, 1 when a step failed
        """
        self._send_status_in_time()
        while not is_stopping():
            self._receive()
            try:
                events = self.engine.expire() + self.engine.step()
                self._check_progress(is_done=bool(events))
            except Exception as error:  # noqa: BLE001 - kernels and drivers raise anything; all of it is answered
                self._fail(error)
                return 1
            if events:
                self._send(events)
                self._last_frame = time.monotonic()
            self._send_status_in_time()
        self._abort_all()
        return 0

    def _receive(self) -> None:
        wait_ms = 0 if self.engine.has_work else IDLE_MS
        for _ in range(MESSAGES_PER_STEP):
            try:
                message = self.endpoint.receive(wait_ms)
            except ProtocolError as error:
                # Whose request it was cannot be known, so frontends are told as a whole.
                _logger.error("%s", error)
                self._send([self.engine.status(detail=str(error))])
                continue
            if message is None:
                return
            wait_ms = 0
            match message:
                case Request():
                    self._send(self.engine.add(message))
                case Abort():
                    self._send(self.engine.abort(message.request_id))
                case StatusQuery():
                    self._tell_status()
                case Vocabulary():
                    self._learn(message)

    def _learn(self, vocabulary: Vocabulary) -> None:
        """Learn a vocabulary, having said that nothing else will be done for a while."""
        status = msgspec.structs.replace(self.engine.status(), step_bound_s=LEARN_SECONDS)
        self.endpoint.send([status])
        self.engine.learn(vocabulary)
        self._tell_status()

    def _check_progress(self, *, is_done: bool) -> None:
        """Fail where there is work and nothing comes of it: a loop that turns is alive and yet no use to anyone.

        Raises  RoseError
        """
        engine, num_steps = self.engine, self.engine.counters.num_steps
        is_idle = not engine.scheduler.has_work or engine.grammars.is_busy
        if is_done or is_idle or num_steps != self._num_steps:
            self._num_steps, self._idle_since = num_steps, 0.0
            return
        now = time.monotonic()
        self._idle_since = self._idle_since or now
        if now - self._idle_since > STUCK_SECONDS:
            running, waiting = len(engine.scheduler.running), len(engine.scheduler.waiting)
            raise RoseError(
                f"no step could be planned for {STUCK_SECONDS:g} s with {running} sequences running and "
                f"{waiting} waiting"
            )

    def _send(self, events: list[FromEngine]) -> None:
        if events:
            self.endpoint.send(events)
        lost = self.endpoint.take_lost()
        if lost:
            _log_lost(list(lost.values()))
            text = "events of this request were lost because its frontend took none for too long; send it again"
            for request_id in lost:
                self.engine.abort(request_id)
            self.endpoint.send([_failure(name, text, "engine_failed") for name in lost])

    def _beat(self) -> None:
        """Tell that a step begins and how long it may take, where nothing else was told lately or it is long."""
        bound_s = self.engine.clock.bound_s
        if max(bound_s, self._told_bound_s) > LONG_STEP_SECONDS or (
            time.monotonic() - self._last_frame > BEAT_SECONDS
        ):
            self._tell_status()

    def _send_status_in_time(self) -> None:
        # Tried again at once where nobody was there, so that a frontend which comes late soon knows.
        if time.monotonic() >= self._next_status and self._tell_status():
            self._next_status = self._last_frame + STATUS_SECONDS

    def _tell_status(self) -> bool:
        status = self.engine.status()
        self._last_frame, self._told_bound_s = time.monotonic(), status.step_bound_s
        return self.endpoint.send([status])

    def _fail(self, error: Exception) -> None:
        _logger.critical("a step failed with %d requests open", self._num_open(), exc_info=error)
        reason = f"{type(error).__name__}: {error}"
        text = f"the engine failed in a step ({reason}) and stops; send the request again"
        # Who has no token yet loses nothing by being asked again; the frontend may do so by itself.
        events: list[FromEngine] = [
            _failure(name, text, "engine_failed" if self.engine.has_begun(name) else NOT_BEGUN)
            for name in self.engine.running_ids()
        ]
        self._say_goodbye(events, text, NOT_BEGUN, f"failed: {reason}")

    def _abort_all(self) -> None:
        events: list[FromEngine] = []
        text = (
            "the engine is being stopped and takes no more requests; send the request again later"
        )
        for request_id in self.engine.running_ids():
            # Not the abort that it makes: nobody asked for one, and the client is to know why it is cut off.
            self.engine.abort(request_id)
            events.append(_failure(request_id, text, "shutting_down"))
        self._say_goodbye(events, text, "shutting_down", "stopped")

    def _say_goodbye(
        self, events: list[FromEngine], text: str, code: ErrorCode, detail: str
    ) -> None:
        """Send last events, refuse the requests that are still in the channel, and say what happened."""
        for _ in range(MESSAGES_PER_STEP):
            try:
                message = self.endpoint.receive()
            except ProtocolError:
                continue
            if message is None:
                break
            if isinstance(message, Request):
                events.append(_failure(message.request_id, text, code))
        self.endpoint.send([*events, self.engine.status(detail, is_ready=False)])

    def _num_open(self) -> int:
        return len(self.engine.running_ids())


def _failure(request_id: str, text: str, code: ErrorCode) -> ErrorEvent:
    return ErrorEvent(request_id=request_id, code=code, message=text)


def _log_lost(are_gone: list[bool]) -> None:
    """Say of requests that their frontends took no events: one that has gone may have been stopped."""
    for is_gone in sorted(set(are_gone)):
        count = are_gone.count(is_gone)
        requests = "its request ends" if count == 1 else f"its {count} requests end"
        if is_gone:
            _logger.info("a frontend has gone; %s", requests)
        else:
            _logger.warning("a frontend takes no events; %s", requests)
