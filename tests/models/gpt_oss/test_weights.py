"""Every layout gives the same parameters: those that the names and codes in the file spell out."""

import json
import math
from pathlib import Path

import pytest
import torch

from fakes import checkpoints
from rose.config.quant import QuantConfig
from rose.kernels.formats import decode, plain
from rose.models.gpt_oss import weights
from rose.models.gpt_oss.config import published
from rose.quant.encode import requantize
from rose.quant.scheme import scheme
from rose.utils.errors import CheckpointError, ConfigError

CASES = Path(__file__).parents[2] / "data" / "handed.jsonl"
LAYOUTS = ("mxfp4", "bf16", "original")


def _load(folder, name="bf16", activations="float32", **cut):
    return weights.load(
        folder,
        weights.read_config(folder),
        QuantConfig(weights=name, activations=activations),
        **cut,
    )


def _flat(parameters):
    """Every tensor by name; matrices as numbers."""
    tensors = {
        "embedding": parameters.embedding_VD,
        "final_norm": parameters.final_norm_D,
        "head": decode(parameters.head.matrix),
    }
    for n, layer in enumerate(parameters.layers):
        tensors |= {
            f"{n}.attention_norm": layer.attention_norm_D,
            f"{n}.sinks": layer.sinks_H,
            f"{n}.expert_norm": layer.expert_norm_D,
            f"{n}.gate_up": decode(layer.experts.gate_up),
            f"{n}.gate_up_bias": layer.experts.gate_up_bias_EF,
            f"{n}.down": decode(layer.experts.down),
            f"{n}.down_bias": layer.experts.down_bias_ED,
        }
        for name in ("qkv", "out", "router"):
            linear = getattr(layer, name)
            tensors[f"{n}.{name}.matrix"] = decode(linear.matrix)
            if linear.bias_N is not None:
                tensors[f"{n}.{name}.bias"] = linear.bias_N
    return tensors


def _expected(original):
    """The same, from OpenAI's names alone."""
    tensors = {
        "embedding": original["embedding.weight"],
        "final_norm": original["norm.scale"],
        "head": original["unembedding.weight"],
    }
    names = {
        "attention_norm": "attn.norm.scale",
        "sinks": "attn.sinks",
        "expert_norm": "mlp.norm.scale",
        "gate_up_bias": "mlp.mlp1_bias",
        "down_bias": "mlp.mlp2_bias",
        "qkv.matrix": "attn.qkv.weight",
        "qkv.bias": "attn.qkv.bias",
        "out.matrix": "attn.out.weight",
        "out.bias": "attn.out.bias",
        "router.matrix": "mlp.gate.weight",
        "router.bias": "mlp.gate.bias",
    }
    for n in range(2):
        for ours, theirs in names.items():
            tensors[f"{n}.{ours}"] = original[f"block.{n}.{theirs}"]
        for ours, theirs in (("gate_up", "mlp1_weight"), ("down", "mlp2_weight")):
            tensors[f"{n}.{ours}"] = checkpoints.expand(
                original[f"block.{n}.mlp.{theirs}.blocks"],
                original[f"block.{n}.mlp.{theirs}.scales"],
            )
    return {name: tensor.float() for name, tensor in tensors.items()}


@pytest.fixture(scope="module")
def tiny():
    c = checkpoints.config()
    return c, checkpoints.numbers(c)


@pytest.fixture(scope="module")
def folders(tiny, tmp_path_factory):
    c, original = tiny
    root = tmp_path_factory.mktemp("layouts")
    return {n: checkpoints.write_layout(root / n, c, original, n) for n in LAYOUTS}


def _assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].shape == tensor.shape, name
        assert torch.equal(found[name].float(), tensor), name


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["bf16", "float32", "mxfp4", "fp8_block"])
def test_every_layout_loads_into_every_format_exactly(folders, tiny, layout, name):
    """The numbers are MXFP4 with an exponent span of 2, so that all of these formats hold them."""
    parameters = _load(folders[layout], name)
    _assert_same(_flat(parameters), _expected(tiny[1]))
    assert parameters.layers[0].experts.down.format.name == name
    assert parameters.embedding_VD.dtype == torch.float32


