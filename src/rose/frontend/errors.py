"""Every error a client can get: one table from code to HTTP status and OpenAI error object.

Messages are written where the mistake is found; this file decides only how they are sent.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import msgspec

from rose.frontend.formatters.base import FormatError
from rose.protocol.event import ErrorEvent
from rose.utils.errors import RoseError

INVALID = "invalid_request_error"
RATE = "requests"
"""OpenAI's type of rate limits."""
SERVER = "server_error"


@dataclass(frozen=True, slots=True)
class ErrorKind:
    """How one code is answered."""

    status: int
    type: str
    retry_after_s: float | None = None
    """Sent as Retry-After, and to the millisecond as retry-after-ms, where waiting helps."""
    name: str | None = None
    """The code that clients see, where OpenAI has another word than the engine."""


KINDS: dict[str, ErrorKind] = {
    "invalid_json": ErrorKind(400, INVALID),
    "invalid_request": ErrorKind(400, INVALID),
    "unknown_field": ErrorKind(400, INVALID),
    "unsupported_value": ErrorKind(400, INVALID),
    "grammar_failed": ErrorKind(400, INVALID),
    "context_length_exceeded": ErrorKind(400, INVALID),
    "invalid_http": ErrorKind(400, INVALID),
    "invalid_api_key": ErrorKind(401, INVALID),
    "permission_denied": ErrorKind(403, INVALID),
    "previous_response_not_found": ErrorKind(400, INVALID),
    "item_not_found": ErrorKind(400, INVALID),
    "invalid_encrypted_content": ErrorKind(400, INVALID),
    "response_not_found": ErrorKind(404, INVALID),
    "model_not_found": ErrorKind(404, INVALID),
    "not_found": ErrorKind(404, INVALID),
    "method_not_allowed": ErrorKind(405, INVALID),
    "duplicate_request_id": ErrorKind(409, INVALID),
    "request_too_large": ErrorKind(413, INVALID),
    "unsupported_media_type": ErrorKind(415, INVALID),
    "head_too_large": ErrorKind(431, INVALID),
    "client_disconnected": ErrorKind(499, INVALID),  # nobody reads it; for logs and metrics
    "queue_full": ErrorKind(429, RATE, retry_after_s=1, name="rate_limit_exceeded"),
    "engine_loading": ErrorKind(503, SERVER, retry_after_s=5),
    "engine_unavailable": ErrorKind(503, SERVER, retry_after_s=5),
    "shutting_down": ErrorKind(503, SERVER, retry_after_s=5),
    "store_unavailable": ErrorKind(503, SERVER, retry_after_s=5),
    "request_timeout": ErrorKind(504, SERVER),
    "engine_failed": ErrorKind(500, SERVER),
    "logits_not_finite": ErrorKind(500, SERVER),
    "internal_error": ErrorKind(500, SERVER),
}


class RequestError(RoseError):
    """A request that cannot be answered; always told to its client, never only logged."""

    def __init__(self, code: str, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param

    @property
    def kind(self) -> ErrorKind:
        """How this error is sent."""
        return KINDS[self.code]

    @classmethod
    def of_event(cls, event: ErrorEvent) -> RequestError:
        """Return what the engine said as an error of this request."""
        return cls(event.code, event.message, param=event.param)

    @classmethod
    def of_format(cls, error: FormatError) -> RequestError:
        """Return what a formatter said of a conversation."""
        return cls("invalid_request", str(error), param=error.param)


class ErrorObject(msgspec.Struct, kw_only=True):
    """OpenAI's error; all four fields are always sent."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct, kw_only=True):
    """The body of every answer that failed, and of an error inside a stream."""

    error: ErrorObject


def error_body(error: RequestError) -> bytes:
    """Return the JSON of an error."""
    return msgspec.json.encode(
        ErrorBody(
            error=ErrorObject(
                message=error.message,
                type=error.kind.type,
                param=error.param,
                code=error.kind.name or error.code,
            )
        )
    )


def error_headers(error: RequestError) -> dict[str, str]:
    """Return the headers that belong to an error."""
    if error.code == "invalid_api_key":
        return {"www-authenticate": "Bearer"}
    seconds = error.kind.retry_after_s
    headers = {}
    if seconds is not None:
        # Whole seconds for everyone; OpenAI's clients look for the other first.
        headers["retry-after"] = str(math.ceil(seconds))
        headers["retry-after-ms"] = str(round(seconds * 1000))
    if error.code == "shutting_down":
        headers["connection"] = "close"  # the next request belongs to another server
    return headers
