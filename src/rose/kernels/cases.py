"""What a kernel folder's `cases.py` is made of: cases, tolerances and comparison of results.

A folder's `cases.py` defines
  CASES                          list of Case, gpt-oss shapes first, then edges
  inputs(case, seed, device)     keyword arguments of one call; outputs allocated, not filled
  tolerance(case)                Tolerance, with its reason
  flops(case), num_bytes(case)   the least work: for the share of the machine's limit
and, where it applies,
  rounded_tolerance(case, rounding)  for implementations that declare `activation_rounding`
  promised(case, name, tensor)       the part of an output that the contract speaks of
  rotated(case, arguments, step)     the same work on other parts of shared weights, for cold caches
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Case:
    """One call of an operation, by its sizes."""

    name: str
    sizes: Mapping[str, int]
    formats: Mapping[str, str] = field(default_factory=dict)
    phase: str = "prefill"
    rows: int = 1
    options: Mapping[str, Any] = field(default_factory=dict)
    """What `inputs` reads besides the sizes."""
    large: bool = False
    """Left out on a CPU, where it would take minutes."""
    timed: bool = False
    """Also run by `bench`."""
    branches: bool = False
    """Reaches all branches of persistent kernels in few tiles: what `sanitize` takes of them side by side."""


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """How far from the reference a result may be, and why that far."""

    relative: float
    """Of ||result - reference|| / ||reference|| over a whole output."""
    absolute: float
    """Of the largest single difference, divided by the largest reference value."""
    reason: str


EXACT = Tolerance(relative=0.0, absolute=0.0, reason="integers, or moves of bits")
FLOAT32 = Tolerance(
    relative=2e-6, absolute=1e-5, reason="float32 sums of a few thousand terms in another order"
)
BF16_OUT = Tolerance(
    relative=4e-3,
    absolute=8e-3,
    reason="one rounding of the result to bf16 (2^-9 each) over float32 sums",
)


@dataclass(frozen=True, kw_only=True)
class Difference:
    """One output compared with its reference."""

    output: str
    relative: float
    absolute: float
    first_bad: tuple[int, ...] | None
    found: float
    wanted: float

    def __str__(self) -> str:
        place = (
            ""
            if self.first_bad is None
            else (
                f", first bad at {list(self.first_bad)}: {self.found:.6g}, wanted {self.wanted:.6g}"
            )
        )
        return f"{self.output}: relative {self.relative:.2e}, largest {self.absolute:.2e}{place}"


def poison(tensor: Tensor) -> None:
    """Fill an output with what no right result holds: NaN, or the least integer."""
    if tensor.dtype == torch.float8_e4m3fn:
        tensor.view(torch.uint8).fill_(0x7F)
    elif tensor.dtype.is_floating_point:
        tensor.fill_(float("nan"))
    elif tensor.dtype == torch.bool:
        tensor.fill_(True)
    else:
        tensor.fill_(torch.iinfo(tensor.dtype).min)


def compare(name: str, found: Tensor, wanted: Tensor, tolerance: Tolerance) -> Difference | None:
    """Compare one output; return None where it is within `tolerance`. NaN never passes.

    Integers are compared exactly, whatever the tolerance of the other outputs.
    """
    if found.numel() == 0:
        return None
    if not (found.dtype.is_floating_point or wanted.dtype.is_floating_point):
        tolerance = EXACT
    a, b = found.detach().double(), wanted.detach().double()  # on the device: outputs may be large
    difference = (a - b).abs()
    scale = b.abs().max().clamp_min(1e-30)
    relative = (difference.norm() / b.norm().clamp_min(1e-30)).item()
    absolute = (difference.max() / scale).item()
    if relative <= tolerance.relative and absolute <= tolerance.absolute:
        return None
    bad = ~(difference <= tolerance.absolute * scale)
    index = torch.nonzero(bad)[0] if bad.any() else torch.nonzero(difference == difference.max())[0]
    place = tuple(index.tolist())
    return Difference(
        output=name,
        relative=relative,
        absolute=absolute,
        first_bad=place,
        found=a[place].item(),
        wanted=b[place].item(),
    )
