"""The OpenAPI description as one page of HTML: no script, no style sheet or font of another server."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from typing import Any

Schema = dict[str, Any]
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
code, .method { font-family: ui-monospace, monospace; }
details { border-top: 1px solid #8884; padding: .4rem 0; }
summary { cursor: pointer; }
.method { display: inline-block; width: 4.5rem; font-weight: 600; text-transform: uppercase; }
.quiet { opacity: .7; }
table { border-collapse: collapse; margin: .5rem 0; }
td, th { text-align: left; vertical-align: top; padding: .15rem 1rem .15rem 0; }
:root { color-scheme: light dark; }
"""


def page(document: Schema) -> bytes:
    """Return the page of a description made by `openapi.document`."""
    return "\n".join(_lines(document)).encode()


def _lines(document: Schema) -> Iterator[str]:
    title = escape(f"{document['info']['title']} {document['info']['version']}")
    yield f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>'
    yield f'<meta name="viewport" content="width=device-width"><style>{STYLE}</style>'
    yield f"<h1>{title}</h1><p>{escape(document['info']['description'])}"
    yield '<a href="/openapi.json">openapi.json</a></p>'
    if "security" in document:
        yield "<p>Send the header <code>Authorization: Bearer KEY</code>.</p>"
    yield "<h2>Routes</h2>"
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            yield from _operation(path, method, operation)
    yield "<h2>Bodies</h2>"
    for name, schema in document["components"]["schemas"].items():
        yield from _struct(name, schema)
    yield "</html>"


def _operation(path: str, method: str, operation: Schema) -> Iterator[str]:
    yield f'<details><summary><span class="method">{method}</span> <code>{escape(path)}</code> '
    yield f'<span class="quiet">{escape(operation["summary"])}</span></summary><table>'
    for parameter in operation["parameters"]:
        name = f"{parameter['in']}: {parameter['name']}"
        yield _row(escape(name), _type(parameter["schema"]), "")
    if "requestBody" in operation:
        content = operation["requestBody"]["content"]["application/json"]
        yield _row("body", _type(content["schema"]), "")
    for status, response in operation["responses"].items():
        types = [
            f"{_type(_data_of(body['schema']))} <span class='quiet'>{escape(media)}</span>"
            for media, body in response["content"].items()
        ]
        yield _row(status, "<br>".join(types), escape(response["description"]))
    yield "</table></details>"


def _struct(name: str, schema: Schema) -> Iterator[str]:
    yield f'<details id="{name}"><summary><code>{name}</code> '
    yield f'<span class="quiet">{escape(schema.get("description", ""))}</span></summary><table>'
    required = schema.get("required", [])
    for field, inner in schema.get("properties", {}).items():
        mark = "" if field in required else ' <span class="quiet">optional</span>'
        text = escape(inner.get("description", ""))
        yield _row(f"<code>{escape(field)}</code>{mark}", _type(inner), text)
    yield "</table></details>"


def _row(*cells: str) -> str:
    return "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"


def _data_of(schema: Schema) -> Schema:
    """Return what the events of a stream hold, or the schema itself where it is no stream."""
    return schema.get("x-data", schema)


def _type(schema: Schema) -> str:
    """Return a type in words, named ones as links."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f'<a href="#{name}">{name}</a>'
    if "anyOf" in schema:
        return " or ".join(map(_type, schema["anyOf"]))
    if "enum" in schema:
        return " or ".join(f"<code>{escape(str(value))}</code>" for value in schema["enum"])
    kinds = schema.get("type", "anything")
    kinds = [kinds] if isinstance(kinds, str) else kinds
    words = [
        f"list of {_type(schema['items'])}" if k == "array" and "items" in schema else k
        for k in kinds
    ]
    low, high = schema.get("minimum"), schema.get("maximum")
    bounds = f" ({low} to {high})" if low is not None and high is not None else ""
    return " or ".join(words) + bounds
