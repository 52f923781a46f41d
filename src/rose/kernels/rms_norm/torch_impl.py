"""RMSNorm with torch operators: runs anywhere."""

from __future__ import annotations

from rose.kernels.registry import Band, Implementation, register
from rose.kernels.rms_norm.reference import reference

register(
    Implementation(
        operation="rms_norm",
        name="torch",
        function=reference,
        band=Band.PORTABLE,
        note="reference operators",
    )
)
