"""Whether an engine can serve a request at all; answered at once, in words for its user.

Knows no queue and no model, so that the scripted engine refuses in the same words.
"""

from __future__ import annotations

from rose.protocol.event import ErrorCode, ErrorEvent
from rose.protocol.request import MAX_SALT_CHARACTERS, Request, problems_of_limits
from rose.protocol.sampling_params import MAX_BANNED


def refusal(
    request: Request, *, context_tokens: int, kv_tokens: int, vocab_size: int
) -> ErrorEvent | None:
    """Return why the request can never run, or None.

    Units    context_tokens: the limit of model and configuration; kv_tokens: what the KV cache holds
    """
    problems = _problems(request, vocab_size)
    if problems:
        return _error(request, "invalid_request", "; ".join(problems))
    length = len(request.prompt_token_ids) + request.max_tokens
    asked = f"{len(request.prompt_token_ids)} prompt tokens and max_tokens={request.max_tokens} make {length} tokens"
    if length > context_tokens:
        return _error(
            request,
            "context_length_exceeded",
            f"{asked}; the context length is {context_tokens}; shorten the prompt or lower max_tokens",
        )
    if length > kv_tokens:
        return _error(
            request,
            "context_length_exceeded",
            f"{asked}; this server's KV cache holds {kv_tokens} tokens; shorten the prompt, lower "
            "max_tokens, or have the server started with more KV memory (cache.kv_tokens, cache.memory_fraction)",
        )
    return None


def duplicate_id(request: Request) -> ErrorEvent:
    """Return the refusal of a request whose id still runs."""
    return _error(
        request,
        "duplicate_request_id",
        f"request_id {request.request_id!r} is still running; ids must be unique among running requests; "
        "choose another",
    )


def queue_full(request: Request, found: str) -> ErrorEvent:
    """Return the refusal of a request that there is no room for now; `found` says how many there are."""
    return _error(request, "queue_full", f"{found}; try again later")


def not_by_priority(request: Request) -> ErrorEvent:
    """Return the refusal of a priority where nobody looks at it."""
    return _error(
        request,
        "invalid_request",
        f"priority={request.priority}; this server serves first come, first served; allowed: 0, which is the "
        "default; leave it out, or have the server started with --policy priority",
        param="priority",
    )


def timed_out(request_id: str, timeout_s: float, found: str) -> ErrorEvent:
    """Return the end of a request whose time is up; `found` says how far it came."""
    return ErrorEvent(
        request_id=request_id,
        code="request_timeout",
        message=f"timeout={timeout_s:g} s have passed and the request {found}; ask for fewer tokens, give it more "
        "time or send it when the server is less busy",
    )


def _problems(request: Request, vocab_size: int) -> list[str]:
    problems = request.sampling.problems()
    if not request.prompt_token_ids:
        problems.append("prompt_token_ids is empty; at least one token is needed")
    if request.max_tokens < 1:
        problems.append(f"max_tokens={request.max_tokens}; allowed: 1 or more")
    problems += problems_of_limits(priority=request.priority, timeout_s=request.timeout_s)
    if len(request.cache_salt) > MAX_SALT_CHARACTERS:
        problems.append(
            f"cache_salt has {len(request.cache_salt)} characters; allowed: at most {MAX_SALT_CHARACTERS}"
        )
    for name, ids in (
        ("prompt_token_ids", request.prompt_token_ids),
        ("stop_token_ids", request.stop_token_ids),
        ("logit_bias", list(request.sampling.logit_bias)),
    ):
        if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
            index = next(i for i, t in enumerate(ids) if not 0 <= t < vocab_size)
            problems.append(f"{name}[{index}]={ids[index]}; allowed: 0 to {vocab_size - 1}")
    problems += request.constraint.problems() if request.constraint is not None else []
    minimum = request.sampling.min_tokens
    if minimum > max(1, request.max_tokens):
        problems.append(f"min_tokens={minimum}; allowed: 0 to max_tokens={request.max_tokens}")
    if minimum and len(request.stop_token_ids) > MAX_BANNED:
        problems.append(
            f"min_tokens with {len(request.stop_token_ids)} stop_token_ids; allowed: {MAX_BANNED} at most"
        )
    return problems


def _error(
    request: Request, code: ErrorCode, message: str, *, param: str | None = None
) -> ErrorEvent:
    return ErrorEvent(request_id=request.request_id, code=code, message=message, param=param)
