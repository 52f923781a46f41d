"""Rows of a table, by indexing."""

from __future__ import annotations

from torch import Tensor


def reference(token_ids_T: Tensor, table_VD: Tensor, *, out_TD: Tensor) -> None:
    """Copy one row per token; see the contract."""
    out_TD.copy_(table_VD[token_ids_T])
