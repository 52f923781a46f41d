"""Attention of prefill with torch operators: runs anywhere, one sequence after the other.

The reference gathers, masks and multiplies whole sequences in chunks of queries already; window layers
gather only the pages that the window reaches. Nothing is left to gain with torch operators on a CPU.
"""

from __future__ import annotations

from rose.kernels.attention_prefill.reference import CHUNK_QUERIES, reference
from rose.kernels.registry import Band, Implementation, Sizes, register


def _workspace(sizes: Sizes, rows: int, longest: int) -> int:
    scores = min(rows, CHUNK_QUERIES) * sizes["H"] * longest
    keys_and_values = 2 * sizes["G"] * longest * sizes["D"]
    return 4 * (4 * scores + 3 * keys_and_values)


register(
    Implementation(
        operation="attention_prefill",
        name="torch",
        function=reference,
        band=Band.PORTABLE,
        is_capturable=False,
        workspace=_workspace,
        note="one sequence after the other; asks the device for lengths, so not for graphs",
    )
)
