"""What every answer carries: a request id, the time it took; what every request is counted and logged in.

Log lines name the request's id, method, path and status. No line holds a body, a header or a piece of an answer,
and of a bug only where it happened: messages of exceptions may quote what a client sent.
"""

from __future__ import annotations

import re
import time
import traceback
import uuid
from contextvars import ContextVar

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rose.frontend.errors import RequestError
from rose.frontend.metrics import Metrics
from rose.frontend.reply import send_error
from rose.utils.log import get_logger

ID_FORM = re.compile(r"[\x21-\x7e]{1,128}")
"""What is echoed of a client's x-request-id: printable, short, nothing that could end a header."""
QUIET_PATHS = frozenset({"/health", "/ready", "/metrics"})
"""Asked every few seconds by machines; their answers are not logged."""
MAX_LOGGED_PATH = 100

_request_id: ContextVar[str] = ContextVar("request_id", default="-")
logger = get_logger(__name__)


def current_request_id() -> str:
    """Return the id of the request that is being answered, for log lines."""
    return _request_id.get()


def log_failure(error: BaseException) -> None:
    """Log where a bug happened, without the text of the exception."""
    frames = "".join(traceback.format_tb(error.__traceback__))
    logger.error(
        "%s failed: %s (its text is left out: it may quote the request)\n%s",
        current_request_id(),
        type(error).__name__,
        frames,
    )


class RequestFrame:
    """ASGI middleware: x-request-id (the client's or a new one) and openai-processing-ms on every answer."""

    def __init__(self, app: ASGIApp, *, metrics: Metrics, logs_requests: bool = True) -> None:
        self._app = app
        self._metrics = metrics
        self._logs_requests = logs_requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on with its answer's headers extended; answer for what fails on the way."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = time.monotonic()
        request_id = _id_of(scope)
        _request_id.set(request_id.decode())
        status = 0

        async def send_framed(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                elapsed_ms = (time.monotonic() - started) * 1000
                message["headers"] = [
                    *message.get("headers", []),
                    (b"x-request-id", request_id),
                    (b"openai-processing-ms", b"%d" % elapsed_ms),
                ]
            await send(message)

        self._metrics.opened()
        try:
            await self._app(scope, receive, send_framed)
        except Exception as error:  # noqa: BLE001 - whatever it is, the client gets an answer and the log a place
            log_failure(error)
            if status == 0:
                self._metrics.answered("other", 500, "error")
                await send_error(send_framed, RequestError("internal_error", FAILED))
            else:
                raise ConnectionAbortedError("an answer broke off") from None
        finally:
            self._metrics.closed()
            if self._logs_requests and scope["path"] not in QUIET_PATHS:
                self._log(scope, status, time.monotonic() - started)

    def _log(self, scope: Scope, status: int, seconds: float) -> None:
        path = ascii(scope["path"][:MAX_LOGGED_PATH])[1:-1]
        request_id, method = current_request_id(), scope["method"]
        logger.info("%s %s %s: %s in %.0f ms", request_id, method, path, status, seconds * 1000)


FAILED = "the server failed on this request"


def _id_of(scope: Scope) -> bytes:
    for name, value in scope["headers"]:
        if name == b"x-request-id" and ID_FORM.fullmatch(value.decode("latin-1")):
            return value
    return b"req_" + uuid.uuid4().hex.encode()
