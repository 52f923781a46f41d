"""RMSNorm for the batch-invariant mode on a CPU: the operators of the reference, each rounded exactly."""

from __future__ import annotations

from torch import Tensor

from rose.kernels.registry import Band, Implementation, register


def rms_norm(
    x_TD: Tensor, weight_D: Tensor, *, eps: float, residual_TD: Tensor | None, out_TD: Tensor
) -> None:
    """Rows are summed each by itself; root and quotient are rounded exactly, which `rsqrt` need not be."""
    if residual_TD is not None:
        residual_TD += x_TD
        x_TD = residual_TD
    t_TD = x_TD.float()
    mean_T1 = t_TD.square().sum(dim=-1, keepdim=True).div_(t_TD.shape[1])
    scale_T1 = mean_T1.add_(eps).sqrt_().reciprocal_()
    out_TD.copy_(t_TD.mul(scale_T1).mul_(weight_D))


register(
    Implementation(
        operation="rms_norm",
        name="torch_invariant",
        function=rms_norm,
        band=Band.PORTABLE,
        device="cpu",
        formats={"activation": frozenset({"float32", "bf16"})},
        is_batch_invariant=True,
        note="reference operators, exactly rounded",
    )
)
