"""gpt-oss in a form that trains: batched, differentiable, every expert computed and those not chosen weighted by zero.

The mathematics is that of src/rose/models/gpt_oss/reference.py (a test compares them in float64). Expert matrices can
pass through MXFP4 rounding with a straight-through gradient. Rows hold several documents; attention keeps to its own.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, linear

from rose.layers.rotary import Yarn
from rose.models.gpt_oss.config import GptOssConfig

MOST_SINK = 3.0
"""Logit of the last head's sink before training, as much as 20 keys with a score of zero."""
CHUNK = 128
"""Queries per piece of a window layer: with a window of at most this, a piece sees itself and the one before."""


def rounding_to_mxfp4(w: Tensor) -> Tensor:
    """Return rounded minus exact, the numbers of rose.quant.mxfp4 (a test compares them bit by bit).

    Float32 [..., K]; the exponent comes from the bits, so it is exact on every device.
    """
    blocks = w.unflatten(-1, (-1, 32))
    bits = blocks.abs().amax(-1, keepdim=True).contiguous().view(torch.int32)
    # Smallest t with amax <= 6 * 2^t: 6 is 1.5 * 2^2.
    t = (bits >> 23) - 127 - 2 + ((bits & 0x7FFFFF) > 0x400000).int()
    scale = ((t.clamp_min(-126) + 127) << 23).view(torch.float32)
    a = blocks.abs() / scale
    # torch.round takes ties to even, and so do codes whose step doubles at 2 and 4.
    near = torch.where(
        a < 2, torch.round(2 * a) / 2, torch.where(a < 4, torch.round(a), 2 * torch.round(a / 2))
    )
    return (near * scale * blocks.sign() - blocks).flatten(-2)


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) times the weight."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn pairs (i, i + d / 2); x [B, H, T, d], cos and sin [B, 1, T, d / 2]."""
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)


def activate(up: Tensor, weight: Tensor, alpha: float, limit: float) -> Tensor:
    """Clamped SwiGLU of [R, E, 2 I] times the routing weight [R, E]."""
    gate, passing = up[..., 0::2].clamp(max=limit), up[..., 1::2].clamp(-limit, limit)
    return gate * torch.sigmoid(alpha * gate) * (passing + 1) * weight[..., None].to(up.dtype)


@dataclass
class Tools:
    """The inner functions; on a GPU some of them compiled (see `compiled`)."""

    rounding: Callable[[Tensor], Tensor] = rounding_to_mxfp4
    norm: Callable[[Tensor, Tensor, float], Tensor] = norm
    rotate: Callable[[Tensor, Tensor, Tensor], Tensor] = rotate
    activate: Callable[[Tensor, Tensor, float, float], Tensor] = activate
    flex: Callable | None = None
    """flex_attention, compiled by itself or within `body`; None: plain attention."""
    body: Callable | None = None
    """Block.body compiled whole; None: as written."""


def compiled(kind: str) -> Tools:
    """Return tools for a GPU; `kind`: block (layers compiled whole), parts (inner functions) or plain (no flex)."""
    from torch.nn.attention.flex_attention import flex_attention

    # Few shapes come, each compiled once; the default of 8 would be passed and then run uncompiled.
    torch._dynamo.config.recompile_limit = 64
    if kind == "block":
        return Tools(
            rounding=torch.compile(rounding_to_mxfp4, dynamic=False),
            flex=flex_attention,
            body=torch.compile(Block.body, dynamic=False),
        )
    tools = Tools(
        rounding=torch.compile(rounding_to_mxfp4, dynamic=False),
        norm=torch.compile(norm, dynamic=False),
        rotate=torch.compile(rotate, dynamic=False),
        activate=torch.compile(activate, dynamic=False),
    )
    if kind == "parts":
        tools.flex = torch.compile(flex_attention, dynamic=False)
    return tools


@dataclass
class Rows:
    """What all layers need of a batch of rows.

    Shapes   cos, sin [B, 1, T, d / 2];  docs [B, T];  block_masks: of flex, by window; block_mask: one layer's
    """

    cos: Tensor
    sin: Tensor
    docs: Tensor
    block_masks: dict[int | None, object]
    block_mask: object = None

    def of(self, window: int | None) -> "Rows":
        """Return what one layer needs."""
        return Rows(self.cos, self.sin, self.docs, {}, self.block_masks.get(window))


