"""The memory plan made before weights are loaded: it is what loading then takes, and refuses with what would fit."""

from __future__ import annotations

import json
import logging
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fakes import checkpoints
from rose.cli.main import run
from rose.config.cache import CacheConfig
from rose.config.engine import EngineConfig, KernelsConfig
from rose.config.quant import QuantConfig
from rose.config.scheduler import SchedulerConfig
from rose.decoders.build import build_decoder
from rose.kernels import registry
from rose.layers.own_pages import OwnPages
from rose.models.gpt_oss.config import published
from rose.models.registry import entry
from rose.runtime import before_load, load
from rose.runtime.before_load import Planner
from rose.runtime.footprint import PeakBytes, footprint
from rose.runtime.inputs import DeviceTables, table_bytes
from rose.runtime.memory import GIB, MemoryUse
from rose.runtime.memory_words import outcome
from rose.utils.device import CPU, H200, DeviceFacts, _free_on_host
from rose.utils.errors import ConfigError

ENTRY = entry("gpt_oss")
HOST = replace(CPU, memory_bytes=8 * GIB)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    c = checkpoints.config()
    root = tmp_path_factory.mktemp("model")
    return checkpoints.write_layout(root / "m", c, checkpoints.numbers(c), "mxfp4")


def _planner(size="20b", device=H200, free_bytes=None):
    return Planner(entry=ENTRY, model_config=published(size), device=device, free_bytes=free_bytes)


def _config(device=H200, *, weights="mxfp4", kv="auto", **changes):
    config = EngineConfig(model="m", quant=QuantConfig(weights=weights, kv=kv), **changes)
    return config.resolve(device, checkpoint_format="mxfp4")


def _small(folder, **changes):
    return EngineConfig(
        model=str(folder),
        device="cpu",
        scheduler=SchedulerConfig(max_step_tokens=300, max_mixed_tokens=300, max_sequences=8),
        **{"cache": CacheConfig(kv_tokens=512), **changes},
    )


@pytest.mark.parametrize(
    ("size", "weights", "gib", "tokens"),
    [
        # 3.36 GiB bf16 beside the experts, 12 layers of 24 KiB a token; the 120b: 4.0 GiB, 18 layers of 36 KiB, and
        # in mxfp4 3.5 GiB of offsets by which its experts are expanded in prefill
        ("20b", "fp8_block", 21.16, 4.0e6),
        ("120b", "fp8_block", 110.85, 0.33e6),
        ("120b", "mxfp4", 64.31, 1.5e6),
    ],
)
def test_an_h200_holds_the_published_models(size, weights, gib, tokens):
    planner, config = _planner(size), _config(weights=weights)
    plan = planner.plan(config)
    assert plan.use.weights / GIB == pytest.approx(gib, abs=0.01)
    assert plan.kv_tokens == pytest.approx(tokens, rel=0.15)
    assert plan.total <= plan.budget_bytes < H200.memory_bytes
    assert 1 < plan.use.workspace / GIB < 3.5
    table = "\n".join(planner.lines(config, plan))
    assert re.search(rf"weights +{gib} GiB +experts in {weights}, relayouts included\n", table)
    for part in ("workspace", "graphs", "tables", "KV", "full", "window", "left", "140.40 GiB"):
        assert part in table


def test_the_plan_that_the_page_shows_is_the_one_of_the_120b():
    pytest.importorskip("triton", reason="without triton the kernels planned take more")
    planner, config = _planner("120b"), _config(weights="auto")
    shown = "\n".join(f"    {line}" for line in planner.lines(config, planner.plan(config)))
    page = (Path(__file__).parents[2] / "docs" / "memory.md").read_text()
    assert f"\n\n{shown}\n\n" in page, shown


