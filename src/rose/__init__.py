"""rose: an inference engine for gpt-oss on NVIDIA H200 GPUs.

Public names are loaded on first use, so that importing `rose` costs nothing and brings no torch.
"""

from __future__ import annotations

from importlib import import_module

from rose.utils.extras import missing_package

__version__ = "0.1.0"

_PUBLIC = {
    "LLMEngine": "rose.engine.engine",
    "EngineConfig": "rose.config.engine",
    "Request": "rose.protocol.request",
    "SamplingParams": "rose.protocol.sampling_params",
}
__all__ = sorted([*_PUBLIC, "__version__"])


def __getattr__(name: str) -> object:
    if name not in _PUBLIC:
        raise AttributeError(
            f"module 'rose' has no attribute {name!r}; public: {', '.join(__all__)}"
        )
    try:
        return getattr(import_module(_PUBLIC[name]), name)
    except ModuleNotFoundError as error:
        text = missing_package(f"rose.{name}", error)
        if text is None:
            raise
        raise ModuleNotFoundError(text, name=error.name) from None
