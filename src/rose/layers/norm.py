"""RMSNorm over the residual stream, the add of the last sub-layer's output included."""

from __future__ import annotations

import torch
from torch import Tensor

from rose.layers.build import LayerBuild
from rose.layers.context import ForwardContext


class RmsNorm:
    """Normalise rows; `weight_D` is float32."""

    def __init__(self, weight_D: Tensor, *, eps: float, build: LayerBuild) -> None:
        self._weight_D = weight_D
        self._eps = eps
        self._rms_norm = build.bind("rms_norm", sizes={"D": len(weight_D)})
        build.weight_bytes += weight_D.numel() * weight_D.element_size()

    def forward(
        self, x_TD: Tensor, context: ForwardContext, *, residual_TD: Tensor | None = None
    ) -> Tensor:
        """Return the normalised sum.

        Aliasing  adds `x_TD` to `residual_TD` in place; without it `x_TD` itself is normalised.
        """
        out_TD = torch.empty_like(x_TD)
        rms_norm = self._rms_norm.select(context.phase, len(x_TD))
        rms_norm(x_TD, self._weight_D, eps=self._eps, residual_TD=residual_TD, out_TD=out_TD)
        return out_TD
