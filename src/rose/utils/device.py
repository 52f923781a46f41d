"""Facts about the device that decide which kernels may run and what memory there is; torch only inside functions."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from rose.utils.errors import ConfigError

DEVICES = ("auto", "cpu", "cuda")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFacts:
    """What `bind`, `resolve` and the memory plan need to know of a device."""

    kind: str
    """cpu or cuda."""
    name: str
    capability: tuple[int, int] = (0, 0)
    """CUDA compute capability; (0, 0) on a CPU."""
    num_sms: int = 0
    memory_bytes: int = 0
    bandwidth_bytes_per_s: float = 0.0
    """Measured read rate where known, else 0."""
    bf16_flops_per_s: float = 0.0
    fp8_flops_per_s: float = 0.0


CPU = DeviceFacts(kind="cpu", name="cpu")

# Measured on one H200 (143771 MiB, 700 W): read rate, bf16 and fp8 8192^3 matrix products.
H200_RATES = {
    "bandwidth_bytes_per_s": 4.6e12,
    "bf16_flops_per_s": 765e12,
    "fp8_flops_per_s": 1411e12,
}


H200 = DeviceFacts(
    kind="cuda",
    name="NVIDIA H200",
    capability=(9, 0),
    num_sms=132,
    memory_bytes=143771 << 20,
    **H200_RATES,
)
"""For plans made on other machines."""


def free_bytes(device: DeviceFacts) -> int | None:
    """Return the memory that nobody holds now; None where it cannot be told."""
    if device.kind == "cuda":
        import torch

        return int(torch.cuda.mem_get_info()[0]) if torch.cuda.is_available() else None
    return _free_on_host(Path("/proc/meminfo"), Path("/sys/fs/cgroup"))


def _free_on_host(meminfo: Path, group: Path) -> int | None:
    """Return what the system calls available, or what this process's group may still take, whichever is less."""
    try:
        lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        free = int(lines["MemAvailable"].split()[0]) << 10
    except (OSError, KeyError, ValueError):
        return None
    try:
        statistics = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        used = int((group / "memory.current").read_text()) - int(statistics["inactive_file"])
        return min(free, int((group / "memory.max").read_text()) - used)
    except (OSError, KeyError, ValueError):  # no group, or "max"
        return free


def detect(device: str = "auto") -> DeviceFacts:
    """Look at the machine; `device` is auto, cpu or cuda.

    Raises  ConfigError where cuda was asked for and none is usable.
    """
    import torch

    if device not in DEVICES:
        raise ConfigError(
            f"device {device!r} is not known; allowed: {', '.join(DEVICES)}; change --device"
        )
    if device == "cpu" or (device == "auto" and not torch.cuda.is_available()):
        page_bytes, num_pages = os.sysconf("SC_PAGE_SIZE"), os.sysconf("SC_PHYS_PAGES")
        return DeviceFacts(kind="cpu", name="cpu", memory_bytes=page_bytes * num_pages)
    if not torch.cuda.is_available():
        raise ConfigError(
            "device 'cuda' was asked for, but torch "
            f"{torch.__version__} finds no usable CUDA device; use --device cpu or install a CUDA build of torch"
        )
    properties = torch.cuda.get_device_properties(0)
    rates = H200_RATES if "H200" in properties.name else {}
    return DeviceFacts(
        kind="cuda",
        name=properties.name,
        capability=(properties.major, properties.minor),
        num_sms=properties.multi_processor_count,
        memory_bytes=properties.total_memory,
        **rates,
    )


@cache
def num_multiprocessors(device_index: int) -> int:
    """Return how many blocks fill a CUDA device, at one each."""
    import torch

    return torch.cuda.get_device_properties(device_index).multi_processor_count
