"""JSON bodies of requests and answers as structs; field names are OpenAI's.

Requests: what is not a field here is refused by name (`parsing.py`). Answers: fields that are UNSET are not sent.
Knows no formatter and no engine.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType

# ---- requests ----------------------------------------------------------------------------------------------


class StreamOptions(Struct, kw_only=True, forbid_unknown_fields=True):
    """Options of a streamed answer."""

    include_usage: bool | None = False
    include_obfuscation: bool | None = False
    """Accepted; padding against traffic analysis is not sent."""


class ReasoningOptions(Struct, kw_only=True, forbid_unknown_fields=True):
    """The effort as the Responses API writes it; `reasoning_effort` wins."""

    effort: str | None = None


class FunctionDefinition(Struct, kw_only=True, forbid_unknown_fields=True):
    """A function the model may call."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    """Arguments are held to the schema of `parameters`."""


class Tool(Struct, kw_only=True, forbid_unknown_fields=True):
    """A tool; only functions exist on chat completions."""

    type: Literal["function"]
    function: FunctionDefinition


class CalledFunction(Struct, kw_only=True, forbid_unknown_fields=True):
    """Name and arguments of a call in the history."""

    name: str
    arguments: str
    parsed_arguments: Any | UnsetType = UNSET
    """Left over from openai-python's helpers; not read."""


class HistoryCall(Struct, kw_only=True, forbid_unknown_fields=True):
    """A call that the model made earlier."""

    id: str
    function: CalledFunction
    type: Literal["function"] = "function"
    index: int | None = None
    """Left over from a streamed answer; not read."""
    provider_specific_fields: Any = None
    """Left over from litellm; not read."""


class Message(Struct, kw_only=True, forbid_unknown_fields=True):
    """One message of the conversation; which fields a role needs is checked by the formatter."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: list[HistoryCall] | None = None
    tool_call_id: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    # What clients copy from an answer into the history; none of it reaches the prompt.
    refusal: str | None = None
    annotations: list[Any] | None = None
    audio: None = None
    function_call: None = None
    parsed: Any = None  # openai-python's helpers
    raw_messages: Any = None  # ours, of --reasoning debug
    provider_specific_fields: Any = None  # litellm
    thinking_blocks: Any = None  # litellm


class SamplingFields(Struct, kw_only=True):
    """What every request that generates has."""

    model: str
    stream: bool | None = False
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    """Token id, as JSON writes it in a name, -> what is added to its logit."""
    min_tokens: int | None = None
    ignore_eos: bool | None = False
    """Do not end at the model's stop tokens."""
    seed: int | None = None
    stop: str | list[str] | None = None
    cache_salt: str | None = None
    """Cached prefixes are shared only with requests of the same salt."""
    priority: int | None = None
    """Smaller runs sooner, where the server orders by priority."""
    timeout: float | None = None
    """Seconds after which the engine ends it, waiting or running."""


class ChoiceFields(SamplingFields, kw_only=True):
    """What chat completions and completions share."""

    stream_options: StreamOptions | None = None
    n: int | None = None
    max_tokens: int | None = None


class ChatRequest(ChoiceFields, kw_only=True):
    """Body of POST /v1/chat/completions."""

    messages: list[Any]
    """Each is read as a Message."""
    logprobs: bool | None = False
    top_logprobs: int | None = None
    tools: list[Any] | None = None
    """Each is read as a Tool."""
    tool_choice: Any = None
    """Read by `grammar/shape.py`, as is `response_format`."""
    response_format: Any = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    reasoning: ReasoningOptions | None = None
    max_completion_tokens: int | None = None
    include_reasoning: bool | None = True
    """False leaves reasoning out of the answer; it is generated and counted all the same."""
    reasoning_mode: str | None = None
    """visible, hidden or debug, where the server's own mode shall not hold."""


class CompletionRequest(ChoiceFields, kw_only=True):
    """Body of POST /v1/completions."""

    prompt: str | list[Any]
    echo: bool | None = False
    """Begin the answer's text with the prompt."""
    best_of: int | None = None
    """As many as `n`, or nothing: no answers are drawn to be thrown away."""
    logprobs: int | bool | None = None
    """Alternatives per token; false is as good as null."""


