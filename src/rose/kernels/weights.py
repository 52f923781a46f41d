"""The weight operands of contracts: plain groups of tensors that `prepare` may lay out anew."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from rose.kernels.formats import FormattedTensor


def _bytes(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.numel() * tensor.element_size()


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearWeights:
    """A projection: matrix [N, K] (out, in) and bias [N] or None."""

    matrix: FormattedTensor
    bias_N: Tensor | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes held on the device."""
        return self.matrix.num_bytes + _bytes(self.bias_N)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertWeights:
    """The experts of one layer, as in the checkpoint.

    Shapes   E experts, D hidden size, I intermediate size
             gate_up      [E, 2I, D]; row 2i is gate channel i, row 2i + 1 is up channel i
             gate_up_bias_EF  bf16 or float32 [E, 2I], interleaved likewise
             down         [E, D, I];  down_bias_ED  [E, D]
    """

    gate_up: FormattedTensor
    gate_up_bias_EF: Tensor
    down: FormattedTensor
    down_bias_ED: Tensor

    @property
    def num_bytes(self) -> int:
        """Bytes held on the device."""
        biases = _bytes(self.gate_up_bias_EF) + _bytes(self.down_bias_ED)
        return self.gate_up.num_bytes + self.down.num_bytes + biases


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockWeights:
    """One transformer block, as in the checkpoint.

    Shapes   D hidden, H query heads, G kv heads, A head size, E experts
             attention_norm_D, expert_norm_D, sinks_H  float32
             qkv     [(H + 2 G) A, D]: q heads, k heads, v heads;  out [D, H A];  router [E, D]
    """

    attention_norm_D: Tensor
    qkv: LinearWeights
    sinks_H: Tensor
    out: LinearWeights
    expert_norm_D: Tensor
    router: LinearWeights
    experts: ExpertWeights
    window_tokens: int | None
    """None: the layer sees everything."""

    @property
    def num_bytes(self) -> int:
        """Bytes held on the device."""
        vectors = (self.attention_norm_D, self.sinks_H, self.expert_norm_D)
        groups = (self.qkv, self.out, self.router, self.experts)
        return sum(map(_bytes, vectors)) + sum(group.num_bytes for group in groups)


@dataclass(frozen=True, slots=True, kw_only=True)
class StackWeights:
    """All blocks of a model, in order."""

    blocks: tuple[BlockWeights, ...]

    @property
    def windows(self) -> set[int]:
        """Tokens that blocks with a window see; empty where none has one."""
        return {b.window_tokens for b in self.blocks if b.window_tokens is not None}

    @property
    def num_bytes(self) -> int:
        """Bytes held on the device."""
        return sum(block.num_bytes for block in self.blocks)
