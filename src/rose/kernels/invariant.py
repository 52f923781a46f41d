"""Arithmetic whose result for one row does not depend on the rows beside it: the CPU side of the batch-invariant mode.

Three things make results of torch operators depend on the batch: libraries choose the order of a sum by the number of
rows, vectorised functions treat the last few elements differently, and a longer row is summed in other groups. So here
matrices meet `TILE_ROWS` rows at a time, always; exponentials are taken of whole vectors, or made of operations that
IEEE 754 rounds exactly; and sums over a history go page by page, the oldest first.

That a product gives a row the same bits at any place of a tile is not promised by any library. It is tried for every
matrix when its weights are prepared (`require_equal_rows`), and for attention when it is bound (`equal_rows_problem`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import pad

from rose.utils.errors import InvarianceError

TILE_ROWS = 8
"""Rows of every product. More make prefill faster and a lone sequence slower (docs/numerics.md has the cost)."""
MOST_WIDENED = 1 << 26
"""Elements of a matrix, or of one layer's experts, up to which float32 copies are made at load (256 MiB)."""
_LINE = 16
"""Float32 numbers in a cache line."""
_LOG2_E = 1.4426950408889634
# ln 2 in two parts: the product of the first with a whole number up to 2^8 is exact in float32.
_LN2_HIGH, _LN2_LOW = 0.693359375, -2.12194440e-4
# exp(r) = 1 + r + r^2 p(r) for |r| <= ln 2 / 2; Cephes, expf.
_POLYNOMIAL = (
    1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1,
)  # fmt: skip
_LEAST, _MOST = -87.0, 88.0
_LANES = 64
"""Numbers that are whole vectors on every CPU: torch takes up to four registers of 16 at a time."""
_MOST_AT_ONCE = 32768
"""More are cut among threads, anywhere."""


@dataclass(frozen=True, slots=True)
class Factor:
    """A matrix and its bias as the mode multiplies with them.

    Shapes   matrix_KN float32, K and N at least those of the weights: what is more is zeros;  bias_N float32 or None
    """

    matrix_KN: Tensor
    bias_N: Tensor | None
    num_out: int

    @classmethod
    def of(cls, matrix_NK: Tensor, bias_N: Tensor | None) -> Factor:
        """Make columns and rows multiples of 16, so that each row begins at a cache line.

        At other places libraries may sum in another order.
        """
        num_out, num_columns = matrix_NK.shape
        rows, columns = -num_out % _LINE, -num_columns % _LINE
        if rows or columns:
            matrix_NK = pad(matrix_NK, (0, columns, 0, rows))
        if bias_N is not None:
            bias_N = pad(bias_N.float(), (0, rows))
        return cls(matrix_NK.contiguous().T, bias_N, num_out)

    def times(self, x_TK: Tensor) -> Tensor:
        """Return x W^T + b, float32 [T, N], tile by tile."""
        num_rows, num_columns = len(x_TK), len(self.matrix_KN)
        rows, columns = -num_rows % TILE_ROWS, num_columns - x_TK.shape[1]
        x_TK = x_TK.float()
        if rows or columns:
            x_TK = pad(x_TK, (0, columns, 0, rows))
        if num_rows <= TILE_ROWS:
            y_TN = self._product(x_TK.contiguous())
        else:
            y_TN = x_TK.new_empty(len(x_TK), self.matrix_KN.shape[1])
            tiles = zip(x_TK.contiguous().split(TILE_ROWS), y_TN.split(TILE_ROWS), strict=True)
            for x_MK, y_MN in tiles:
                self._product(x_MK, out=y_MN)
        return y_TN[:num_rows, : self.num_out]

    def _product(self, x_MK: Tensor, out: Tensor | None = None) -> Tensor:
        if self.bias_N is None:
            return torch.mm(x_MK, self.matrix_KN, out=out)
        return torch.addmm(self.bias_N, x_MK, self.matrix_KN, out=out)

    @property
    def num_bytes(self) -> int:
        """Bytes held."""
        bias = 0 if self.bias_N is None else self.bias_N.numel()
        return 4 * (self.matrix_KN.numel() + bias)


def exp_(x: Tensor) -> Tensor:
    """Overwrite float32 numbers (contiguous) with their exponentials, equal bits for equal inputs wherever they lie.

    Within 2e-7 relative; at most exp(88), and below exp(-87) what that is.
    """
    x.clamp_(_LEAST, _MOST)
    return _in_whole_vectors(x) if is_exp_uniform(torch.get_num_threads()) else exact_exp_(x)


def _in_whole_vectors(x: Tensor) -> Tensor:
    flat = x.view(-1)
    count = flat.numel()
    whole = count - count % _LANES
    for begin in range(0, whole, _MOST_AT_ONCE):
        flat[begin : min(begin + _MOST_AT_ONCE, whole)].exp_()
    if whole < count:
        rest = flat.new_zeros(_LANES)
        rest[: count - whole] = flat[whole:]
        flat[whole:] = rest.exp_()[: count - whole]
    return x