def test_down_is_not_transposed_where_hidden_equals_intermediate(folders, tiny):
    """A transpose too many or too few has the right shape here and wrong numbers."""
    down = decode(_load(folders["bf16"]).layers[1].experts.down)
    expected = _expected(tiny[1])["1.down"]
    assert torch.equal(down, expected)
    assert not torch.equal(down, expected.transpose(1, 2))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_projections_and_head_become_fp8_tiles_of_the_fused_matrix(folders, tiny, layout):
    """q ends at row 192, inside a tile: the tiles must be those of q, k and v together."""
    parameters = _load(folders[layout], "fp8_block_all")
    expected, formats = (
        _expected(tiny[1]),
        scheme(QuantConfig(weights="fp8_block_all", activations="bf16")),
    )
    for name, matrix in (
        ("0.qkv.matrix", parameters.layers[0].qkv.matrix),
        ("0.out.matrix", parameters.layers[0].out.matrix),
        ("head", parameters.head.matrix),
    ):
        wanted = requantize(plain(expected[name]), formats.head)
        assert torch.equal(matrix.scales, wanted.scales), name
        assert torch.equal(matrix.values.float(), wanted.values.float()), name


def test_the_checkpoints_format_is_what_its_experts_are_in(folders):
    found = {name: weights.checkpoint_format(folder) for name, folder in folders.items()}
    assert found == {"mxfp4": "mxfp4", "bf16": "bf16", "original": "mxfp4"}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_both_configurations_read_the_same(folders, tiny, layout):
    assert weights.read_config(folders[layout]) == tiny[0]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["mxfp4", "float32", "fp8_block"])
def test_the_shares_of_two_ranks_make_the_whole(folders, tiny, layout, name):
    c, whole = tiny[0], _flat(_load(folders[layout], name))
    shares = [_flat(_load(folders[layout], name, rank=r, size=2)) for r in range(2)]
    q, kv = c.num_q_heads * c.head_dim // 2, c.num_kv_heads * c.head_dim // 2
    for n in range(2):
        for kind in ("matrix", "bias"):
            parts = [share[f"{n}.qkv.{kind}"].split([q, kv, kv]) for share in shares]
            joined = torch.cat([part[i] for i in range(3) for part in parts])
            assert torch.equal(joined, whole[f"{n}.qkv.{kind}"])
        for key, axis in (("sinks", 0), ("gate_up", 0), ("down", 0), ("gate_up_bias", 0)):
            joined = torch.cat([share[f"{n}.{key}"] for share in shares], dim=axis)
            assert torch.equal(joined, whole[f"{n}.{key}"])
        joined = torch.cat([share[f"{n}.out.matrix"] for share in shares], dim=1)
        assert torch.equal(joined, whole[f"{n}.out.matrix"])
        assert f"{n}.out.bias" in shares[0], "added before the all-reduce, so by one rank"
        assert f"{n}.out.bias" not in shares[1]
        for key in ("router.matrix", "expert_norm"):
            assert torch.equal(shares[1][f"{n}.{key}"], whole[f"{n}.{key}"])


def test_expert_parallel_keeps_experts_whole():
    """The case cfg-ep-shards, on the rules of the published sizes."""
    lines = map(json.loads, CASES.read_text().splitlines())
    case = next(c for c in lines if c["id"] == "cfg-ep-shards")
    layout = weights.Layout(naming="hugging_face", experts="mxfp4")
    for size, counts in case["expected"]["experts_per_rank"].items():
        rule = next(
            r for r in weights.rules(published(size), layout) if r.target == "layers.0.experts.down"
        )
        for ranks, count in zip(case["input"]["ep"], counts, strict=True):
            weights.check_split(published(size), ranks)
            assert rule.local_shape(ranks) == (
                count,
                *case["expected"]["down_proj_shape_per_expert"],
            )


def test_ranks_that_cannot_share_heads_are_refused(folders):
    with pytest.raises(ConfigError, match=r"4 ranks cannot share 2 kv heads; allowed: 1, 2"):
        _load(folders["mxfp4"], "mxfp4", rank=0, size=4)


