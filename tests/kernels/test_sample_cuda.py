"""The CUDA draw on threads of a CPU: the kernel's own source over stand-ins for its instructions."""

from __future__ import annotations

import ctypes
import importlib
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rose.kernels import build, registry
from rose.kernels.draw import generator
from rose.kernels.sample import cases
from rose.kernels.sample.reference import reference

registry.load("sample")
cuda_cluster = importlib.import_module("rose.kernels.sample.cuda_cluster_impl")
HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def draw(tmp_path_factory):
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("g++ is not installed")
    folder = tmp_path_factory.mktemp("draw_host")
    source = cuda_cluster.LIBRARY.source.with_name("draw_cluster.cuh")
    for path in (source, HERE / "decode_host/launch.cuh", *(HERE / "draw_host").iterdir()):
        shutil.copy(path, folder)
    command = [compiler, "-std=c++20", "-O2", "-shared", "-fPIC", "-pthread", "-w"]
    done = subprocess.run(
        [*command, "-o", str(folder / "host.so"), str(folder / "host.cpp")],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    function = ctypes.CDLL(str(folder / "host.so")).launch_draw
    types = {"p": ctypes.c_void_p, "i": ctypes.c_int}
    function.argtypes = [types[t] for t in cuda_cluster.TYPES]
    return function


NAMES = [
    "rows_1", "vocab_2", "vocab_50", "vocab_1025", "top_k", "top_p", "min_p", "mixed", "greedy_ties",
    "greedy_ignores_filters", "ties_filtered", "filter_borders", "all_but_one_banned", "nothing_banned", "bf16",
    "damaged", "damaged_filtered", "damaged_bf16",
]  # fmt: skip


def _check(case, draw, monkeypatch, seed: int) -> None:
    _compare(cases.inputs(case, seed, "cpu"), draw, monkeypatch)


def _compare(arguments, draw, monkeypatch) -> None:
    wanted = {**arguments, "tokens_S": torch.empty_like(arguments["tokens_S"])}
    reference(**wanted)
    arguments["tokens_S"].fill_(-5)
    monkeypatch.setattr(cuda_cluster, "_draw", draw)
    monkeypatch.setattr(cuda_cluster, "_stream", lambda _tensor: 0)
    cuda_cluster.sample(**arguments)
    assert arguments["tokens_S"].tolist() == wanted["tokens_S"].tolist()


@pytest.mark.parametrize("name", NAMES)
def test_tokens_are_those_of_the_reference(name, draw, monkeypatch):
    case = next(c for c in cases.CASES if c.name == name)
    rows = min(case.rows, 8 if name == "filter_borders" else 12 if "damaged" in name else 4)
    case = replace(case, rows=rows, sizes={**case.sizes, "S": rows})
    _check(case, draw, monkeypatch, 3)


@pytest.mark.parametrize("filters", ["top_k", "top_p", "mixed"])
def test_a_flat_row_of_many_ids_is_cut_at_the_same_id(filters, draw, monkeypatch):
    _check(
        cases.make_case("flat", 6, 6000, filters=filters, temperature=None), draw, monkeypatch, 4
    )


def test_few_ids_are_cut_where_the_reference_cuts_them(draw, monkeypatch):
    # Of five ids the last kept one is drawn often, so that a cut one too early or too late shows in 20 rows.
    source = generator("cpu", 7)
    arguments = cases.inputs(
        cases.make_case("few", 20, 5, filters="mixed", banned="none"), 6, "cpu"
    )
    arguments["logits_SV"] = torch.rand(20, 5, generator=source)
    arguments["top_k_S"] = torch.randint(0, 5, (20,), generator=source, dtype=torch.int32)
    arguments["top_p_S"] = 0.4 + 0.6 * torch.rand(20, generator=source)
    _compare(arguments, draw, monkeypatch)


def test_equal_logits_are_cut_by_id(draw, monkeypatch):
    case = cases.make_case("tied", 12, 700, filters="mixed", is_tied=True, logits="bf16")
    _check(case, draw, monkeypatch, 5)


@pytest.mark.slow
@pytest.mark.skipif(build.find_nvcc() is None, reason="nvcc is not installed")
def test_two_blocks_fit_a_multiprocessor():
    log = cuda_cluster.LIBRARY.build().log
    registers = [int(r) for r in re.findall(r"Used (\d+) registers", log)]
    assert len(registers) == 4
    assert max(registers) * 512 * 2 <= 65536
    assert "warning" not in log
