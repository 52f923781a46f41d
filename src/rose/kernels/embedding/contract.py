"""Rows of the embedding table."""

from __future__ import annotations

from torch import Tensor

from rose.kernels.registry import Operation


def embedding(token_ids_T: Tensor, table_VD: Tensor, *, out_TD: Tensor) -> None:
    """Copy one table row per token.

    Shapes   T tokens, V vocabulary rows, D hidden size
             token_ids_T  int64, each in 0..V-1
             table_VD     activation dtype, contiguous
    Aliasing writes out_TD
    """


OPERATION = Operation(
    name="embedding",
    signature=embedding,
    sizes=("D", "V"),
    outputs=("out_TD",),
    formats=("activation",),
)
