"""Harmony messages to token ids: what the model is given to read.

Control tokens are placed here by id and nowhere else; every text goes through ordinary encoding, so that no text of
a user or tool can forge a message. The token sequence is that of openai-harmony 0.0.8.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rose.frontend.formatters.harmony.messages import Content, Message, SystemContent, has_functions
from rose.frontend.formatters.harmony.tokens import CONSTRAIN_NAME, harmony_tokens
from rose.frontend.tokenizer import Tokenizer


class HarmonyRenderer:
    """Renders with one vocabulary."""

    def __init__(self, tokenizer: Tokenizer, *, is_channel_first: bool = False) -> None:
        """`is_channel_first`: calls are written `<|channel|>commentary to=f`, the other way round otherwise."""
        self._tokenizer = tokenizer
        self._is_channel_first = is_channel_first
        self.tokens = harmony_tokens(tokenizer)

    def render(
        self, messages: Sequence[Message], *, next_role: str | None = "assistant"
    ) -> list[int]:
        """Return the tokens of a conversation, then the beginning of a message of `next_role`.

        Every message is kept; see `drop_finished_reasoning` for what a model shall not read again.
        """
        offers_functions = has_functions(messages)
        token_ids: list[int] = []
        for message in messages:
            token_ids += self.render_message(message, has_functions=offers_functions)
        if next_role is not None:
            token_ids += [self.tokens.start, *self._tokenizer.encode(next_role)]
        return token_ids

    def render_for_training(self, messages: Sequence[Message]) -> list[int]:
        """Return a finished conversation as the model would have written it: a last final ends in return."""
        token_ids = self.render(messages, next_role=None)
        if messages and messages[-1].role == "assistant" and messages[-1].channel == "final":
            token_ids[-1] = self.tokens.return_
        return token_ids

    def render_message(self, message: Message, *, has_functions: bool = False) -> list[int]:
        """Return the tokens of one message."""
        if message.token_ids:
            return [self.tokens.start, *self._tokenizer.encode(message.role), *message.token_ids]
        token_ids = [self.tokens.start, *self._header(message), self.tokens.message]
        for text in _texts(message.content, has_functions):
            token_ids += self._tokenizer.encode(text)
        is_call = message.role == "assistant" and message.recipient is not None
        token_ids.append(self.tokens.call if is_call else self.tokens.end)
        return token_ids

    def _header(self, message: Message) -> list[int]:
        encode = self._tokenizer.encode
        if message.role == "tool":
            assert message.name, "a tool's message is named after the tool"
            token_ids = encode(message.name)
        else:
            token_ids = encode(message.role)
            token_ids += encode(f":{message.name}") if message.name is not None else []
        has_recipient = message.recipient is not None and message.recipient != "all"
        recipient = f" to={message.recipient}" if has_recipient else ""
        if message.channel is None:
            token_ids += encode(recipient)
        elif self._is_channel_first and message.role == "assistant":
            token_ids += [self.tokens.channel, *encode(message.channel + recipient)]
        else:
            token_ids += [*encode(recipient), self.tokens.channel, *encode(message.channel)]
        return token_ids + self._content_type(message.content_type)

    def _content_type(self, content_type: str | None) -> list[int]:
        if content_type is None:
            return []
        encode = self._tokenizer.encode
        if content_type.startswith(CONSTRAIN_NAME):
            kind = content_type.removeprefix(CONSTRAIN_NAME)
            return [*encode(" "), self.tokens.constrain, *encode(kind)]
        return encode(f" {content_type}")


def _texts(contents: Iterable[Content], has_functions: bool) -> Iterable[str]:
    for content in contents:
        if isinstance(content, str):
            yield content
        elif isinstance(content, SystemContent):
            yield content.text(has_functions=has_functions)
        else:
            yield content.text()
