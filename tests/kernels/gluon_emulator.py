"""Run Gluon kernels on a CPU: layouts are ignored, since they never change what a tensor means.

Triton's interpreter knows no Gluon. This evaluates the Python function behind a kernel with a stand-in for
`gl` over numpy; bf16 is held in float32 and rounded to nearest where a kernel converts to it. Inline
assembly and matrix instructions are replaced by functions of the test.
"""

from __future__ import annotations

import itertools
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from triton.experimental.gluon import language as real_gl
from triton.runtime.jit import JITFunction


class Dtype:
    """An element type; bf16 values live in float32."""

    def __init__(self, name: str) -> None:
        self.name = name


BF16 = Dtype("bf16")


def round_bf16(a: Any) -> Any:
    return torch.from_numpy(np.ascontiguousarray(a, dtype=np.float32)).bfloat16().float().numpy()


class Value(np.ndarray):
    """A block of values with the methods that kernels call."""

    def to(self, dtype: Any) -> Value:
        if dtype is BF16:
            return wrap(round_bf16(self))
        return wrap(np.asarray(self).astype(dtype))

    def permute(self, order: list[int]) -> Value:
        return wrap(np.transpose(self, order))

    def reshape(self, shape: Any, *rest: int) -> Value:  # type: ignore[override]
        return wrap(np.reshape(np.asarray(self), shape if not rest else (shape, *rest)))


def wrap(a: Any) -> Value:
    return np.asarray(a).view(Value)


class Pointer:
    """A tensor's memory, addressed by element."""

    def __init__(self, tensor: torch.Tensor, offset: Any = 0) -> None:
        self.tensor, self.offset = tensor, offset
        self.dtype = types.SimpleNamespace(
            element_ty=BF16
            if tensor.dtype == torch.bfloat16
            else np.dtype(str(tensor.dtype).removeprefix("torch."))
        )

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.tensor, self.offset + offset)


def _memory(tensor: torch.Tensor) -> torch.Tensor:
    """Return all elements from the first of `tensor` to the end of its storage, whatever its strides."""
    first = tensor.storage_offset()
    count = tensor.untyped_storage().nbytes() // tensor.element_size() - first
    return tensor.as_strided((count,), (1,), first)


def _load(pointer: Pointer, mask: Any = None, other: Any = 0, **_: Any) -> Value:
    flat = _memory(pointer.tensor)
    offset = np.asarray(pointer.offset)
    mask = np.broadcast_to(True if mask is None else np.asarray(mask), offset.shape)
    inside = offset[mask]
    assert ((inside >= 0) & (inside < flat.numel())).all(), "a load leaves its tensor"
    source = flat.float() if flat.dtype == torch.bfloat16 else flat
    found = source.numpy()[np.where(mask, offset, 0)]
    return wrap(np.where(mask, found, np.asarray(other).astype(found.dtype)))


def _store(pointer: Pointer, value: Any, mask: Any = None) -> None:
    offset = np.asarray(pointer.offset)
    value, offset = np.broadcast_arrays(np.asarray(value), offset)
    mask = np.broadcast_to(True if mask is None else np.asarray(mask), offset.shape)
    flat = _memory(pointer.tensor)
    where = offset[mask]
    assert ((where >= 0) & (where < flat.numel())).all(), "a store leaves its tensor"
    flat[torch.from_numpy(where.astype(np.int64))] = torch.from_numpy(
        np.ascontiguousarray(value[mask])
    ).to(flat.dtype)


