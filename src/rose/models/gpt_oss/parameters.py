"""The tensors of a gpt-oss model as layers take them: one tree, whoever fills it.

Filled from a checkpoint by `weights.loader` with the rules of `weights.py`, or from a seed by `synthetic.py`.
Everything is already cut for this rank and in its resident format.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from rose.kernels.weights import ExpertWeights, LinearWeights


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerParameters:
    """One block.

    Shapes   D hidden, h query heads and g kv heads of this rank, d head size, E experts
             attention_norm_D, expert_norm_D  float32
             qkv     [(h + 2 g) d, D] with bias: q heads, k heads, v heads
             out     [D, h d]; its bias belongs to rank 0 only (it is added before the all-reduce)
             sinks_H float32 [h]
             router  [E, D] with bias, activation dtype
    """

    attention_norm_D: Tensor
    qkv: LinearWeights
    sinks_H: Tensor
    out: LinearWeights
    expert_norm_D: Tensor
    router: LinearWeights
    experts: ExpertWeights


@dataclass(frozen=True, slots=True, kw_only=True)
class GptOssParameters:
    """The whole model.

    Shapes   V vocabulary rows, D hidden
             embedding_VD  activation dtype;  final_norm_D float32;  head [V, D], no bias
    """

    embedding_VD: Tensor
    layers: tuple[LayerParameters, ...]
    final_norm_D: Tensor
    head: LinearWeights
