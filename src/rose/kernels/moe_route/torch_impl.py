"""The router with torch operators: runs anywhere."""

from __future__ import annotations

from rose.kernels.moe_route.reference import reference
from rose.kernels.registry import Band, Implementation, register

register(
    Implementation(
        operation="moe_route",
        name="torch",
        function=reference,
        band=Band.PORTABLE,
        note="reference operators",
    )
)
