"""All blocks in one launch in CUDA C++: a grid that stays, weights that stream through shared memory without a pause.

layers.cuh has the kernel. What it needs besides its operands belongs to the bound operation: a workspace,
which each launch takes as the one before has left it, and a table of the addresses of all weights and pages.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from rose.kernels.build import CudaLibrary
from rose.kernels.decode_layers.contract import MAX_SEQUENCES
from rose.kernels.formats import BF16, MXFP4, FormattedTensor
from rose.kernels.registry import Band, Implementation, Sizes, register
from rose.kernels.weights import BlockWeights, LinearWeights, StackWeights

SIZES = {"D": 2880, "I": 2880, "H": 64, "G": 8, "A": 64, "K": 4, "R": 1}
"""The kernel is compiled for these, and for either number of experts."""
NUM_EXPERTS = (32, 128)
MAX_BLOCKS = 36
PAGE_TOKENS = (16, 32, 64, 128, 256)
NUM_CUDA_BLOCKS = 120
"""Of the launch, one to a multiprocessor, which wait for each other: `GptOss` of layers_sm90.cu."""
COUNTER_BYTES = 128
"""Of the workspace: `kCounterBytes` of layers_plan.cuh. What follows is empty where all bits are ones."""

_SPILLED = (
    "registers of 640 threads are 96, given out as 104 to the warps that multiply and 64 to the others; what is stored "
    "are addresses that the warps which finish make ahead of all layers, and a few that live across phases: none of "
    "it in the loops of the items"
)
SPILLS = {"ELi32EEEEE": (280, _SPILLED), "ELi128EEEEE": (284, _SPILLED)}
"""For `python -m rose.kernels aot`: bytes and reason, by a part of the kernel's name."""
_LATE = (
    "reads of the token's columns at the begin of a phase, for a warp without an item; ordinary stores alone overwrite "
    "them, which queue up behind them; and an address in the table of layers, where nothing is ever stored again"
)
LATE_READS = {"ELi32EEEEE": (4, _LATE), "ELi128EEEEE": (5, _LATE)}
"""Likewise."""

LIBRARY = CudaLibrary(Path(__file__).with_name("layers_sm90.cu"))
LAYERS_TYPES = "pipppppppppiiifffp"


class StackLaunchers:
    """The functions of one library."""

    def __init__(self, library: CudaLibrary) -> None:
        self.call_layers = library.launcher("launch_decode_layers", LAYERS_TYPES)
        self.call_workspace_bytes = library.number("decode_layers_workspace_bytes", "")
        self.call_qkv_at = library.number("decode_layers_qkv_at", "")
        self.call_attended_at = library.number("decode_layers_attended_at", "")


LAUNCHERS = StackLaunchers(LIBRARY)


@dataclass(slots=True, kw_only=True)
class Stack:
    """The weights of a bound operation, and what its launches share.

    HAZARD: one launch at a time, of this stack and of all others on the device: blocks of two launches that have half
    of the multiprocessors each would wait for good. Calls must be ordered by one stream. What is missing is made by the
    first call with it, which is never one that a graph captures: every step is run once before it is captured.
    """

    weights: StackWeights
    _tables: dict[tuple[int, ...], Tensor] = field(default_factory=dict, init=False)
    """Addresses of the pages of all layers -> int64 [B, 17]. Kept for good: graphs hold their addresses."""
    _workspace: Tensor | None = field(default=None, init=False)

    @property
    def blocks(self) -> tuple[BlockWeights, ...]:
        """Return the blocks, as the weights have them."""
        return self.weights.blocks

    @property
    def windows(self) -> set[int]:
        """Return the lengths of windows, likewise."""
        return self.weights.windows

    @property
    def num_bytes(self) -> int:
        """Bytes of the weights, which are not copied."""
        return self.weights.num_bytes

    def table(self, kv_pages: list[Tensor]) -> Tensor:
        """Return the addresses of every block's weights and pages; see `_row`."""
        key = tuple(pages.data_ptr() for pages in kv_pages)
        if key not in self._tables:
            self._refuse_capture("a table of pages")
            rows = [_row(block, pages) for block, pages in zip(self.blocks, kv_pages, strict=True)]
            self._tables[key] = torch.tensor(rows, dtype=torch.int64, device=kv_pages[0].device)
        return self._tables[key]

    def workspace(self, device: torch.device) -> Tensor:
        """Return the memory of all launches, in which nothing is counted and written before the first."""
        if self._workspace is None:
            self._refuse_capture("its workspace")
            num_bytes = LAUNCHERS.call_workspace_bytes()
            workspace = torch.full((num_bytes,), 255, dtype=torch.uint8, device=device)
            workspace[:COUNTER_BYTES] = 0
            self._workspace = workspace
        return self._workspace

    def _refuse_capture(self, what: str) -> None:
        assert not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()), (
            f"decode_layers makes {what} in the first call with it; run the step once before it is captured"
        )


