"""gpt-oss: embedding, blocks of attention and experts, final norm, head.

The residual stream is one tensor that the norms update in place: each norm adds the output of the
sub-layer before it. What the layers compute, and what is special in them, is told in README.md.

Of a prompt one token samples, and nothing reads what the last block makes of the others: they leave their k and v
there and no more.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rose.kernels.registry import KernelRow
from rose.kernels.weights import BlockWeights
from rose.layers.attention import Attention
from rose.layers.build import LayerBuild
from rose.layers.context import ForwardContext, SampledRows
from rose.layers.decode_layers import DecodeLayers
from rose.layers.embedding import Embedding
from rose.layers.lm_head import LmHead
from rose.layers.moe import MixtureOfExperts
from rose.layers.norm import RmsNorm
from rose.layers.rotary import Yarn
from rose.models.gpt_oss.config import GptOssConfig
from rose.models.gpt_oss.parameters import GptOssParameters, LayerParameters
from rose.utils.dtypes import torch_dtype


def yarn(config: GptOssConfig) -> Yarn:
    """Return the rotary scaling of a configuration."""
    return Yarn(
        head_dim=config.head_dim,
        theta=config.rope_theta,
        factor=config.rope_scaling_factor,
        original_tokens=config.rope_original_tokens,
        beta_fast=config.rope_beta_fast,
        beta_slow=config.rope_beta_slow,
    )


def _block_weights(config: GptOssConfig, parameters: GptOssParameters) -> tuple[BlockWeights, ...]:
    """Return the same tensors as one operation takes them."""
    return tuple(
        BlockWeights(
            attention_norm_D=layer.attention_norm_D,
            qkv=layer.qkv,
            sinks_H=layer.sinks_H,
            out=layer.out,
            expert_norm_D=layer.expert_norm_D,
            router=layer.router,
            experts=layer.experts,
            window_tokens=window_tokens,
        )
        for layer, window_tokens in zip(parameters.layers, config.window_tokens, strict=True)
    )


class GptOssBlock:
    """Attention, then experts, each behind a norm."""

    def __init__(
        self,
        config: GptOssConfig,
        parameters: LayerParameters,
        *,
        layer: int,
        page_tokens: int,
        cos_sin_PD: Tensor,
        build: LayerBuild,
    ) -> None:
        """Build layer number `layer`."""
        eps = config.rms_norm_eps
        self.attention_norm = RmsNorm(parameters.attention_norm_D, eps=eps, build=build)
        self.attention = Attention(
            layer=layer,
            head_dim=config.head_dim,
            window_tokens=config.window_tokens[layer],
            page_tokens=page_tokens,
            qkv=parameters.qkv,
            out=parameters.out,
            sinks_H=parameters.sinks_H,
            cos_sin_PD=cos_sin_PD,
            build=build,
        )
        self.expert_norm = RmsNorm(parameters.expert_norm_D, eps=eps, build=build)
        self.experts = MixtureOfExperts(
            experts_per_token=config.experts_per_token,
            swiglu_alpha=config.swiglu_alpha,
            swiglu_limit=config.swiglu_limit,
            router=parameters.router,
            experts=parameters.experts,
            build=build,
        )

    def forward(self, x_TD: Tensor | None, residual_TD: Tensor, context: ForwardContext) -> Tensor:
        """Add `x_TD` (the last block's output; None before the first) to the stream, return this block's.

        Aliasing  updates `residual_TD`; the result is not in it yet.
        """
        h_TD = self._normalise(x_TD, residual_TD, context)
        x_TD = self.attention.forward(h_TD, context)
        return self._run_experts(x_TD, residual_TD, context)

    def forward_sampled(
        self,
        x_TD: Tensor | None,
        residual_TD: Tensor,
        context: ForwardContext,
        sampled: SampledRows,
    ) -> tuple[Tensor, Tensor, ForwardContext] | None:
        """The same of a last block: write k and v of all rows, and go on with those that sample alone.

        Returns   this block's output [M, D], the stream [M, D] and the context that they go on with; None without rows
        Aliasing  updates `residual_TD`
        """
        h_TD = self._normalise(x_TD, residual_TD, context)
        q_THD = self.attention.project(h_TD, context)
        if not len(sampled.rows_M):
            return None
        q_MHD = q_THD.index_select(0, sampled.rows_M)
        residual_MD = residual_TD.index_select(0, sampled.rows_M)
        context = context.alone(sampled)
        x_MD = self.attention.attend(q_MHD, context)
        return self._run_experts(x_MD, residual_MD, context), residual_MD, context

    def _normalise(
        self, x_TD: Tensor | None, residual_TD: Tensor, context: ForwardContext
    ) -> Tensor:
        if x_TD is None:
            return self.attention_norm.forward(residual_TD, context)
        return self.attention_norm.forward(x_TD, context, residual_TD=residual_TD)

    def _run_experts(self, x_TD: Tensor, residual_TD: Tensor, context: ForwardContext) -> Tensor:
        h_TD = self.expert_norm.forward(x_TD, context, residual_TD=residual_TD)
        return self.experts.forward(h_TD, context)


class GptOss:
    """The model behind `models.base.CausalLM`."""

    def __init__(
        self,
        config: GptOssConfig,
        parameters: GptOssParameters,
        *,
        build: LayerBuild,
        page_tokens: int,
        num_positions: int | None = None,
    ) -> None:
        """Bind every kernel and relayout weights where kernels want it.

        `num_positions`: rows of the rotary table; None is the context of the model.
        """
        self.config, self.page_tokens = config, page_tokens
        self.device = parameters.embedding_VD.device
        self.kv_dtype = torch_dtype(build.quant.kv_element)
        self._build = build
        cos_sin_PD = yarn(config).table(
            num_positions or config.context_tokens,
            dtype=torch.float64 if build.dtype == torch.float64 else torch.float32,
            device=self.device,
        )
        self.embedding = Embedding(parameters.embedding_VD, build=build)
        self.blocks = [
            GptOssBlock(
                config,
                layer_parameters,
                layer=i,
                page_tokens=page_tokens,
                cos_sin_PD=cos_sin_PD,
                build=build,
            )
            for i, layer_parameters in enumerate(parameters.layers)
        ]
        self.decode_layers = DecodeLayers(
            _block_weights(config, parameters),
            experts_per_token=config.experts_per_token,
            page_tokens=page_tokens,
            eps=config.rms_norm_eps,
            swiglu_alpha=config.swiglu_alpha,
            swiglu_limit=config.swiglu_limit,
            cos_sin_NA=cos_sin_PD,
            build=build,
        )
        self.final_norm = RmsNorm(parameters.final_norm_D, eps=config.rms_norm_eps, build=build)
        self.head = LmHead(parameters.head, build=build)

    def forward(self, token_ids_T: Tensor, context: ForwardContext) -> Tensor:
        """See CausalLM."""
        residual_TD = self.embedding.forward(token_ids_T, context)
        if self.decode_layers.takes(context, len(residual_TD)) and not self._is_observed():
            self.decode_layers.forward(residual_TD, context)
            return self.final_norm.forward(residual_TD, context)
        x_TD, last = None, self.blocks[-1]
        for block in self.blocks[:-1]:
            x_TD = block.forward(x_TD, residual_TD, context)
        if context.sampled is None:
            x_TD = last.forward(x_TD, residual_TD, context)
            return self.final_norm.forward(x_TD, context, residual_TD=residual_TD)
        rest = last.forward_sampled(x_TD, residual_TD, context, context.sampled)
        if rest is None:
            return residual_TD[:0]
        x_MD, residual_MD, context = rest
        return self.final_norm.forward(x_MD, context, residual_TD=residual_MD)

    def _is_observed(self) -> bool:
        """Whether a tool wants to see which experts are chosen: only the blocks show them."""
        return any(block.experts.observer is not None for block in self.blocks)

    def logits(self, hidden_SD: Tensor) -> Tensor:
        """Return float32 logits [S, V] of chosen rows."""
        return self.head.forward(hidden_SD)

    def kernel_table(self) -> list[KernelRow]:
        """Return lines for the start-up table."""
        return self._build.kernel_table()

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights on this rank's device, relayouts included."""
        return self._build.weight_bytes
