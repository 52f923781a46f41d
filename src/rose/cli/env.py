"""`rose env`: what is installed and what this machine can do; for bug reports."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import shutil
import sys
from importlib import metadata
from typing import Any

import click

PACKAGES = (
    *("rose-engine", "torch", "triton", "numpy", "safetensors"),
    *("starlette", "uvicorn", "uvloop", "httptools", "msgspec", "pyzmq", "tokenizers"),
    *("prometheus-client", "click", "rich", "httpx", "flashinfer-python", "sgl-deep-gemm"),
)


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def env(as_json: bool) -> None:
    """Print versions, devices and usable kernels. Reads no file of yours and sends nothing."""
    facts = {
        "machine": _machine(),
        "packages": {name: _version(name) for name in PACKAGES},
        "tools": {
            name: shutil.which(name) or "not found" for name in ("nvcc", "ptxas", "nvidia-smi")
        },
        "devices": _devices(),
        "kernels": _kernels(),
    }
    if as_json:
        click.echo(json.dumps(facts, indent=2))
        return
    for title, part in facts.items():
        click.secho(title, bold=True)
        for name, value in part.items():
            click.echo(f"  {name:20} {value}")


def _machine() -> dict[str, Any]:
    return {
        "python": f"{platform.python_version()} ({sys.executable})",
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cores": os.cpu_count(),
        "memory": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.1f} GiB",
    }


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _devices() -> dict[str, str]:
    if importlib.util.find_spec("torch") is None:
        return {"cuda": "unknown: torch is not installed"}
    import torch

    if not torch.cuda.is_available():
        build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU only"
        return {"cuda": f"none usable (torch is built for {build})"}
    found = {}
    for place in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(place)
        found[f"cuda:{place}"] = (
            f"{facts.name}, sm_{facts.major}{facts.minor}, {facts.multi_processor_count} SMs, "
            f"{facts.total_memory / 2**30:.0f} GiB"
        )
    return found


def _kernels() -> dict[str, str]:
    if importlib.util.find_spec("torch") is None:
        return {"all": "unknown: torch is not installed"}
    from rose.kernels import registry
    from rose.utils.device import detect

    device, found = detect(), {}
    for name in registry.operation_names():
        usable = [i.name for i in registry.implementations(name) if i.runs_on(device)]
        found[name] = ", ".join(usable)
    return found
