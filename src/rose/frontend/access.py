"""Who may ask: API keys on every route but health and readiness, and which web pages may call at all.

Both are ASGI middleware. Keys are kept and compared as digests only; nothing here logs or prints one.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rose.frontend.config import FrontendConfig
from rose.frontend.errors import RequestError
from rose.frontend.metrics import Metrics
from rose.frontend.reply import send_error, start
from rose.utils.errors import ConfigError

KEYS_VARIABLE = "ROSE_API_KEY"
"""Environment variable with keys, separated by blanks or commas."""
KEY_NAME = "rose.key_name"
"""In the scope of a request: a name for the key it came with; empty where no key is asked for."""
OPEN_PATHS = frozenset({"/health", "/ready"})
"""Probes ask these without a key, and learn only whether the server works."""
MAX_KEY_CHARACTERS = 512
EXPOSED_HEADERS = "x-request-id, openai-processing-ms, retry-after, retry-after-ms"
PREFLIGHT_SECONDS = 600
_KEY = re.compile(r"[\x21-\x7e]{1,512}")


def read_keys(config: FrontendConfig, environment: Mapping[str, str]) -> list[str]:
    """Return the keys of option, file and environment together; none means that no key is asked for.

    Raises  ConfigError for a file that cannot be read or holds none, and for a key that no header can carry.
    """
    told = re.split(r"[\s,]+", environment.get(KEYS_VARIABLE, ""))
    keys = [*config.api_key, *filter(None, told)]
    if config.api_key_file:
        keys += _keys_of_file(Path(config.api_key_file))
    if not all(_KEY.fullmatch(key) for key in keys):
        raise ConfigError(
            f"an API key is empty, has blanks, other than ASCII characters or more than {MAX_KEY_CHARACTERS}; allowed: "
            f"1 to {MAX_KEY_CHARACTERS} visible ASCII characters; change --api-key, --api-key-file or {KEYS_VARIABLE}"
        )
    return keys


def _keys_of_file(path: Path) -> list[str]:
    try:
        lines = [line.strip() for line in path.read_text().splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"api_key_file={str(path)!r} cannot be read ({error}); allowed: a text file with one key per line; "
            "change --api-key-file"
        ) from error
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise ConfigError(
            f"api_key_file={str(path)!r} holds no key, which would leave the server open; allowed: one key per "
            "line; add one or leave --api-key-file out"
        )
    return keys


class KeyCheck:
    """Refuse what comes without a known key; without keys let everything pass."""

    def __init__(self, app: ASGIApp, *, keys: Iterable[str], metrics: Metrics) -> None:
        self._app = app
        self._digests = [_digest(key.encode()) for key in keys]
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer 401."""
        is_open = scope["type"] != "http" or scope["path"] in OPEN_PATHS or not self._digests
        key = None if is_open else _bearer(scope)
        if is_open or self._is_known(key):
            scope[KEY_NAME] = "" if key is None else _digest(b"name of " + key).hex()[:32]
            await self._app(scope, receive, send)
            return
        self._metrics.answered("other", 401, "error")
        await send_error(
            send,
            RequestError(
                "invalid_api_key",
                "no known API key was sent; this server needs one; send the header Authorization: Bearer KEY",
            ),
        )

    def _is_known(self, key: bytes | None) -> bool:
        """Compare with every key, and with equal effort: the time tells neither which nor how much was right."""
        digest = _digest(b"" if key is None else key)
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        return key is not None and any(matches)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _bearer(scope: Scope) -> bytes | None:
    for name, value in scope["headers"]:
        if name == b"authorization":
            kind, _, key = value.strip().partition(b" ")
            if kind.lower() == b"bearer":
                return key.strip()
    return None


class Origins:
    """Cross-origin requests of web pages: refused unless their origin is on the list.

    Programs send no Origin header and pages of this server send their own, so both pass.
    """

    def __init__(self, app: ASGIApp, *, allowed: Iterable[str], metrics: Metrics) -> None:
        self._app = app
        self._allowed = frozenset(allowed)
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on with the headers its page needs, or answer 403."""
        headers = dict(scope["headers"]) if scope["type"] == "http" else {}
        origin = headers.get(b"origin")
        if origin is None or _is_own(origin, scope, headers):
            await self._app(scope, receive, send)
            return
        if not self._is_allowed(origin):
            self._metrics.answered("other", 403, "error")
            await send_error(send, _refusal(origin))
            return
        granted = [(b"access-control-allow-origin", origin), (b"vary", b"origin")]
        if scope["method"] == "OPTIONS" and b"access-control-request-method" in headers:
            await _answer_preflight(headers, granted, send)
            return
        granted.append((b"access-control-expose-headers", EXPOSED_HEADERS.encode()))

        async def send_granted(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", []), *granted]
            await send(message)

        await self._app(scope, receive, send_granted)

    def _is_allowed(self, origin: bytes) -> bool:
        return "*" in self._allowed or origin.decode("latin-1") in self._allowed


def _is_own(origin: bytes, scope: Scope, headers: dict[bytes, bytes]) -> bool:
    return origin == scope.get("scheme", "http").encode() + b"://" + headers.get(b"host", b"")


def _refusal(origin: bytes) -> RequestError:
    return RequestError(
        "permission_denied",
        f"a web page of {origin.decode('latin-1')[:200]!r} asked; allowed: origins named by --allowed-origins; "
        "start the server with this one or leave the Origin header out",
    )


async def _answer_preflight(
    headers: dict[bytes, bytes], granted: list[tuple[bytes, bytes]], send: Send
) -> None:
    message = start(204, {"access-control-max-age": str(PREFLIGHT_SECONDS)})
    asked = headers.get(b"access-control-request-headers", b"")
    message["headers"] += [*granted, (b"access-control-allow-methods", b"GET, POST, DELETE")]
    message["headers"] += [(b"access-control-allow-headers", asked)] if asked else []
    await send(message)
    await send({"type": "http.response.body", "body": b""})
