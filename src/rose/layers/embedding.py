"""Token ids to rows of the embedding table; every rank holds the whole table."""

from __future__ import annotations

from torch import Tensor

from rose.layers.build import LayerBuild
from rose.layers.context import ForwardContext


class Embedding:
    """A table [V, D] in the activation dtype."""

    def __init__(self, table_VD: Tensor, *, build: LayerBuild) -> None:
        self._table_VD = table_VD
        num_rows, self._hidden = table_VD.shape
        self._embedding = build.bind("embedding", sizes={"V": num_rows, "D": self._hidden})
        build.weight_bytes += table_VD.numel() * table_VD.element_size()

    def forward(self, token_ids_T: Tensor, context: ForwardContext) -> Tensor:
        """Return a new [T, D]; it may serve as the residual stream."""
        out_TD = self._table_VD.new_empty(len(token_ids_T), self._hidden)
        embedding = self._embedding.select(context.phase, len(token_ids_T))
        embedding(token_ids_T, self._table_VD, out_TD=out_TD)
        return out_TD