# ---- answers -----------------------------------------------------------------------------------------------


class PromptDetails(Struct, kw_only=True):
    """Where prompt tokens came from."""

    cached_tokens: int = 0


class CompletionDetails(Struct, kw_only=True):
    """What completion tokens were spent on."""

    reasoning_tokens: int = 0


class Usage(Struct, kw_only=True):
    """Tokens of a request; completion tokens include reasoning and the stop token."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails


class FunctionPiece(Struct, kw_only=True):
    """Name (first piece) and more arguments of a call."""

    name: str | UnsetType = UNSET
    arguments: str = ""


class ToolCallPiece(Struct, kw_only=True):
    """A piece of a call: index always, id, type and name with the first."""

    index: int
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET
    function: FunctionPiece


class RawMessagePiece(Struct, kw_only=True):
    """A message as the model wrote it, or more of its text; the header comes with the first piece of each index."""

    index: int
    role: str | UnsetType = UNSET
    name: str | UnsetType | None = UNSET
    channel: str | UnsetType | None = UNSET
    recipient: str | UnsetType | None = UNSET
    content_type: str | UnsetType | None = UNSET
    content: str = ""


class ChatDelta(Struct, kw_only=True):
    """What a chunk adds to a message. Reasoning has two names because clients read one or the other."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallPiece] | UnsetType = UNSET
    raw_messages: list[RawMessagePiece] | UnsetType = UNSET
    """With reasoning mode debug only."""


class TopLogprob(Struct, kw_only=True):
    """A token that could have stood here."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(Struct, kw_only=True):
    """A token of the content."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct, kw_only=True):
    """Log-probabilities of the content's tokens."""

    content: list[TokenLogprob]
    refusal: None = None


class CompletionLogprobs(Struct, kw_only=True):
    """Log-probabilities of a text completion: one entry per token in each list."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]] | None
    text_offset: list[int]


class ChatChunkChoice(Struct, kw_only=True):
    """One choice of a chunk."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None


class ChatChunk(Struct, kw_only=True):
    """One event of a streamed chat answer."""

    id: str
    object: str = "chat.completion.chunk"
    created: int
    model: str
    system_fingerprint: str | None = None
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET


class ToolCall(Struct, kw_only=True):
    """A whole call."""

    id: str
    type: str = "function"
    function: CalledFunction


class ChatMessage(Struct, kw_only=True):
    """The message of a whole answer."""

    role: str = "assistant"
    content: str | None = None
    refusal: None = None
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET
    raw_messages: list[RawMessagePiece] | UnsetType = UNSET
    """With reasoning mode debug only: every message with its channel and recipient."""


class ChatChoice(Struct, kw_only=True):
    """One choice of a whole answer."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str


class ChatCompletion(Struct, kw_only=True):
    """A whole chat answer."""

    id: str
    object: str = "chat.completion"
    created: int
    model: str
    system_fingerprint: str | None = None
    choices: list[ChatChoice]
    usage: Usage


class CompletionChoice(Struct, kw_only=True):
    """Text of one choice; of a chunk or whole."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None


class Completion(Struct, kw_only=True):
    """A whole text completion, or one chunk of it."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    system_fingerprint: str | None = None
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET


class Model(Struct, kw_only=True):
    """A model that requests may name."""

    id: str
    object: str = "model"
    created: int
    owned_by: str = "rose"
    max_model_len: int | UnsetType = UNSET
    """Context length in tokens, once the engine is ready; not OpenAI's, but clients look for it."""


class ModelList(Struct, kw_only=True):
    """Body of GET /v1/models."""

    object: str = "list"
    data: list[Model]


class Health(Struct, kw_only=True):
    """Body of GET /health and GET /ready."""

    status: str
    """ok, loading, draining or failed."""
    detail: str = ""
    model: str | UnsetType = UNSET
    context_tokens: int | UnsetType = UNSET
    num_running: int | UnsetType = UNSET
    num_waiting: int | UnsetType = UNSET


encode = msgspec.json.Encoder().encode