def _language(program: tuple[int, ...], num_warps: int) -> types.SimpleNamespace:
    def join(a: Any, b: Any) -> Value:
        return wrap(np.stack([a, b], axis=-1))

    return types.SimpleNamespace(
        constexpr=int, bfloat16=BF16, float32=np.float32, int32=np.int32, int64=np.int64,
        arange=lambda a, b, layout=None: wrap(np.arange(a, b, dtype=np.int32)),
        zeros=lambda shape, dtype, layout=None: wrap(np.zeros(shape, dtype)),
        full=lambda shape, value, dtype, layout=None: wrap(np.full(shape, value, dtype)),
        load=_load, store=_store, join=join,
        split=lambda a: (wrap(a[..., 0]), wrap(a[..., 1])),
        broadcast=lambda a, b: tuple(wrap(v) for v in np.broadcast_arrays(a, b)),
        where=lambda c, a, b: wrap(np.where(c, a, b)),
        minimum=lambda a, b: wrap(np.minimum(a, b)), maximum=lambda a, b: wrap(np.maximum(a, b)),
        exp=lambda a: wrap(np.exp(a)), sum=lambda a, axis: wrap(np.sum(a, axis=axis, dtype=a.dtype)),
        convert_layout=lambda a, layout, assert_trivial=False: wrap(a),
        static_range=range, program_id=lambda axis: np.int32(program[axis]),
        num_warps=lambda: num_warps, thread_barrier=lambda: None,
        SliceLayout=real_gl.SliceLayout, BlockedLayout=real_gl.BlockedLayout,
        DistributedLinearLayout=real_gl.DistributedLinearLayout,
        DotOperandLayout=real_gl.DotOperandLayout,
        NVMMADistributedLayout=real_gl.NVMMADistributedLayout,
    )  # fmt: skip


def _mma(a: Any, b: Any, acc: Any) -> Value:
    return wrap(np.matmul(a, b, dtype=np.float32) + acc)


def run(
    kernel: JITFunction,
    grid: tuple[int, ...],
    *arguments: Any,
    replace: dict[str, Callable[..., Any]] | None = None,
    num_warps: int = 4,
    **constants: Any,
) -> None:
    """Run every program of `grid`; tensors become pointers; `replace` maps names of device functions."""
    values = [Pointer(a) if isinstance(a, torch.Tensor) else a for a in arguments]
    padded = (*grid, 1, 1)[:3]
    with np.errstate(over="ignore", invalid="ignore"):
        for program in itertools.product(*(range(n) for n in padded)):
            gl = _language(program, num_warps)
            _evaluate(kernel, gl, replace or {})(*values, **constants)


def _evaluate(kernel: JITFunction, gl: Any, replace: dict[str, Any]) -> Callable[..., Any]:
    """Rebuild the Python function of `kernel` over the stand-in, and all that it calls."""
    scope: dict[str, Any] = {}
    for name, value in kernel.fn.__globals__.items():
        if name in replace:
            scope[name] = replace[name]
        elif name == "gl":
            scope[name] = gl
        elif name == "mma_v2":
            scope[name] = _mma
        elif name.startswith("gdc_"):
            scope[name] = lambda: None
        elif isinstance(value, real_gl.constexpr):
            scope[name] = value.value
        elif isinstance(value, JITFunction) and value is not kernel:
            scope[name] = _Lazy(value, gl, replace)
        elif hasattr(value, "fn") and not isinstance(value, JITFunction):
            scope[name] = value.fn
        else:
            scope[name] = value
    return types.FunctionType(kernel.fn.__code__, scope, kernel.fn.__name__, kernel.fn.__defaults__)


class _Lazy:
    """A device function, rebuilt when it is called: they may refer to each other."""

    def __init__(self, kernel: JITFunction, gl: Any, replace: dict[str, Any]) -> None:
        self.kernel, self.gl, self.replace = kernel, gl, replace

    def __call__(self, *arguments: Any, **constants: Any) -> Any:
        return _evaluate(self.kernel, self.gl, self.replace)(*arguments, **constants)


class Launcher:
    """Stands for a kernel in `kernel[grid](...)`."""

    def __init__(
        self, kernel: JITFunction, replace: dict[str, Callable[..., Any]] | None = None
    ) -> None:
        self.kernel, self.replace = kernel, replace

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def call(
            *arguments: Any,
            num_warps: int = 4,
            maxnreg: int | None = None,
            launch_pdl: bool = False,
            **constants: Any,
        ) -> None:
            run(
                self.kernel, grid, *arguments,
                replace=self.replace, num_warps=num_warps, **constants,
            )  # fmt: skip

        return call
