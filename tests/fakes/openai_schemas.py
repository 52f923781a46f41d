"""OpenAI's published schemas as an oracle; the file is reduced from openapi.yaml, see its `source`."""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path

import jsonschema

FILE = Path(__file__).parents[1] / "data" / "openai_schemas.json"
ROUTES = (
    (r"/v1/chat/completions", "chat.completion", "chat.completion.chunk"),
    (r"/v1/completions", "completion", "completion"),
    (r"/v1/models", "model.list", ""),
    (r"/v1/models/.+", "model", ""),
    (r"/v1/responses", "response", "response.stream_event"),
    (r"/v1/responses/input_tokens", "response.input_tokens", ""),
    (r"/v1/responses/[^/]+/input_items", "response.item_list", ""),
    (r"/v1/responses/[^/]+(/cancel)?", "response", "response.stream_event"),
)
"""Path, root of a whole answer, root of a streamed one's chunks or events; the first that matches counts."""
OUTSIDE = ("/health", "/ready")
"""Routes whose bodies are our own at every status."""


@functools.cache
def _document():
    return json.loads(FILE.read_text())


@functools.cache
def _validator(root: str):
    document = _document()
    schema = {"$ref": document["roots"][root], "$defs": document["$defs"]}
    return jsonschema.Draft202012Validator(schema)


def problems(root: str, answer) -> list[str]:
    """Return where an answer breaks the schema of that root."""
    return [f"{e.json_path}: {e.message}" for e in _validator(root).iter_errors(answer)]


def check_response(
    path: str, status: int, content_type: str, text: str, *, method: str = "POST"
) -> None:
    """Fail unless the answer of a route is what OpenAI publishes for it."""
    whole, part = next(
        ((whole, part) for form, whole, part in ROUTES if re.fullmatch(form, path)), ("", "")
    )
    if content_type.startswith("text/event-stream"):
        for part_json in sse_data(text):
            if part or "error" in part_json:  # our own routes have no schema of OpenAI's
                _check_part(part, part_json)
    elif status >= 400:
        if path not in OUTSIDE:
            assert problems("error", json.loads(text)) == []
    elif (
        status != 204 and whole and method != "DELETE"
    ):  # no schema of a deleted response is published
        assert problems(whole, json.loads(text)) == []


def sse_data(text: str) -> list:
    """Return the JSON of each event of a stream, [DONE] and comments left out; event names must be the types."""
    found = []
    for block in filter(None, text.split("\n\n")):
        fields = [line.partition(": ")[::2] for line in block.split("\n") if line[0] != ":"]
        data = "".join(value for name, value in fields if name == "data")
        if not data or data == "[DONE]":
            continue
        found.append(json.loads(data))
        names = [value for name, value in fields if name == "event"]
        assert names in ([], [found[-1].get("type")]), block
    return found


def _check_part(root: str, part) -> None:
    if "error" in part and "type" not in part:
        assert problems("error", part) == []
        return
    if root == "completion":
        # The published schema has whole completions only: in chunks finish_reason is null until the last.
        for choice in part["choices"]:
            choice["finish_reason"] = choice["finish_reason"] or "stop"
        part = {name: value for name, value in part.items() if name != "usage" or value}
    if root == "response.stream_event":
        # Each event against its own schema: of "none of 60 alternatives fits" nobody could learn anything.
        root = f"{root}/{part['type']}"
        assert root in _document()["roots"], f"OpenAI has no event {part['type']}"
    found = problems(root, part)
    assert found == [], f"{found} in {json.dumps(part)[:2000]}"
