"""Attention of prefill with torch operators: runs anywhere, one sequence after the other.

The reference gathers, masks and multiplies whole sequences in chunks of queries already; window layers
gather only the pages that the window reaches. Nothing is left to gain with torch operators on a CPU.
"""

from __future__ import annotations

from rose.kernels.attention_prefill.reference import reference
from rose.kernels.registry import Band, Implementation, register

register(
    Implementation(
        operation="attention_prefill",
        name="torch",
        function=reference,
        band=Band.PORTABLE,
        is_capturable=False,
        note="one sequence after the other; asks the device for lengths, so not for graphs",
    )
)