def test_a_model_saved_by_transformers_loads_unchanged(tmp_path):
    transformers = pytest.importorskip("transformers")
    c = transformers.GptOssConfig(
        num_hidden_layers=2, num_local_experts=4, vocab_size=50, hidden_size=64,
        intermediate_size=64, head_dim=16, num_attention_heads=4, num_key_value_heads=2,
        num_experts_per_tok=2, sliding_window=4,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.GptOssForCausalLM(c)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn_like(p))  # biases start as zeros, which would hide mistakes
    model.save_pretrained(tmp_path)
    assert weights.checkpoint_format(tmp_path) == "float32"
    parameters = _load(tmp_path, "float32")
    state = model.state_dict()
    for n, layer in enumerate(parameters.layers):
        at = f"model.layers.{n}."
        experts = at + "mlp.experts."
        qkv = [state[f"{at}self_attn.{letter}_proj.weight"] for letter in "qkv"]
        assert torch.equal(layer.qkv.matrix.values, torch.cat(qkv))
        assert torch.equal(layer.experts.gate_up.values, state[experts + "gate_up_proj"].mT)
        assert torch.equal(layer.experts.down.values, state[experts + "down_proj"].mT)
        assert torch.equal(layer.experts.down_bias_ED, state[experts + "down_proj_bias"])
        assert torch.equal(layer.sinks_H, state[at + "self_attn.sinks"])
    assert torch.equal(parameters.head.matrix.values, state["lm_head.weight"])
    assert weights.read_config(tmp_path).window_tokens == (4, None)


def test_all_that_does_not_add_up_is_reported_at_once(tmp_path, tiny):
    c, original = tiny
    tensors = checkpoints.hugging_face(c, original)
    del tensors["model.layers.1.self_attn.sinks"]
    tensors["model.layers.1.self_attn.sink"] = torch.zeros(6)
    tensors["lm_head.weight"] = tensors["lm_head.weight"][:200].clone()
    tensors["model.layers.0.mlp.experts.down_proj_scales"] = torch.zeros(4, 160, 5)
    folder = checkpoints.write(tmp_path / "bad", tensors, checkpoints.hugging_face_json(c))
    with pytest.raises(CheckpointError) as caught:
        _load(folder)
    missing, unused, misshapen = caught.value.problems
    assert "1 tensors are missing: model.layers.1.self_attn.sinks (like" in missing
    assert "model.layers.1.self_attn.sink;" in unused
    assert (
        "lm_head.weight: found BF16 [200, 160], needed BF16 or F32 or F64 [300, 160]" in misshapen
    )
    assert "down_proj_scales: found F32 [4, 160, 5], needed U8 [4, 160, 5]" in misshapen


@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_numbers_that_are_none_are_refused_with_their_tensors_name(tmp_path, tiny, number):
    c, original = tiny
    tensors = checkpoints.hugging_face(c, original)
    name = "model.layers.1.input_layernorm.weight"
    tensors[name] = tensors[name].clone()
    tensors[name][7] = number
    folder = checkpoints.write(tmp_path / "nan", tensors, checkpoints.hugging_face_json(c))
    with pytest.raises(CheckpointError, match=f"{name}: weights hold NaN or infinity"):
        _load(folder)