@cache
def is_exp_uniform(num_threads: int) -> bool:
    """Try whether torch's exponential gives a number the same bits at each place of whole vectors.

    It is so where it computes them in vector registers and nothing is left over; the number of threads is the
    current one, as more of them might cut elsewhere.
    """
    assert num_threads == torch.get_num_threads()
    for value in (0.0, 1e-5, -0.3, -1.7, 3.9, -20.3, 60.1, _LEAST, _MOST):
        wanted = torch.full((_LANES,), value).exp_()[:1]
        for size in (_LANES, 17 * _LANES, _MOST_AT_ONCE):
            if not (torch.full((size,), value).exp_() == wanted).all():
                return False
    return True


def exact_exp_(x: Tensor) -> Tensor:
    """The same out of operations that IEEE 754 rounds exactly; of numbers in -87 .. 88."""
    # One operation a line, each rounded by itself: with a factor in `add` a library may or may not fuse the two.
    whole = x.mul(_LOG2_E).round_()
    x.sub_(whole.mul(_LN2_HIGH))
    x.sub_(whole.mul(_LN2_LOW))
    y = x.mul(_POLYNOMIAL[0])
    for coefficient in _POLYNOMIAL[1:]:
        y.add_(coefficient).mul_(x)
    y.mul_(x).add_(x).add_(1.0)
    power = whole.to(torch.int32).add_(127).bitwise_left_shift_(23).view(torch.float32)
    return torch.mul(y, power, out=x)


def sum_columns(x_TK: Tensor) -> Tensor:
    """Return [T, 1]: a few columns added from the left."""
    total_T1 = x_TK[:, :1]
    for k in range(1, x_TK.shape[1]):
        total_T1 = total_T1 + x_TK[:, k : k + 1]
    return total_T1


def require_equal_rows(factor: Factor) -> Factor:
    """Try whether products give a row the same bits at each place of a tile, and beside whatever rows.

    Returns  the factor
    Raises   InvarianceError where it does not: this machine's library cannot serve the mode
    """
    matrix_KN = factor.matrix_KN
    if matrix_KN.is_meta:
        return factor
    # Numbers of every size, so that another order of summation would show.
    row_K = torch.arange(len(matrix_KN), dtype=torch.float32).mul_(0.7).sin_().exp_()
    x_nMK = row_K.expand(TILE_ROWS, TILE_ROWS, -1).clone()
    for i in range(TILE_ROWS):
        x_nMK[i, torch.arange(TILE_ROWS) != i] *= -0.3 * (i + 1)
    y_nMN = factor.times(x_nMK.flatten(0, 1)).unflatten(0, (TILE_ROWS, TILE_ROWS))
    same_MN = y_nMN.diagonal().T
    alone_N = factor.times(row_K.unsqueeze(0))[0]
    if not (same_MN == alone_N).all():
        raise InvarianceError(
            f"kernels.batch_invariant is on, but this machine's matrix products of {TILE_ROWS} rows with a matrix "
            f"{list(matrix_KN.T.shape)} give a row other bits at other places; change kernels.batch_invariant to off"
        )
    return factor


@cache
def equal_rows_problem(num_rows: int, num_inner: int, num_columns: int) -> str | None:
    """Say why batched products [rows, inner] x [inner, columns] give a row other bits at other places, or None.

    Places are those in a product and those in a batch, of one product or many.
    """
    x_K = torch.arange(num_inner, dtype=torch.float32).mul_(0.7).sin_().exp_()
    y_KN = torch.arange(num_inner * num_columns, dtype=torch.float32).mul_(0.3).sin_()
    y_KN = y_KN.view(num_inner, num_columns)
    found = []
    for batch in (1, 2, 3, 16):
        for at in {0, batch // 2, batch - 1}:
            for row in range(num_rows):
                left = torch.full((batch, num_rows, num_inner), 0.3 * (at - 3.5))
                left[at, row] = x_K
                right = y_KN.expand(batch, -1, -1) * torch.arange(1.0, batch + 1).view(-1, 1, 1)
                right[at] = y_KN
                # Keys are read as they lie, values too: both ways of the second factor.
                found += [
                    torch.bmm(left, right)[at, row],
                    torch.bmm(left, right.mT.contiguous().mT)[at, row],
                ]
    for way in (found[::2], found[1::2]):
        if any(not torch.equal(y_N, way[0]) for y_N in way):
            shape = f"[{num_rows}, {num_inner}] x [{num_inner}, {num_columns}]"
            return f"this machine's products {shape} give a row other bits at other places"
    return None
