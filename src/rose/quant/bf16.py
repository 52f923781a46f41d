"""The formats without scales: bf16, float32 and float64."""

from __future__ import annotations

from torch import Tensor

from rose.kernels.formats import FormattedTensor, TensorFormat
from rose.utils.dtypes import torch_dtype


def encode(w: Tensor, form: TensorFormat) -> FormattedTensor:
    """Round to the element type of `form` (nearest even); not copied where it has that type already."""
    return FormattedTensor(format=form, values=w.to(torch_dtype(form.element)))
