"""JSON bodies of the Responses API as structs; field names are OpenAI's.

Requests: what is not a field here is refused by name (`parsing.py`). Items of the conversation stay JSON objects in a
normal form (`items.py`), because they are stored and read again as they are. Knows no formatter and no engine.
"""

from __future__ import annotations

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType

from rose.frontend.schemas import SamplingFields, TokenLogprob

# ---- requests ----------------------------------------------------------------------------------------------


class ReasoningField(Struct, kw_only=True, forbid_unknown_fields=True):
    """How much the model shall think, and whether a summary is wanted."""

    effort: str | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    """Any of them: the reasoning itself stands in for a summary."""
    generate_summary: Literal["auto", "concise", "detailed"] | None = None
    """An older name of summary."""
    context: Literal["auto", "current_turn"] | None = None
    """Reasoning of finished turns is never shown to the model again."""
    mode: Literal["standard"] | None = None


class TextField(Struct, kw_only=True, forbid_unknown_fields=True):
    """The shape of the answer's text."""

    format: dict[str, Any] | None = None
    verbosity: Literal["medium"] | None = None


class FunctionTool(Struct, kw_only=True, forbid_unknown_fields=True):
    """A function that the model may call."""

    type: Literal["function"] = "function"
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class NamespaceTool(Struct, kw_only=True, forbid_unknown_fields=True):
    """Functions under a name of their own."""

    type: Literal["namespace"] = "namespace"
    name: str
    description: str | None = None
    tools: list[FunctionTool]


class ResponsesStreamOptions(Struct, kw_only=True, forbid_unknown_fields=True):
    """Options of a streamed response."""

    include_obfuscation: bool | None = None
    """Accepted; padding against traffic analysis is not sent."""


class ResponsesRequest(SamplingFields, kw_only=True):
    """Body of POST /v1/responses; .../input_tokens reads what the prompt is made of, the fields down to truncation."""

    input: str | list[Any]
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: list[Any] | None = None
    """Each is read as a FunctionTool or a NamespaceTool."""
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningField | None = None
    text: TextField | None = None
    truncation: Literal["auto", "disabled"] | None = None
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None
    """Counts calls of built-in tools, of which there are none."""
    top_logprobs: int | None = None
    include: list[str] | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    background: bool | None = None
    stream_options: ResponsesStreamOptions | None = None
    reasoning_mode: str | None = None
    """visible, hidden or debug, where the server's own mode shall not hold."""
    # Labels, sent back and otherwise without effect.
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: Literal["in_memory", "24h"] | None = None


# ---- answers -----------------------------------------------------------------------------------------------


class TextPart(Struct, kw_only=True):
    """A piece of a message."""

    type: str = "output_text"
    text: str
    annotations: list[Any] = []
    logprobs: list[TokenLogprob] = []


class ReasoningPart(Struct, kw_only=True):
    """A piece of reasoning (reasoning_text) or of its summary (summary_text)."""

    type: str
    text: str


class MessageItem(Struct, kw_only=True):
    """A message to the user."""

    id: str
    type: str = "message"
    status: str
    role: str = "assistant"
    phase: str
    """commentary or final_answer."""
    content: list[TextPart]


class ReasoningItem(Struct, kw_only=True):
    """What the model thought."""

    id: str
    type: str = "reasoning"
    status: str
    summary: list[ReasoningPart]
    content: list[ReasoningPart]
    encrypted_content: str | UnsetType | None = UNSET


class CallItem(Struct, kw_only=True):
    """A call of a function."""

    id: str
    type: str = "function_call"
    status: str
    call_id: str
    name: str
    namespace: str | UnsetType = UNSET
    arguments: str


OutputItem = MessageItem | ReasoningItem | CallItem


class InputDetails(Struct, kw_only=True):
    """Where input tokens came from."""

    cached_tokens: int
    cache_write_tokens: int = 0
    """A kind of charge that does not exist here."""


class OutputDetails(Struct, kw_only=True):
    """What output tokens were spent on."""

    reasoning_tokens: int


class ResponseUsage(Struct, kw_only=True):
    """Tokens of a response; output tokens include reasoning and the stop token."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class ResponseError(Struct, kw_only=True):
    """Why a response failed."""

    code: str
    message: str


class ResponseBody(Struct, kw_only=True):
    """A response, finished or not: what was asked, as it was understood, and what came of it."""

    id: str
    object: str = "response"
    created_at: int
    status: str
    """queued, in_progress, completed, incomplete, failed or cancelled."""
    completed_at: int | None = None
    background: bool
    error: ResponseError | None = None
    incomplete_details: dict[str, str] | None = None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    prompt_cache_retention: str | None
    reasoning: dict[str, str | None]
    safety_identifier: str | None
    service_tier: str = "default"
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[FunctionTool | NamespaceTool]
    top_logprobs: int
    top_p: float
    truncation: str
    usage: ResponseUsage | None = None
    user: str | None
    metadata: dict[str, str]
    raw_messages: list[dict[str, str | None]] | UnsetType = UNSET
    """With reasoning mode debug only: every message with its channel and recipient."""


class DeletedResponse(Struct, kw_only=True):
    """Body of DELETE /v1/responses/{id}."""

    id: str
    object: str = "response"
    deleted: bool = True


class InputTokens(Struct, kw_only=True):
    """Body of POST /v1/responses/input_tokens."""

    object: str = "response.input_tokens"
    input_tokens: int


class ItemList(Struct, kw_only=True):
    """Body of GET /v1/responses/{id}/input_items."""

    object: str = "list"
    data: list[dict[str, Any]]
    has_more: bool
    first_id: str
    last_id: str
