"""All blocks of a decode step of one sequence in one call, where a kernel for that is bound.

Elsewhere, and in every other step, the blocks run as they are: the model asks here which.
"""

from __future__ import annotations

from torch import Tensor

from rose.kernels.weights import BlockWeights, StackWeights
from rose.layers.build import LayerBuild
from rose.layers.context import FULL, WINDOW, ForwardContext


class DecodeLayers:
    """The blocks of a model as one operation, on weights that the blocks hold too.

    Shapes   as BlockWeights has them;  cos_sin_NA float32 [N, A]
    """

    def __init__(
        self,
        blocks: tuple[BlockWeights, ...],
        *,
        experts_per_token: int,
        page_tokens: int,
        eps: float,
        swiglu_alpha: float,
        swiglu_limit: float,
        cos_sin_NA: Tensor,
        build: LayerBuild,
    ) -> None:
        """Bind the operation where an implementation other than the blocks themselves takes it."""
        self._cos_sin_NA = cos_sin_NA
        self._numbers = {
            "experts_per_token": experts_per_token,
            "eps": eps,
            "swiglu_alpha": swiglu_alpha,
            "swiglu_limit": swiglu_limit,
        }
        first, head_dim = blocks[0], cos_sin_NA.shape[1]
        num_heads = len(first.sinks_H)
        num_experts, twice_inner, hidden = first.experts.gate_up.shape
        sizes = {
            "B": len(blocks),
            "D": hidden,
            "I": twice_inner // 2,
            "H": num_heads,
            "G": (first.qkv.matrix.shape[0] // head_dim - num_heads) // 2,
            "A": head_dim,
            "E": num_experts,
            "K": experts_per_token,
            "L": page_tokens,
            "R": build.group.size,
        }
        formats = {
            "projection": first.qkv.matrix.format.name,
            "weight": first.experts.gate_up.format.name,
        }
        self._decode_layers = build.bind_fusion("decode_layers", sizes=sizes, weights=formats)
        if self._decode_layers is not None:
            # Not counted: the blocks hold the same weights, and their kernels of decode read them as they are.
            self._decode_layers.prepare(StackWeights(blocks=blocks))

    def takes(self, context: ForwardContext, num_rows: int) -> bool:
        """Tell whether a step is one of those that it was bound for."""
        bound = self._decode_layers
        return bound is not None and any(r.holds(context.phase, num_rows) for r in bound.table)

    def forward(self, residual_SD: Tensor, context: ForwardContext) -> None:
        """Run all blocks.

        Aliasing  updates `residual_SD`, the last block's output included; writes the new KV into its pages.
        """
        assert self._decode_layers is not None, "ask `takes` first"
        kinds = context.kinds
        # A model may lack a kind of layer: then nobody reads what stands for it.
        full = kinds[FULL if FULL in kinds else WINDOW]
        window = kinds[WINDOW if WINDOW in kinds else FULL]
        decode_layers = self._decode_layers.select(context.phase, len(residual_SD))
        decode_layers(
            residual_SD,
            context.positions_T,
            context.lengths_S,
            self._cos_sin_NA,
            full_table_SP=full.page_table_SP,
            full_slots_S=full.slots_T,
            window_table_SP=window.page_table_SP,
            window_slots_S=window.slots_T,
            kv_pages=context.kv_pages,
            **self._numbers,
        )
