"""`rose harmony render` and `rose harmony parse`: the prompt format by itself, JSON lines in, JSON lines out.

For looking at prompts, for tests, and for people who write clients. A line that cannot be done answers with an
object `{"error": {...}}`, the lines after it go on, and the exit code is 1 at the end.
"""

from __future__ import annotations

import difflib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from rose.frontend.formatters.harmony.formatter import HarmonyFormatter
    from rose.frontend.tokenizer import Tokenizer

_model_option = click.option(
    "--model",
    "folder",
    metavar="DIR",
    type=click.Path(path_type=Path),
    help="Take the tokenizer of this model folder instead of o200k_harmony.",
)
_LENGTH_WORDS = ("length", "max_tokens", "max_output_tokens")


class _CannotLoad(click.ClickException):
    exit_code = 2  # as every mistake of the caller, see cli/main.py


@click.group()
def harmony() -> None:
    """Render and parse the Harmony format, JSON lines in and out."""


@harmony.command()
@_model_option
def render(folder: Path | None) -> None:
    """Render request bodies to prompts.

    Reads one body of chat completions or Responses per line, with "api" (chat or responses) and, optionally,
    "conversation_date"; writes {"text", "tokens"} per line.
    """
    tokenizer, formatter = _load(folder)

    def render_line(line: dict[str, Any]) -> dict[str, Any]:
        from rose.frontend.tokenizer import decode

        token_ids = formatter.encode(_with_stored_turn(line)).token_ids
        return {"text": decode(tokenizer, token_ids), "tokens": token_ids}

    _run(render_line)


@harmony.command()
@_model_option
def parse(folder: Path | None) -> None:
    """Parse sampled tokens to messages and to chat.

    Reads {"tokens", "declared_tools", "stopped_by"} per line, tokens being what the model wrote after
    <|start|>assistant and stopped_by stop (the default) or max_tokens; writes {"messages", "chat"} per line.
    """
    tokenizer, formatter = _load(folder)
    _run(lambda line: _parse_line(line, tokenizer, formatter))


def _load(folder: Path | None) -> tuple[Tokenizer, HarmonyFormatter]:
    from rose.frontend.formatters.harmony.formatter import HarmonyFormatter
    from rose.frontend.tokenizer import load_tokenizer
    from rose.utils.errors import ConfigError

    try:
        tokenizer = load_tokenizer(folder)
        return tokenizer, HarmonyFormatter(tokenizer)
    except ConfigError as error:
        raise _CannotLoad(str(error)) from None


def _parse_line(
    line: dict[str, Any], tokenizer: Tokenizer, formatter: HarmonyFormatter
) -> dict[str, Any]:
    declared = line.get("declared_tools") or []
    if not isinstance(declared, list) or not all(isinstance(name, str) for name in declared):
        raise ValueError(f"declared_tools: found {declared!r:.80}; allowed: a list of names")
    is_cut = _read_stopped_by(line.get("stopped_by"))
    decoder = formatter.decoder(declared_tools=declared)
    decoder.push(_read_tokens(line, tokenizer))
    decoder.finish("length" if is_cut else "stop")
    answer = decoder.answer()
    fields = ("channel", "recipient", "content_type", "content")
    return {
        "messages": [{f: getattr(message, f) for f in fields} for message in answer.messages],
        "chat": {
            "content": answer.content,
            "reasoning": answer.reasoning,
            "tool_calls": answer.tool_calls,
            "finish_reason": answer.finish_reason,
        },
    }


def _read_stopped_by(value: Any) -> bool:
    """Return whether the answer was cut; any other reason is a string such as stop, end or a stop token."""
    if value is not None and not isinstance(value, str):
        raise ValueError(f"stopped_by: found {value!r:.80}; allowed: stop or max_tokens")
    return value in _LENGTH_WORDS


def _read_tokens(line: dict[str, Any], tokenizer: Tokenizer) -> list[int]:
    from rose.frontend.tokenizer import token_ids_of

    if "tokens" not in line and isinstance(line.get("text"), str):
        return tokenizer.encode_with_control(line["text"])
    tokens = line.get("tokens")
    token_ids = token_ids_of(tokens) if isinstance(tokens, list) else None
    if token_ids is None and "tokens" not in line:
        raise ValueError(_missing_tokens(list(line)))
    if token_ids is None:
        raise ValueError(f"tokens: found {tokens!r:.80}; allowed: a list of token ids")
    return token_ids


def _missing_tokens(found: list[str]) -> str:
    near = difflib.get_close_matches("tokens", found, n=1)
    hint = f"did you mean tokens by {near[0]!r}? " if near else ""
    keys = ", ".join(map(repr, found))[:80] or "nothing"
    return f"tokens: {hint}it is missing; found {keys}; allowed: a list of token ids under tokens"


def _with_stored_turn(line: dict[str, Any]) -> dict[str, Any]:
    """Put in the earlier turn that a Responses line carries instead of a server's store."""
    from rose.frontend.formatters.harmony.responses_body import with_stored_turn

    stored = line.get("stored_turn")
    if stored is None:
        return line
    request = line.get("request")
    if not isinstance(stored, dict) or not isinstance(request, dict):
        raise ValueError("stored_turn: allowed: an object, beside an object under request")
    outer = {k: v for k, v in line.items() if k not in ("stored_turn", "request")}
    return {**outer, **with_stored_turn(stored, request)}


def _run(answer: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Answer every line of standard input; exit with 1 when one of them was an error."""
    num_errors = 0
    for number, raw in enumerate(sys.stdin.buffer, start=1):
        if not raw.strip():
            continue
        reply = _answer_line(raw, number, answer)
        num_errors += "error" in reply
        sys.stdout.write(json.dumps(reply, ensure_ascii=True) + "\n")
        sys.stdout.flush()
    if num_errors:
        click.echo(f"{num_errors} lines could not be done; each says why", err=True)
        sys.exit(1)


def _answer_line(
    raw: bytes, number: int, answer: Callable[[dict[str, Any]], dict[str, Any]]
) -> dict[str, Any]:
    from rose.frontend.formatters.base import FormatError

    try:
        line = _read_json(raw)
        if not isinstance(line, dict):
            raise ValueError(f"found {line!r:.80}; allowed: a JSON object per line")
        return answer(line)
    except FormatError as error:
        return {"error": {"message": str(error), "param": error.param, "line": number}}
    except RecursionError:
        message = "the JSON is nested too deeply; allowed: some hundred levels"
        return {"error": {"message": message, "param": None, "line": number}}
    except ValueError as error:
        return {"error": {"message": str(error), "param": None, "line": number}}


def _read_json(raw: bytes) -> Any:
    try:
        return json.loads(raw)
    except ValueError as error:
        raise ValueError(f"found no JSON ({error}); allowed: a JSON object per line") from None
