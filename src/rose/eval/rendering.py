"""The right answer of a question as tokens, written by our own formatter."""

from __future__ import annotations

from rose.eval.examples import Example
from rose.eval.tool_tasks import compact
from rose.frontend.formatters.harmony.conversation import call_message
from rose.frontend.formatters.harmony.formatter import HarmonyFormatter
from rose.frontend.formatters.harmony.messages import Message
from rose.frontend.formatters.harmony.render import HarmonyRenderer
from rose.frontend.tokenizer import Tokenizer


class Documents:
    """Questions with their answers as token ids, in one vocabulary."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.formatter = HarmonyFormatter(tokenizer)
        self.renderer = HarmonyRenderer(tokenizer)
        self._begin = [self.renderer.tokens.start, *tokenizer.encode("assistant")]

    def answer(self, example: Example) -> list[int]:
        """Return what the model shall write after `<|start|>assistant`."""
        messages = [Message(role="assistant", channel="analysis", content=(example.reasoning,))]
        if example.call is not None:
            name, arguments = example.call
            messages.append(call_message(name, compact(arguments)))
        else:
            assert example.content is not None, "an answer without a call has content"
            messages.append(Message(role="assistant", channel="final", content=(example.content,)))
        token_ids = self.renderer.render_for_training(messages)
        first = len(self._begin)
        assert token_ids[:first] == self._begin, "the prompt ends where the answer begins"
        return token_ids[first:]

    def asked_more(self, example: Example) -> tuple[list[int], int]:
        """Return the last message of a question and its answer, to be put after another conversation."""
        text = example.messages[-1]["content"]
        asked = self.renderer.render_message(Message(role="user", content=(text,)))
        return asked + self._begin + self.answer(example), len(asked) + len(self._begin)

    def whole(self, example: Example) -> tuple[list[int], int]:
        """Return prompt and answer, and the length of the prompt."""
        prompt = self.formatter.encode(example.body).token_ids
        return prompt + self.answer(example), len(prompt)
