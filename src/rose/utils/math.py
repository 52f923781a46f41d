"""Integer arithmetic that several packages need. Knows no tensors."""

from __future__ import annotations


def ceil_div(a: int, b: int) -> int:
    """Divide rounding up."""
    return -(-a // b)


def round_up(a: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is at least `a`."""
    return ceil_div(a, multiple) * multiple


def is_power_of_two(a: int) -> bool:
    """Tell whether `a` is 1, 2, 4, ..."""
    return a > 0 and a & (a - 1) == 0


def next_power_of_two(a: int) -> int:
    """Return the smallest power of two that is at least `a` (1 for `a` <= 1)."""
    return 1 << max(0, a - 1).bit_length()
