"""How many CPU threads a model can use."""

from __future__ import annotations

import torch

from rose.utils.device import DeviceFacts
from rose.utils.log import get_logger

ONE_THREAD_BYTES = 128 << 20
"""Below, threads wait for each other longer than they work. On two cores with other work beside it, a model of
1.2 million parameters took 0.015 s per token with one thread and 0.3 to 0.6 s with two; the embedded one of 19
million (77 MB) ends its demo after 8 s with one and had not ended after 45 s with two."""

_logger = get_logger(__name__)


def fit_threads(weight_bytes: int, device: DeviceFacts) -> None:
    """Give the whole process one thread where its model is too small for more, and log it."""
    if device.kind == "cpu" and weight_bytes < ONE_THREAD_BYTES:
        torch.set_num_threads(1)
        _logger.info(
            "a model of %.1f MB on a CPU: one thread for this process (torch.set_num_threads for more)",
            weight_bytes / 1e6,
        )
