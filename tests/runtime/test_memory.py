"""The memory plan: what it gives away fits, what does not fit is refused with the numbers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose.cache.layout import CacheLayout
from rose.config.cache import CacheConfig
from rose.config.engine import EngineConfig
from rose.config.scheduler import SchedulerConfig
from rose.models.gpt_oss.config import published
from rose.runtime.memory import GIB, MemoryUse, plan_memory, window_pages
from rose.runtime.memory_words import table
from rose.utils.device import H200
from rose.utils.errors import ConfigError

H200_BYTES = H200.memory_bytes


def _plan(size="20b", *, use=None, device_bytes=H200_BYTES, is_context_asked=False, **changes):
    cache = CacheConfig(**changes.pop("cache", {}))
    scheduler = SchedulerConfig(**changes.pop("scheduler", {}))
    layout = CacheLayout.of(published(size), cache, kv_element="bf16")
    return plan_memory(
        layout=layout,
        cache=cache,
        scheduler=scheduler,
        use=use or MemoryUse(weights=14 * GIB, workspace=6 * GIB, graphs=GIB),
        device_bytes=device_bytes,
        context_tokens=changes.pop("context_tokens", 131072),
        is_context_asked=is_context_asked,
    )


def test_the_prefix_cache_gets_window_pages_in_proportion_to_the_full_ones():
    plan, without = _plan(), _plan(cache={"prefix_cache": False})
    assert plan.num_pages["window"] == 1280 + plan.num_pages["full"] // 32
    # A page is as large in both kinds.
    assert plan.num_pages["full"] == pytest.approx(without.num_pages["full"] * 32 / 33, abs=1)
    assert plan.kv_bytes <= without.kv_bytes + 12 * 64 * 2048


def test_an_h200_holds_millions_of_tokens_of_the_20b():
    # 0.9 x 140.4 - 21 = 105.4 GiB; window pages 256 x 3 + 256 + 256 = 1280 of 1.5 MiB; a token is 24 KiB.
    plan = _plan(cache={"prefix_cache": False})
    assert plan.num_pages["window"] == 1280
    assert plan.kv_tokens == pytest.approx((105.36 - 1.875) * GIB / (12 * 2048), rel=0.001)
    assert plan.context_tokens == 131072


@given(
    weights=st.integers(0, 100),
    device=st.integers(1, 200),
    sequences=st.integers(1, 1000),
    context=st.sampled_from([1000, 131072]),
    prefix_cache=st.booleans(),
)
def test_everything_fits_into_the_budget_or_is_refused(
    weights, device, sequences, context, prefix_cache
):
    try:
        plan = _plan(
            use=MemoryUse(weights=weights * GIB, workspace=GIB, graphs=GIB),
            device_bytes=device * GIB,
            scheduler={"max_sequences": sequences},
            context_tokens=context,
            cache={"prefix_cache": prefix_cache},
        )
    except ConfigError:
        # Refused although two pages would have fitted: that would be wrong.
        two_pages = 2 * 2 * 12 * 64 * 2048
        assert int(device * GIB * 0.9) - (weights + 2) * GIB < two_pages
        return
    assert plan.use.total + plan.kv_bytes <= plan.budget_bytes
    assert plan.num_pages["window"] <= plan.num_pages["full"]
    assert plan.num_pages["full"] * 64 <= sequences * (context + 63)


def test_weights_that_leave_nothing_are_refused_with_the_numbers_and_what_to_change():
    with pytest.raises(ConfigError) as caught:
        _plan("120b", use=MemoryUse(weights=130 * GIB), is_context_asked=True)
    text = str(caught.value)
    for part in ("131072 tokens", "126.36 GiB", "weights take 130.00", "cache.memory_fraction"):
        assert part in text


def _lines(plan):
    layout = CacheLayout.of(published("20b"), CacheConfig(), kv_element="bf16")
    config = EngineConfig(model="m")
    return list(table(plan, layout, config, H200, context_tokens=131072))


def test_small_sizes_are_told_in_mib_and_what_was_not_measured_is_not_told():
    lines = _lines(_plan(use=MemoryUse(weights=9_500_000), cache={"kv_tokens": 32768}))
    assert lines[1].split()[:3] == ["weights", "9.06", "MiB"]
    assert not any("workspace" in line for line in lines)
    assert any("workspace" in line for line in _lines(_plan()))


def test_a_context_that_was_not_asked_for_shrinks_to_what_fits_and_says_so():
    plan = _plan(cache={"kv_tokens": 32768})
    assert (plan.context_tokens, plan.num_pages) == (32768, {"full": 512, "window": 512})
    assert "longest sequence 32768 tokens" in _lines(plan)[-1]


def test_a_context_that_was_asked_for_does_not():
    with pytest.raises(ConfigError, match="kv_tokens=32768 holds 32768 tokens"):
        _plan(cache={"kv_tokens": 32768}, is_context_asked=True)


def test_window_pages_suffice_for_every_sequence_and_the_chunks_of_a_step():
    scheduler = SchedulerConfig(max_sequences=8, max_step_tokens=1024, max_mixed_tokens=512)
    layout = CacheLayout.of(published("20b"), CacheConfig(), kv_element="bf16")
    assert window_pages(layout, scheduler, 10_000) == 8 * 3 + 1024 // 64 + 8
    assert window_pages(layout, scheduler, 20) == 20


def test_a_cache_larger_than_the_device_is_refused():
    with pytest.raises(ConfigError, match=r"kv_tokens=9000000 needs .* GiB; the device has 140.40"):
        _plan(cache={"kv_tokens": 9_000_000})
