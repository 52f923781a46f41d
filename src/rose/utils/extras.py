"""What the base install leaves out, and the words for someone who meets the gap."""

from __future__ import annotations

ENGINE_PACKAGES = ("torch", "numpy", "safetensors", "triton")
"""Of the extra `engine`; triton of the extra of its name."""


def missing_package(what: str, error: ModuleNotFoundError) -> str | None:
    """Say which extra `what` needs; None where the missing module is none of the engine's packages."""
    package = (error.name or "").partition(".")[0]
    if package not in ENGINE_PACKAGES:
        return None
    packages, extra = (
        ("it", "engine,triton") if package == "triton" else ("the engine's packages", "engine")
    )
    return (
        f"{what} needs {package}, which is not installed here; "
        f"install {packages}: pip install 'rose-engine[{extra}]'"
    )
