"""Synthetic checkpoints: published names, files and sizes; the same numbers for the same seed; sane activations."""

import json
import math

import pytest
import torch

from fakes import gpt_oss as fake_gpt_oss
from rose.config.quant import QuantConfig
from rose.kernels.formats import decode
from rose.models.gpt_oss import checkpoints, weights
from rose.models.gpt_oss.reference import Trace, forward
from rose.quant.fp8 import exponent_spans
from rose.utils.errors import CheckpointError, ConfigError
from rose.weights import synth
from rose.weights.reader import CheckpointReader


def _small(**changes):
    return fake_gpt_oss.config(vocab_size=500, hidden_size=96, intermediate_size=64, **changes)


def _layout(experts="mxfp4"):
    return weights.Layout(naming="hugging_face", experts=experts)


@pytest.mark.parametrize(
    ("size", "num_files", "num_tensors", "num_bytes", "num_parameters"),
    [
        ("20b", 3, 459, 13_761_264_768, 20_914_757_184),
        ("120b", 15, 687, 65_248_815_744, 116_829_156_672),
    ],
)
def test_published_sizes_have_the_published_files(
    size, num_files, num_tensors, num_bytes, num_parameters
):
    rules = synth.in_published_order(weights.rules(checkpoints.configuration(size), _layout()))
    shards = synth.published_shards(rules, synth.SHARD_BYTES)
    assert len(shards) == num_files
    assert shards[0].file_name == f"model-00000-of-{num_files - 1:05d}.safetensors"
    assert sum(len(shard.tensors) for shard in shards) == num_tensors
    assert sum(shard.num_bytes for shard in shards) == num_bytes
    assert sum(math.prod(rule.shape) for rule in rules) == num_parameters
    if size == "20b":  # layers in the order of strings; layer 6 straddles the last two files
        assert shards[1].tensors[-1].name == "model.layers.6.mlp.experts.gate_up_proj_bias"
        assert shards[2].tensors[-1].name == "lm_head.weight"
        assert shards[2].tensors[0].shape == (32, 5760, 90, 16)


def test_the_same_seed_gives_the_same_numbers(tmp_path):
    config = _small()
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        checkpoints.synthesise(tmp_path / name, config, seed=seed)
    files = sorted(p.name for p in (tmp_path / "a").iterdir())
    assert len([f for f in files if f.endswith(".safetensors")]) >= 3
    for file in files:
        a, b, c = ((tmp_path / n / file).read_bytes() for n in "abc")
        assert a == b
        assert (a != c) == file.endswith(".safetensors")


def test_fewer_layers_hold_the_same_numbers(tmp_path):
    checkpoints.synthesise(tmp_path / "whole", _small(num_layers=3))
    checkpoints.synthesise(tmp_path / "part", _small(num_layers=1))
    with CheckpointReader(tmp_path / "whole") as whole, CheckpointReader(tmp_path / "part") as part:
        assert len(part.entries) == 22
        for name in part.entries:
            assert torch.equal(part.read(name), whole.read(name)), name


@pytest.mark.parametrize("name", ["mxfp4", "bf16"])
def test_it_loads_and_says_what_it_is(tmp_path, name):
    checkpoints.synthesise(tmp_path / "m", _small(), format_name=name)
    assert weights.checkpoint_format(tmp_path / "m") == name
    assert weights.read_config(tmp_path / "m") == _small()
    values = json.loads((tmp_path / "m" / "config.json").read_text())
    assert values.get("quantization_config", {}).get("quant_method") == (
        "mxfp4" if name == "mxfp4" else None
    )


def test_transformers_reads_its_configuration(tmp_path):
    transformers = pytest.importorskip("transformers")
    checkpoints.synthesise(tmp_path / "m", _small(), format_name="bf16")
    model = transformers.GptOssForCausalLM.from_pretrained(tmp_path / "m", dtype=torch.float32)
    assert model.config.rope_parameters["rope_theta"] == 150000
    assert model.config.layer_types == ["sliding_attention", "full_attention"]


def test_activations_stay_sane_and_tokens_spread_over_the_experts(tmp_path):
    """Runs the reference on 8 layers; 64 tokens choose 2 of 8 experts in each layer."""
    config = _small(num_layers=8, num_experts=8)
    checkpoints.synthesise(tmp_path / "m", config)
    parameters = weights.load(
        tmp_path / "m", config, QuantConfig(weights="float32", activations="float32")
    )
    trace = Trace()
    tokens = torch.arange(64) * 7 % config.vocab_size
    logits = forward(
        fake_gpt_oss.reference_config(config), _original_names(parameters), tokens, trace=trace
    )
    for residual in trace.residuals:
        assert 0.7 < residual.square().mean().sqrt() < 5
    assert 1.5 < logits.std() < 6
    for experts in trace.experts:
        counts = torch.bincount(experts.flatten(), minlength=8)
        assert counts.min() >= 1, "every expert is used"
        assert counts.max() <= 48, "none takes more than three times its share of 16"


def _original_names(p):
    tensors = {
        "embedding.weight": p.embedding_VD,
        "norm.scale": p.final_norm_D,
        "unembedding.weight": decode(p.head.matrix),
    }
    for n, layer in enumerate(p.layers):
        at = f"block.{n}."
        tensors |= {
            at + "attn.norm.scale": layer.attention_norm_D,
            at + "attn.qkv.weight": decode(layer.qkv.matrix),
            at + "attn.qkv.bias": layer.qkv.bias_N,
            at + "attn.sinks": layer.sinks_H,
            at + "attn.out.weight": decode(layer.out.matrix),
            at + "attn.out.bias": layer.out.bias_N,
            at + "mlp.norm.scale": layer.expert_norm_D,
            at + "mlp.gate.weight": decode(layer.router.matrix),
            at + "mlp.gate.bias": layer.router.bias_N,
            at + "mlp.mlp1_weight": decode(layer.experts.gate_up),
            at + "mlp.mlp1_bias": layer.experts.gate_up_bias_EF,
            at + "mlp.mlp2_weight": decode(layer.experts.down),
            at + "mlp.mlp2_bias": layer.experts.down_bias_ED,
        }
    return tensors


def test_experts_convert_to_fp8_exactly(tmp_path):
    checkpoints.synthesise(tmp_path / "m", _small())
    p = weights.load(tmp_path / "m", _small(), QuantConfig(weights="mxfp4", activations="float32"))
    for layer in p.layers:
        assert int(exponent_spans(layer.experts.down).max()) == 2


def test_bad_requests_are_answered(tmp_path):
    with pytest.raises(ConfigError, match="'7b' is not known; allowed: 20b, 120b, tiny"):
        checkpoints.configuration("7b")
    with pytest.raises(ConfigError, match="layers=30 was asked of 20b, which has 24"):
        checkpoints.configuration("20b", num_layers=30)
    with pytest.raises(ConfigError, match="'fp8_block' was asked for; allowed: mxfp4, bf16"):
        checkpoints.synthesise(tmp_path / "m", _small(), format_name="fp8_block")
    (tmp_path / "x").write_text("")
    with pytest.raises(CheckpointError, match="is not empty"):
        checkpoints.synthesise(tmp_path, _small())
