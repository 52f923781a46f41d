"""What is registered, what is bound where, and what is said when nothing can be."""

from __future__ import annotations

import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

import rose
from rose.cli.main import run
from rose.config.cache import CacheConfig
from rose.config.engine import EngineConfig, KernelsConfig
from rose.config.quant import QuantConfig
from rose.engine.engine import LLMEngine
from rose.kernels import registry
from rose.kernels.__main__ import _joined
from rose.kernels.__main__ import main as kernels_main
from rose.kernels.formats import plain
from rose.kernels.registry import MANY_DECODE, REGIMES, Band, Implementation, Operation, Regime
from rose.kernels.weights import LinearWeights
from rose.layers.build import LayerBuild
from rose.utils.device import CPU, DeviceFacts
from rose.utils.errors import ContractError

EMBEDDED = Path(rose.__file__).parent / "assets" / "tiny-gpt-oss"
H200 = DeviceFacts(kind="cuda", name="H200", capability=(9, 0))


def scale(x_TD: Tensor, *, weights: LinearWeights | None, out_TD: Tensor) -> None:
    """Copy x, times two."""


def noop(x_TD: Tensor, *, weights: LinearWeights | None, out_TD: Tensor) -> None:
    """Do nothing."""


@pytest.fixture
def operation(monkeypatch) -> Operation:
    """An operation of our own in an empty registry."""
    operation = Operation(
        name="scale",
        signature=scale,
        sizes=("D",),
        outputs=("out_TD",),
        formats=("activation",),
        validate=lambda _formats, sizes: [] if sizes["D"] % 2 == 0 else [f"D {sizes['D']} is odd"],
    )
    monkeypatch.setattr(registry, "_operations", {"scale": operation})
    monkeypatch.setattr(registry, "_implementations", {})
    monkeypatch.setattr(registry, "_absent", {"scale": []})
    return operation


def add(name: str, band: Band, **details: object) -> Implementation:
    function = details.pop("function", noop)
    return registry.register(
        Implementation(operation="scale", name=name, function=function, band=band, **details)
    )


def bind(**changes: object) -> registry.BoundOperation:
    options = {"formats": {"activation": "bf16"}, "sizes": {"D": 4}} | changes
    return registry.bind("scale", **options)


def names(bound: registry.BoundOperation) -> dict[str, str]:
    return {str(regime): i.name for regime, i in bound.table.items()}


def test_the_highest_band_that_may_run_is_bound_per_regime(operation):
    add("slow", Band.PORTABLE)
    add("decode", Band.TUNED, phases=frozenset({"decode"}))
    add("few_rows", Band.SPECIALISED, phases=frozenset({"decode"}), rows=(1, 16))
    add("fast", Band.SPECIALISED, device="cuda")
    assert set(names(bind()).values()) == {"slow", "decode", "few_rows"}
    assert names(bind())["decode 2..16"] == "few_rows"
    assert names(bind())["decode 17..48"] == "decode"
    assert set(names(bind(device=H200)).values()) == {"fast"}  # of equal bands the first by name


def test_select_is_a_lookup_by_phase_and_rows(operation):
    calls = []

    def few(x_TD: Tensor, *, weights: LinearWeights | None, out_TD: Tensor) -> None:
        calls.append("few")

    def many(x_TD: Tensor, *, weights: LinearWeights | None, out_TD: Tensor) -> None:
        calls.append("many")

    add("many", Band.PORTABLE, function=many)
    add("few", Band.TUNED, function=few, phases=frozenset({"decode"}), rows=(1, 16))
    bound, x = bind(), torch.zeros(1, 4)
    for phase, rows in (("decode", 16), ("decode", 17), ("prefill", 1), ("decode", 100_000)):
        bound.select(phase, rows)(x, weights=None, out_TD=x)
    assert calls == ["few", "many", "many", "many"]


def test_every_refusal_is_told_when_nothing_can_run(operation):
    add("cuda_only", Band.PORTABLE, device="cuda")
    add("new_only", Band.PORTABLE, device="cuda", min_capability=(10, 0))
    add("wide_only", Band.PORTABLE, formats={"activation": frozenset({"float32"})})
    add("narrow", Band.PORTABLE, limits=lambda sizes: f"D {sizes['D']}; takes 2")
    with pytest.raises(ContractError) as error:
        bind()
    assert str(error.value) == (
        "scale (decode 1): nothing can run; cuda_only: needs cuda; narrow: D 4; takes 2; "
        "new_only: needs cuda; wide_only: activation is bf16, takes float32"
    )
    with pytest.raises(ContractError, match=r"new_only: capability \(9, 0\) outside \(10, 0\)"):
        bind(device=H200, only={"scale": "new_only"})


