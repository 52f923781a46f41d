"""OpenAI's published schemas as an oracle; the file is reduced from openapi.yaml, see its `source`."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import jsonschema

FILE = Path(__file__).parents[1] / "data" / "openai_schemas.json"
ROOTS = {
    "/v1/chat/completions": ("chat.completion", "chat.completion.chunk"),
    "/v1/completions": ("completion", "completion"),
    "/v1/models": ("model.list", ""),
}


@functools.cache
def _validator(root: str):
    document = json.loads(FILE.read_text())
    schema = {"$ref": document["roots"][root], "$defs": document["$defs"]}
    return jsonschema.Draft202012Validator(schema)


def problems(root: str, answer) -> list[str]:
    """Return where an answer breaks the schema of that root."""
    return [f"{e.json_path}: {e.message}" for e in _validator(root).iter_errors(answer)]


def check_response(path: str, status: int, content_type: str, text: str) -> None:
    """Fail unless the answer of a route is what OpenAI publishes for it."""
    whole, chunk = ROOTS.get(path, ("", ""))
    if content_type.startswith("text/event-stream"):
        for block in filter(None, text.split("\n\n")):
            data = block.removeprefix("data: ")
            if data != "[DONE]":
                _check_chunk(chunk, json.loads(data))
    elif status >= 400:
        if path not in ("/health", "/ready"):
            assert problems("error", json.loads(text)) == []
    elif whole:
        assert problems(whole, json.loads(text)) == []


def _check_chunk(root: str, chunk) -> None:
    if "error" in chunk:
        assert problems("error", chunk) == []
        return
    if root == "completion":
        # The published schema has whole completions only: in chunks finish_reason is null until the last.
        for choice in chunk["choices"]:
            choice["finish_reason"] = choice["finish_reason"] or "stop"
        chunk = {name: value for name, value in chunk.items() if name != "usage" or value}
    assert problems(root, chunk) == []
