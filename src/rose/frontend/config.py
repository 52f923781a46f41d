"""The configuration of the frontend service."""

from __future__ import annotations

import datetime
import math
import re
from dataclasses import dataclass, field
from typing import Literal

from rose.frontend.compat_metrics import PEERS, Peer
from rose.utils.errors import ConfigError

MAX_FRONTENDS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontendConfig:
    """Where the server listens, what it calls its model, and how patient it is."""

    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 for all."""
    port: int = 8000
    """0 takes a free port and prints it."""
    frontends: int = 1
    """Processes that speak HTTP, render and parse, in front of the one engine: more where one cannot keep up."""
    served_model_name: tuple[str, ...] = ()
    """Names that requests may give as `model`; the first is the one answers carry. None given: the model's folder."""
    formatter: str = "harmony"
    """Prompt format of chat requests."""
    reasoning: Literal["visible", "hidden", "debug"] = "visible"
    """What answers show of reasoning where a request does not say; with hidden, no request can lift it."""
    conversation_date: str = "today"
    """Day named in the prompt: today, none or YYYY-MM-DD."""
    api_key: tuple[str, ...] = field(default=(), repr=False)
    """A key that requests must bring; repeat it for several. Who can list processes sees it: better a file."""
    api_key_file: str = ""
    """File with one key per line; lines with # are comments. The variable ROSE_API_KEY is read too."""
    allowed_origins: tuple[str, ...] = ()
    """Origins whose web pages may call this server, such as https://chat.example; * allows all."""
    ssl_certfile: str = ""
    """Certificate chain (PEM); with it the server speaks HTTPS only."""
    ssl_keyfile: str = ""
    """Private key of the certificate (PEM, without a password), where it is not in the same file."""
    call_header: Literal["recipient_first", "channel_first"] = "recipient_first"
    """How prompts repeat calls: as the reference library writes them, or in the order in which models write them."""
    max_request_bytes: int = 32 * 2**20
    """Larger bodies are refused with 413."""
    response_store: str = "memory"
    """Where responses are kept for previous_response_id and GET: memory (of the process), none, or a file, which
    several servers may share."""
    response_store_count: int = 10_000
    """Most responses kept; the longest unused go first."""
    response_store_bytes: int = 256 * 2**20
    """Most bytes of responses kept, and as many again of events of responses made in the background."""
    response_store_s: float = 86_400.0
    """A response that nobody asks for is forgotten after so many seconds."""
    responses_key_file: str = ""
    """File with the secret that seals encrypted reasoning (32 bytes or more). Empty: a key of this process alone."""
    max_schema_bytes: int = 131_072
    """Larger JSON schemas are refused (each one of a request, written as JSON)."""
    grammar_build_seconds: float = 2.0
    """A schema whose grammar takes longer to build is refused."""
    request_timeout_s: float = 0.0
    """Answers that take longer are ended with 504; 0: never. A request may ask for less with x-request-timeout."""
    log_requests: bool = True
    """One line per answered request: id, method, path, status, milliseconds. Never what was asked or answered."""
    engine_timeout_s: float = 4.0
    """An engine that makes no progress for so long, and for five times what its step was predicted to take, is stuck:
    its requests fail, /health answers 503, and it is killed and started again."""
    max_engine_restarts: int = 5
    """Restarts in a row, each within a minute of the last, before the server gives up and ends; 0: none."""
    metrics_compat: Peer = "none"
    """Also publish the core series of /metrics under the names of vllm or sglang."""
    linger_s: float = 5.0
    """After the engine was given up: seconds in which requests are still answered with 503 before the server ends."""
    shutdown_timeout_s: float = 10.0
    """After Ctrl-C or SIGTERM: seconds in which running answers may finish."""

    def __post_init__(self) -> None:
        problems = []
        if not 0 <= self.port <= 65535:
            problems.append(f"port={self.port}; allowed: 0 to 65535; change --port")
        if not 1 <= self.frontends <= MAX_FRONTENDS:
            problems.append(
                f"frontends={self.frontends}; allowed: 1 to {MAX_FRONTENDS}; change --frontends"
            )
        if self.max_request_bytes < 1024:
            problems.append(
                f"max_request_bytes={self.max_request_bytes}; allowed: 1024 or more; change --max-request-bytes"
            )
        if self.max_schema_bytes < 1024:
            problems.append(
                f"max_schema_bytes={self.max_schema_bytes}; allowed: 1024 or more; change --max-schema-bytes"
            )
        if not 0 < self.grammar_build_seconds <= 600:
            problems.append(
                f"grammar_build_seconds={self.grammar_build_seconds}; allowed: above 0, at most 600; "
                "change --grammar-build-seconds"
            )
        if self.ssl_keyfile and not self.ssl_certfile:
            problems.append(
                "ssl_keyfile was given without ssl_certfile; give --ssl-certfile or leave --ssl-keyfile out"
            )
        problems += _wrong_origins(self.allowed_origins)
        seconds = ("engine_timeout_s", "linger_s", "shutdown_timeout_s", "request_timeout_s")
        for name in seconds:
            if not 0 <= getattr(self, name) < 86400:
                flag = name.replace("_", "-")
                problems.append(
                    f"{name}={getattr(self, name)}; allowed: 0 to 86399 seconds; change --{flag}"
                )
        if self.max_engine_restarts < 0:
            problems.append(
                f"max_engine_restarts={self.max_engine_restarts}; allowed: 0 or more; change --max-engine-restarts"
            )
        for name in ("response_store_count", "response_store_bytes", "response_store_s"):
            if not 0 < getattr(self, name) < math.inf:
                flag = name.replace("_", "-")
                problems.append(
                    f"{name}={getattr(self, name)}; allowed: above 0, or --response-store none; change --{flag}"
                )
        if self.metrics_compat not in PEERS:
            problems.append(
                f"metrics_compat={self.metrics_compat!r}; allowed: {', '.join(PEERS)}; change --metrics-compat"
            )
        if not _is_date_choice(self.conversation_date):
            problems.append(
                f"conversation_date={self.conversation_date!r}; allowed: today, none or YYYY-MM-DD; "
                "change --conversation-date"
            )
        if problems:
            raise ConfigError(problems)

    def date_of_now(self) -> str | None:
        """Return the day that a prompt written now names; None for no day."""
        if self.conversation_date == "none":
            return None
        if self.conversation_date == "today":
            return datetime.datetime.now(datetime.UTC).date().isoformat()
        return self.conversation_date


def _wrong_origins(origins: tuple[str, ...]) -> list[str]:
    form = re.compile(r"\*|[a-z][a-z0-9+.-]*://[^/\s]+|null")
    return [
        f"allowed_origins={origin!r}; allowed: *, or scheme://host with a port where it is not the scheme's own, "
        "and no path; change --allowed-origins"
        for origin in origins
        if not form.fullmatch(origin)
    ]


def _is_date_choice(text: str) -> bool:
    if text in ("today", "none"):
        return True
    try:
        return datetime.date.fromisoformat(text).isoformat() == text
    except ValueError:
        return False
