"""What the base install leaves out, and the words for someone who meets the gap."""

from __future__ import annotations

ENGINE_PACKAGES = ("torch", "numpy", "safetensors", "triton")
"""Of the extra `engine`."""


def missing_package(what: str, error: ModuleNotFoundError) -> str | None:
    """Say which extra `what` needs; None where the missing module is none of the engine's packages."""
    package = (error.name or "").partition(".")[0]
    if package not in ENGINE_PACKAGES:
        return None
    return (
        f"{what} needs {package}, which is not installed here; "
        "install the engine's packages: pip install 'rose-engine[engine]'"
    )
