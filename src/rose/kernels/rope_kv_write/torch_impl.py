"""Rotary embedding and KV write with torch operators: runs anywhere, all tokens at once."""

from __future__ import annotations

from rose.kernels.registry import Band, Implementation, register
from rose.kernels.rope_kv_write.reference import reference

register(
    Implementation(
        operation="rope_kv_write",
        name="torch",
        function=reference,
        band=Band.PORTABLE,
        is_capturable=False,
        is_batch_invariant=True,
        note="reference operators; asks the device which slots are kept, so not for graphs",
    )
)
