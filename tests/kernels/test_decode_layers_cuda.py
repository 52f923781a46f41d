"""The wrapper of the CUDA kernel of all blocks: what it passes on, what it keeps, what it refuses.

The kernel's place is taken by a function that finds tensors by the addresses that it gets and computes the reference.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fakes import decode_layers as fake
from fakes.decode_layers import cuda_impl
from rose.config.engine import EngineConfig, KernelsConfig
from rose.config.quant import QuantConfig
from rose.kernels import registry
from rose.kernels.check import Draw, cases_module, check_case, is_runnable
from rose.kernels.decode_layers.contract import MAX_SEQUENCES
from rose.kernels.decode_layers.reference import reference
from rose.kernels.formats import MXFP4, FormattedTensor, plain
from rose.kernels.registry import BoundOperation, Implementation, Regime
from rose.kernels.weights import BlockWeights, ExpertWeights, LinearWeights, StackWeights
from rose.layers.build import LayerBuild
from rose.models.gpt_oss.config import published
from rose.models.gpt_oss.model import GptOss
from rose.models.registry import entry
from rose.runtime.footprint import footprint
from rose.utils.device import CPU, H200
from rose.utils.errors import ContractError

OPERATION = registry.load("decode_layers")
REGIME = str(Regime("decode", 1, MAX_SEQUENCES))
CASES = cases_module("decode_layers").CASES
TAKEN = [
    c for c in CASES if not c.large and c.sizes["D"] < 1000 and c.rows == 1
    and (c.formats["activation"], c.formats["weight"]) == ("bf16", "mxfp4")
]  # fmt: skip
STACK: Implementation = next(
    i for i in registry.implementations("decode_layers") if i.name == "cuda_stack"
)
WORKSPACE_BYTES = 320


def tensors(value: object) -> Iterator[Tensor]:
    """Yield every tensor inside."""
    if isinstance(value, Tensor):
        yield value
    elif is_dataclass(value):
        for field in fields(value):
            yield from tensors(getattr(value, field.name))
    elif isinstance(value, dict | list | tuple):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from tensors(inner)


class Kernel:
    """`launch_decode_layers` on tensors of this process; `known` holds them."""

    def __init__(self, experts_per_token: int) -> None:
        self.known: list[object] = []
        self.experts_per_token = experts_per_token
        self.calls: list[dict[str, Any]] = []

    def at(self, address: int) -> Tensor:
        return next(t for t in tensors(self.known) if t.data_ptr() == address)

    def linear(self, matrix: int, bias: int) -> LinearWeights:
        return LinearWeights(matrix=plain(self.at(matrix)), bias_N=self.at(bias))

    def mxfp4(self, codes: int, scales: int) -> FormattedTensor:
        return FormattedTensor(format=MXFP4, values=self.at(codes), scales=self.at(scales))

    def block(self, row: list[int], window_tokens: int) -> BlockWeights:
        return BlockWeights(
            attention_norm_D=self.at(row[0]),
            qkv=self.linear(*row[1:3]),
            sinks_H=self.at(row[3]),
            out=self.linear(*row[4:6]),
            expert_norm_D=self.at(row[6]),
            router=self.linear(*row[7:9]),
            experts=ExpertWeights(
                gate_up=self.mxfp4(*row[9:11]),
                gate_up_bias_EF=self.at(row[11]),
                down=self.mxfp4(*row[12:14]),
                down_bias_ED=self.at(row[14]),
            ),
            window_tokens=window_tokens if row[16] else None,
        )

    def launch(
        self, table, layers, residual, positions, lengths, full_table, window_table, full_slots,
        window_slots, cos_sin, workspace, experts, page_tokens, window_tokens, eps, alpha, limit,
        stream,
    ) -> int:  # fmt: skip
        numbers = list((ctypes.c_int64 * (17 * layers)).from_address(table))
        rows = [numbers[17 * i : 17 * i + 17] for i in range(layers)]
        memory = bytes((ctypes.c_uint8 * WORKSPACE_BYTES).from_address(workspace))
        counted, exchanged = memory[: cuda_impl.COUNTER_BYTES], memory[cuda_impl.COUNTER_BYTES :]
        assert set(counted) == {0}
        assert set(exchanged) == {255}
        blocks = tuple(self.block(row, window_tokens) for row in rows)
        kv_pages = [self.at(row[15]) for row in rows]
        tables = (self.at(full_table), self.at(window_table))
        assert len(self.at(residual)) == 1
        assert {p.shape[3] for p in kv_pages} == {page_tokens}
        assert {len(b.experts.down_bias_ED) for b in blocks} == {experts}
        self.calls.append({"table": table, "workspace": workspace})
        reference(
            self.at(residual), self.at(positions), self.at(lengths), self.at(cos_sin),
            full_table_SP=tables[0], full_slots_S=self.at(full_slots),
            window_table_SP=tables[1], window_slots_S=self.at(window_slots),
            kv_pages=kv_pages, weights=StackWeights(blocks=blocks),
            experts_per_token=self.experts_per_token,
            eps=eps, swiglu_alpha=alpha, swiglu_limit=limit,
        )  # fmt: skip
        return 0


@pytest.fixture
def kernel(monkeypatch) -> Kernel:
    kernel = Kernel(experts_per_token=4)
    fake.put_on_cpu(monkeypatch, layers=kernel.launch, workspace_bytes=lambda: WORKSPACE_BYTES)
    return kernel


def stacked(case, seed: int = 0) -> dict[str, Any]:
    """Return a call with weights prepared as at load."""
    arguments = cases_module("decode_layers").inputs(case, seed, "cpu")
    return {**arguments, "weights": STACK.prepare(arguments["weights"])}


@pytest.mark.parametrize("case", TAKEN, ids=lambda c: c.name)
def test_every_address_and_number_is_passed_at_its_place(case, kernel):
    kernel.experts_per_token = case.sizes["K"]
    draw = Draw(OPERATION, case, 0, CPU)
    draw.fresh = lambda fresh=draw.fresh: kernel.known.append(a := fresh()) or a
    anywhere = replace(STACK, device="any", limits=lambda _sizes: None)
    found = check_case(OPERATION, anywhere, case, CPU, 0, draw=draw)
    assert found.status == "ok", found.detail
    assert len(kernel.calls) == 1


def test_tables_and_the_workspace_are_made_once_and_kept(kernel):
    call = stacked(TAKEN[0])
    other = {**call, "kv_pages": [p.clone() for p in call["kv_pages"]]}
    kernel.known += [call, other]
    for arguments in (call, call, other, call):
        cuda_impl.decode_layers(**arguments)
    first, again, moved, back = kernel.calls
    assert first == again == back
    assert first["table"] != moved["table"]
    assert first["workspace"] == moved["workspace"]


def test_nothing_is_made_while_a_graph_is_captured(kernel, monkeypatch):
    call = stacked(TAKEN[0])
    kernel.known.append(call)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(AssertionError, match="run the step once before it is captured"):
        cuda_impl.decode_layers(**call)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    cuda_impl.decode_layers(**call)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    cuda_impl.decode_layers(**call)  # all is there
    assert len(kernel.calls) == 2


class Properties:
    multi_processor_count = 114


@pytest.fixture
def asked(monkeypatch) -> list[int]:
    """A Hopper device of 114 multiprocessors; which one was asked for them."""
    found = []
    monkeypatch.setattr(type(cuda_impl.LIBRARY), "refusal", lambda _self: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda index: found.append(index) or Properties
    )
    monkeypatch.setattr(registry, "begin_compiling", lambda _bound: None)
    return found


HELD = "needs 120 multiprocessors, this device has 114"


def build(*, device=H200, dry_context: int | None = None, **kernels: Any) -> LayerBuild:
    quant = QuantConfig(weights="mxfp4", activations="bf16", kv="bf16")
    return LayerBuild(
        quant=quant, device=device, kernels=KernelsConfig(**kernels), dry_context=dry_context
    )


def told(built: LayerBuild | GptOss) -> list[tuple[str, str, str]]:
    return [(row.operation, str(row.regime), row.told) for row in built.kernel_table()]


def fusion(build: LayerBuild) -> tuple[bool, list[tuple[str, str, str]]]:
    weights = {"projection": "bf16", "weight": "mxfp4"}
    found = build.bind_fusion("decode_layers", sizes=GOOD, weights=weights)
    return found is not None, told(build)


def test_a_device_that_cannot_hold_the_grid_runs_the_blocks_and_the_table_at_start_says_why(asked):
    regime = REGIME
    wanted = [("decode_layers", regime, f"blocks (cuda_stack: {HELD})")]
    assert fusion(build()) == (False, wanted)
    assert fusion(build()) == (False, wanted)
    assert set(asked) == {3}
    lines = registry.explain("decode_layers", formats=FORMATS, sizes=GOOD, device=H200)
    assert (regime, "cuda_stack", HELD) in lines
    with pytest.raises(ContractError, match=f"nothing can run; cuda_stack: {HELD}"):
        fusion(build(only={"decode_layers": "cuda_stack"}))
    case = next(c for c in CASES if c.name == "20b_layer")
    assert is_runnable(STACK, case, H200) == HELD


def test_a_device_that_holds_the_grid_runs_it(asked, monkeypatch):
    monkeypatch.setattr(Properties, "multi_processor_count", cuda_impl.NUM_CUDA_BLOCKS)
    assert fusion(build())[1] == [("decode_layers", REGIME, "cuda_stack")]


@pytest.mark.parametrize(
    "build_it",
    [
        lambda: build(
            dry_context=8192
        ),  # the plan of the memory, rose inspect: maybe of another machine
        lambda: build(only={"decode_layers": "blocks"}),
        lambda: build(batch_invariant=True),
        lambda: build(device=CPU),
        lambda: build(device=replace(H200, capability=(10, 0))),
    ],
    ids=["dry", "blocks", "invariant", "cpu", "other"],
)
def test_nothing_is_asked_of_a_device_where_nothing_is_to_be_run_on_it(build_it, asked):
    fusion(build_it())
    assert asked == []


def test_nothing_is_asked_of_another_device_than_the_one_that_is_planned_for(asked, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    assert fusion(build())[0]
    assert asked == []


def test_no_rows_launch_nothing(kernel):
    call = stacked(TAKEN[0])
    cuda_impl.decode_layers(**{**call, "residual_SD": call["residual_SD"][:0]})
    assert kernel.calls == []


def test_weights_of_another_kind_are_refused_by_name(kernel):
    call = stacked(TAKEN[0])
    block = call["weights"].blocks[0]
    for change, said in [
        ({"sinks_H": block.sinks_H.bfloat16()}, "a weight is torch.bfloat16, must be torch.float32"),
        ({"out": LinearWeights(matrix=block.out.matrix)}, "every projection of a block has a bias"),
        ({"router": replace(block.router, matrix=plain(torch.zeros(8, 96)))}, "a projection is float32"),
        ({"expert_norm_D": block.expert_norm_D.repeat(2)[::2]}, "weights are contiguous"),
        ({"expert_norm_D": block.expert_norm_D.repeat(2)[1:97]}, "multiples of 16 bytes"),
    ]:  # fmt: skip
        stack = STACK.prepare(StackWeights(blocks=(replace(block, **change),)))
        with pytest.raises(AssertionError, match=said):
            stack.table(call["kv_pages"][:1])
    with pytest.raises(AssertionError, match=r"pages are torch\.float32"):
        call["weights"].table([p.float() for p in call["kv_pages"]])


def test_calls_through_a_bound_operation_are_checked_with_prepared_weights(kernel):
    call = stacked(TAKEN[0])
    kernel.known.append(dict(call))
    [regime] = OPERATION.regimes
    bound = BoundOperation(OPERATION, {regime: STACK}, check_calls=True)
    stack = call.pop("weights")
    assert bound.prepare(stack.weights) == stack.num_bytes == stack.weights.num_bytes
    bound.select("decode", 1)(**call)
    assert len(kernel.calls) == 1
    with pytest.raises(ContractError, match="1 layers of KV for 2 blocks"):
        bound.select("decode", 1)(**{**call, "kv_pages": call["kv_pages"][:1]})


GOOD = {**cuda_impl.SIZES, "B": 24, "E": 32, "L": 64}
FORMATS = {"activation": "bf16", "kv": "bf16", "projection": "bf16", "weight": "mxfp4"}


@pytest.mark.parametrize(
    ("sizes", "formats", "said"),
    [
        ({}, {}, None),
        ({"E": 128, "L": 16, "B": 36}, {}, None),
        ({"E": 64}, {}, "64 experts; takes 32 or 128"),
        ({"B": 37}, {}, "37 blocks; takes up to 36"),
        ({"L": 8}, {}, "pages of 8 tokens; takes 16, 32, 64, 128, 256"),
        ({"D": 320}, {}, "D is 320, takes 2880"),
        ({"R": 2}, {}, "R is 2, takes 1"),
        ({}, {"kv": "fp8_e4m3"}, "kv is fp8_e4m3, takes bf16"),
        ({}, {"projection": "fp8_block"}, "projection is fp8_block, takes bf16"),
        ({}, {"weight": "fp8_block"}, "weight is fp8_block, takes mxfp4"),
    ],
)
def test_it_is_bound_on_an_h200_for_what_it_takes(sizes, formats, said, monkeypatch):
    monkeypatch.setattr(type(cuda_impl.LIBRARY), "refusal", lambda _self: None)
    lines = registry.explain(
        "decode_layers", formats={**FORMATS, **formats}, sizes={**GOOD, **sizes}, device=H200
    )
    words = {name: why for _, name, why in lines}
    assert {regime for regime, _, _ in lines} == {REGIME}
    assert words["cuda_stack"] == (said or "bound (specialised)")
    assert words["blocks"].startswith("bound" if said else "another is bound before it")


def test_the_wrapper_and_the_source_state_the_same_sizes():
    source = cuda_impl.LIBRARY.source
    [stated] = re.findall(r"using GptOss = Model<([\d, ]+)>;", source.read_text())
    hidden, inner, heads, kv_heads, _, blocks = map(int, stated.split(", "))
    of = cuda_impl.SIZES
    assert (hidden, inner, heads, kv_heads) == (of["D"], of["I"], of["H"], of["G"])
    assert blocks == cuda_impl.NUM_CUDA_BLOCKS
    plan = source.with_name("layers_plan.cuh").read_text()
    for name, number in (
        ("kHeadDim", of["A"]),
        ("kChosen", of["K"]),
        ("kMostLayers", cuda_impl.MAX_BLOCKS),
        ("kCounterBytes", cuda_impl.COUNTER_BYTES),
    ):
        assert f"constexpr int {name} = {number};" in plan
    experts = set(re.findall(r"if \(experts == (\d+)\) return run<", source.read_text()))
    assert experts == {str(n) for n in cuda_impl.NUM_EXPERTS}


@pytest.mark.parametrize("size", ["20b", "120b"])
def test_a_published_model_plans_the_same_memory_with_it_and_says_that_it_runs(size, monkeypatch):
    monkeypatch.setattr(type(cuda_impl.LIBRARY), "refusal", lambda _self: None)
    uses = []
    for only in ({"decode_layers": "blocks"}, {}):
        config = EngineConfig(model="m", quant=QuantConfig(), kernels=KernelsConfig(only=only))
        config = config.resolve(H200, checkpoint_format="mxfp4")
        uses.append(footprint(entry("gpt_oss"), published(size), config, H200, context_tokens=8192))
        model = entry("gpt_oss").dry_model(published(size), config, H200, context_tokens=8192)
        name = only.get("decode_layers", "cuda_stack")
        assert ("decode_layers", REGIME, name) in told(model)
    assert uses[0] == uses[1]