def attend_plain(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, docs: Tensor, window: int | None
) -> Tensor:
    """Attention with sinks among tokens of one document.

    Shapes   q [B, H, T, d]; k, v [B, G, T, d]; docs [B, T];  a window layer is cut into pieces of CHUNK queries
    """
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    tokens = q.shape[2]
    if window is None or window > CHUNK or tokens % CHUNK or tokens == CHUNK:
        place = torch.arange(tokens, device=q.device)
        far = place[:, None] - place[None, :]
        seen = (far >= 0) & (far < (window or tokens)) & (docs[:, :, None] == docs[:, None, :])
        return _weigh(q, k, v, sinks.view(1, -1, 1, 1), seen[:, None])
    # [B, H, C, CHUNK, d] queries, keys of the piece and the one before it.
    q, k, v = (x.unflatten(2, (-1, CHUNK)) for x in (q, k, v))
    k, v = (torch.cat([x.roll(1, 2), x], 3) for x in (k, v))
    own = docs.unflatten(1, (-1, CHUNK))
    before = own.roll(1, 1).clone()
    before[:, 0].fill_(-1)  # nothing stands before the first piece
    keys = torch.cat([before, own], 2)
    place = torch.arange(2 * CHUNK, device=q.device)
    far = place[CHUNK:, None] - place[None, :]
    seen = (far >= 0) & (far < window) & (own[..., :, None] == keys[..., None, :])
    return _weigh(q, k, v, sinks.view(1, -1, 1, 1, 1), seen[:, None]).flatten(2, 3)


def _weigh(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, seen: Tensor) -> Tensor:
    score = (
        (q @ k.transpose(-1, -2)).float() if q.dtype != torch.float64 else q @ k.transpose(-1, -2)
    )
    score = (score / math.sqrt(q.shape[-1])).masked_fill(~seen, float("-inf"))
    sink = sinks.to(score.dtype).expand(*score.shape[:-1], 1)
    weight = torch.cat([score, sink], -1).softmax(-1)[..., :-1]
    return weight.to(v.dtype) @ v


def attend_flex(
    flex: Callable, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, block_mask: object
) -> Tensor:
    """The same through flex attention: a sink takes its share out of the sum, out * sigmoid(lse - sink)."""
    from torch.nn.attention.flex_attention import AuxRequest

    aux = AuxRequest(lse=True)
    out, found = flex(q, k, v, block_mask=block_mask, enable_gqa=True, return_aux=aux)
    share = torch.sigmoid(found.lse - sinks.view(1, -1, 1))
    return out * share[..., None].to(out.dtype)