def test_what_is_left_is_of_what_is_free_where_that_is_known():
    config = _config(weights="fp8_block")
    for free_bytes, words in ((None, "of the device"), (130 * GIB, "of what is free")):
        planner = _planner(free_bytes=free_bytes)
        plan = planner.plan(config)
        left = ((H200.memory_bytes if free_bytes is None else free_bytes) - plan.total) / GIB
        [line] = [text for text in planner.lines(config, plan) if text.startswith("left")]
        assert line.split() == ["left", f"{left:.2f}", "GiB", *words.split()]


@pytest.mark.parametrize("size", ["20b", "120b"])
def test_kv_in_e4m3_holds_twice_the_tokens_in_pages_of_half_the_bytes(size):
    planner, plain, narrow = _planner(size), _config(), _config(kv="fp8_e4m3")
    before, after = planner.plan(plain), planner.plan(narrow)
    assert after.use == before.use
    assert after.total <= after.budget_bytes
    bytes_before, bytes_after = (
        [k.page_bytes for k in planner._layout(c).kinds] for c in (plain, narrow)
    )
    assert [2 * n for n in bytes_after] == bytes_before
    assert f"{after.kv_tokens} tokens in fp8_e4m3" in "\n".join(planner.lines(narrow, after))
    # Window pages are as many as before: their number follows the sequences that may run.
    assert after.kv_tokens / before.kv_tokens == pytest.approx(2, abs=0.1)


def test_kv_in_e4m3_is_named_where_it_would_fit_and_only_there():
    asked = CacheConfig(kv_tokens=6_000_000)
    with pytest.raises(ConfigError, match=r"What fits: .*change quant\.kv to fp8_e4m3"):
        _planner().plan(_config(cache=asked))
    ampere = replace(H200, capability=(8, 0))
    for planner, config in (
        (_planner(device=ampere), _config(cache=asked)),
        (_planner(), _config(kv="fp8_e4m3", cache=CacheConfig(kv_tokens=20_000_000))),
    ):
        with pytest.raises(ConfigError) as caught:
            planner.plan(config)
        assert "quant.kv" not in str(caught.value)


def test_what_does_not_fit_is_refused_with_numbers_and_the_formats_that_would():
    with pytest.raises(ConfigError) as caught:
        _planner("120b").plan(_config(weights="bf16"))
    text = str(caught.value)
    assert "weights take 217.61" in text
    assert "of 126.36 GiB" in text
    assert "change quant.weights to mxfp4" in text


def test_what_never_fits_says_what_it_takes():
    small = replace(H200, memory_bytes=4 * GIB)
    with pytest.raises(ConfigError, match=r"No single option .* takes \d\d\.\d\d GiB"):
        _planner(device=small).plan(_config())


CHANGES = {
    r"raise cache.kv_tokens to (\d+)": ("cache", "kv_tokens"),
    r"raise cache.memory_fraction to ([\d.]+)": ("cache", "memory_fraction"),
    r"lower cache.memory_fraction to ([\d.]+)": ("cache", "memory_fraction"),
    r"lower cache.kv_tokens to (\d+)": ("cache", "kv_tokens"),
    r"lower context_tokens to (\d+)": (None, "context_tokens"),
    r"lower scheduler.max_sequences to (\d+)": ("scheduler", "max_sequences"),
    r"lower scheduler.max_step_tokens to (\d+)": ("scheduler", "max_step_tokens"),
    r"change quant.kv to (fp8_e4m3)": ("quant", "kv"),
}


def _applied(config, text):
    """Yield the configuration after each change that the message names."""
    for pattern, (node, name) in CHANGES.items():
        found = re.search(pattern, text)
        if found is None:
            continue
        value = found[1]
        if node != "quant":
            value = float(value) if "fraction" in name else int(value)
        if node is None:
            yield replace(config, **{name: value})
        else:
            values = {name: value}
            if name == "max_step_tokens":
                values["max_mixed_tokens"] = min(value, config.scheduler.max_mixed_tokens)
            yield replace(config, **{node: replace(getattr(config, node), **values)})


