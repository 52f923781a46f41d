"""Reading a request's body within a size limit, and parsing it without holding up other streams."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from starlette.requests import Request

from rose.frontend.errors import RequestError
from rose.frontend.parsing import quoted

JSON_TYPES = ("application/json", "text/json")
INLINE_BODY_BYTES = 32_768
"""Larger bodies are parsed and rendered in a thread: 8k tokens take about 10 ms, in which no other stream would
move. Guessed."""

MAX_TIMEOUT_SECONDS = 86_400

Parsed = TypeVar("Parsed")


async def read_body(request: Request, *, max_bytes: int) -> bytes:
    """Return the body.

    Raises  RequestError for another media type than JSON (none at all is taken for JSON), for packed bodies and for too
            many bytes.
    """
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type and media_type not in JSON_TYPES and not media_type.endswith("+json"):
        raise RequestError(
            "unsupported_media_type",
            f"content-type {quoted(media_type)} was sent; allowed: application/json; set the header",
        )
    coding = request.headers.get("content-encoding", "identity").strip().lower()
    if coding != "identity":
        raise RequestError(
            "unsupported_media_type",
            f"content-encoding {quoted(coding)} was sent; allowed: none; send the JSON as it is",
        )
    announced = request.headers.get("content-length", "")
    if announced.isdigit() and int(announced) > max_bytes:
        raise _too_large(int(announced), max_bytes)
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > max_bytes:
            raise _too_large(len(body), max_bytes)
    return bytes(body)


def timeout_of(request: Request, server_s: float) -> float | None:
    """Return how long an answer may take in seconds: the lesser of the server's limit (0: none) and x-request-timeout.

    Raises  RequestError where the header is no number above 0.
    """
    limit = server_s or None
    header = request.headers.get("x-request-timeout")
    if header is None:
        return limit
    try:
        asked = float(header)
    except ValueError:
        asked = 0.0
    if not 0 < asked < MAX_TIMEOUT_SECONDS:
        raise RequestError(
            "invalid_request",
            f"x-request-timeout={quoted(header)}; allowed: seconds above 0, below {MAX_TIMEOUT_SECONDS}; "
            "change the header or leave it out",
        )
    return asked if limit is None else min(asked, limit)


async def parsed(raw: bytes, parse: Callable[[bytes], Parsed]) -> Parsed:
    """Return what `parse` makes of a body, in a thread where the body is large.

    Raises  whatever `parse` raises
    """
    if len(raw) > INLINE_BODY_BYTES:
        return await asyncio.to_thread(parse, raw)
    return parse(raw)


def _too_large(num_bytes: int, max_bytes: int) -> RequestError:
    return RequestError(
        "request_too_large",
        f"the body has {num_bytes} bytes or more; allowed: {max_bytes}; send less or raise --max-request-bytes",
    )
