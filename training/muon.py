"""Muon for matrices: momentum whose singular values are all made about one by a few products (Newton-Schulz).

Small models learn in fewer steps with it than with AdamW, which stays in charge of embeddings, output head, routers
and vectors. Matrices of one shape are worked on together: some eighty launches a step, whatever the number of layers.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of x -> a x + b x^3 + c x^5: steep at zero, and near one for all that began above 0.01 after five rounds."""
ROUNDS = 5


def orthogonal(x: Tensor) -> Tensor:
    """Return bf16 [N, R, C] with the singular vectors of each matrix and singular values of about one."""
    is_tall = x.shape[-2] > x.shape[-1]
    x = x.bfloat16()
    x = x.mT if is_tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    a, b, c = COEFFICIENTS
    for _ in range(ROUNDS):
        square = x @ x.mT
        square = torch.baddbmm(square, square, square, beta=b, alpha=c)
        x = torch.baddbmm(x, square, x, beta=a)
    return x.mT if is_tall else x


class Muon(Optimizer):
    """Groups have `params` and `rows`: of each matrix that a parameter is a stack of; None: as its last two sizes.

    A group's `lr` may be a number or a tensor [] on the device, which a recorded step reads anew on every replay.
    """

    def __init__(
        self, groups: Iterable[dict], lr: float, momentum: float = 0.95, weight_decay: float = 0.0
    ) -> None:
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "rows": None}
        super().__init__(groups, defaults)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Take one step; `closure` is not supported."""
        assert closure is None, "the losses are computed before"
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if not params:
                continue
            grads = [p.grad for p in params]
            for p in params:
                if not self.state[p]:
                    self.state[p]["momentum"] = torch.zeros_like(p)
            kept = [self.state[p]["momentum"] for p in params]
            # The lists of torch, which its optimisers take and which it does not export.
            torch._foreach_lerp_(kept, grads, 1 - group["momentum"])  # pyright: ignore[reportPrivateImportUsage]
            wanted = torch._foreach_lerp(grads, kept, group["momentum"])  # pyright: ignore[reportPrivateImportUsage]
            torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])  # pyright: ignore[reportPrivateImportUsage]
            self._add(params, list(wanted), group["rows"], group["lr"])

    def _add(
        self, params: list[nn.Parameter], wanted: list[Tensor], rows: int | None, lr: float | Tensor
    ) -> None:
        by_shape: dict[tuple[int, int], list[int]] = {}
        for i, p in enumerate(params):
            by_shape.setdefault((rows or p.shape[-2], p.shape[-1]), []).append(i)
        for (height, width), numbers in by_shape.items():
            stacks = [wanted[i].reshape(-1, height, width) for i in numbers]
            # One product with the rate, not `alpha=`: that takes a number, and the host would wait for a tensor's.
            moved = orthogonal(torch.cat(stacks)).float() * (lr * max(1.0, height / width) ** 0.5)
            parts = moved.split([len(s) for s in stacks])
            for i, part in zip(numbers, parts, strict=True):
                params[i].sub_(part.view_as(params[i]))