@pytest.mark.parametrize(
    ("device_gib", "free_gib", "changes", "least"),
    [
        (30, None, {"context_tokens": 131072}, 3),
        (30, None, {"cache": CacheConfig(kv_tokens=400_000)}, 1),
        (140, 60, {}, 1),
        (140, 60, {"cache": CacheConfig(kv_tokens=2_000_000)}, 1),
    ],
)
def test_each_change_that_a_refusal_names_makes_it_fit(device_gib, free_gib, changes, least):
    device = replace(H200, memory_bytes=device_gib * GIB)
    planner = _planner(device=device, free_bytes=free_gib and free_gib * GIB)
    config = _config(weights="fp8_block", **changes)
    with pytest.raises(ConfigError) as caught:
        planner.plan(config)
    text = str(caught.value).partition("What fits:")[2]
    found = list(_applied(config, text))
    assert len(found) >= least, text
    for changed in found:
        planner.plan(changed)


@pytest.mark.parametrize(
    ("changes", "advice"),
    [
        (
            {"cache": CacheConfig(kv_tokens=100), "context_tokens": 4096},
            "raise cache.kv_tokens to 4096, or lower context_tokens to 128",
        ),
        ({"cache": CacheConfig(kv_tokens=64)}, "raise cache.kv_tokens to 128"),
        ({"scheduler": SchedulerConfig(max_sequences=1_000_000)}, "lower scheduler.max_sequences"),
    ],
)
def test_a_value_that_fits_nothing_is_answered_with_one_that_fits(changes, advice):
    asked = EngineConfig(model="m", quant=QuantConfig(weights="fp8_block"), **changes)
    config = asked.resolve(H200, checkpoint_format="mxfp4")
    planner = replace(_planner(), asked=asked.scheduler)
    with pytest.raises(ConfigError) as caught:
        planner.plan(config)
    text = str(caught.value)
    assert f"What fits: {advice}" in text
    count = re.search(r"lower scheduler.max_sequences to (\d+)", text)
    if count is not None:
        scheduler = SchedulerConfig(max_sequences=int(count[1]))
        again = replace(asked, scheduler=scheduler)
        planner.plan(again.resolve(H200, checkpoint_format="mxfp4"))


def test_a_step_that_was_asked_for_does_not_follow_fewer_sequences():
    """The most sequences fit only with a step that shrinks with them: where it was given, that is no advice."""
    given = SchedulerConfig(
        max_sequences=1_000_000, max_step_tokens=1_000_000, max_mixed_tokens=1_000_000
    )
    small = replace(H200, memory_bytes=30 * GIB)
    config = _config(weights="fp8_block", scheduler=given)
    with pytest.raises(ConfigError) as caught:
        replace(_planner(device=small), asked=given).plan(config)
    assert "max_sequences to" not in str(caught.value)


def test_batch_invariance_is_on_on_a_cpu_and_refused_by_name_where_kernels_lack_it():
    assert _config(CPU).kernels.batch_invariant is True
    assert _config(H200).kernels.batch_invariant is False
    chosen = KernelsConfig(only={"gemm": "torch"})
    assert _config(CPU, kernels=chosen).kernels.batch_invariant is False
    asked = _config(H200, kernels=KernelsConfig(batch_invariant=True))
    with pytest.raises(ConfigError) as caught:
        _planner().plan(asked)
    text = str(caught.value)
    assert "kernels.batch_invariant was asked for on NVIDIA H200 with bf16 activations" in text
    for name in ("gemm", "attention_prefill", "attention_decode", "moe_route", "moe_experts"):
        assert name in text
    assert "rms_norm" not in text  # one program a row, whatever the batch
    assert "What fits" not in text


def test_memory_that_others_hold_is_told():
    with pytest.raises(ConfigError, match=r"of the device's 140.40 GiB only 60.00 are free"):
        _planner(free_bytes=60 * GIB).plan(_config())