def block_lists(docs: Tensor, window: int | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return which blocks of 128 keys each block of 128 queries needs, and the other way round.

    Documents stand in order in a row, so this follows from the first and last tokens of the blocks: [B, C, C]
    comparisons and not [B, T, T]. On any device; host and GPU give the same.

    Shapes   docs [B, T]; number of needed blocks int32 [B, 1, C] and their order int32 [B, 1, C, C], needed ones first
    """
    tokens = docs.shape[1]
    first, last = docs[:, ::CHUNK], docs[:, CHUNK - 1 :: CHUNK]
    if last.shape[1] < first.shape[1]:
        last = torch.cat([last, docs[:, -1:]], 1)
    chunk = torch.arange(first.shape[1], device=docs.device)
    apart = chunk[:, None] - chunk[None, :]
    # Between the first query of one and the last key of the other.
    nearest = (apart - 1) * CHUNK + 1
    needed = (apart >= 0) & (nearest < (window or tokens)) & (last[:, None, :] >= first[:, :, None])
    return *_ordered(needed), *_ordered(needed.mT)


def _ordered(needed: Tensor) -> tuple[Tensor, Tensor]:
    number = needed.sum(-1, dtype=torch.int32)[:, None]
    order = needed.int().argsort(dim=-1, descending=True, stable=True)[:, None]
    return number.contiguous(), order.to(torch.int32, memory_format=torch.contiguous_format)


def block_mask_of(docs: Tensor, window: int | None, lists: tuple[Tensor, ...]) -> object:
    """Return flex attention's mask for causal attention within documents and a window; `lists` of `block_lists`.

    Aliasing   reads docs and lists whenever it is used: written anew, they are the mask of another batch
    """
    from torch.nn.attention.flex_attention import BlockMask

    batch, tokens = docs.shape
    # By tensor, not by number: window and full layers then share what is compiled.
    reach = torch.full((batch,), window or tokens, dtype=torch.int32, device=docs.device)

    def seen(b: Tensor, _h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (q >= k) & (docs[b, q] == docs[b, k]) & (q - k < reach[b])

    number, order, number_of_queries, order_of_queries = lists
    return BlockMask(
        seq_lengths=(tokens, tokens),
        kv_num_blocks=number,
        kv_indices=order,
        full_kv_num_blocks=None,
        full_kv_indices=None,
        q_num_blocks=number_of_queries,
        q_indices=order_of_queries,
        full_q_num_blocks=None,
        full_q_indices=None,
        BLOCK_SIZE=(CHUNK, CHUNK),
        mask_mod=seen,
    )


def block_mask(docs: Tensor, window: int | None) -> object:
    """Return `block_mask_of` a batch whose lists are made here."""
    return block_mask_of(docs, window, block_lists(docs, window))


class Block(nn.Module):
    """One layer; parameters as in the Hugging Face layout, dots as underscores, biases apart."""

    def __init__(self, config: GptOssConfig, window: int | None) -> None:
        super().__init__()
        self.config, self.window = config, window
        hidden, inner, experts = config.hidden_size, config.intermediate_size, config.num_experts
        width = config.num_q_heads * config.head_dim
        kv = config.num_kv_heads * config.head_dim

        def normal(*shape: int, scale: float = 1.0) -> nn.Parameter:
            return nn.Parameter(torch.randn(*shape) * scale / math.sqrt(shape[-1]))

        def zeros(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.zeros(*shape))

        into_stream = 1 / math.sqrt(2 * config.num_layers)
        self.input_layernorm = nn.Parameter(torch.ones(hidden))
        self.post_attention_layernorm = nn.Parameter(torch.ones(hidden))
        self.qkv_proj, self.qkv_bias = normal(width + 2 * kv, hidden), zeros(width + 2 * kv)
        self.o_proj, self.o_bias = normal(hidden, width, scale=into_stream), zeros(hidden)
        # Spread: heads that begin without a sink of weight hardly learn one, and ignoring sinks would show nowhere.
        self.sinks = nn.Parameter(torch.linspace(0.0, MOST_SINK, config.num_q_heads))
        self.router, self.router_bias = normal(experts, hidden), zeros(experts)
        self.gate_up_proj = normal(experts, 2 * inner, hidden)
        self.gate_up_bias = zeros(experts, 2 * inner)
        self.down_proj = normal(experts, hidden, inner, scale=into_stream)
        self.down_bias = zeros(experts, hidden)

    def forward(
        self, x: Tensor, rows: Rows, tools: Tools, is_rounded: bool
    ) -> tuple[Tensor, Tensor]:
        """Return the stream [B, T, D] and a penalty on uneven use of the experts."""
        gate_up, down = self.gate_up_proj, self.down_proj
        if is_rounded:
            gate_up = gate_up + tools.rounding(gate_up.detach())
            down = down + tools.rounding(down.detach())
        return (tools.body or Block.body)(self, x, rows.of(self.window), tools, gate_up, down)

    def body(
        self, x: Tensor, rows: Rows, tools: Tools, gate_up: Tensor, down: Tensor
    ) -> tuple[Tensor, Tensor]:
        """All but the rounding: the same graph before and after rounding sets in."""
        eps = self.config.rms_norm_eps
        x = x + self.attend(tools.norm(x, self.input_layernorm, eps), rows, tools)
        h = tools.norm(x, self.post_attention_layernorm, eps).flatten(0, 1)
        added, penalty = self.experts(h, tools, gate_up, down)
        return x + added.view_as(x), penalty

    def attend(self, x: Tensor, rows: Rows, tools: Tools) -> Tensor:
        c = self.config
        qkv = linear(x, self.qkv_proj, self.qkv_bias)
        heads = qkv.unflatten(-1, (-1, c.head_dim)).transpose(1, 2)
        q, k, v = heads.split([c.num_q_heads, c.num_kv_heads, c.num_kv_heads], 1)
        q, k = tools.rotate(q, rows.cos, rows.sin), tools.rotate(k, rows.cos, rows.sin)
        if tools.flex is None:
            out = attend_plain(q, k, v, self.sinks, rows.docs, self.window)
        else:
            out = attend_flex(tools.flex, q, k, v.contiguous(), self.sinks, rows.block_mask)
        return linear(out.transpose(1, 2).flatten(2), self.o_proj, self.o_bias)

    def experts(
        self, h: Tensor, tools: Tools, gate_up: Tensor, down: Tensor
    ) -> tuple[Tensor, Tensor]:
        c = self.config
        with torch.autocast(h.device.type, enabled=False):
            logits = linear(h, self.router, self.router_bias)
        best, chosen = logits.topk(c.experts_per_token, dim=-1)
        weight = torch.zeros_like(logits).scatter(-1, chosen, best.softmax(-1))
        # One product for all experts, [R, D] x [D, E 2I], and one for their weighted sum, [R, E I] x [E I, D].
        up = linear(h, gate_up.flatten(0, 1), self.gate_up_bias.flatten())
        up = up.unflatten(-1, (c.num_experts, -1))
        act = tools.activate(up, weight, c.swiglu_alpha, c.swiglu_limit)
        out = linear(act.flatten(1), down.transpose(0, 1).flatten(1))
        out = out + weight.to(out.dtype) @ self.down_bias.to(out.dtype)
        share = torch.zeros_like(weight).scatter(-1, chosen, 1.0).mean(0) / c.experts_per_token
        penalty = c.num_experts * (logits.softmax(-1).mean(0) * share).sum()
        return out, penalty


class TrainableGptOss(nn.Module):
    """The whole model."""

    def __init__(self, config: GptOssConfig, tools: Tools | None = None) -> None:
        super().__init__()
        self.config, self.tools, self.is_rounded = config, tools or Tools(), False
        self.embed_tokens = nn.Parameter(torch.randn(config.vocab_size, config.hidden_size) * 0.5)
        self.layers = nn.ModuleList(Block(config, w) for w in config.window_tokens)
        self.norm = nn.Parameter(torch.ones(config.hidden_size))
        self.lm_head = nn.Parameter(
            torch.randn(config.vocab_size, config.hidden_size) / (4 * math.sqrt(config.hidden_size))
        )
        self._tables: dict[tuple[str, torch.dtype], Tensor] = {}

    def rows(
        self,
        positions: Tensor,
        docs: Tensor,
        block_masks: dict[int | None, object] | None = None,
    ) -> Rows:
        """Prepare what the layers need of a batch; flex attention's masks are made where none are given."""
        cos, sin = self._table(docs.device)[positions][:, None].chunk(2, -1)
        if self.tools.flex is None:
            return Rows(cos, sin, docs, {})
        if block_masks is None:
            block_masks = {w: block_mask(docs, w) for w in set(self.config.window_tokens)}
        return Rows(cos, sin, docs, block_masks)

    def _table(self, device: torch.device) -> Tensor:
        """Return cosines and sines by position."""
        c = self.config
        wide = self.norm.dtype
        key = (str(device), wide)
        if key not in self._tables:
            yarn = Yarn(
                head_dim=c.head_dim,
                theta=c.rope_theta,
                factor=c.rope_scaling_factor,
                original_tokens=c.rope_original_tokens,
                beta_fast=c.rope_beta_fast,
                beta_slow=c.rope_beta_slow,
            )
            self._tables[key] = yarn.table(8192, dtype=wide, device=device)
        return self._tables[key]

    def forward(self, tokens: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
        """Return hidden states after the final norm [B, T, D] and the penalty of the routers."""
        x = embedding(tokens, self.embed_tokens)
        penalty = x.new_zeros(())
        for layer in self.layers:
            x, more = layer(x, rows, self.tools, self.is_rounded)
            penalty = penalty + more / len(self.layers)
        return self.tools.norm(x, self.norm, self.config.rms_norm_eps), penalty

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits [..., V]."""
        return linear(hidden, self.lm_head)


class MtpHead(nn.Module):
    """Predicts the token after the next: from the model's hidden state at t and the embedding of token t + 1.

    One block with full attention; embedding and output head are those of the model it belongs to.
    """

    def __init__(self, config: GptOssConfig) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.config = config
        self.hidden_norm, self.embed_norm, self.norm = (
            nn.Parameter(torch.ones(hidden)) for _ in range(3)
        )
        self.proj = nn.Parameter(torch.randn(hidden, 2 * hidden) / math.sqrt(2 * hidden))
        self.block = Block(config, None)

    def forward(self, hidden: Tensor, embedded_next: Tensor, rows: Rows, tools: Tools) -> Tensor:
        """Return hidden states [B, T, D]; `rows` are those of positions t (the block sees places t)."""
        eps = self.config.rms_norm_eps
        both = [
            tools.norm(hidden, self.hidden_norm, eps),
            tools.norm(embedded_next, self.embed_norm, eps),
        ]
        x = linear(torch.cat(both, -1), self.proj)
        x, _ = self.block(x.float() if x.dtype == torch.bfloat16 else x, rows, tools, True)
        return tools.norm(x, self.norm, eps)
