"""Run `rose` with the unbound wide experts in the place of the bound ones for prefill, in this process only.

    PYTHONPATH=src python benchmarks/cuda_wide_trial.py wide bench accuracy --size 120b --layers 2
    PYTHONPATH=src python benchmarks/cuda_wide_trial.py wide bench latency --size 120b --batches 1 --repeats 2 \\
        --device cuda --weights mxfp4

The first word is a shape of benchmarks/unbound/wide.py, the rest are `rose`'s own. Lines name the kernel only where
they hold a kernel table: file them apart from those of what is bound. "prefill_against_rounded" of accuracy rounds the
SwiGLU in groups of 128 channels, not in fixed units; the other errors are the trial's own.
"""

from __future__ import annotations

import sys

from torch import Tensor
from unbound import wide

from rose.cli.main import main
from rose.kernels import registry
from rose.kernels.registry import Band, Implementation, Sizes, register

registry.load("moe_experts")

from rose.kernels.moe_experts.cuda_fused_impl import size_limits as rows_limits  # noqa: E402
from rose.kernels.moe_experts.cuda_wide import size_limits, workspace  # noqa: E402
from rose.kernels.moe_experts.swapped_tables import OffsetExperts, with_offsets  # noqa: E402

LIBRARY = wide.WideLibrary()


def limits(sizes: Sizes) -> str | None:
    """Say why these sizes cannot be taken, or None."""
    inner = {**sizes, "D": sizes["I"]}
    return rows_limits(sizes) or size_limits(sizes) or size_limits(inner) or LIBRARY.bound.refusal()


def register_shape(shape: wide.Shape) -> Implementation:
    """Put a shape above what is bound for prefill with mxfp4."""

    def moe_experts(
        x_TD: Tensor,
        expert_ids_TK: Tensor,
        expert_weights_TK: Tensor,
        *,
        weights: OffsetExperts,
        swiglu_alpha: float,
        swiglu_limit: float,
        out_TD: Tensor,
    ) -> None:
        wide.run_experts(
            LIBRARY, x_TD, expert_ids_TK, expert_weights_TK,
            weights=weights, swiglu_alpha=swiglu_alpha, swiglu_limit=swiglu_limit, out_TD=out_TD, shape=shape,
        )  # fmt: skip

    return register(
        Implementation(
            operation="moe_experts",
            name="cuda_trial",
            function=moe_experts,
            band=Band.SPECIALISED,
            device="cuda",
            min_capability=(9, 0),
            max_capability=(9, 0),
            formats={"activation": frozenset({"bf16"}), "weight": frozenset({"mxfp4"})},
            phases=frozenset({"prefill"}),
            limits=limits,
            prepare=with_offsets,
            workspace=workspace,
            activation_rounding=("fp8_token", "fp8_group128"),
            library=LIBRARY,
            note="trial",
        )
    )


if __name__ == "__main__":
    if sys.argv[1:2] and sys.argv[1] in wide.SHAPES:
        register_shape(wide.SHAPES[sys.argv.pop(1)])
        main()
    sys.exit(f"the first word has to be one of {', '.join(wide.SHAPES)}")
