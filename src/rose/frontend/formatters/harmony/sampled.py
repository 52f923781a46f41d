"""The sampled tokens of an answer, message by message, as a later prompt can repeat them.

A model writes headers in another order than prompts have them, and may cut text into other tokens. A prompt that
repeats what was sampled finds the whole turn in the prefix cache; one that renders its text again finds the turn's
beginning. Only well-formed output is repeated.
"""

from __future__ import annotations

from collections.abc import Sequence

from rose.frontend.formatters.harmony.tokens import HarmonyTokens


def message_tokens(
    token_ids: Sequence[int], tokens: HarmonyTokens, assistant: Sequence[int]
) -> list[list[int] | None]:
    """Split what followed `<|start|>assistant` into messages, each without that beginning.

    `assistant` is the role in tokens. The end of a final message becomes `<|end|>`, as prompts have it.

    Returns  one entry per message; None where a message is cut or is not the assistant's.
    """
    parts: list[list[int]] = [[*assistant]]
    for token_id in token_ids:
        if token_id == tokens.start:
            parts.append([])
        else:
            parts[-1].append(token_id)
    return [_without_role(part, tokens, list(assistant)) for part in parts]


def _without_role(part: list[int], tokens: HarmonyTokens, assistant: list[int]) -> list[int] | None:
    rest = part[len(assistant) :]
    is_whole = bool(rest) and rest[-1] in tokens.terminators
    if part[: len(assistant)] != assistant or not is_whole:
        return None
    return [*rest[:-1], tokens.end] if rest[-1] == tokens.return_ else rest