def test_sizes_are_checked_before_any_implementation(operation):
    add("any", Band.PORTABLE)
    with pytest.raises(ContractError, match="scale: D 3 is odd"):
        bind(sizes={"D": 3})
    with pytest.raises((ContractError, KeyError)):
        bind(sizes={})


def test_an_implementation_can_be_forced_and_unknown_ones_are_errors(operation):
    add("slow", Band.PORTABLE)
    add("fast", Band.TUNED)
    assert set(names(bind(only={"scale": "slow"})).values()) == {"slow"}
    assert set(names(bind(only={"other": "slow"})).values()) == {"fast"}
    with pytest.raises(
        ContractError, match="implementation 'quick' is not known; known: fast, slow"
    ):
        bind(only={"scale": "quick"})


def test_parameters_must_be_those_of_the_contract(operation):
    def other(x_TD: Tensor, *, out_TD: Tensor) -> None:
        """Lack the weights."""

    with pytest.raises(ContractError, match=r"takes \(x_TD, out_TD\); the contract says \(x_TD, w"):
        add("other", Band.PORTABLE, function=other)
    add("once", Band.PORTABLE)
    with pytest.raises(ContractError, match="registered twice"):
        add("once", Band.PORTABLE)


def test_prepare_runs_once_per_layout_and_counts_what_is_held(operation):
    calls, seen = [], []

    def prepare(weights: LinearWeights) -> LinearWeights:
        calls.append(weights)
        return LinearWeights(matrix=plain(weights.matrix.values.T.contiguous()))

    def use(x_TD: Tensor, *, weights: LinearWeights | None, out_TD: Tensor) -> None:
        seen.append(weights)

    add("relaid", Band.TUNED, prepare=prepare, function=use, phases=frozenset({"decode"}))
    add("as_is", Band.PORTABLE, function=use)
    weights = LinearWeights(matrix=plain(torch.zeros(2, 3)))
    bound = bind()
    assert (
        bound.prepare(weights) == 2 * 24
    )  # one copy for all decode regimes, the original for prefill
    assert calls == [weights]
    x = torch.zeros(1, 4)
    bound.select("decode", 1)(x, out_TD=x)
    bound.select("prefill", 1)(x, out_TD=x)
    assert seen[0].matrix.shape == (3, 2)
    assert seen[1] is weights


def test_explain_says_why_for_each_regime_and_implementation(operation):
    add("slow", Band.PORTABLE)
    add("fast", Band.TUNED, phases=frozenset({"decode"}))
    lines = registry.explain("scale", formats={"activation": "bf16"}, sizes={"D": 4})
    assert len(lines) == 2 * len(REGIMES)
    assert ("decode 2..16", "fast", "bound (tuned)") in lines
    assert ("decode 2..16", "slow", "another is bound before it (portable)") in lines
    prefill = str(REGIMES[-1])
    assert (prefill, "fast", "only for decode") in lines
    assert (prefill, "slow", "bound (portable)") in lines


def test_explain_follows_the_batch_invariant_mode_as_bind_does(operation):
    add("fast", Band.TUNED)
    add("steady", Band.PORTABLE, is_batch_invariant=True)
    given = {"formats": {"activation": "bf16"}, "sizes": {"D": 4}, "batch_invariant": True}
    lines = registry.explain("scale", **given)
    assert ("decode 2..16", "fast", "its results may depend on the batch") in lines
    assert ("decode 2..16", "steady", "bound (portable)") in lines
    assert {i.name for i in registry.bind("scale", **given).table.values()} == {"steady"}


def test_the_explain_command_tells_what_serving_binds_on_a_cpu(capsys, caplog):
    config = EngineConfig(model=str(EMBEDDED), device="cpu", cache=CacheConfig(kv_tokens=1024))
    with caplog.at_level("INFO", "rose.engine.engine"):
        LLMEngine.from_config(config)
    ends = (" everywhere", " decode of 1 sequence: layer by layer, as other steps")
    rows = [m.split(maxsplit=2) for m in caplog.messages if m.endswith(ends)]
    served = {(operation, kernel) for operation, kernel, _ in rows}
    assert ("attention_decode", "torch_invariant") in served
    assert ("decode_layers", "blocks") in served
    words = ["kernels", "explain", *sorted({n for n, _ in served}), "--device", "cpu"]
    assert run(words) == 0
    operation, bound = "", set()
    for line in capsys.readouterr().out.splitlines():
        if " on cpu, formats " in line:
            operation = line.split()[0]
        elif "bound (" in line:
            bound.add((operation, line.partition(" bound (")[0].split()[-1]))
    assert bound == served