def _row(block: BlockWeights, pages: Tensor) -> list[int]:
    """Return the addresses of one block, in the kernel's order, and whether it has a window."""
    assert pages.dtype == torch.bfloat16, f"pages are {pages.dtype}, must be bf16"
    return [
        _float32(block.attention_norm_D),
        *_linear(block.qkv),
        _float32(block.sinks_H),
        *_linear(block.out),
        _float32(block.expert_norm_D),
        *_linear(block.router),
        *_mxfp4(block.experts.gate_up),
        _bf16(block.experts.gate_up_bias_EF),
        *_mxfp4(block.experts.down),
        _bf16(block.experts.down_bias_ED),
        pages.data_ptr(),
        int(block.window_tokens is not None),
    ]


def _linear(weights: LinearWeights) -> tuple[int, int]:
    assert weights.matrix.format == BF16, f"a projection is {weights.matrix.format.name}"
    assert weights.bias_N is not None, "every projection of a block has a bias"
    return _bf16(weights.matrix.values), _bf16(weights.bias_N)


def _mxfp4(matrix: FormattedTensor) -> tuple[int, int]:
    assert matrix.format == MXFP4, f"experts are {matrix.format.name}, must be mxfp4"
    assert matrix.scales is not None, "mxfp4 comes with scales"
    return _address(matrix.values, torch.uint8), _address(matrix.scales, torch.uint8)


def _bf16(tensor: Tensor) -> int:
    return _address(tensor, torch.bfloat16)


def _float32(tensor: Tensor) -> int:
    return _address(tensor, torch.float32)


def _address(tensor: Tensor, dtype: torch.dtype) -> int:
    assert tensor.dtype == dtype, f"a weight is {tensor.dtype}, must be {dtype}"
    assert tensor.is_contiguous(), "weights are contiguous"
    assert tensor.data_ptr() % 16 == 0, "bulk copies begin at multiples of 16 bytes"
    return tensor.data_ptr()


def decode_layers(
    residual_SD: Tensor,
    positions_S: Tensor,
    lengths_S: Tensor,
    cos_sin_NA: Tensor,
    *,
    full_table_SP: Tensor,
    full_slots_S: Tensor,
    window_table_SP: Tensor,
    window_slots_S: Tensor,
    kv_pages: list[Tensor],
    weights: Stack,
    experts_per_token: int,
    eps: float,
    swiglu_alpha: float,
    swiglu_limit: float,
) -> None:
    """See the contract; `weights` as `Stack` has them."""
    if len(residual_SD) == 0:
        return
    blocks = weights.blocks
    LAUNCHERS.call_layers(
        weights.table(kv_pages).data_ptr(), len(blocks), residual_SD.data_ptr(),
        positions_S.data_ptr(), lengths_S.data_ptr(),
        full_table_SP.data_ptr(), window_table_SP.data_ptr(),
        full_slots_S.data_ptr(), window_slots_S.data_ptr(), cos_sin_NA.data_ptr(),
        weights.workspace(residual_SD.device).data_ptr(), blocks[0].router.matrix.shape[0], kv_pages[0].shape[3],
        max(weights.windows, default=0), eps, swiglu_alpha, swiglu_limit, _stream(residual_SD),
    )  # fmt: skip


def _stream(tensor: Tensor) -> int:
    return torch._C._cuda_getCurrentRawStream(tensor.device.index)


def prepare(weights: StackWeights) -> Stack:
    """Take the weights as they are; nothing is made before the first call."""
    return Stack(weights=weights)


def _limits(sizes: Sizes) -> str | None:
    for name, size in SIZES.items():
        if sizes[name] != size:
            return f"{name} is {sizes[name]}, takes {size}"
    if sizes["E"] not in NUM_EXPERTS:
        return f"{sizes['E']} experts; takes {' or '.join(map(str, NUM_EXPERTS))}"
    if sizes["B"] > MAX_BLOCKS:
        return f"{sizes['B']} blocks; takes up to {MAX_BLOCKS}"
    if sizes["L"] not in PAGE_TOKENS:
        return f"pages of {sizes['L']} tokens; takes {', '.join(map(str, PAGE_TOKENS))}"
    return LIBRARY.refusal()


def _ask_device(_sizes: Sizes) -> str | None:
    """Say why the device at hand cannot hold the whole grid: what waited for a place would be waited for, for good."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        return None
    found = torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
    if found >= NUM_CUDA_BLOCKS:
        return None
    return f"needs {NUM_CUDA_BLOCKS} multiprocessors, this device has {found}"


register(
    Implementation(
        operation="decode_layers",
        name="cuda_stack",
        function=decode_layers,
        band=Band.SPECIALISED,
        device="cuda",
        min_capability=(9, 0),
        max_capability=(9, 0),
        formats={
            "activation": frozenset({"bf16"}),
            "kv": frozenset({"bf16"}),
            "projection": frozenset({"bf16"}),
            "weight": frozenset({"mxfp4"}),
        },
        phases=frozenset({"decode"}),
        rows=(1, MAX_SEQUENCES),
        limits=_limits,
        ask_device=_ask_device,
        prepare=prepare,
        library=LIBRARY,
        note="one launch for all blocks, on a grid that stays; weights stream without a pause",
    )
)
