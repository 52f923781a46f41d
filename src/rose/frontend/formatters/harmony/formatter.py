"""Harmony as a formatter: conversations in, deltas out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rose.frontend.formatters.base import EncodedPrompt
from rose.frontend.formatters.harmony.answer import HarmonyDecoder
from rose.frontend.formatters.harmony.chat_body import read_chat
from rose.frontend.formatters.harmony.conversation import Conversation, problem
from rose.frontend.formatters.harmony.messages import drop_finished_reasoning
from rose.frontend.formatters.harmony.render import HarmonyRenderer
from rose.frontend.formatters.harmony.responses_body import read_responses
from rose.frontend.formatters.harmony.rules import HarmonyRules
from rose.frontend.formatters.shape import AnswerRules, AnswerShape
from rose.frontend.tokenizer import Tokenizer, vocabulary
from rose.protocol.grammar import Vocabulary


class HarmonyFormatter:
    """The format of gpt-oss."""

    name = "harmony"
    has_grammars = True

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._renderer = HarmonyRenderer(tokenizer)
        self._channel_first = HarmonyRenderer(tokenizer, is_channel_first=True)
        self._rules = HarmonyRules(tokenizer)
        self._vocabulary: Vocabulary | None = None

    def encode(self, conversation: dict[str, Any]) -> EncodedPrompt:
        """Render a body of chat completions or (`api`: responses) Responses."""
        read = read_conversation(conversation)
        try:
            token_ids = self._renderer_of(conversation).render(
                drop_finished_reasoning(read.messages)
            )
        except RecursionError:
            raise problem("tools", "a schema nested too deeply", "some hundred levels") from None
        return EncodedPrompt(
            token_ids=token_ids,
            stop_token_ids=self._renderer.tokens.stops,
            declared_tools=read.function_names,
        )

    def _renderer_of(self, conversation: dict[str, Any]) -> HarmonyRenderer:
        forms = {"recipient_first": self._renderer, "channel_first": self._channel_first}
        form = conversation.get("call_header", "recipient_first")
        if form not in forms:
            raise problem("call_header", form, " or ".join(forms))
        return forms[form]

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of a token, of a control token its name."""
        return self._tokenizer.token_bytes(token_id)

    def vocabulary(self) -> Vocabulary:
        """Return the tokens as the engine's grammars need them."""
        if self._vocabulary is None:
            self._vocabulary = vocabulary(self._tokenizer, end_name="<|return|>")
        return self._vocabulary

    def rules(self, shape: AnswerShape) -> AnswerRules | None:
        """Return the grammars that hold an answer to a shape."""
        return self._rules.rules(shape)

    def decoder(self, *, declared_tools: Sequence[str] = ()) -> HarmonyDecoder:
        """Return a parser for one answer."""
        return HarmonyDecoder(self._tokenizer, declared_tools)


def read_conversation(body: dict[str, Any]) -> Conversation:
    """Return the Harmony messages of a body; `api` says whose it is.

    Raises   FormatError
    """
    api = body.get("api", "chat")
    if api == "chat":
        return read_chat(body)
    if api == "responses":
        return read_responses(body)
    raise problem("api", api, "chat or responses")
