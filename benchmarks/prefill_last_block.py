"""What prefill saves where the last block goes on with the rows that sample alone, and how far its logits move.

    PYTHONPATH=src python benchmarks/prefill_last_block.py [--sizes 20b 120b] [--json FILE] [--commit NAME]

Two layers of the real shapes, a window and a full one, synthetic weights as `rose bench` serves them. The same step
runs with hidden states of all rows asked for, as tools do, and of each prompt's last row, as serving does; in turns, on
the same tokens. One JSON line per step:

    all_ms, sampled_ms  medians between two events, of the model alone: no head, no token
    saved_ms            their difference: what a whole prompt saves, since the last of its layers is a full one
    relative            ||logits of the sampled rows - of the same rows among all|| / ||the latter||: attention of
                        decode for that of prefill in one layer, and on the 120b other experts (one row: a short step)
    same_token          share of the rows whose largest logit is at the same place
    kv_equal            whether both left the same KV behind, to the bit
"""

from __future__ import annotations

import argparse
import shlex
import statistics
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rose.bench.build import build_model, setup
from rose.bench.record import Origin, append
from rose.layers.context import ForwardContext, SampledRows
from rose.layers.own_pages import OwnPages
from rose.models.gpt_oss.model import GptOss

LAYERS = 2
STEPS = ((1, 8192), (1, 16384), (8, 1024), (64, 32))
"""Prompts of a step, and tokens of each. Longer prompts come in steps of 16384."""
TURNS = 7


class Prompts:
    """Random prompts of one length, and contexts of the one step that holds them all."""

    def __init__(self, model: GptOss, num_prompts: int, length: int) -> None:
        device = model.device
        self._own = OwnPages(
            model.config, num_sequences=num_prompts, max_tokens=length,
            page_tokens=model.page_tokens, dtype=model.kv_dtype, device=device,
        )  # fmt: skip
        self._num_prompts, self._length = num_prompts, length
        generator = torch.Generator(device).manual_seed(7)
        self.tokens_T = torch.randint(
            model.config.vocab_size, (num_prompts * length,), generator=generator, device=device
        )
        sequences_M = torch.arange(num_prompts, device=device)
        self.sampled = SampledRows(rows_M=(sequences_M + 1) * length - 1, sequences_M=sequences_M)

    def context(self, *, is_sampled: bool) -> ForwardContext:
        """Return the step over empty pages; None of what earlier ones wrote is read."""
        self._own.lengths = [0] * self._num_prompts
        context = self._own.step(prefill=[(s, self._length) for s in range(self._num_prompts)])
        context.sampled = self.sampled if is_sampled else None
        return context

    @property
    def kv_pages(self) -> list[Tensor]:
        """Per layer, as the last step left them."""
        return self._own.kv_pages


def elapsed_ms(model: GptOss, prompts: Prompts, *, is_sampled: bool) -> float:
    """Time the model on one step, between two events."""
    context = prompts.context(is_sampled=is_sampled)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    model.forward(prompts.tokens_T, context)
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def compared(model: GptOss, prompts: Prompts) -> dict[str, Any]:
    """Run both ways once and compare logits and KV."""
    wanted_TD = model.forward(prompts.tokens_T, prompts.context(is_sampled=False))
    wanted_MV = model.logits(wanted_TD[prompts.sampled.rows_M])
    wanted_pages = [pages.clone() for pages in prompts.kv_pages]
    found_MV = model.logits(model.forward(prompts.tokens_T, prompts.context(is_sampled=True)))
    distance = (found_MV - wanted_MV).norm() / wanted_MV.norm()
    same = (found_MV.argmax(-1) == wanted_MV.argmax(-1)).float().mean()
    pairs = zip(prompts.kv_pages, wanted_pages, strict=True)
    return {
        "relative": round(distance.item(), 5),
        "same_token": round(same.item(), 3),
        "kv_equal": all(torch.equal(found, wanted) for found, wanted in pairs),
    }


@torch.inference_mode()
def measure(model: GptOss, num_prompts: int, length: int) -> dict[str, Any]:
    """Return the figures of one step."""
    prompts = Prompts(model, num_prompts, length)
    line = compared(model, prompts)
    samples: dict[bool, list[float]] = {False: [], True: []}
    for turn in range(TURNS + 1):
        for is_sampled, times in samples.items():
            time_ms = elapsed_ms(model, prompts, is_sampled=is_sampled)
            if turn:
                times.append(time_ms)
    all_ms, sampled_ms = (statistics.median(samples[key]) for key in (False, True))
    return {
        "all_ms": round(all_ms, 3),
        "sampled_ms": round(sampled_ms, 3),
        "saved_ms": round(all_ms - sampled_ms, 3),
        **line,
    }


def main() -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", nargs="+", default=["20b", "120b"], choices=["20b", "120b"])
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--commit", help="of the tree, where it travels without its repository")
    arguments = parser.parse_args()
    command = shlex.join(["python", "benchmarks/prefill_last_block.py", *sys.argv[1:]])
    for size in arguments.sizes:
        bench = setup(size=size, weights="mxfp4", device="cuda", layers=LAYERS)
        origin = Origin.here(
            device=bench.device.name, config=bench.name, commit=arguments.commit, command=command
        )
        model = build_model(bench)
        for num_prompts, length in STEPS:
            line = {
                "bench": "prefill_last_block", "model": size, "layers": LAYERS,
                "prompts": num_prompts, "tokens": num_prompts * length,
                **measure(model, num_prompts, length),
            }  # fmt: skip
            line = origin.stamp(line)
            append(arguments.json, line)
            print(line, flush=True)
        del model
        torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())