def test_the_explain_command_tells_regimes_of_which_the_same_is_told_as_one(capsys):
    assert kernels_main(["explain", "moe_experts", "--device", "cpu", "--only", "torch"]) == 0
    told = [x.split()[:3] for x in capsys.readouterr().out.splitlines() if x.startswith("  ")]
    assert told == [["decode", "1..512", "torch"], ["prefill", "1..", "torch"]]
    assert kernels_main(["explain", "moe_experts", "--only", "cuda_decoder"]) == 2
    caught = capsys.readouterr()
    assert "'cuda_decoder' is in none of moe_experts; known: cuda_decode, " in caught.err
    assert not caught.out


def test_neighbours_of_which_something_else_is_told_stay_apart():
    regimes = [Regime("decode", 1, 1), Regime("decode", 2, 16), Regime("decode", 17, 48)]
    lines = [(str(r), "x", "bound" if r.min_rows > 1 else "no") for r in regimes]
    joined = _joined(regimes, lines)
    assert [str(r) for r, _ in joined] == ["decode 1", "decode 2..48"]


def test_list_shows_one_implementation_where_one_is_asked_for(capsys):
    for name in ("torch", "reference"):
        assert kernels_main(["list", "rms_norm", "--only", name]) == 0
        [line] = capsys.readouterr().out.splitlines()
        assert line.split()[:2] == ["rms_norm", name]


def test_a_forced_implementation_that_serves_some_steps_only_is_refused_with_the_option(operation):
    add("single", Band.TUNED, phases=frozenset({"decode"}), rows=(1, 1))
    add("any", Band.PORTABLE)
    told = r"\(decode 2\.\.16\): nothing can run; single: only for 1 row; kernels\.only asks single of every step"
    with pytest.raises(ContractError, match=told):
        bind(only={"scale": "single"})


def test_rows_of_an_implementation_are_told_without_the_bound_of_all_steps(operation):
    add("long", Band.TUNED, rows=(2049, registry.MAX_ROWS))
    add("few", Band.TUNED, rows=(2, 48))
    add("any", Band.PORTABLE)
    lines = registry.explain("scale", formats={"activation": "bf16"}, sizes={"D": 4})
    assert ("decode 1", "long", "only for 2049 rows or more") in lines
    assert ("decode 1", "few", "only for 2..48 rows") in lines


def test_a_toolchain_that_is_not_installed_is_explained(monkeypatch):
    # Files register when they are imported: they are imported anew here, and the tables of before hold what they did.
    registry.load("rope_kv_write")
    for module in [m for m in sys.modules if m.startswith("rose.kernels.rope_kv_write.")]:
        monkeypatch.delitem(sys.modules, module)
    find_spec = registry.importlib.util.find_spec
    monkeypatch.setattr(
        registry.importlib.util, "find_spec", lambda n: None if n == "triton" else find_spec(n)
    )
    for table in ("_operations", "_implementations", "_absent"):
        monkeypatch.setattr(registry, table, {})
    registry.load("rope_kv_write")
    assert all(i.toolchain != "triton" for i in registry.implementations("rope_kv_write"))
    sizes = {"H": 4, "G": 2, "D": 64, "L": 16}
    lines = registry.explain("rope_kv_write", formats={"activation": "bf16"}, sizes=sizes)
    assert any(why == "triton is not installed" for _, _, why in lines)


def test_unknown_operations_are_errors_that_name_the_known():
    with pytest.raises(ContractError, match=r"'rms_nrom' is not known; known: .*rms_norm"):
        registry.load("rms_nrom")


def test_calls_are_held_against_the_letters_of_the_contract(operation):
    add("any", Band.PORTABLE)
    call = bind(check_calls=True).select("decode", 2)
    call(torch.zeros(2, 4), weights=None, out_TD=torch.zeros(2, 4))
    with pytest.raises(ContractError, match="T is 2 in x_TD, but 3 in out_TD"):
        call(torch.zeros(2, 4), weights=None, out_TD=torch.zeros(3, 4))
    with pytest.raises(ContractError, match=r"out_TD has shape \[2\], needs 2 axes"):
        call(torch.zeros(2, 4), weights=None, out_TD=torch.zeros(2))


def test_a_trailing_one_means_one_more():
    arguments = {"query_starts_S1": torch.zeros(4), "lengths_S": torch.zeros(3)}
    operation = registry.load("attention_prefill")
    assert registry.call_problems(operation, arguments) == []
    arguments["lengths_S"] = torch.zeros(4)
    assert registry.call_problems(operation, arguments) == [
        "S is 3 in query_starts_S1, but 4 in lengths_S"
    ]


