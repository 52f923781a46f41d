"""Write src/rose/kernels/ahead.json: the Triton kernels that starts on an H200 compile ahead. Needs no GPU.

usage: python tools/kernel_lists.py          for whoever changed a kernel, a launch, the warm-up or the published sizes

The engine starts on tensors without a device (tests/fakes/launches.py) and its launches are written down.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]
CONFIGURATIONS = [(size, {"kv": kv}) for size in ("20b", "120b") for kv in ("auto", "fp8_e4m3")]


def main() -> None:
    """Find the lists and write them."""
    if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        sys.exit(
            "error: with TRITON_INTERPRET nothing is compiled, so that nothing can be listed; unset it"
        )
    from fakes.launches import list_of
    from rose.kernels.ahead import FILE, write_lists

    lists = [list_of(size, quant) for size, quant in CONFIGURATIONS]
    write_lists(FILE, lists)
    print(f"{FILE}: {', '.join(str(len(kernels)) for _, kernels in lists)} kernels")


if __name__ == "__main__":
    main()
