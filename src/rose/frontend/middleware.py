"""What every answer carries: a request id, the time it took; and what every request is counted in."""

from __future__ import annotations

import re
import time
import uuid

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rose.frontend.metrics import Metrics

ID_FORM = re.compile(r"[\x21-\x7e]{1,128}")
"""What is echoed of a client's x-request-id: printable, short, nothing that could end a header."""


class RequestFrame:
    """ASGI middleware: x-request-id (the client's or a new one) and openai-processing-ms on every answer."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on with its answer's headers extended."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = time.monotonic()
        request_id = _request_id(scope)

        async def send_framed(message: Message) -> None:
            if message["type"] == "http.response.start":
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
        finally:
            self._metrics.closed()


def _request_id(scope: Scope) -> bytes:
    for name, value in scope["headers"]:
        if name == b"x-request-id" and ID_FORM.fullmatch(value.decode("latin-1")):
            return value
    return b"req_" + uuid.uuid4().hex.encode()