def test_regimes_cover_every_number_of_rows_of_both_phases():
    for phase in ("decode", "prefill"):
        for rows in (1, 16, 17, 48, 49, 256, 257, 512, 513, 1 << 20):
            implementation = Implementation(
                operation="scale", name="any", function=noop, band=Band.PORTABLE
            )
            bound = registry.BoundOperation(
                registry.load("rms_norm"), dict.fromkeys((*REGIMES, MANY_DECODE), implementation)
            )
            assert bound.select(phase, rows) is noop
    assert str(Regime("decode", 2, 16)) == "decode 2..16"
    assert str(Regime("decode", 1, 1)) == "decode 1"


def test_a_real_binding_on_a_cpu_takes_only_what_runs_there():
    sizes = {"H": 64, "G": 8, "D": 64, "L": 64}
    formats = {"activation": "float32", "kv": "float32"}
    bound = registry.bind("attention_prefill", formats=formats, sizes=sizes, device=CPU)
    assert {i.name for i in bound.table.values()} == {"torch"}
    with pytest.raises(ContractError, match="64 query heads are no multiple of 7 kv heads"):
        registry.bind("attention_prefill", formats=formats, sizes={**sizes, "G": 7})


def test_an_override_of_an_operation_that_does_not_exist_is_refused():
    with pytest.raises(
        ContractError, match=r"names gem; known operations: .*gemm.*; change kernels.only"
    ):
        LayerBuild(
            quant=QuantConfig(activations="float32", kv="float32"),
            kernels=KernelsConfig(only={"gem": "torch", "gemm": "torch"}),
        )


def test_explain_and_list_answer_an_unknown_operation_with_the_known_ones(capsys):
    for verb in ("explain", "list"):
        assert kernels_main([verb, "rmsnorm"]) == 2
        assert (
            "error: operation 'rmsnorm' is not known; known: attention" in capsys.readouterr().err
        )


def test_a_mistake_is_one_line_that_names_the_command_typed(capsys):
    with pytest.raises(SystemExit) as caught:
        kernels_main(["lst"], prog="rose kernels")
    [line] = capsys.readouterr().err.splitlines()
    assert caught.value.code == 2
    assert line.startswith("error: ")
    assert "invalid choice: 'lst'" in line
    assert line.endswith("; see rose kernels --help")
    with pytest.raises(SystemExit):
        kernels_main(["--help"], prog="rose kernels")
    assert "python -m" not in capsys.readouterr().out


def test_list_shows_what_is_left_out_and_why(monkeypatch, capsys):
    registry.load("rms_norm")
    monkeypatch.setitem(registry._absent, "rms_norm", ["x_impl: x is not installed"])
    assert kernels_main(["list", "rms_norm"]) == 0
    [line] = [x for x in capsys.readouterr().out.splitlines() if "x_impl" in x]
    assert line.split(maxsplit=4) == ["rms_norm", "x_impl", "left", "out", "x is not installed"]


def test_every_operation_loads_and_binds_on_a_machine_without_triton():
    program = (
        "import sys, importlib.util as u; find = u.find_spec; sys.modules['triton'] = None\n"
        "u.find_spec = lambda name, *rest: None if name == 'triton' else find(name, *rest)\n"
        "from rose.kernels import registry\n"
        "from rose.kernels.check import cases_module\n"
        "for name in registry.operation_names():\n"
        "    case = cases_module(name).CASES[0]\n"
        "    registry.bind(name, formats=case.formats, sizes=case.sizes)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_sources_of_a_bound_table_are_compiled_beside_other_work():
    class Library:
        def __init__(self) -> None:
            self.started, self.may_end, self.ended = (threading.Event() for _ in range(3))

        def build(self) -> None:
            self.started.set()
            assert self.may_end.wait(10)
            self.ended.set()
            raise RuntimeError("told at the first call, not here")

    library = Library()
    operation = registry.load("rms_norm")
    chosen = replace(registry.implementations("rms_norm")[0], library=library)
    bound = registry.BoundOperation(operation, dict.fromkeys(registry.REGIMES, chosen))
    registry.begin_compiling(bound)
    assert library.started.wait(10)
    assert not library.ended.is_set()
    library.may_end.set()
    assert library.ended.wait(10)


def test_a_folder_that_fails_to_import_stays_refused():
    program = (
        "import pkgutil\n"
        "from rose.kernels import registry\n"
        "broken = pkgutil.ModuleInfo(None, 'torch_missing_impl', False)\n"
        "registry.pkgutil.iter_modules = lambda path: [broken]\n"
        "for _ in range(2):\n"
        "    try:\n"
        "        registry.load('rms_norm')\n"
        "        print('loaded')\n"
        "    except ModuleNotFoundError as error:\n"
        "        print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.count("No module named 'rose.kernels.rms_norm.torch_missing_impl'") == 2
