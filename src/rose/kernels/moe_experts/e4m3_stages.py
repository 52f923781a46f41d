"""Both stages of cuda_e4m3 in each of its launch shapes, on matrices of few rows: for sanitizers.

    python -m rose.kernels.moe_experts.e4m3_stages --device cuda [--shape 0] [--define WORD]
The operation takes rows of 2880 columns alone and so has 8,640 rows to an expert, which take minutes under a sanitizer.
Called by itself a stage takes any number of rows.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Iterator, Sequence

import torch

from rose.kernels import registry
from rose.kernels.build import define_in_all
from rose.kernels.cases import BF16_OUT, compare
from rose.kernels.check import Outcome
from rose.kernels.draw import generator, matrix, normal
from rose.kernels.moe_experts.cuda_decode_calls import DecodeExperts, Launch
from rose.kernels.moe_experts.e4m3_weights import with_exponents
from rose.kernels.moe_experts.reference import swiglu
from rose.kernels.weights import ExpertWeights

ROWS = 384
"""Six tiles to a hit, 30 in all: each of two blocks has 15, so that its places for scales and parts come round."""
ALPHA, LIMIT = 1.702, 7.0


def drawn_ids(width: int, *, source: torch.Generator) -> torch.Tensor:
    """Draw the experts of so many tokens that there are whole hits, one of a single token, an empty expert, and -1.

    Returns  int32 [P, 1]; five hits of `width` tokens at most. P is 27 for a width of 8 and over 32 for others, for
             which the lists are made in another way
    """
    rows = {0: 2 * width + 1, 2: 1, 4: width, -1: 1}
    ids_P = torch.cat([torch.full((count,), e, dtype=torch.int32) for e, count in rows.items()])
    ids_P = ids_P.to(source.device)
    return ids_P[torch.randperm(len(ids_P), generator=source, device=source.device)].unsqueeze(1)


def check_stages(
    experts: DecodeExperts, shapes: Sequence[Launch], *, columns: int, device: str, seed: int = 0
) -> Iterator[Outcome]:
    """Compare each stage in each shape with the formula in float64, one outcome at a time."""
    source = generator(device, seed)
    for shape in shapes:
        ids_P1 = drawn_ids(shape.width, source=source)
        for stage in ("gate_up", "down"):
            wide = matrix("mxfp4", 5, ROWS, columns, source=source)
            bias_EF = normal(5, ROWS, source=source, dtype="bf16", scale=0.3)
            x_PC = normal(len(ids_P1), columns, source=source, dtype="bf16")
            is_here_P = ids_P1[:, 0] >= 0
            own = wide.to_float(torch.float64)[ids_P1[:, 0].clamp(min=0).long()]
            wanted = torch.einsum("pfc,pc->pf", own, x_PC.double())
            wanted += bias_EF.double()[ids_P1[:, 0].clamp(min=0).long()]
            # What gate_up asks of the other matrix is its shape.
            other = matrix("mxfp4", 5, columns, ROWS // 2, source=source)
            weights = with_exponents(
                ExpertWeights(
                    gate_up=wide,
                    gate_up_bias_EF=bias_EF,
                    down=other if stage == "gate_up" else wide,
                    down_bias_ED=bias_EF,
                )
            )
            if stage == "gate_up":
                found = torch.full_like(wanted[:, : ROWS // 2], torch.nan, dtype=torch.bfloat16)
                experts.gate_up(shape, x_PC, ids_P1, weights, found, alpha=ALPHA, limit=LIMIT)
                wanted = swiglu(wanted, alpha=ALPHA, limit=LIMIT)
            else:
                found = torch.full_like(wanted, torch.nan, dtype=torch.float32)
                experts.down(shape, x_PC, ids_P1, weights, found)
            difference = compare(stage, found[is_here_P], wanted[is_here_P].float(), BF16_OUT)
            if difference is None and not found[~is_here_P].isnan().all():
                difference = "wrote the row of an expert that is elsewhere"
            yield Outcome(
                operation="moe_experts",
                implementation="cuda_e4m3",
                case=f"{stage} of {shape.width} tokens in {shape.warps} warps",
                status="ok" if difference is None else "failed",
                detail="" if difference is None else str(difference),
            )


def main(argv: Sequence[str] | None = None) -> int:
    """Check all shapes; return 1 where one failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--define", action="append", default=[], metavar="WORD")
    parser.add_argument("--shape", type=int, metavar="N", help="of SHAPES, that alone")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args(argv)
    define_in_all(arguments.define)  # before the library is made
    registry.load("moe_experts")
    bound = importlib.import_module("rose.kernels.moe_experts.cuda_e4m3_impl")
    failed = False
    shapes = bound.SHAPES if arguments.shape is None else [bound.SHAPES[arguments.shape]]
    for outcome in check_stages(
        bound.EXPERTS, shapes, columns=bound.COLUMNS, device=arguments.device,
        seed=arguments.seed,
    ):  # fmt: skip
        failed |= outcome.status == "failed"
        print(f"{outcome.status:7} {outcome.case} {outcome.detail}", flush=True)  # noqa: T201
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
