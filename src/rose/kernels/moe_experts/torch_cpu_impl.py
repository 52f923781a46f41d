"""The torch experts for small models on a CPU: the matrices are widened once at load, not in every call."""

from __future__ import annotations

import torch

from rose.kernels.formats import FormattedTensor, plain
from rose.kernels.moe_experts.torch_impl import moe_experts, workspace
from rose.kernels.registry import Band, Implementation, Sizes, register
from rose.kernels.weights import ExpertWeights

MOST_ELEMENTS = 1 << 26
"""Of one layer, 256 MiB when widened. Larger models would not fit a CPU twice."""


def _widened(matrix: FormattedTensor) -> FormattedTensor:
    return matrix if matrix.values.dtype == torch.float64 else plain(matrix.to_float())


def _prepare(weights: ExpertWeights) -> ExpertWeights:
    return ExpertWeights(
        gate_up=_widened(weights.gate_up),
        gate_up_bias_EF=weights.gate_up_bias_EF,
        down=_widened(weights.down),
        down_bias_ED=weights.down_bias_ED,
    )


def _limits(sizes: Sizes) -> str | None:
    elements = 3 * sizes["E"] * sizes["I"] * sizes["D"]
    return None if elements <= MOST_ELEMENTS else f"{elements} elements, takes {MOST_ELEMENTS}"


register(
    Implementation(
        operation="moe_experts",
        name="torch_cpu",
        function=moe_experts,
        band=Band.TUNED,
        device="cpu",
        limits=_limits,
        prepare=_prepare,
        workspace=workspace,
        note="float32 copy of the matrices, made at load",
    )
)
