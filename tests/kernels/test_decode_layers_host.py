"""The CUDA kernel of all blocks on threads of a CPU: its own source over stand-ins for its instructions, called through
the wrapper that serving calls.
"""

from __future__ import annotations

import ctypes
import importlib
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fakes import decode_layers as fake
from fakes.decode_layers import cuda_impl
from rose.kernels import registry
from rose.kernels.check import cases_module, check_case, clone
from rose.kernels.decode_layers.cases import MODEL
from rose.kernels.decode_layers.contract import MAX_SEQUENCES
from rose.kernels.paged import JUNK
from rose.utils.device import CPU

HERE = Path(__file__).parent
OPERATION = registry.load("decode_layers")
CASES = {
    c.name: c
    for c in cases_module("decode_layers").CASES
    if c.name.startswith("model_") and c.rows <= MAX_SEQUENCES
}
STACK = next(i for i in registry.implementations("decode_layers") if i.name == "cuda_stack")
FEW = ("model_full_alone", "model_of_33")


@pytest.fixture(scope="module")
def host(tmp_path_factory) -> ctypes.CDLL:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("g++ is not installed")
    folder = tmp_path_factory.mktemp("layers_host")
    kernels = Path(cuda_impl.__file__).parent
    # The stand-ins come last and take the place of what they stand for.
    for path in (
        kernels.parent / "moe_experts/decode_call.cuh",
        *kernels.glob("*.cuh"),
        HERE / "cuda_model/permute_ptx.cuh",
        HERE / "decode_host/launch.cuh",
        HERE / "decode_host/products.cuh",
        HERE / "decode_host/wgmma.cuh",
        HERE / "decode_host/decode_e4m3_ptx.cuh",
        HERE / "decode_host/wgmma_fp8_registers.cuh",
        *(HERE / "layers_host").iterdir(),
    ):
        (folder / path.name).write_text(path.read_text().replace("../moe_experts/", ""))
    command = [compiler, "-std=c++20", "-O1", "-shared", "-fPIC", "-pthread", "-w"]
    done = subprocess.run(
        [*command, "-o", str(folder / "host.so"), str(folder / "host.cpp")],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return ctypes.CDLL(str(folder / "host.so"))


def check(name: str, host: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    fake.put_library_on_cpu(monkeypatch, host)
    anywhere = replace(STACK, device="any", limits=lambda _sizes: None)
    found = check_case(OPERATION, anywhere, CASES[name], CPU, seed)
    assert found.status == "ok", found.detail


@pytest.mark.parametrize("name", FEW)
def test_the_blocks_are_those_of_the_reference(name, host, monkeypatch):
    check(name, host, monkeypatch, 3)


def expanded(host: ctypes.CDLL, codes: int, below: int) -> torch.Tensor:
    found = torch.empty(8)
    host.expand_codes(ctypes.c_uint32(codes), below, ctypes.c_void_p(found.data_ptr()))
    return found


@pytest.mark.parametrize("codes", [0x76543210, 0xFEDCBA98, 0x0F1E2D3C, 0x89ABCDEF])
def test_codes_become_e4m3_and_are_exact_up_to_13_powers_of_two_below_the_largest(codes, host):
    magnitudes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    each = torch.tensor([codes >> 4 * i & 15 for i in range(8)])
    numbers = magnitudes[each & 7] * torch.where(each >= 8, -1, 1)
    for below in range(32):
        found, wanted = expanded(host, codes, below), numbers * 2.0 ** (6 - below)
        if below <= 13:
            assert torch.equal(found, wanted)
        assert ((found - wanted).abs() <= 2.0**-8).all()
        assert (found * numbers >= 0).all()


def split(host: ctypes.CDLL, numbers: torch.Tensor, largest: torch.Tensor) -> torch.Tensor:
    found = torch.empty(8)
    bits = largest.view(torch.int16).item()
    host.split_chunk(ctypes.c_void_p(numbers.data_ptr()), bits, ctypes.c_void_p(found.data_ptr()))
    return found


@pytest.mark.parametrize("power", [-100, -3, 0, 9, 100])
def test_activations_are_sums_of_two_e4m3_numbers(power, host):
    source = torch.Generator().manual_seed(3)
    for _ in range(50):
        sizes = torch.rand(8, generator=source) * 14
        signs = torch.randint(2, (8,), generator=source) * 2 - 1
        numbers = (signs * torch.exp2(power - sizes)).bfloat16()
        largest = numbers.abs().max()
        found = split(host, numbers, largest)
        off = (found - numbers.float()).abs()
        assert (off[numbers.abs() >= largest * 2.0**-9] == 0).all()
        assert (off <= largest * 2.0**-17).all()


@pytest.mark.parametrize("largest", [torch.inf, torch.nan])
def test_activations_that_are_no_numbers_stay_so(largest, host):
    ones = torch.ones(8, dtype=torch.bfloat16)
    assert split(host, ones, torch.tensor(largest, dtype=torch.bfloat16)).isnan().all()


@pytest.mark.slow
@pytest.mark.parametrize("damage", [torch.inf, torch.nan])
def test_a_damaged_stream_ends_as_one_that_is_not_finite(damage, host, monkeypatch):
    fake.put_library_on_cpu(monkeypatch, host)
    call = cases_module("decode_layers").inputs(CASES["model_full_alone"], 3, "cpu")
    call["residual_SD"][0, 5] = damage
    cuda_impl.decode_layers(**call | {"weights": STACK.prepare(call["weights"])})
    assert not call["residual_SD"].isfinite().any()


def assert_next_exchange_is_empty(workspace: torch.Tensor, num_layers: int) -> None:
    """`num_layers`: of all launches so far; layers take turns at two exchanges."""
    exchanges = workspace[cuda_impl.COUNTER_BYTES :].view(2, -1)
    assert (exchanges[num_layers % 2] == 255).all()
    assert (exchanges[(num_layers + 1) % 2] != 255).any()


@pytest.mark.parametrize(
    "name", ["model_full_alone", pytest.param("model_of_33", marks=pytest.mark.slow)]
)
def test_launches_share_a_workspace_and_what_lies_beside_the_history_is_nobodys(
    name, host, monkeypatch
):
    fake.put_library_on_cpu(monkeypatch, host)
    case = CASES[name]
    call = cases_module("decode_layers").inputs(case, 3, "cpu")
    stack = STACK.prepare(call["weights"])
    [length], page_tokens = case.options["lengths"], case.sizes["L"]
    first = max(0, length - case.options["window"])
    found = []
    # The first is of another token: the third uses the words again that the first has left, if nobody emptied them.
    for number, beside in enumerate((JUNK, JUNK, torch.nan)):
        fresh = clone({**call, "weights": None}) | {"weights": stack}
        for block, pages in zip(stack.blocks, fresh["kv_pages"], strict=True):
            pages.masked_fill_(pages == JUNK, beside)
            if block.window_tokens is not None:
                page = fresh["window_table_SP"][0, first // page_tokens]
                pages[page, :, :, : first % page_tokens] = beside
        if number == 0:
            fresh["residual_SD"].neg_()
        cuda_impl.decode_layers(**fresh)
        workspace = stack.workspace(torch.device("cpu"))
        assert_next_exchange_is_empty(workspace, (number + 1) * len(stack.blocks))
        found.append(fresh["residual_SD"])
    other, first, second = found
    assert first.isfinite().all()
    assert torch.equal(first, second)
    assert not torch.equal(first, other)


@pytest.fixture
def design_points(host, monkeypatch):
    """benchmarks/design_points.py, which checks the attention of this kernel by itself."""
    pytest.importorskip("triton", reason="benchmarks/design_points.py looks at Triton kernels too")
    fake.put_library_on_cpu(monkeypatch, host)
    monkeypatch.syspath_prepend(str(HERE.parents[1] / "benchmarks"))
    return importlib.import_module("design_points")


@pytest.mark.timeout(600)
@pytest.mark.parametrize("length", [130, pytest.param(128_000, marks=pytest.mark.slow)])
def test_attention_inside_the_layers_is_as_exact_as_rounding_allows(length, design_points):
    lines = list(design_points.layer_attention_points(MODEL, length, "cpu"))
    assert [(line["tokens"], line["window"]) for line in lines] == [(length, 128), (length, None)]
    for line in lines:
        assert 1e-3 < line["of_rounding_to_bf16"] < line["largest_of_a_head"]
        assert not design_points.is_off(line), line


def _number(call: dict, stack) -> None:
    """The first attended number is off by two hundredths of its head."""
    attended = stack.workspace(torch.device("cpu"))[cuda_impl.LAUNCHERS.call_attended_at() :]
    head = attended[: 2 * MODEL["A"]].view(torch.bfloat16)
    head[0] += 0.02 * head.norm()


def _unwritten(call: dict, stack) -> None:
    attended = stack.workspace(torch.device("cpu"))[cuda_impl.LAUNCHERS.call_attended_at() :]
    attended[:4] = 255


def _value(call: dict, stack) -> None:
    """The launch has seen other values of one token than lie in the pages."""
    [pages] = call["kv_pages"]
    pages[call["full_table_SP"][0, 2], 1, 0, 5] *= -1


@pytest.mark.parametrize("disturb", [_number, _unwritten, _value])
def test_attention_that_is_not_exact_is_found(disturb, design_points, monkeypatch):
    launch = cuda_impl.decode_layers

    def disturbed(**call: object) -> None:
        launch(**call)
        disturb(call, call["weights"])

    monkeypatch.setattr(cuda_impl, "decode_layers", disturbed)
    *_, full = design_points.layer_attention_points(MODEL, 130, "cpu")
    assert full["window"] is None
    assert design_points.is_off(full)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", [n for n in CASES if n not in FEW])
def test_all_cases_are_those_of_the_reference(name, host, monkeypatch):
    check(name, host, monkeypatch, 3)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_long_history_is_attended_to_as_the_reference_does(host, monkeypatch):
    fake.put_library_on_cpu(monkeypatch, host)
    case = CASES["model_full_alone"]
    long = replace(
        case,
        name="long",
        sizes={**case.sizes, "B": 1},
        options={**case.options, "lengths": (128_000,), "kinds": ("full",)},
    )
    anywhere = replace(STACK, device="any", limits=lambda _sizes: None)
    found = check_case(OPERATION, anywhere, long, CPU, 3)
    assert found.status == "ok", found.detail
