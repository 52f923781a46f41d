"""JSON bodies of the routes that speak of tokens: tokenize, detokenize, render and generate. Not OpenAI's; ours."""

from __future__ import annotations

from msgspec import UNSET, Struct, UnsetType

from rose.frontend.schemas import ChoiceFields, Usage


class TokenizeRequest(Struct, kw_only=True):
    """Body of POST /tokenize."""

    prompt: str
    """Encoded as text: what looks like a control token stays text."""
    model: str | None = None
    return_token_strs: bool | None = False
    """Send each token as text too."""


class Tokenized(Struct, kw_only=True):
    """Answer of POST /tokenize; field names are vLLM's."""

    count: int
    max_model_len: int | UnsetType = UNSET
    """Context length, once the engine is ready."""
    tokens: list[int]
    token_strs: list[str] | UnsetType = UNSET


class DetokenizeRequest(Struct, kw_only=True):
    """Body of POST /detokenize."""

    tokens: list[int]
    model: str | None = None


class Detokenized(Struct, kw_only=True):
    """Answer of POST /detokenize: the text, control tokens by name, broken characters as U+FFFD."""

    prompt: str


class RenderedPrompt(Struct, kw_only=True):
    """What the engine would be sent for one prompt."""

    token_ids: list[int]
    text: str
    """The tokens as text, control tokens by name."""
    stop_token_ids: list[int]
    max_tokens: int
    """Most tokens that would be generated."""


class RenderedPrompts(Struct, kw_only=True):
    """Answer of the render routes: one entry per prompt; a conversation is one."""

    object: str = "list"
    model: str
    data: list[RenderedPrompt]


class TokenRequest(ChoiceFields, kw_only=True):
    """Body of POST /v1/generate: token ids in, token ids out."""

    prompt_token_ids: list[int]
    stop_token_ids: list[int] | None = None
    """None: those that end an answer of the model. A list, empty or not, replaces them."""
    logprobs: int | None = None
    """Alternatives per token."""


class TokenLogprobEntry(Struct, kw_only=True):
    """Log-probabilities at one position."""

    logprob: float
    """Of the sampled token."""
    top_token_ids: list[int]
    """The best, as many as were asked for, best first."""
    top_logprobs: list[float]


class TokenChoice(Struct, kw_only=True):
    """Tokens of one choice; of a chunk or whole. The stop token is among them."""

    index: int
    token_ids: list[int]
    logprobs: list[TokenLogprobEntry] | None = None
    finish_reason: str | None = None
    """stop or length; null in all chunks but the last."""


class TokenCompletion(Struct, kw_only=True):
    """Answer of POST /v1/generate, whole or one chunk of it."""

    id: str
    object: str = "token_completion"
    created: int
    model: str
    choices: list[TokenChoice]
    usage: Usage | UnsetType | None = UNSET
