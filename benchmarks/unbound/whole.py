"""The decode experts of whole.cuh: one launch for both matrices, one for the sum over the chosen experts."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from rose.kernels import registry
from rose.kernels.build import CudaLibrary

registry.load("moe_experts")

from rose.kernels.formats import MXFP4  # noqa: E402
from rose.kernels.moe_experts.cuda_decode_calls import Launch  # noqa: E402
from rose.kernels.weights import ExpertWeights  # noqa: E402
from rose.utils.device import num_multiprocessors  # noqa: E402

WHOLE_TYPES = "pppppppppppp" + "iiiiffiiii" + "p"
SUM_TYPES = "ppppp" + "iiiii" + "p"
MARKS = (
    "begun",
    "router done",
    "first weights",
    "gate_up multiplied",
    "gate_up written",
    "activations there",
    "down multiplied",
    "down written",
)
"""What a build with ROSE_TIMELINE notes for each block, in nanoseconds of the device's clock."""


class WholeExperts:
    """The launchers of a library."""

    def __init__(self, library: CudaLibrary) -> None:
        self.call_whole = library.launcher("launch_whole", WHOLE_TYPES)
        self.call_sum = library.launcher("launch_sum", SUM_TYPES)
        self._written: dict[torch.device, Tensor] = {}

    def launch(
        self,
        shape: Launch,
        x_TD: Tensor,
        expert_ids_TK: Tensor,
        expert_weights_TK: Tensor,
        *,
        weights: ExpertWeights,
        swiglu_alpha: float,
        swiglu_limit: float,
        out_TD: Tensor,
        marks_BM: Tensor | None = None,
    ) -> None:
        """Run with a given launch shape; see the contract. `marks_BM`: int64, what a timeline build fills.

        LIMIT: calls with the same weights' device must follow each other; they share the counters.
        """
        (num_tokens, hidden), inner = x_TD.shape, weights.down.shape[2]
        if num_tokens == 0:
            return
        up, down = weights.gate_up, weights.down
        assert hidden == inner, f"D {hidden} and I {inner} must be equal"
        assert up.format == down.format == MXFP4, f"takes {MXFP4}, not {up.format}, {down.format}"
        assert up.scales is not None
        assert down.scales is not None
        num_pairs, num_chosen = expert_ids_TK.numel(), expert_ids_TK.shape[1]
        act_PI = x_TD.new_empty(num_pairs, inner)
        y_PD = x_TD.new_empty(num_pairs, hidden, dtype=torch.float32)
        written, num_written = self._counters(x_TD.device, shape, num_pairs, weights)
        stream = _stream(x_TD)
        self.call_whole(
            x_TD.data_ptr(), expert_ids_TK.data_ptr(), up.values.data_ptr(), up.scales.data_ptr(),
            weights.gate_up_bias_EF.data_ptr(), act_PI.data_ptr(), down.values.data_ptr(),
            down.scales.data_ptr(), weights.down_bias_ED.data_ptr(), y_PD.data_ptr(),
            written.data_ptr(), 0 if marks_BM is None else marks_BM.data_ptr(),
            num_pairs, num_chosen, down.shape[0], hidden, swiglu_alpha, swiglu_limit, shape.width,
            shape.stages, num_blocks(shape, x_TD), shape.is_dependent, stream,
        )  # fmt: skip
        self.call_sum(
            y_PD.data_ptr(), expert_ids_TK.data_ptr(), expert_weights_TK.data_ptr(),
            out_TD.data_ptr(), written.data_ptr(), num_tokens, num_chosen, hidden, num_written,
            shape.is_dependent, stream,
        )  # fmt: skip

    def _counters(
        self, device: torch.device, shape: Launch, num_pairs: int, weights: ExpertWeights
    ) -> tuple[Tensor, int]:
        # Zeros from the first call on: every call leaves them as it found them.
        num_written = min(num_pairs, weights.down.shape[0]) + num_pairs // shape.width + 1
        if device not in self._written:
            self._written[device] = torch.zeros(4096, dtype=torch.int32, device=device)
        assert num_written <= len(self._written[device])
        return self._written[device], num_written


def num_blocks(shape: Launch, like: Tensor) -> int:
    """Return the blocks of a launch: all must be resident, since they wait for each other."""
    return shape.blocks_per_sm * num_multiprocessors(like.device.index)


def _stream(tensor: Tensor) -> int:
    return torch._C._cuda_getCurrentRawStream(tensor.device.index)


LIBRARY = CudaLibrary(Path(__file__).with_name("whole_sm90.cu"))
TIMELINE = CudaLibrary(LIBRARY.source, defines=("ROSE_TIMELINE",))
EXPERTS = WholeExperts(LIBRARY)
