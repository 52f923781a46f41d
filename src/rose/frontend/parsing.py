"""Bytes of a request body -> a checked struct, or a RequestError that names the field.

Three lists decide about a field: those a struct has, those that are accepted and change nothing (IGNORED), and
those that exist at OpenAI but not here yet (UNSUPPORTED, refused unless they ask for nothing). Everything else is
refused with the nearest known name. Knows no formatter and no engine.
"""

from __future__ import annotations

import difflib
import itertools
import re
from typing import Any, NoReturn, TypeVar

import msgspec

from rose.frontend.errors import RequestError
from rose.frontend.schemas import (
    ChatRequest,
    ChoiceFields,
    CompletionRequest,
    Message,
    SamplingFields,
    Tool,
)
from rose.protocol.request import MAX_SALT_CHARACTERS
from rose.protocol.sampling_params import MAX_TOP_LOGPROBS

MAX_JSON_DEPTH = 100
"""Of objects and lists in each other. JSON schemas, the deepest that clients send, take two for each of theirs."""
MAX_JSON_VALUES = 2_000_000
"""Of a body, about: each takes some 50 bytes once it is read. 1024 prompts of 2000 token ids fit."""
MAX_MESSAGES = 16_384
"""Each takes 4 tokens at least, so more than a context holds are refused a little later anyway."""
MAX_TOOLS = 1024
"""OpenAI allows 128; a prompt with more fits and works."""
MAX_CHOICES = 128
MAX_STOPS = 16
"""OpenAI allows 4; more cost nothing here, but each is searched for in every piece of text."""
MAX_STOP_CHARACTERS = 4096
"""Of one stop string: an end of the text is compared with each beginning of it, so the work grows with the square."""
MAX_RUNS = 1024
"""Prompts times choices of one request: more than an engine queues by default, and each costs memory at once."""
MAX_QUOTED = 200
"""Characters of a client's value that an error message repeats."""
MAX_GUESSED = 64
"""Longest unknown name for which a near one is looked up; difflib takes a second per million characters."""

IGNORED = frozenset(
    {
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
    }
)
"""Accepted and without effect: labels, and hints to OpenAI's own billing, storage and caches."""

# Name -> values that ask for nothing (null always does).
UNSUPPORTED_CHAT: dict[str, tuple[Any, ...]] = {
    "modalities": (["text"],),
    "verbosity": ("medium",),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "moderation": (),
    "functions": ([],),
    "function_call": ("none",),
}
UNSUPPORTED_COMPLETION: dict[str, tuple[Any, ...]] = {
    "suffix": ("",),
}

Parsed = TypeVar("Parsed", bound=msgspec.Struct)


def parse_json(body: bytes) -> dict[str, Any]:
    """Return the object in a body.

    Raises  RequestError for malformed JSON, for JSON that is no object, is nested too deeply or has too many values.
    """
    _check_shape(body)
    try:
        value = msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeError, RecursionError, ValueError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise RequestError(
            "invalid_json",
            f"the body ({len(body)} bytes) is not JSON: {reason}; send one JSON object",
        ) from error
    if not isinstance(value, dict):
        raise RequestError(
            "invalid_json",
            f"the body is JSON of type {type(value).__name__}; allowed: an object; see docs/api.md",
        )
    return value


_STRING = re.compile(rb'"[^"]*"?')
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_STEPS = [1 if byte in b"[{" else -1 for byte in range(256)]


