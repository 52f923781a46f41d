"""Rows of a table with one torch operator: runs anywhere."""

from __future__ import annotations

import torch
from torch import Tensor

from rose.kernels.registry import Band, Implementation, register


def embedding(token_ids_T: Tensor, table_VD: Tensor, *, out_TD: Tensor) -> None:
    """Gather straight into the output."""
    torch.index_select(table_VD, 0, token_ids_T, out=out_TD)


register(
    Implementation(
        operation="embedding",
        name="torch",
        function=embedding,
        band=Band.PORTABLE,
        is_batch_invariant=True,
        note="index_select",
    )
)
