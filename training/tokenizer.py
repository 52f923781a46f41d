"""Train the embedded vocabulary: byte-level BPE of a few thousand tokens with Harmony's control tokens by name.

usage: PYTHONPATH=src python training/tokenizer.py [FILE]
Digits, and capitals not followed by a small letter, are tokens of their own: so arithmetic and spelling are learnable.
"""

import random
import sys
from pathlib import Path

import english
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from rose.eval.tasks import draw_for_training
from rose.eval.tool_tasks import TOOLS, compact
from rose.frontend.formatters.harmony.messages import DeveloperContent, Namespace, SystemContent
from rose.frontend.formatters.harmony.messages import Tool as HarmonyTool

PATH = Path(__file__).with_name("tokenizer.json")
CONTROL = (
    "<|startoftext|>", "<|endoftext|>", "<|return|>", "<|constrain|>", "<|channel|>", "<|start|>",
    "<|end|>", "<|message|>", "<|call|>",
)  # fmt: skip
VOCAB_SIZE = 3072
SEED = 11
PIECES = Regex(
    r"""[^\r\n\p{L}\p{N}]?\p{Lu}?[\p{Ll}\p{M}]+|\p{L}|\p{N}|"""
    r""" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"""
)


def system_texts() -> list[str]:
    """Return what stands in nearly every prompt."""
    tools = [
        HarmonyTool(
            name=t["function"]["name"],
            description=t["function"]["description"],
            parameters=t["function"]["parameters"],
        )
        for t in TOOLS
    ]
    content = DeveloperContent(
        instructions="Answer.", namespaces=(Namespace(name="functions", tools=tools),)
    )
    system = SystemContent(date="2026-08-05", effort="medium").text(has_functions=True)
    roles = "system developer user assistant to=functions.get_weather analysis commentary final json low high"
    return [system, content.text(), roles]


def train(path: Path) -> None:
    """Write tokenizer.json; the same on every machine with this Python and this `tokenizers`."""
    source = random.Random(SEED)
    texts = system_texts() * 400
    for _ in range(6000):
        example = draw_for_training(source)
        texts += [str(m.get("content") or m.get("tool_calls")) for m in example.messages]
        texts += [example.reasoning, example.content or compact(example.call)]
    passages = english.passages()
    texts += [english.draw(passages, source, 2000) for _ in range(700)]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(PIECES, "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(CONTROL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.save(str(path))


if __name__ == "__main__":
    train(Path(sys.argv[1]) if len(sys.argv) > 1 else PATH)
