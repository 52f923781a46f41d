"""The end-to-end vector of a tiny model, against the reference model and against ours."""

import pytest
import torch

from fakes import gpt_oss
from rose.models.gpt_oss.reference import Trace, forward

TOKENS = torch.tensor([(7 * i + 3) % 50 for i in range(10)])
RESIDUALS = (
    [-4.68240366, 0.77764539, -4.7320744, -8.78181328],
    [-2.19766785, -0.21281138, -4.45377804, -7.0553219],
)
EXPERTS = ([3, 2], [2, 1])
LAST_LOGITS = [1.72277914, 2.8655241, -3.25237261, 1.64902489, -0.07586115, 0.01486655]
BEST = [40, 33, 12, 6, 30, 39, 45, 3, 26, 1]
TOLERANCE = 1e-6
"""The vector has eight digits and took its angles in float64; ours are float32 products (1e-7 off)."""
SUM, SUM_OF_MAGNITUDES = 4.586572713867, 534.925535048


def test_the_hash_gives_the_published_numbers():
    numbers = (gpt_oss.hashed(0, (4,), 0.5) + 0.5).tolist()
    assert numbers == pytest.approx([0.4068822323, 0.4570922100, 0.1309462062, 0.8522593745])
    numbers = (gpt_oss.hashed(5, (2,), 0.5) + 0.5).tolist()
    assert numbers == pytest.approx([0.1883909821, 0.6360216832])


def test_reference_gives_the_published_stream_experts_and_logits():
    config, trace = gpt_oss.config(), Trace()
    weights = gpt_oss.hashed_weights(config, torch.float64)
    assert len(weights) == 29
    logits_TV = forward(gpt_oss.reference_config(config), weights, TOKENS, trace=trace)
    for layer in range(2):
        stream = trace.residuals[layer][-1, :4].tolist()
        assert stream == pytest.approx(RESIDUALS[layer], rel=TOLERANCE)
        assert trace.experts[layer][-1].tolist() == EXPERTS[layer]
    _check_logits(logits_TV, tolerance=TOLERANCE)


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float64, TOLERANCE), (torch.float32, 1e-5)],  # float32: its sums
)
def test_the_model_gives_the_published_logits(dtype, tolerance):
    config = gpt_oss.config()
    model = gpt_oss.build(
        config, gpt_oss.parameters(config, gpt_oss.hashed_weights(config, dtype)), dtype
    )
    _check_logits(gpt_oss.run(model, TOKENS), tolerance=tolerance)


def _check_logits(logits_TV, *, tolerance):
    assert logits_TV[-1, :6].tolist() == pytest.approx(LAST_LOGITS, rel=tolerance, abs=tolerance)
    assert logits_TV.argmax(dim=-1).tolist() == BEST
    assert logits_TV.sum().item() == pytest.approx(SUM, abs=500 * tolerance)
    assert logits_TV.abs().sum().item() == pytest.approx(SUM_OF_MAGNITUDES, rel=tolerance)
