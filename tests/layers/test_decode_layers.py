"""A fusion of all blocks: where it is bound, which steps it takes, and that a model says what runs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fakes import decode_layers as fake
from fakes import gpt_oss
from rose.config.engine import EngineConfig, KernelsConfig
from rose.config.quant import QuantConfig
from rose.kernels import registry
from rose.kernels.decode_layers.contract import MAX_SEQUENCES
from rose.kernels.registry import Regime
from rose.layers.build import LayerBuild
from rose.layers.own_pages import OwnPages
from rose.models.gpt_oss.config import published
from rose.models.gpt_oss.model import GptOss
from rose.models.gpt_oss.synthetic import synthetic_parameters
from rose.models.registry import entry
from rose.runtime.footprint import footprint
from rose.utils.device import H200, detect
from rose.utils.errors import ContractError, InvarianceError

RELATIVE = 1e-5
"""Float32 sums in another order; measured 4e-7."""
SIZES = {"B": 2, "D": 64, "I": 64, "H": 4, "G": 2, "A": 16, "E": 4, "K": 2, "L": 16, "R": 1}
WEIGHTS = {"projection": "float32", "weight": "float32"}
ROW = ("decode_layers", str(Regime("decode", 1, MAX_SEQUENCES)))


def build(**kernels: object) -> LayerBuild:
    quant = QuantConfig(weights="float32", activations="float32", kv="float32")
    return LayerBuild(quant=quant, kernels=KernelsConfig(**kernels))


def bound(build: LayerBuild, **changes: int):
    found = build.bind_fusion("decode_layers", sizes={**SIZES, **changes}, weights=WEIGHTS)
    [row] = told(build)
    return found, row


def told(built: LayerBuild | GptOss) -> list[tuple[str, str, str]]:
    return [(row.operation, str(row.regime), row.told) for row in built.kernel_table()]


def model(config=None, **kernels: object):
    config = config or gpt_oss.config(num_layers=3)
    parameters = gpt_oss.parameters(config, gpt_oss.hashed_weights(config, torch.float32))
    return gpt_oss.build(config, parameters, torch.float32, **kernels)


def test_without_a_kernel_the_blocks_run_and_the_table_says_so():
    assert bound(build()) == (None, (*ROW, "blocks"))
    assert bound(build(batch_invariant=True)) == (None, (*ROW, "blocks"))


def test_a_kernel_that_takes_the_sizes_is_bound(monkeypatch):
    fake.register(monkeypatch, limits=lambda s: None if s["R"] == 1 else f"{s['R']} ranks")
    found, row = bound(build())
    assert row == (*ROW, "fused")
    assert [i.name for i in found.table.values()] == ["fused"]
    assert bound(build(), R=2) == (None, (*ROW, "blocks"))


def test_only_turns_a_kernel_off_and_refuses_where_it_cannot_run(monkeypatch):
    fake.register(monkeypatch, limits=lambda s: None if s["R"] == 1 else f"{s['R']} ranks")
    only = {"decode_layers": "blocks"}
    assert bound(build(only=only)) == (None, (*ROW, "blocks"))
    assert bound(build(only=only, batch_invariant=True)) == (None, (*ROW, "blocks"))
    only = {"decode_layers": "fused"}
    with pytest.raises(ContractError, match="nothing can run; fused: 2 ranks"):
        bound(build(only=only), R=2)
    with pytest.raises(registry.NotInvariant, match="fused: its results may depend on the batch"):
        bound(build(only=only, batch_invariant=True))


def test_the_batch_invariant_mode_leaves_a_kernel_out(monkeypatch):
    fake.register(monkeypatch)
    assert bound(build(batch_invariant=True)) == (None, (*ROW, "blocks"))


@torch.inference_mode()
def test_a_model_with_it_gives_what_its_blocks_give(monkeypatch):
    rows = fake.register(monkeypatch)
    fused, blocks = model(), model(only={"decode_layers": "blocks"})
    assert (*ROW, "fused") in told(fused)
    assert (*ROW, "blocks") in told(blocks)
    found = []
    for each in (fused, blocks):
        own = gpt_oss.pages(each, 64, num_sequences=3)
        tokens = torch.arange(50)
        each.forward(tokens[:37], own.step(prefill=[(0, 21), (1, 15), (2, 1)]))
        steps = [[0], [0, 1], [0, 1, 2], [1]]
        hidden = [each.forward(tokens[: len(s)] + 5, own.step(decode=s)) for s in steps]
        found.append((torch.cat(hidden), torch.stack(own.kv_pages)))
    assert rows == [1, 1]  # not the prompts, nor the steps of more
    for mine, theirs in zip(*found, strict=True):
        assert gpt_oss.relative(mine, theirs) < RELATIVE
    # A step beside a prompt is none of decode.
    fused.forward(tokens[:4], own.step(decode=[0], prefill=[(1, 3)]))
    assert len(rows) == 2


@pytest.mark.parametrize("window", [None, 4])
@torch.inference_mode()
def test_a_model_of_one_kind_of_layers_runs_too(monkeypatch, window):
    rows = fake.register(monkeypatch)
    config = gpt_oss.config(num_layers=1, window=window)
    found = []
    for each in (model(config), model(config, only={"decode_layers": "blocks"})):
        own = gpt_oss.pages(each, 32)
        each.forward(torch.arange(9), own.step(prefill=[(0, 9)]))
        context = own.step(decode=[0])
        lacking = "window" if window is None else "full"
        del context.kinds[lacking]
        found.append(each.forward(torch.tensor([3]), context))
    assert rows == [1]
    assert gpt_oss.relative(*found) < RELATIVE


@torch.inference_mode()
def test_an_observer_sees_the_experts_of_every_layer(monkeypatch):
    rows = fake.register(monkeypatch)
    each = model()
    own = gpt_oss.pages(each, 16)
    seen: list[torch.Tensor] = []
    each.blocks[1].experts.observer = seen.append
    each.forward(torch.tensor([1]), own.step(decode=[0]))
    assert (len(seen), rows) == (1, [])
    each.blocks[1].experts.observer = None
    each.forward(torch.tensor([1]), own.step(decode=[0]))
    assert (len(seen), rows) == (1, [1])


def test_calls_are_held_against_the_contract(monkeypatch):
    fake.register(monkeypatch)
    each = model()  # with check_calls
    own = gpt_oss.pages(each, 16)
    context = own.step(decode=[0])
    context.lengths_S = context.lengths_S.long()
    with pytest.raises(ContractError, match=r"decode_layers: lengths_S is torch\.int64"):
        each.decode_layers.forward(torch.zeros(1, 64), context)


def test_its_weights_are_those_of_the_blocks_and_count_once(monkeypatch):
    held = []

    def prepare(weights):
        held.append(weights)
        return weights

    fake.register(monkeypatch, prepare=prepare)
    config = gpt_oss.config(num_layers=3)
    parameters = gpt_oss.parameters(config, gpt_oss.hashed_weights(config, torch.float32))
    fused = gpt_oss.build(config, parameters, torch.float32)
    plain = gpt_oss.build(config, parameters, torch.float32, only={"decode_layers": "blocks"})
    assert fused.weight_bytes == plain.weight_bytes
    [weights] = held
    for block, layer, window in zip(
        weights.blocks, parameters.layers, config.window_tokens, strict=True
    ):
        assert block.qkv is layer.qkv
        assert block.experts is layer.experts
        assert block.window_tokens == window


def test_the_memory_plan_is_the_same_with_it(monkeypatch):
    config = EngineConfig(model="m", quant=QuantConfig()).resolve(H200, checkpoint_format="mxfp4")
    architecture, size = entry("gpt_oss"), published("20b")
    uses = []
    for is_known in (False, True):
        if is_known:
            fake.register(monkeypatch, device="cuda")
        uses.append(footprint(architecture, size, config, H200, context_tokens=131072))
    assert uses[0] == uses[1]


def test_the_batch_invariant_mode_on_a_gpu_names_what_was_asked_for(monkeypatch):
    fake.register(monkeypatch, device="cuda")
    size = published("20b")
    for only, is_named in (({}, False), ({"decode_layers": "fused"}, True)):
        kernels = KernelsConfig(batch_invariant=True, only=only)
        config = EngineConfig(model="m", kernels=kernels)
        config = config.resolve(H200, checkpoint_format="mxfp4")
        with pytest.raises(InvarianceError) as error:
            footprint(entry("gpt_oss"), size, config, H200, context_tokens=4096)
        assert ("decode_layers" in str(error.value)) == is_named
        assert ("without kernels.only decode_layers=fused" in str(error.value)) == is_named


def _require_replay_is_eager(model: GptOss, own: OwnPages) -> None:
    """Replays write the same KV to the same slots, so that they may be repeated."""
    tokens_S = torch.tensor([3], device="cuda")
    context = own.step(decode=[0])
    eager = model.forward(tokens_S, context)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = model.forward(tokens_S, context)
    for _ in range(3):
        captured.zero_()
        graph.replay()
        assert gpt_oss.relative(captured, eager) < 1e-3


@pytest.mark.gpu
@torch.inference_mode()
def test_a_model_on_a_gpu_decodes_with_it_as_with_its_blocks():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    device, size = detect("cuda"), replace(
        published("20b"), num_layers=4, window_tokens=published("20b").window_tokens[:4], vocab_size=512
    )  # fmt: skip
    config = EngineConfig(model="m", quant=QuantConfig()).resolve(device, checkpoint_format="mxfp4")
    parameters = synthetic_parameters(size, config.quant, device="cuda", seed=0)
    found = []
    for name in ("cuda_stack", "blocks"):
        build = LayerBuild(
            quant=config.quant,
            device=device,
            kernels=KernelsConfig(only={"decode_layers": name}, check_calls=True),
        )
        model = GptOss(size, parameters, build=build, page_tokens=64, num_positions=4096)
        own = gpt_oss.pages(model, 700, num_sequences=2, device="cuda")
        tokens_T = torch.arange(640, device="cuda") % 512
        model.forward(tokens_T, own.step(prefill=[(0, 600), (1, 40)]))
        hidden = [
            model.forward(tokens_T[7 + i : 7 + i + len(rows)], own.step(decode=rows))
            for i, rows in enumerate([[0], [0, 1], [1, 0], [1]] * 8)
        ]
        found.append(torch.cat(hidden).float())
        if name == "cuda_stack":
            _require_replay_is_eager(model, own)
    rows_T = (found[0] - found[1]).norm(dim=1) / found[1].norm(dim=1)
    # Each is up to 1e-2 off after four blocks (the tolerance of the operation's cases), and a near tie between experts
    # takes the other one in either; most rows have none. Guessed, to be measured on a GPU.
    assert rows_T.median() < 2e-2
    assert (rows_T < 5e-2).float().mean() > 0.6