def test_nan_scales_are_refused_with_their_tensors_name(tmp_path, tiny):
    c, original = tiny
    tensors = checkpoints.hugging_face(c, original)
    name = "model.layers.1.mlp.experts.gate_up_proj_scales"
    tensors[name] = tensors[name].clone()
    tensors[name][2, 3, 1] = 255
    folder = checkpoints.write(tmp_path / "nan", tensors, checkpoints.hugging_face_json(c))
    with pytest.raises(CheckpointError, match=f"{name} holds the scale byte 255"):
        _load(folder, "mxfp4")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "llama"}, "model_type 'llama'; supported: gpt_oss"),
        ({"num_hidden_layers": "24"}, "num_layers is .24.; needed: a whole number"),
        ({"hidden_size": 0}, "hidden_size is 0; needed: a whole number of at least 1"),
        ({"num_local_experts": 2.5}, "num_experts is 2.5"),
        ({"num_hidden_layers": 10**9}, "num_layers is 1000000000; .* at most 4096"),
        ({"vocab_size": 10**12}, "vocab_size is 1000000000000; .* at most"),
        ({"max_position_embeddings": 10**12}, "context_tokens is 1000000000000; .* at most"),
        ({"num_attention_heads": 7}, "7 query heads cannot share 2 kv heads evenly"),
        ({"head_dim": 31}, "head_dim is 31; needed: an even number"),
        ({"num_experts_per_tok": 9}, "9 experts per token of 4"),
        ({"sliding_window": 0}, "sliding_window is 0; needed: a whole number of at least 1"),
        ({"sliding_window": "128"}, "sliding_window is '128'"),
        ({"sliding_window": 12.5}, "sliding_window is 12.5"),
        ({"sliding_window": None}, "sliding_window is null"),
        ({"sliding_window": 10**30}, f"sliding_window is {10**30}; .* at most 67108864"),
        ({"rms_norm_eps": "1e-5"}, "rms_norm_eps is '1e-5'; needed: a number above 0"),
        ({"rms_norm_eps": -1}, "rms_norm_eps is -1"),
        ({"swiglu_limit": None}, "swiglu_limit is None"),
        ({"rope_theta": 1}, "rope_theta is 1.0; needed: a number above 1"),
        ({"rope_theta": float("nan")}, "rope_theta is nan"),
        ({"rope_scaling": {"factor": 0}}, "rope factor is 0.0; needed: a number of at least 1"),
        ({"rope_scaling": {"beta_fast": 1.0}}, r"beta_fast is 1.0; .* above beta_slow \(1.0\)"),
        ({"rope_scaling": {"beta_slow": -1}}, "rope_beta_slow is -1.0; needed: a number above 0"),
        ({"layer_types": [["a"], "full_attention"]}, "layer_types has 2 entries of kinds"),
        ({"eos_token_id": 1.5}, "eos_token_id is 1.5; needed: token ids"),
        ({"eos_token_id": [1, 10**30]}, "eos_token_id is .*; needed: token ids, .* to 16777215"),
        ({"attention_bias": False}, "attention_bias is False; gpt-oss has biases"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"rope_theta": [1]}, "wrong kind"),
        ({"rope_theta": 10**400}, "wrong kind"),
        ({"rope_scaling": [1]}, r"rope_scaling is \[1\]; needed: an object"),
        ({"rope_scaling": []}, r"rope_scaling is \[\]; needed: an object"),
        ({"rope_parameters": 0}, "rope_parameters is 0; needed: an object"),
        ({"rope_scaling": {"truncate": {}}}, "rope truncate is {}"),
        ({"layer_types": 0}, "layer_types is 0; needed: a list"),
        ({"tie_word_embeddings": True}, "separate output head"),
        ({"tie_word_embeddings": {}}, "tie_word_embeddings is {}; .* separate output head"),
    ],
)
def test_configurations_that_cannot_be_used_are_answered(tmp_path, tiny, change, message):
    c, _ = tiny
    folder = checkpoints.write(
        tmp_path, {"model.norm.weight": torch.ones(1)}, checkpoints.hugging_face_json(c) | change
    )
    with pytest.raises(CheckpointError, match=message) as caught:
        weights.read_config(folder)
    assert str(folder / "config.json") in str(caught.value), "which file is to be mended"


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000], ids=["lists", "objects"])
def test_json_nested_past_all_reason_is_answered(tmp_path, tiny, text):
    folder = checkpoints.write(
        tmp_path, {"model.norm.weight": torch.ones(1)}, checkpoints.hugging_face_json(tiny[0])
    )
    (folder / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match="cannot be read as JSON"):
        weights.read_config(folder)


def test_foreign_names_are_refused_with_what_was_found(tmp_path, tiny):
    folder = checkpoints.write(
        tmp_path, {"transformer.wte": torch.ones(1)}, checkpoints.hugging_face_json(tiny[0])
    )
    with pytest.raises(CheckpointError, match=r"names of neither .*found: transformer\.wte"):
        weights.checkpoint_format(folder)
