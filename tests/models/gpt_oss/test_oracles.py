"""Our logits are those of transformers' and of OpenAI's own model, and a saved checkpoint loads unchanged."""

import importlib.util
import json
import random
from pathlib import Path

import pytest
import torch

from fakes import gpt_oss, oracles
from rose.config.quant import QuantConfig
from rose.models.gpt_oss.config import GptOssConfig, published
from rose.models.gpt_oss.model import yarn
from rose.models.gpt_oss.reference import forward
from rose.models.gpt_oss.weights import load

RELATIVE = 5e-6
"""Float32 sums in another order; the largest seen is 1.2e-6. The rotary tables are equal to the bit."""

SHAPES = {
    "vector": ({}, 40),
    "wide_window": ({"window": 128, "vocab_size": 97, "num_q_heads": 2, "num_kv_heads": 1}, 300),
    "many_experts": (
        {
            "num_layers": 3,
            "hidden_size": 48,
            "intermediate_size": 80,
            "num_experts": 16,
            "experts_per_token": 4,
            "num_q_heads": 8,
            "head_dim": 32,
            "window": 16,
        },
        200,
    ),
    "no_groups": ({"num_layers": 4, "num_q_heads": 3, "num_kv_heads": 3, "window": 1}, 33),
    "past_4096": ({"window": 128, "num_q_heads": 2, "num_kv_heads": 1, "num_experts": 2}, 4200),
}
GOLDEN = Path(__file__).parents[2] / "data" / "openai_torch_logits.json"
GOLDEN_SHAPES = ("vector", "wide_window", "many_experts", "no_groups")


def case(name):
    changes, length = SHAPES[name]
    config = gpt_oss.config(**changes)
    weights = gpt_oss.hashed_weights(config, torch.float32, first=100 * len(name))
    tokens = torch.randint(
        config.vocab_size, (length,), generator=torch.Generator().manual_seed(length)
    )
    return config, weights, tokens


def random_case(seed):
    """Any shape that all models allow: at least two layers, since theirs alternate."""
    draw = random.Random(seed)
    kv_heads, group = draw.choice([1, 2, 3]), draw.choice([1, 2, 4])
    experts = draw.randint(2, 12)
    config = gpt_oss.config(
        vocab_size=draw.randint(20, 200),
        hidden_size=draw.choice([32, 48, 64, 72]),
        intermediate_size=draw.choice([16, 40, 64, 96]),
        num_layers=draw.randint(2, 4),
        num_q_heads=kv_heads * group,
        num_kv_heads=kv_heads,
        head_dim=draw.choice([16, 32, 64]),
        num_experts=experts,
        experts_per_token=draw.randint(1, min(4, experts)),
        window=draw.choice([1, 2, 15, 16, 17, 64, 128]),
    )
    weights = gpt_oss.hashed_weights(config, torch.float32, first=1000 * seed)
    length = draw.randint(129 + 16, 400)  # more than the widest window and a page
    generator = torch.Generator().manual_seed(seed)
    return config, weights, torch.randint(config.vocab_size, (length,), generator=generator)


def ours(config, weights, tokens):
    model = gpt_oss.build(config, gpt_oss.parameters(config, weights), torch.float32)
    return gpt_oss.run(model, tokens)


@pytest.mark.parametrize("name", SHAPES)
def test_logits_equal_those_of_the_reference(name):
    config, weights, tokens = case(name)
    wanted = forward(gpt_oss.reference_config(config), weights, tokens)
    assert gpt_oss.relative(ours(config, weights, tokens), wanted) < 1e-5  # the same angles


@pytest.mark.parametrize("name", SHAPES)
def test_logits_equal_those_of_transformers(name):
    pytest.importorskip("transformers")
    config, weights, tokens = case(name)
    with torch.no_grad():
        wanted = oracles.transformers_model(config, weights)(tokens[None]).logits[0]
    assert gpt_oss.relative(ours(config, weights, tokens), wanted) < RELATIVE


@pytest.mark.parametrize("name", SHAPES)
def test_logits_equal_those_of_openai(name):
    pytest.importorskip("gpt_oss.torch.model", reason="PyPI gpt-oss 0.0.9 is not installed")
    config, weights, tokens = case(name)
    with torch.no_grad():
        wanted = oracles.openai_model(config, weights)(tokens)
    assert gpt_oss.relative(ours(config, weights, tokens), wanted) < RELATIVE


def test_the_rotary_table_is_openai_s_to_the_bit_at_every_position():
    theirs = pytest.importorskip("gpt_oss.torch.model", reason="PyPI gpt-oss is not installed")
    rotary = theirs.RotaryEmbedding(64, 150000.0, torch.float32, scaling_factor=32.0)
    wanted = torch.cat(rotary._compute_cos_sin(131072), dim=-1)
    found = yarn(published("20b")).table(131072, dtype=torch.float32, device="cpu")
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("seed", range(6))
def test_logits_equal_those_of_all_three_on_random_configurations(seed):
    pytest.importorskip("transformers")
    config, weights, tokens = random_case(seed)
    found = ours(config, weights, tokens)
    wanted = {"reference": forward(gpt_oss.reference_config(config), weights, tokens)}
    with torch.no_grad():
        theirs = oracles.transformers_model(config, weights)
        wanted["transformers"] = theirs(tokens[None]).logits[0]
    if importlib.util.find_spec("gpt_oss"):
        with torch.no_grad():
            wanted["openai"] = oracles.openai_model(config, weights)(tokens)
    distances = {name: gpt_oss.relative(found, logits) for name, logits in wanted.items()}
    assert max(distances.values()) < RELATIVE, (distances, config)


@pytest.mark.parametrize("name", GOLDEN_SHAPES)
def test_logits_equal_those_that_openai_gave(name):
    config, weights, tokens = case(name)
    wanted = torch.tensor(json.loads(GOLDEN.read_text())[name])
    found = ours(config, weights, tokens)[-len(wanted) :]
    assert gpt_oss.relative(found, wanted) < RELATIVE


@pytest.mark.parametrize("name", ["many_experts", "vector"])
def test_a_checkpoint_that_transformers_saved_loads_unchanged(name, tmp_path):
    pytest.importorskip("transformers")
    config, weights, tokens = case(name)
    theirs = oracles.transformers_model(config, weights)
    theirs.save_pretrained(tmp_path)
    read = GptOssConfig.from_json(json.loads((tmp_path / "config.json").read_text()))
    assert read.window_tokens == config.window_tokens
    parameters = load(tmp_path, read, QuantConfig(weights="float32", activations="float32"))
    found = gpt_oss.run(gpt_oss.build(read, parameters, torch.float32), tokens)
    assert torch.equal(found, ours(config, weights, tokens))


def write_golden():
    """Run OpenAI's model once more: `PYTHONPATH=src:tests python tests/models/gpt_oss/test_oracles.py`."""
    golden = {}
    for name in GOLDEN_SHAPES:
        config, weights, tokens = case(name)
        with torch.no_grad():
            logits = oracles.openai_model(config, weights)(tokens)
        golden[name] = logits[-3:].tolist()
    GOLDEN.write_text(json.dumps(golden) + "\n")


if __name__ == "__main__":
    write_golden()
