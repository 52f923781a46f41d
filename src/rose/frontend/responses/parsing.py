"""Bytes of a Responses body -> a checked struct, or a RequestError that names the field.

The same three lists decide about a field as in `rose.frontend.parsing`. Knows no formatter and no engine.
"""

from __future__ import annotations

from typing import Any

from rose.frontend.parsing import (
    MAX_MESSAGES,
    MAX_TOOLS,
    check_count,
    check_stops,
    checked_top_logprobs,
    convert,
    convert_part,
    quoted,
    refuse,
)
from rose.frontend.responses.schemas import FunctionTool, NamespaceTool, ResponsesRequest

IGNORED = frozenset({"service_tier", "client_metadata"})
"""Accepted and without effect; the second is what coding agents tell of themselves."""
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "conversation": (),
    "prompt": (),
    "context_management": (),
    "moderation": (),
    "prompt_cache_options": (),
}
TOOL_KINDS = ("function", "namespace")
LOGPROBS = "message.output_text.logprobs"
ENCRYPTED_REASONING = "reasoning.encrypted_content"
INCLUDES = (LOGPROBS, ENCRYPTED_REASONING)
NOTHING_TO_INCLUDE = (
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
)
"""Of tools and images that no response here has: accepted, since there is nothing to leave out."""
MAX_METADATA = 16
MAX_METADATA_NAME = 64
MAX_METADATA_TEXT = 512


def parse_response(body: dict[str, Any]) -> ResponsesRequest:
    """Return a checked request.

    Raises  RequestError naming the field by its path.
    """
    request = convert(body, ResponsesRequest, UNSUPPORTED, IGNORED)
    check_include(request.include or [])
    checked_top_logprobs(request.top_logprobs)
    check_stops(request)
    _check_counts(request)
    read_tools(request)
    _check_metadata(request.metadata or {})
    if request.stream_options is not None and not request.stream:
        refuse(
            "invalid_request",
            "stream_options",
            "stream_options was given without stream=true; set stream or leave it out",
        )
    if request.background and request.store is False:
        refuse(
            "invalid_request",
            "background",
            "background=true was given with store=false; nobody could ask for the response; leave one of them out",
        )
    return request


def parse_input_tokens(body: dict[str, Any], *, model: str) -> ResponsesRequest:
    """Return a checked request for a number of tokens, of this model where it names none.

    Raises  RequestError naming the field by its path.
    """
    if body.get("model") is None:
        body = {**body, "model": model}
    request = convert(body, ResponsesRequest, UNSUPPORTED | {"personality": ()}, IGNORED)
    _check_counts(request)
    read_tools(request)
    return request


def response_logprobs(request: ResponsesRequest) -> int | None:
    """Return the alternatives per token, None without log-probabilities; `include` or `top_logprobs` asks for them."""
    asked = request.top_logprobs or 0
    return asked if asked or LOGPROBS in (request.include or []) else None


def check_include(names: list[str]) -> None:
    """Check what a response shall hold besides.

    Raises  RequestError for a name that nobody knows.
    """
    for i, name in enumerate(names):
        if name not in INCLUDES and name not in NOTHING_TO_INCLUDE:
            refuse(
                "invalid_request",
                f"include[{i}]",
                f"include[{i}] is {quoted(name)}; allowed: {', '.join(INCLUDES)}",
            )


def read_tools(request: ResponsesRequest) -> list[FunctionTool | NamespaceTool]:
    """Return the tools.

    Raises  RequestError for another tool than a function or a namespace of functions.
    """
    return [_read_tool(tool, f"tools[{i}]") for i, tool in enumerate(request.tools or [])]


def _read_tool(tool: Any, where: str) -> FunctionTool | NamespaceTool:
    kind = tool.get("type") if isinstance(tool, dict) else None
    if isinstance(tool, dict) and kind not in TOOL_KINDS:
        refuse(
            "unsupported_value",
            f"{where}.type",
            f"{where} has type {quoted(kind)}; supported by this server: {', '.join(TOOL_KINDS)}; leave it out",
        )
    if kind != "namespace":
        return convert_part(tool, FunctionTool, where)
    for i, inner in enumerate(tool["tools"] if isinstance(tool.get("tools"), list) else []):
        if isinstance(inner, dict) and inner.get("type") != "function":
            refuse(
                "unsupported_value",
                f"{where}.tools[{i}].type",
                f"{where}.tools[{i}] has type {quoted(inner.get('type'))}; supported by this server: function; "
                "leave it out",
            )
    return convert_part(tool, NamespaceTool, where)


def _check_counts(request: ResponsesRequest) -> None:
    if isinstance(request.input, list):
        check_count("input", request.input, MAX_MESSAGES)
    check_count("tools", request.tools or [], MAX_TOOLS)


def _check_metadata(metadata: dict[str, str]) -> None:
    if len(metadata) > MAX_METADATA:
        refuse(
            "invalid_request",
            "metadata",
            f"metadata has {len(metadata)} pairs; allowed: {MAX_METADATA} at most",
        )
    for name, text in metadata.items():
        if len(name) > MAX_METADATA_NAME or len(text) > MAX_METADATA_TEXT:
            refuse(
                "invalid_request",
                "metadata",
                f"metadata[{quoted(name)}] has a name of {len(name)} and a text of {len(text)} characters; allowed: "
                f"{MAX_METADATA_NAME} and {MAX_METADATA_TEXT} at most",
            )
