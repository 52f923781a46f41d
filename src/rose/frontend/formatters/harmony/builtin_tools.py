"""The built-in tools that gpt-oss was trained with, as its system message words them.

The words are part of the format: openai-harmony 0.0.8 renders them so, and another wording is another prompt.
"""

from __future__ import annotations

from typing import Any

from rose.frontend.formatters.harmony.messages import Namespace, Tool


def python_tool() -> Namespace:
    """Return the stateful Python tool; its calls are raw code to recipient `python`."""
    return Namespace(name="python", description=_PYTHON)


def browser_tool() -> Namespace:
    """Return the browser; its calls are JSON to `browser.search`, `browser.open` and `browser.find`."""
    return Namespace(name="browser", description=_BROWSER, tools=[_search(), _open(), _find()])


def is_builtin(recipient: str) -> bool:
    """Return whether a call to this recipient goes to a tool that the model was trained with."""
    return recipient == "python" or recipient.split(".")[0] in ("browser", "container")


def _search() -> Tool:
    return Tool(
        name="search",
        description="Searches for information related to `query` and displays `topn` results.",
        parameters=_object({"query": _STRING, "topn": _number(10), "source": _STRING}, ["query"]),
    )


def _open() -> Tool:
    parameters = {
        "id": {"type": ["number", "string"], "default": -1},
        "cursor": _number(-1),
        "loc": _number(-1),
        "num_lines": _number(-1),
        "view_source": {"type": "boolean", "default": False},
        "source": _STRING,
    }
    return Tool(name="open", description=_OPEN, parameters=_object(parameters, []))


def _find() -> Tool:
    return Tool(
        name="find",
        description="Finds exact matches of `pattern` in the current page, or the page given by `cursor`.",
        parameters=_object({"pattern": _STRING, "cursor": _number(-1)}, ["pattern"]),
    )


def _object(properties: dict[str, Any], required: list[str]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": required}


def _number(default: int) -> dict[str, Any]:
    return {"type": "number", "default": default}


_STRING = {"type": "string"}

_PYTHON = (
    "Use this tool to execute Python code in your chain of thought. The code will not be "
    "shown to the user. This tool should be used for internal reasoning, but not for code "
    "that is intended to be visible to the user (e.g. when creating plots, tables, or files).\n"
    "\n"
    "When you send a message containing Python code to python, it will be executed in a "
    "stateful Jupyter notebook environment. python will respond with the output of the "
    "execution or time out after 120.0 seconds. The drive at '/mnt/data' can be used to save "
    "and persist user files. Internet access for this session is UNKNOWN. Depends on the "
    "cluster."
)

_BROWSER = (
    "Tool for browsing.\n"
    "The `cursor` appears in brackets before each browsing display: `[{cursor}]`.\n"
    "Cite information from the tool using the following format:\n"
    "`【{cursor}†L{line_start}(-L{line_end})?】`, for example: `【6†L9-L11】` or `【8†L3】`.\n"
    "Do not quote more than 10 words directly from the tool output.\n"
    "sources=web (default: web)"
)

_OPEN = (
    "Opens the link `id` from the page indicated by `cursor` starting at line number `loc`, "
    "showing `num_lines` lines.\n"
    "Valid link ids are displayed with the formatting: `【{id}†.*】`.\n"
    "If `cursor` is not provided, the most recent page is implied.\n"
    "If `id` is a string, it is treated as a fully qualified URL associated with `source`.\n"
    "If `loc` is not provided, the viewport will be positioned at the beginning of the "
    "document or centered on the most relevant passage, if available.\n"
    "Use this function without `id` to scroll to a new location of an opened page."
)
