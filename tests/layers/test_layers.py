"""Layers: what is bound, how the ranks of a group add up, what contexts without an engine look like."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import Tensor

from fakes import gpt_oss
from rose.config.quant import QuantConfig
from rose.kernels.formats import plain
from rose.kernels.weights import ExpertWeights, LinearWeights
from rose.layers.attention import Attention
from rose.layers.build import LayerBuild
from rose.layers.context import FULL, WINDOW
from rose.layers.linear import Linear
from rose.layers.lm_head import LmHead
from rose.layers.moe import MixtureOfExperts
from rose.layers.norm import RmsNorm
from rose.layers.own_pages import OwnPages
from rose.layers.rotary import Yarn
from rose.parallel.single import SingleGroup

QUANT = QuantConfig(weights="float32", activations="float32", kv="float32")
RELATIVE = 1e-6
"""Float32 sums over the ranks in another order."""


@dataclass
class Rank:
    """One rank of a group; keeps what it would have sent."""

    rank: int
    size: int
    sent: list[Tensor] = field(default_factory=list)

    def all_reduce(self, x: Tensor) -> Tensor:
        self.sent.append(x)
        return x

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        self.sent.append(x)
        return x


def build(group=None) -> LayerBuild:
    return LayerBuild(quant=QUANT, group=group)


def context(config, tokens: int):
    own = OwnPages(
        config,
        num_sequences=1,
        max_tokens=tokens,
        page_tokens=16,
        dtype=torch.float32,
        device="cpu",
    )
    return own.step(prefill=[(0, tokens)])


def linear(weights: LinearWeights, *, rows=slice(None), columns=slice(None), bias=True):
    bias_N = weights.bias_N[rows] if bias and weights.bias_N is not None else None
    matrix_NK = weights.matrix.values[rows, columns].contiguous()
    return LinearWeights(matrix=plain(matrix_NK), bias_N=bias_N)


@pytest.fixture(scope="module")
def config():
    return gpt_oss.config(num_q_heads=4, num_kv_heads=2, window=8)


@pytest.fixture(scope="module")
def layer(config):
    weights = gpt_oss.hashed_weights(config, torch.float32)
    return gpt_oss.parameters(config, weights).layers[0]


@pytest.fixture
def x_TD(config):
    return torch.randn(21, config.hidden_size, generator=torch.Generator().manual_seed(1))


def attention(config, p, group, *, heads: list[int] | None = None):
    """Attention on some kv heads and the query heads that use them."""
    d, per_kv = config.head_dim, config.num_q_heads // config.num_kv_heads
    kv = list(range(config.num_kv_heads)) if heads is None else heads
    q = [g * per_kv + i for g in kv for i in range(per_kv)]
    first_k = config.num_q_heads
    first_v = first_k + config.num_kv_heads
    blocks = [*q, *(first_k + g for g in kv), *(first_v + g for g in kv)]
    rows = torch.cat([torch.arange(b * d, (b + 1) * d) for b in blocks])
    columns = torch.cat([torch.arange(h * d, (h + 1) * d) for h in q])
    yarn = Yarn(
        head_dim=d, theta=150000.0, factor=32.0, original_tokens=4096, beta_fast=32.0, beta_slow=1.0
    )
    return Attention(
        layer=0,
        head_dim=d,
        window_tokens=8,
        page_tokens=16,
        qkv=linear(p.qkv, rows=rows),
        out=linear(p.out, columns=columns, bias=group.rank == 0),
        sinks_H=p.sinks_H[q],
        cos_sin_PD=yarn.table(64, dtype=torch.float32, device="cpu"),
        build=build(group),
    )


def test_heads_of_all_ranks_add_up_to_the_whole_attention(config, layer, x_TD):
    whole = attention(config, layer, SingleGroup()).forward(x_TD, context(config, 21))
    ranks = [Rank(r, 2) for r in range(2)]
    part_config = replace(config, num_kv_heads=1)
    for rank in ranks:
        part = attention(config, layer, rank, heads=[rank.rank])
        part.forward(x_TD, context(part_config, 21))
    total = sum(rank.sent[-1] for rank in ranks)
    assert gpt_oss.relative(total, whole) < RELATIVE


def experts(config, router, held: ExpertWeights, group):
    return MixtureOfExperts(
        experts_per_token=config.experts_per_token,
        swiglu_alpha=1.702,
        swiglu_limit=7.0,
        router=router,
        experts=held,
        build=build(group),
    )


def test_experts_of_all_ranks_add_up_whichever_way_they_are_cut(config, layer, x_TD):
    e, step = layer.experts, context(config, 21)
    whole = experts(config, layer.router, e, SingleGroup()).forward(x_TD, step)

    def some_experts(r: int) -> ExpertWeights:
        part = slice(2 * r, 2 * r + 2)
        return ExpertWeights(
            gate_up=plain(e.gate_up.values[part]),
            gate_up_bias_EF=e.gate_up_bias_EF[part],
            down=plain(e.down.values[part]),
            down_bias_ED=e.down_bias_ED[part],
        )

    def some_channels(r: int) -> ExpertWeights:
        inner = config.intermediate_size // 2
        rows, columns = slice(2 * inner * r, 2 * inner * (r + 1)), slice(inner * r, inner * (r + 1))
        return ExpertWeights(
            gate_up=plain(e.gate_up.values[:, rows].contiguous()),
            gate_up_bias_EF=e.gate_up_bias_EF[:, rows],
            down=plain(e.down.values[:, :, columns].contiguous()),
            down_bias_ED=e.down_bias_ED if r == 0 else torch.zeros_like(e.down_bias_ED),
        )

    for cut in (some_experts, some_channels):
        ranks = [Rank(r, 2) for r in range(2)]
        for rank in ranks:
            experts(config, layer.router, cut(rank.rank), rank).forward(x_TD, step)
        assert gpt_oss.relative(sum(r.sent[-1] for r in ranks), whole) < RELATIVE


def test_the_parts_of_the_vocabulary_are_gathered_in_rank_order(x_TD):
    head = LinearWeights(
        matrix=plain(torch.randn(50, 64, generator=torch.Generator().manual_seed(2)))
    )
    whole = LmHead(head, build=build()).forward(x_TD)
    ranks = [Rank(r, 2) for r in range(2)]
    for rank in ranks:
        part = linear(head, rows=slice(25 * rank.rank, 25 * rank.rank + 25))
        LmHead(part, build=build(rank)).forward(x_TD)
    assert torch.allclose(torch.cat([r.sent[-1] for r in ranks], dim=-1), whole, atol=1e-6)
    assert whole.dtype == torch.float32
    assert LmHead(head, build=build()).forward(x_TD[:0]).shape == (0, 50)


def test_only_row_parallel_projections_speak_to_the_group(config, layer, x_TD):
    for split, count in (("none", 0), ("columns", 0), ("rows", 1)):
        rank = Rank(0, 2)
        Linear(layer.qkv, build=build(rank), split=split).forward(x_TD, context(config, 21))
        assert len(rank.sent) == count


def test_a_norm_adds_to_the_stream_in_place_and_leaves_its_input(config, x_TD):
    norm = RmsNorm(torch.ones(config.hidden_size), eps=1e-5, build=build())
    stream, before = torch.ones_like(x_TD), x_TD.clone()
    out_TD = norm.forward(x_TD, context(config, 21), residual_TD=stream)
    assert torch.equal(stream, before + 1)
    assert torch.equal(x_TD, before)
    assert out_TD.square().mean(dim=-1).sub(1).abs().max() < 1e-4


def test_a_build_counts_weights_and_lists_each_binding_once(config, layer):
    shared = build()
    for _ in range(2):
        Linear(layer.qkv, build=shared)
    assert shared.weight_bytes == 2 * layer.qkv.num_bytes
    assert len(shared.kernel_table()) == len(set(shared.kernel_table()))
    assert {row.operation for row in shared.kernel_table()} == {"gemm"}


def test_own_pages_lays_decode_before_chunks_and_frees_what_windows_left(config):
    own = OwnPages(
        config,
        num_sequences=2,
        max_tokens=64,
        page_tokens=16,
        dtype=torch.float32,
        device="cpu",
    )
    own.step(prefill=[(0, 40)])
    step = own.step(decode=[0], prefill=[(1, 20)])
    assert (step.phase, step.num_tokens, step.num_decode) == ("prefill", 21, 1)
    assert step.max_query_tokens == 20
    assert step.max_length == 41
    assert step.positions_T.tolist() == [40, *range(20)]
    assert step.lengths_S.tolist() == [41, 20]
    assert step.query_starts_N1.tolist() == [0, 20]
    assert step.kinds[FULL].page_table_SP.min() >= 0
    # Position 40 with a window of 8 sees 33 .. 40: pages 0 and 1 are behind it.
    assert step.kinds[WINDOW].page_table_SP[0].tolist()[:2] == [-1, -1]
    assert step.kinds[WINDOW].page_table_SP[1].min() >= 0
    slots = step.kinds[FULL].slots_T
    assert len(slots.unique()) == len(slots)
