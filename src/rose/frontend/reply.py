"""Whole answers as ASGI messages, for what answers without a framework: streams and middleware."""

from __future__ import annotations

from typing import Any

from starlette.types import Send

from rose.frontend.errors import RequestError, error_body, error_headers

JSON = "application/json"


def start(status: int, headers: dict[str, str]) -> dict[str, Any]:
    """Return the message that opens an answer."""
    pairs = [(name.encode(), value.encode()) for name, value in headers.items()]
    return {"type": "http.response.start", "status": status, "headers": pairs}


async def send_json(
    send: Send, status: int, body: bytes, headers: dict[str, str] | None = None
) -> None:
    """Send one JSON body."""
    whole = {"content-type": JSON, "content-length": str(len(body)), **(headers or {})}
    await send(start(status, whole))
    await send({"type": "http.response.body", "body": body})


async def send_error(send: Send, error: RequestError) -> None:
    """Send an error as the whole answer."""
    await send_json(send, error.kind.status, error_body(error), error_headers(error))