def _check_shape(body: bytes) -> None:
    """Refuse, before anything is built of it, what would take much memory or the whole stack."""
    if body.count(b"[") + body.count(b"{") <= MAX_JSON_DEPTH and len(body) <= MAX_JSON_VALUES:
        return
    # Without escapes strings are what stands between two quotes: found at the speed of a copy.
    plain = body.replace(rb"\\", b"").replace(rb"\"", b"")
    _check_values(plain.count(b'"') // 2)
    frame = _STRING.sub(b"", plain)
    _check_values(frame.count(b",") + frame.count(b"[") + frame.count(b"{"))
    brackets = frame.translate(None, _NO_BRACKETS)
    depth = max(itertools.accumulate(map(_STEPS.__getitem__, brackets)), default=0)
    if depth > MAX_JSON_DEPTH:
        raise RequestError(
            "invalid_json",
            f"the body is nested {depth} levels deep; allowed: {MAX_JSON_DEPTH}; send one that is flatter",
        )


def _check_values(num_values: int) -> None:
    if num_values > MAX_JSON_VALUES:
        raise RequestError(
            "invalid_json",
            f"the body has about {num_values} values; allowed: {MAX_JSON_VALUES}; send several requests",
        )


def parse_chat(body: dict[str, Any]) -> ChatRequest:
    """Return a checked chat request.

    Raises  RequestError naming the field by its path.
    """
    request = convert(body, ChatRequest, UNSUPPORTED_CHAT)
    if not request.messages:
        refuse("invalid_request", "messages", "messages is empty; give at least one message")
    check_count("messages", request.messages, MAX_MESSAGES)
    check_count("tools", request.tools or [], MAX_TOOLS)
    for place, message in enumerate(request.messages):
        _check_parts(
            convert_part(message, Message, f"messages[{place}]"), f"messages[{place}].content"
        )
    for place, tool in enumerate(request.tools or []):
        convert_part(tool, Tool, f"tools[{place}]")
    check_choices(request)
    chat_logprobs(request)
    return request


def check_count(name: str, listed: list[Any], most: int) -> None:
    """Refuse a list that is too long.

    Raises  RequestError
    """
    if len(listed) > most:
        refuse("invalid_request", name, f"{name} has {len(listed)} entries; allowed: {most}")


def parse_completion(body: dict[str, Any]) -> CompletionRequest:
    """Return a checked completion request.

    Raises  RequestError naming the field by its path.
    """
    request = convert(body, CompletionRequest, UNSUPPORTED_COMPLETION)
    check_choices(request)
    completion_logprobs(request)
    _check_best_of(request)
    if request.echo and completion_logprobs(request) is not None:
        refuse(
            "unsupported_value",
            "echo",
            "echo=true with logprobs asks for the log-probabilities of the prompt, which are not computed; leave one "
            "of them out",
        )
    return request


def _check_best_of(request: CompletionRequest) -> None:
    count = request.n or 1
    if request.best_of not in (None, count):
        refuse(
            "unsupported_value",
            "best_of",
            f"best_of={request.best_of} with n={count}: no answers are drawn to be thrown away; allowed: {count}; "
            "leave it out",
        )


def chat_logprobs(request: ChatRequest) -> int | None:
    """Return the alternatives per token that a chat request wants, None without log-probabilities.

    Raises  RequestError naming the field.
    """
    asked = checked_top_logprobs(request.top_logprobs)
    if asked and not request.logprobs:
        refuse(
            "invalid_request",
            "top_logprobs",
            f"top_logprobs={asked} was given without logprobs=true; set logprobs or leave it out",
        )
    return asked if request.logprobs else None


def checked_top_logprobs(asked: int | None, name: str = "top_logprobs") -> int:
    """Return the alternatives per token, 0 where none were asked for.

    Raises  RequestError
    """
    asked = asked or 0
    if not 0 <= asked <= MAX_TOP_LOGPROBS:
        refuse(
            "invalid_request",
            name,
            f"{name}={asked}; allowed: 0 to {MAX_TOP_LOGPROBS}",
        )
    return asked


def completion_logprobs(request: CompletionRequest) -> int | None:
    """Return the alternatives per token that a completion request wants, None without log-probabilities.

    Raises  RequestError naming the field.
    """
    asked = request.logprobs
    if asked is None or asked is False:
        return None
    if asked is True or not 0 <= asked <= MAX_TOP_LOGPROBS:
        refuse(
            "invalid_request",
            "logprobs",
            f"logprobs={asked}; allowed: a number from 0 to {MAX_TOP_LOGPROBS}",
        )
    return asked


def completion_prompts(request: CompletionRequest) -> list[str | list[int]]:
    """Return the prompts: one text, texts, one list of token ids, or lists of token ids.

    Raises  RequestError for any mixture, and for more prompts than one request may bring.
    """
    prompts = _prompts(request)
    count = request.n or 1
    if len(prompts) * count > MAX_RUNS:
        refuse(
            "invalid_request",
            "prompt",
            f"prompt has {len(prompts)} prompts and n={count}, {len(prompts) * count} answers; allowed: {MAX_RUNS} "
            "per request; send several requests",
        )
    return prompts


def _prompts(request: CompletionRequest) -> list[str | list[int]]:
    prompt = request.prompt
    if isinstance(prompt, str):
        return [prompt]
    if prompt and all(isinstance(item, str) for item in prompt):
        return prompt
    if prompt and all(_is_id(item) for item in prompt):
        return [prompt]
    if prompt and all(isinstance(p, list) and p and all(map(_is_id, p)) for p in prompt):
        return prompt
    raise RequestError(
        "invalid_request",
        "prompt is an empty or mixed list; allowed: a string, a list of strings, a list of token ids, "
        "or a list of lists of token ids",
        param="prompt",
    )


def quoted(value: Any) -> str:
    """Return a client's value for a message, cut to a bounded length."""
    try:
        text = repr(value)
    except RecursionError:
        return f"a {type(value).__name__} nested too deeply to show"
    return text if len(text) <= MAX_QUOTED else f"{text[:MAX_QUOTED]}... ({len(text)} characters)"


def _is_id(item: Any) -> bool:
    return isinstance(item, int) and not isinstance(item, bool)


def convert(
    body: dict[str, Any],
    kind: type[Parsed],
    unsupported: dict[str, tuple[Any, ...]],
    ignored: frozenset[str] = IGNORED,
) -> Parsed:
    """Return a body as a struct.

    Raises  RequestError for a field of a wrong type, an unknown one, and a known one that cannot be had.
    """
    fields = set(kind.__struct_fields__)
    for name, value in body.items():
        if name in fields or name in ignored:
            continue
        if name not in unsupported:
            refuse_unknown(name, name, fields | ignored | set(unsupported))
        if value is not None and value not in unsupported[name]:
            allowed = " or ".join(
                ["null", *(msgspec.json.encode(v).decode() for v in unsupported[name])]
            )
            refuse(
                "unsupported_value",
                name,
                f"{name}={quoted(value)} is not supported by this server yet; allowed: {allowed}; leave it out",
            )
    return convert_part({k: v for k, v in body.items() if k in fields}, kind, "")


def convert_part(value: Any, kind: type[Parsed], path: str) -> Parsed:
    """Return a part of a body, which stands at `path`, as a struct.

    Raises  RequestError that names the field by its whole path.
    """
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        text, _, where = str(error).partition(" - at `$")
        inner = where.rstrip("`").replace("[...]", "")
        text = text.rstrip(".")
        missing = _name_in(text, "Object missing required field `")
        unknown = _name_in(text, "Object contains unknown field `")
        if unknown:
            full = _join(path, f"{inner}.{unknown}")
            known = set(kind.__struct_fields__) if not inner else set()
            refuse_unknown(full, unknown, known, error)
        full = _join(path, f"{inner}.{missing}" if missing else inner)
        text = text if len(text) <= 2 * MAX_QUOTED else f"{text[: 2 * MAX_QUOTED]}..."
        reason = "is missing" if missing else f"is wrong: {text[0].lower()}{text[1:]}"
        raise RequestError(
            "invalid_request",
            f"{full[:MAX_QUOTED] or 'the body'} {reason}; see docs/api.md",
            param=full[:MAX_QUOTED] or None,
        ) from error


def _join(path: str, inner: str) -> str:
    return f"{path}{inner}".strip(".") if path else inner.strip(".")


def _name_in(text: str, prefix: str) -> str | None:
    return text.removeprefix(prefix).rstrip("`") if text.startswith(prefix) else None


def refuse(code: str, param: str, message: str, cause: Exception | None = None) -> NoReturn:
    """Raise the RequestError of one field."""
    raise RequestError(code, message, param=param) from cause


def refuse_unknown(
    param: str, name: str, known: set[str] | frozenset[str], cause: Exception | None = None
) -> NoReturn:
    """Raise the RequestError of a field that nobody knows, with the nearest known names."""
    near = difflib.get_close_matches(name, sorted(known), n=2) if len(name) <= MAX_GUESSED else []
    hint = f"did you mean {' or '.join(near)}?" if near else "leave it out"
    refuse(
        "unknown_field", param[:MAX_QUOTED], f"{quoted(param)} is not a known field; {hint}", cause
    )


def _check_parts(message: Message, path: str) -> None:
    if not isinstance(message.content, list):
        return
    for place, part in enumerate(message.content):
        kind = part.get("type")
        if kind not in ("text", "refusal"):
            refuse(
                "unsupported_value",
                f"{path}[{place}].type",
                f"{path}[{place}] has type {quoted(kind)}; gpt-oss reads text only; allowed: text, refusal",
            )
        if not isinstance(part.get(kind), str):
            refuse(
                "invalid_request",
                f"{path}[{place}].{kind}",
                f"{path}[{place}].{kind} is {quoted(part.get(kind))}; allowed: a string",
            )


def check_choices(request: ChoiceFields) -> None:
    """Check the fields that chat, completions and tokens share.

    Raises  RequestError
    """
    if request.n is not None and not 1 <= request.n <= MAX_CHOICES:
        refuse("invalid_request", "n", f"n={request.n}; allowed: 1 to {MAX_CHOICES}")
    if request.max_tokens is not None and request.max_tokens < 1:
        # Also where max_completion_tokens wins: a field is wrong whether it counts or not.
        refuse(
            "invalid_request", "max_tokens", f"max_tokens={request.max_tokens}; allowed: 1 or more"
        )
    salt = request.cache_salt or ""
    if len(salt) > MAX_SALT_CHARACTERS:
        refuse(
            "invalid_request",
            "cache_salt",
            f"cache_salt has {len(salt)} characters; allowed: {MAX_SALT_CHARACTERS} at most",
        )
    if request.stream_options is not None and not request.stream:
        refuse(
            "invalid_request",
            "stream_options",
            "stream_options was given without stream=true; set stream or leave it out",
        )
    check_stops(request)


def check_stops(request: SamplingFields) -> None:
    """Check the stop strings.

    Raises  RequestError
    """
    strings = stop_strings(request)
    if len(strings) > MAX_STOPS:
        refuse(
            "invalid_request",
            "stop",
            f"stop has {len(strings)} strings; allowed: {MAX_STOPS} at most",
        )
    longest = max(map(len, strings), default=0)
    if longest > MAX_STOP_CHARACTERS:
        refuse(
            "invalid_request",
            "stop",
            f"stop has a string of {longest} characters; allowed: {MAX_STOP_CHARACTERS} at most",
        )
    if "" in strings:
        refuse("invalid_request", "stop", "stop has an empty string; allowed: 1 character or more")


def stop_strings(request: SamplingFields) -> list[str]:
    """Return the stop strings as a list."""
    if request.stop is None:
        return []
    return [request.stop] if isinstance(request.stop, str) else request.stop
