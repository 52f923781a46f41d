"""Script files of `rose serve --scripted`: JSON lines with text or token ids -> lines of token ids alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from rose.server.scripted import ScriptLine
from rose.utils.errors import ConfigError

ALLOWED = ", ".join(("text", *ScriptLine.__struct_fields__))
MAX_PROBLEMS = 20
"""Told one by one; a file of another kind has as many as lines."""


def read_script(path: Path, model_folder: Path | None) -> list[dict[str, Any]]:
    """Return the answers of a script; `text` is encoded with the names of control tokens meaning those tokens.

    Raises  ConfigError listing the wrong lines, the first MAX_PROBLEMS of them one by one.
    """
    answers, problems = [], []
    encode = _lazy_encoder(model_folder)
    for number, raw in enumerate(path.read_bytes().splitlines(), start=1):
        if not raw.strip():
            continue
        try:
            answers.append(_answer(msgspec.json.decode(raw), encode))
        except (msgspec.MsgspecError, ValueError) as error:
            problems.append(
                f"{path} line {number}: {error}; allowed fields: {ALLOWED}; see docs/api.md"
            )
    if not answers and not problems:
        problems.append(
            f"{path} has no lines; allowed: one JSON object per request; see docs/api.md"
        )
    if len(problems) > MAX_PROBLEMS:
        more = len(problems) - MAX_PROBLEMS
        problems[MAX_PROBLEMS:] = [f"{path}: {more} more wrong lines; is it a script?"]
    if problems:
        raise ConfigError(problems)
    return answers


def _answer(line: Any, encode: Any) -> dict[str, Any]:
    if not isinstance(line, dict):
        raise ValueError(f"a line is {type(line).__name__}, not an object")
    text = line.pop("text", None)
    if text is not None:
        if "tokens" in line:
            raise ValueError("a line has text and tokens; give one of them")
        if not isinstance(text, str):
            raise ValueError(f"text is {type(text).__name__}, not a string")
        line["tokens"] = encode(text)
    needs = line.get("needs")
    if isinstance(needs, list):
        line["needs"] = [encode(text) if isinstance(text, str) else text for text in needs]
    return msgspec.to_builtins(msgspec.convert(line, ScriptLine))


def _lazy_encoder(model_folder: Path | None) -> Any:
    tokenizers: list[Any] = []

    def encode(text: str) -> list[int]:
        # A script of token ids alone needs no vocabulary.
        if not tokenizers:
            from rose.frontend.tokenizer import load_tokenizer

            tokenizers.append(load_tokenizer(model_folder))
        return tokenizers[0].encode_with_control(text)

    return encode