@pytest.mark.parametrize("weights", ["mxfp4", "bf16", "fp8_block", "fp8_block_all", "float32"])
@pytest.mark.parametrize("projections", [None, "fp8_block"])
def test_planned_weights_are_those_of_the_loaded_model(folder, weights, projections):
    quant = QuantConfig(weights=weights, projections=projections)
    loaded = load.load_model(_small(folder, quant=quant), HOST, print)
    assert loaded.planned.use.weights == loaded.model.weight_bytes > 0


def test_nothing_is_loaded_where_the_plan_is_refused(folder, monkeypatch):
    monkeypatch.setattr(ENTRY.weights, "load", lambda *_, **__: pytest.fail("weights were read"))
    device = replace(CPU, memory_bytes=1 << 20)
    with pytest.raises(ConfigError, match=r"the device has 0\.00 GiB"):
        load.load_model(_small(folder), device, print)
    with pytest.raises(ConfigError, match="kv_tokens=64 holds 64 tokens, a sequence of 1024"):
        load.load_model(
            _small(folder, cache=CacheConfig(kv_tokens=64), context_tokens=1024), HOST, print
        )


def test_memory_of_a_killed_process_is_waited_for(folder, monkeypatch):
    free, told = [1 << 20, 1 << 20, 4 * GIB], []
    monkeypatch.setattr(load, "free_bytes", lambda _: free.pop(0) if len(free) > 1 else free[0])
    monkeypatch.setattr(load.time, "sleep", lambda _: None)
    assert load.load_model(_small(folder), HOST, told.append).planned.total > 1 << 20
    assert told[:2] == ["waiting for memory that another process holds"] * 2
    monkeypatch.setattr(load, "HELD_SECONDS", 0)
    free[:] = [1 << 20]
    with pytest.raises(ConfigError, match=r"only 0\.00 are free"):
        load.load_model(_small(folder), HOST, print)


def test_a_dry_step_takes_what_a_real_one_does(folder):
    """Within half: never less, so that the plan holds; kernels of torch state what they take from above."""
    config = _small(folder)
    loaded = load.load_model(config, HOST, print)
    use = footprint(
        ENTRY, loaded.model.config, loaded.config, HOST, context_tokens=config.cache.kv_tokens
    )
    own = OwnPages(
        loaded.model.config,
        num_sequences=1,
        max_tokens=512,
        page_tokens=64,
        dtype=torch.float32,
        device="cpu",
    )
    own.step(prefill=[(0, 212)])
    context = own.step(prefill=[(0, 300)])
    logits = 8 * loaded.model.config.vocab_size * 4
    with torch.no_grad(), PeakBytes() as peak:
        hidden_TD = loaded.model.forward(torch.zeros(300, dtype=torch.int64), context)
        del hidden_TD
    assert peak.most < use.workspace
    assert use.workspace < 1.5 * max(peak.most, 16 * logits)


def test_tables_are_counted_as_they_are():
    layout = _planner()._layout(_config())
    tables = DeviceTables(
        layout, num_slots=7, context_tokens=4096, max_step_tokens=512, vocab_size=1000, device=CPU
    )
    real = sum(
        t.numel() * t.element_size()
        for owner in (tables, tables.adjustments, tables.masks)
        for t in vars(owner).values()
        if isinstance(t, torch.Tensor)
    )
    counted = table_bytes(layout, num_slots=7, context_tokens=4096, vocab_size=1000)
    assert counted <= real < counted + 1024


