"""A prompt format of one token per byte, with four markers; enough to test everything around formatters."""

from __future__ import annotations

import codecs
import json

from rose.frontend.formatters.base import (
    Answer,
    ContentSpan,
    Delta,
    EncodedPrompt,
    FormatError,
    WithoutGrammars,
)

REASONING, CONTENT, CALL, ARGUMENTS, END = range(256, 261)


def text_tokens(text: str) -> list[int]:
    """Return one token per byte."""
    return list(text.encode())


def reasoning(text: str) -> list[int]:
    """Return tokens that the decoder reads as reasoning."""
    return [REASONING, *text_tokens(text)]


def content(text: str) -> list[int]:
    """Return tokens that the decoder reads as content."""
    return [CONTENT, *text_tokens(text)]


def call(name: str, arguments: str) -> list[int]:
    """Return tokens that the decoder reads as a call."""
    return [CALL, *text_tokens(name), ARGUMENTS, *text_tokens(arguments)]


class FakeFormatter(WithoutGrammars):
    """Encodes the JSON of the conversation; `prompt` is encoded as it is."""

    name = "fake"

    def __init__(self) -> None:
        self.conversations: list[dict] = []

    def encode(self, conversation):
        self.conversations.append(conversation)
        prompt = conversation.get("prompt")
        if isinstance(prompt, list):
            return EncodedPrompt(token_ids=prompt, stop_token_ids=[END])
        if prompt is None:
            prompt = json.dumps(conversation["messages"])
        if "unrenderable" in prompt:
            raise FormatError("messages[0] cannot be rendered", param="messages[0]")
        names = [tool["function"]["name"] for tool in conversation.get("tools") or []]
        return EncodedPrompt(
            token_ids=text_tokens(prompt), stop_token_ids=[END], declared_tools=names
        )

    def token_bytes(self, token_id):
        return bytes([token_id]) if token_id < 256 else f"<{token_id}>".encode()

    def decoder(self, *, declared_tools=()):
        return FakeDecoder()


class FakeDecoder:
    def __init__(self) -> None:
        self._kind = CONTENT
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._name: list[int] = []
        self._answer = Answer(content=None, reasoning=None)
        self._spans = []
        self._ordinal = self._num_characters = 0

    def track(self):
        self._spans = []
        return self._spans

    def reveal(self):
        pass

    def separate(self):
        pass

    def push(self, token_ids):
        deltas = []
        for token in token_ids:
            taken = self._take(token)
            if token < 256 and self._kind == CONTENT:
                start = self._num_characters
                self._num_characters += sum(len(d.text) for d in taken)
                self._spans.append(ContentSpan(self._ordinal, start, self._num_characters))
            self._ordinal += 1
            deltas += taken
        return deltas

    def plain(self, token_ids):
        return []

    @property
    def continues(self):
        raise AssertionError("there is no short way here")

    def finish(self, reason):
        if reason == "length":
            self._answer.finish_reason = "length"
        elif self._answer.tool_calls:
            self._answer.finish_reason = "tool_calls"
        return []

    def answer(self):
        return self._answer

    def _take(self, token):
        index = len(self._answer.tool_calls) - 1
        if token == END:
            return []
        if token >= 256:
            self._kind = token
            if token != ARGUMENTS:
                return []
            name = bytes(self._name).decode()
            self._name = []
            self._answer.tool_calls.append({"name": name, "arguments": ""})
            return [Delta(kind="tool_call", name=name, index=index + 1)]
        if self._kind == CALL:
            self._name.append(token)
            return []
        if self._kind == REASONING:
            self._answer.num_reasoning_tokens += 1
        text = self._utf8.decode(bytes([token]))
        if not text:
            return []
        if self._kind == ARGUMENTS:
            return [Delta(kind="tool_arguments", text=text, index=index)]
        return [Delta(kind="reasoning" if self._kind == REASONING else "content", text=text)]
