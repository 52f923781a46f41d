"""The engine's state as Prometheus series, under our names and under those of the peers."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from rose.frontend.client import EngineClient
from rose.frontend.compat_metrics import SERIES
from rose.frontend.metrics import Metrics
from rose.protocol.event import EngineStatus
from rose.protocol.histogram import BOUNDS, Buckets


def _status():
    histograms = {
        name: Buckets([1, 2] + [0] * (len(bounds) - 2) + [4], 9.0)
        for name, bounds in BOUNDS.items()
    }
    return EngineStatus(
        is_ready=True,
        model="m",
        context_tokens=100,
        vocab_size=10,
        num_running=3,
        num_waiting=2,
        num_waiting_tokens=77,
        kv_pages_used=5,
        kv_pages_total=20,
        weights_format="mxfp4",
        kv_format="fp8_e4m3",
        window_pages_used=1,
        window_pages_total=4,
        num_queried_tokens=100,
        num_cached_tokens=40,
        num_preemptions=6,
        num_refused=7,
        num_expired=8,
        num_aborted=9,
        num_late_kernels=10,
        num_damaged=11,
        histograms=histograms,
    )


def _samples(peer="none"):
    """Return what a scraper reads: (name, labels) -> value."""
    metrics = Metrics(peer=peer, model="m")
    client = EngineClient()
    client.status, client.num_engines, client.num_sent_again = _status(), 3, 2
    metrics.observe_engine(client)
    watch = metrics.watch(0.0)
    for _ in range(3):
        watch.tokens("a", 1)
    metrics.answered("chat", 200, "stop")
    metrics.answered("completions", 200, "stop")
    metrics.answered("chat", 429, "error")
    families = text_string_to_metric_families(metrics.render().decode())
    return {(s.name, tuple(sorted(s.labels.items()))): s.value for f in families for s in f.samples}


def test_the_configuration_is_published_with_its_formats():
    [labels] = [dict(labels) for name, labels in _samples() if name == "rose_config_info"]
    assert labels == {
        "model": "m",
        "context_tokens": "100",
        "kv_pages": "20",
        "window_pages": "4",
        "weights": "mxfp4",
        "kv": "fp8_e4m3",
    }


def test_the_engines_state_is_published():
    found = {name: value for (name, labels), value in _samples().items() if not labels}
    assert found["rose_requests_running"] == 3
    assert found["rose_waiting_tokens"] == 77
    assert found["rose_prefix_cache_queries_tokens_total"] == 100
    assert found["rose_prefix_cache_hits_tokens_total"] == 40
    assert found["rose_preemptions_total"] == 6
    assert found["rose_admission_rejections_total"] == 7
    assert found["rose_requests_expired_total"] == 8
    assert found["rose_requests_aborted_total"] == 9
    assert found["rose_late_kernels_total"] == 10
    assert found["rose_requests_damaged_total"] == 11
    assert found["rose_engine_restarts_total"] == 2
    assert found["rose_requests_sent_again_total"] == 2
    assert found["rose_request_queue_seconds_count"] == 7
    assert found["rose_request_queue_seconds_sum"] == 9.0


def test_usage_and_step_times_have_labels_and_buckets_add_up():
    found = _samples()
    assert found["rose_kv_cache_usage_ratio", (("pool", "full"),)] == 0.25
    assert found["rose_kv_cache_usage_ratio", (("pool", "window"),)] == 0.25
    for phase in ("prefill", "decode", "mixed"):
        name = "rose_step_seconds_bucket"
        assert found[name, (("le", "0.0005"), ("phase", phase))] == 3
        assert found[name, (("le", "1.0"), ("phase", phase))] == 3
        assert found[name, (("le", "+Inf"), ("phase", phase))] == 7


@pytest.mark.parametrize("peer", ["vllm", "sglang"])
def test_every_series_of_a_peer_comes_from_one_of_ours(peer):
    found = _samples(peer)
    names = {name for name, labels in found if ("model_name", "m") in labels}
    for series in SERIES[peer]:
        endings = ("", "_total", "_bucket")
        assert any(series.name + ending in names for ending in endings), series.name
    assert all(name.startswith(f"{peer}:") for name in names)
    assert len(SERIES[peer]) >= 12
    assert not any(":" in name for name, _ in _samples())


def test_values_of_a_peer_are_ours_summed():
    found = _samples("vllm")
    fixed = (("engine", "0"), ("model_name", "m"))
    assert found["vllm:num_requests_waiting", fixed] == 2
    assert found["vllm:kv_cache_usage_perc", fixed] == 0.25
    assert found["vllm:num_preemptions_total", fixed] == 6
    reason = (("engine", "0"), ("finished_reason", "stop"), ("model_name", "m"))
    assert found["vllm:request_success_total", reason] == 2
    assert found["vllm:inter_token_latency_seconds_count", fixed] == 2
    bucket = (("engine", "0"), ("le", "+Inf"), ("model_name", "m"))
    assert found["vllm:request_queue_time_seconds_bucket", bucket] == 7