def test_serving_says_whether_it_came_out_as_planned(folder, caplog):
    loaded = load.load_model(_small(folder), HOST, print)
    built = build_decoder(loaded.model, loaded.config, HOST, print, planned=loaded.planned)
    size = f"{loaded.model.weight_bytes / (1 << 20):.2f} MiB"
    assert built.lines()[0] == f"memory after loading: weights {size} (planned {size})"
    gpu = outcome(loaded.planned.use, MemoryUse(weights=GIB, workspace=2 * GIB))
    assert re.search(r"weights and tables 1.00 GiB \(planned .*, workspace 2.00 GiB", gpu)
    assert built.assembly.memory is loaded.planned
    wrong = replace(loaded.planned, use=MemoryUse(weights=loaded.planned.use.weights // 2))
    with caplog.at_level(logging.WARNING):
        built = build_decoder(loaded.model, loaded.config, HOST, print, planned=wrong)
    assert "planned again" in caplog.text
    assert built.assembly.memory.use.weights == loaded.model.weight_bytes


def test_inspect_shows_the_plan_that_serving_makes(folder, capsys, monkeypatch):
    monkeypatch.setattr("rose.utils.device.detect", lambda _: HOST)
    options = [f"--max-{name}=300" for name in ("step-tokens", "mixed-tokens")]
    options += ["--kv-tokens=512", "--max-sequences=8"]
    assert run(["inspect", str(folder), *options, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    loaded = load.load_model(_small(folder), HOST, print)
    assert report["plan"]["bytes"]["total"] == loaded.planned.total
    assert report["plan"]["num_pages"] == loaded.planned.num_pages


def test_inspect_plans_for_an_h200_on_any_machine_and_names_flags(folder, capsys):
    assert run(["inspect", str(folder), "--plan-for", "h200"]) == 0
    printed = capsys.readouterr().out
    assert "140.40 GiB  NVIDIA H200" in printed
    assert printed.endswith("\nthe plan fits on NVIDIA H200\n")


def test_inspect_ends_with_the_verdict_and_fails_where_a_plan_is_refused(folder, capsys):
    words = ["inspect", str(folder), "--plan-for", "h200", "--kv-tokens", "900000000"]
    assert run([*words, "--json"]) == run(words) == 1
    printed = capsys.readouterr().out
    *_, complete, refused = printed.splitlines()
    assert complete == "complete: every tensor is in its place"
    assert refused.startswith("memory plan refused: kv_tokens=900000000")
    assert "lower --kv-tokens (cache.kv_tokens) to " in refused


@pytest.mark.parametrize("plan_for", ["h200", "here"])
def test_inspect_says_that_without_triton_a_gpu_is_planned_too_large(
    folder, capsys, monkeypatch, plan_for
):
    left_out = {"attention_prefill": [("triton_impl", "triton is not installed")]}
    monkeypatch.setattr(registry, "left_out", lambda name: left_out.get(name, []))
    words = ["inspect", str(folder), "--device", "cpu", "--plan-for", plan_for]
    assert run(words) == 0
    said = "note: triton is not installed here, so attention_prefill are planned"
    assert (said in capsys.readouterr().out) == (plan_for == "h200")


def test_halves_are_powers_of_two_below():
    assert list(before_load._halves(5000, 1024)) == [4096, 2048, 1024]
    assert list(before_load._halves(4096, 1024)) == [2048, 1024]
    assert list(before_load._halves(1000, 1024)) == []


def test_free_memory_of_a_group_counts_what_it_can_drop(tmp_path):
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 100 kB\nMemAvailable:   80 kB\n")
    assert _free_on_host(meminfo, tmp_path) == 80 << 10
    for name, text in (("max", "65536"), ("current", "50000"), ("stat", "inactive_file 10000\n")):
        Path(tmp_path / f"memory.{name}").write_text(text)
    assert _free_on_host(meminfo, tmp_path) == 65536 - 40000
    (tmp_path / "memory.max").write_text("max\n")
    assert _free_on_host(meminfo, tmp_path) == 80 << 10
    assert _free_on_host(tmp_path / "none", tmp_path) is None


def test_facts_of_no_device_are_not_checked():
    planner = _planner(device=DeviceFacts(kind="cpu", name="cpu"))
    assert planner.plan(_config(CPU)).kv_tokens == 32768
