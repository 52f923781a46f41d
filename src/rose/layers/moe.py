"""Mixture of experts: the router, the experts this rank holds, and the sum over the ranks."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from rose.kernels.weights import ExpertWeights, LinearWeights
from rose.layers.build import LayerBuild
from rose.layers.context import ForwardContext


class MixtureOfExperts:
    """Choose experts for each token and add up their weighted outputs.

    Shapes   router [E, D] on every rank; experts: e of E, consecutive, rank r holds r e .. r e + e - 1.
             e = E with more than one rank: the intermediate size is cut instead, and only rank 0 has the
             down bias; both ways the outputs of the ranks are added.
    """

    def __init__(
        self,
        *,
        experts_per_token: int,
        swiglu_alpha: float,
        swiglu_limit: float,
        router: LinearWeights,
        experts: ExpertWeights,
        build: LayerBuild,
    ) -> None:
        """Bind router and experts."""
        self.observer: Callable[[Tensor], object] | None = None
        """Called with the chosen experts [T, K] of every eager step, for tools; not seen by graph replay. In the last
        block of the rows that sample alone, where the context names them."""
        self._experts_per_token = experts_per_token
        self._swiglu = {"swiglu_alpha": swiglu_alpha, "swiglu_limit": swiglu_limit}
        self._group, self._dtype = build.group, build.dtype
        num_experts, hidden = router.matrix.shape
        num_held, twice_inner, _ = experts.gate_up.shape
        self._num_held, self._is_cut = num_held, num_held < num_experts
        sizes = {"D": hidden, "I": twice_inner // 2, "K": experts_per_token}
        self._route = build.bind(
            "moe_route", sizes={**sizes, "E": num_experts}, weight=router.matrix.format.name
        )
        self._experts = build.bind(
            "moe_experts", sizes={**sizes, "E": num_held}, weight=experts.gate_up.format.name
        )
        build.weight_bytes += self._route.prepare(router) + self._experts.prepare(experts)

    def forward(self, x_TD: Tensor, context: ForwardContext) -> Tensor:
        """Return [T, D]."""
        ids_TK, weights_TK = self.route(x_TD, context)
        if self.observer is not None:
            self.observer(ids_TK)
        out_TD = torch.empty_like(x_TD)
        experts = self._experts.select(context.phase, len(x_TD))
        experts(x_TD, self._held(ids_TK), weights_TK, **self._swiglu, out_TD=out_TD)
        return self._group.all_reduce(out_TD)

    def route(self, x_TD: Tensor, context: ForwardContext) -> tuple[Tensor, Tensor]:
        """Return the chosen experts [T, K], best first, and their weights in the activation dtype."""
        shape = (len(x_TD), self._experts_per_token)
        ids_TK = torch.empty(shape, dtype=torch.int32, device=x_TD.device)
        weights_TK = torch.empty(shape, dtype=self._dtype, device=x_TD.device)
        route = self._route.select(context.phase, len(x_TD))
        route(x_TD, expert_ids_TK=ids_TK, expert_weights_TK=weights_TK)
        return ids_TK, weights_TK

    def _held(self, ids_TK: Tensor) -> Tensor:
        """Number the experts of this rank from 0; -1 for those of other ranks."""
        if not self._is_cut:
            return ids_TK
        local_TK = ids_TK - self._group.rank * self._num_held
        return local_TK.masked_fill((local_TK < 0) | (local_TK >= self._num_held), -1)
