"""Grouped-query attention with sinks: over a window or over everything, in decode, prefill and mixed steps."""

from __future__ import annotations

import torch
from torch import Tensor

from rose.kernels.weights import LinearWeights
from rose.layers.build import LayerBuild
from rose.layers.context import FULL, WINDOW, ForwardContext
from rose.layers.linear import Linear


class Attention:
    """One layer's attention, on the heads of this rank.

    Shapes   h query heads and g kv heads of this rank, d head size
             qkv [(h + 2 g) d, D];  out [D, h d];  sinks_H float32 [h];  cos_sin_PD float32 [P, d]
    """

    def __init__(
        self,
        *,
        layer: int,
        head_dim: int,
        window_tokens: int | None,
        page_tokens: int,
        qkv: LinearWeights,
        out: LinearWeights,
        sinks_H: Tensor,
        cos_sin_PD: Tensor,
        build: LayerBuild,
    ) -> None:
        """Bind the five operations; `layer` picks this layer's pages out of the context."""
        self._layer, self._head_dim, self._window_tokens = layer, head_dim, window_tokens
        self._kind = FULL if window_tokens is None else WINDOW
        self._num_heads = len(sinks_H)
        self._sinks_H, self._cos_sin_PD = sinks_H, cos_sin_PD
        num_kv_heads = (qkv.matrix.shape[0] // head_dim - self._num_heads) // 2
        sizes = {"H": self._num_heads, "G": num_kv_heads, "D": head_dim, "L": page_tokens}
        self._qkv = Linear(qkv, build=build, split="columns")
        self._rope_kv_write = build.bind("rope_kv_write", sizes=sizes)
        self._prefill = build.bind("attention_prefill", sizes=sizes)
        self._decode = build.bind("attention_decode", sizes=sizes)
        self._out = Linear(out, build=build, split="rows")

    def forward(self, x_TD: Tensor, context: ForwardContext) -> Tensor:
        """Project, write the new k and v, attend, project back; [T, D].

        Aliasing  writes this layer's pages at the slots of the step.
        """
        return self.attend(self.project(x_TD, context), context)

    def project(self, x_TD: Tensor, context: ForwardContext) -> Tensor:
        """Project, write the new k and v; return the rotated queries [T, h, d], heads contiguous.

        Aliasing  writes this layer's pages at the slots of the step.
        """
        kind, kv_pages = context.kinds[self._kind], context.kv_pages[self._layer]
        qkv_TF = self._qkv.forward(x_TD, context)
        rope_kv_write = self._rope_kv_write.select(context.phase, len(x_TD))
        rope_kv_write(
            qkv_TF, context.positions_T, self._cos_sin_PD, kind.slots_T, kv_pages=kv_pages
        )
        width = self._num_heads * self._head_dim
        return qkv_TF[:, :width].unflatten(1, (self._num_heads, self._head_dim))

    def attend(self, q_THD: Tensor, context: ForwardContext) -> Tensor:
        """Attend to the pages, which hold the new k and v by now, and project back; [T, D]."""
        page_table_SP = context.kinds[self._kind].page_table_SP
        out_THD = torch.empty(q_THD.shape, dtype=q_THD.dtype, device=q_THD.device)
        if context.num_decode:
            self._attend_decode(q_THD, page_table_SP, context, out_THD)
        if context.num_decode < len(q_THD):
            self._attend_prefill(q_THD, page_table_SP, context, out_THD)
        return self._out.forward(out_THD.flatten(1), context)

    def _attend_decode(
        self, q_THD: Tensor, page_table_SP: Tensor, context: ForwardContext, out_THD: Tensor
    ) -> None:
        """The first `num_decode` tokens are one sequence each."""
        num, lengths_S = context.num_decode, context.lengths_S
        if num < len(q_THD):
            q_THD, out_THD = q_THD[:num], out_THD[:num]
            page_table_SP, lengths_S = page_table_SP[:num], lengths_S[:num]
        self._decode.select("decode", num)(
            q_THD,
            context.kv_pages[self._layer],
            page_table_SP,
            lengths_S,
            self._sinks_H,
            scale=self._head_dim**-0.5,
            window_tokens=self._window_tokens,
            max_length=context.max_length,
            out_SHD=out_THD,
        )

    def _attend_prefill(
        self, q_THD: Tensor, page_table_SP: Tensor, context: ForwardContext, out_THD: Tensor
    ) -> None:
        """The tokens after them belong to chunks."""
        num, lengths_S = context.num_decode, context.lengths_S
        if num:  # slicing costs the host a few microseconds a layer, and most prompts come alone
            q_THD, out_THD = q_THD[num:], out_THD[num:]
            page_table_SP, lengths_S = page_table_SP[num:], lengths_S[num:]
        self._prefill.select("prefill", len(q_THD))(
            q_THD,
            context.kv_pages[self._layer],
            page_table_SP,
            context.query_starts_N1,
            lengths_S,
            self._sinks_H,
            scale=self._head_dim**-0.5,
            window_tokens=self._window_tokens,
            max_query_tokens=context.max_query_tokens,
            out_THD=out_THD,
        )
