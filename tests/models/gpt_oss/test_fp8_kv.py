"""The model with KV in E4M3 is the reference that rounds keys and values, in prefill, in chunks and in decode."""

from __future__ import annotations

import pytest
import torch

from fakes import gpt_oss
from rose.bench.accuracy import rounded_kv
from rose.models.gpt_oss.reference import forward

CONFIG = gpt_oss.config(window=40)
WEIGHTS = gpt_oss.hashed_weights(CONFIG, torch.float32)
FLIPS = 2e-3
"""Of logits: a key whose last float32 bits differ from the reference's may be rounded to the E4M3 number beside it, one
in some ten thousand; seen: 5e-7 to 3e-4. Not rounding at all is seen as 0.13 to 0.19."""


@pytest.fixture(scope="module")
def model():
    parameters = gpt_oss.parameters(CONFIG, WEIGHTS)
    return gpt_oss.build(CONFIG, parameters, torch.float32, kv="fp8_e4m3")


@pytest.mark.parametrize("chunks", [[150], [64, 30, 56], [0] * 150, [100, *[0] * 50]])
def test_logits_are_those_of_the_rounding_reference(model, chunks):
    tokens = torch.randint(CONFIG.vocab_size, (150,), generator=torch.Generator().manual_seed(3))
    with rounded_kv():
        wanted = forward(gpt_oss.reference_config(CONFIG), WEIGHTS, tokens)
    plain = forward(gpt_oss.reference_config(CONFIG), WEIGHTS, tokens)
    found = gpt_oss.run(model, tokens, chunks)
    assert gpt_oss.relative(found, wanted) < FLIPS
    assert gpt_oss.relative(found, plain) > 50 * FLIPS
