"""Our errors beside those of PyTorch in bf16; without torch, for reports."""

from __future__ import annotations


def ratios(errors: dict[str, float]) -> dict[str, float]:
    """Return our errors over those of PyTorch in bf16, each against the reference that rounds as the kernels do."""
    prefill = errors.get("prefill_against_rounded", errors["prefill"])
    decode = errors.get("decode_against_rounded", errors["decode_after_prefill"])
    name = "pytorch_bf16_kv_rounded" if "pytorch_bf16_kv_rounded" in errors else "pytorch_bf16"
    return {
        "prefill": prefill / errors[name],
        "decode": decode / errors[f"{name}_last_tokens"],
    }
