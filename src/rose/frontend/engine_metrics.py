"""The newest EngineStatus as Prometheus series; at most a second old.

Counters start again with an engine that was started again, as Prometheus expects of a process.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)

from rose.frontend.client import EngineClient
from rose.protocol.event import EngineStatus
from rose.protocol.histogram import BOUNDS, Buckets

HISTOGRAM_TEXTS = {
    "step_tokens": "Tokens of a step, prompts and decoding together",
    "request_grammar_seconds": "From arrival until the grammar was built or found; requests with one only",
    "request_queue_seconds": "From arrival at the engine until it ran",
    "request_prefill_seconds": "From when it ran to its first token",
    "request_decode_seconds": "From its first token to its last",
    "request_inference_seconds": "From when it ran to its last token",
    "request_time_per_output_token_seconds": "Mean time per token after the first, one value per request",
}
PHASES = ("prefill", "decode", "mixed")


class EngineCollector:
    """Makes series of the state that a client knows, when somebody looks."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client

    def collect(self) -> Iterator[Metric]:
        """Yield every series."""
        client = self._client
        yield InfoMetricFamily("rose_build", "The release that runs", {"version": _release()})
        yield GaugeMetricFamily(
            "rose_engine_ready", "1 while the engine takes requests", float(client.is_ready)
        )
        yield GaugeMetricFamily(
            "rose_engine_silence_seconds",
            "Since the engine's last sign of life; above the limit of /health it counts as hung",
            client.silence_s,
        )
        yield CounterMetricFamily(
            "rose_engine_restarts", "Engines lost and replaced", max(0, client.num_engines - 1)
        )
        yield CounterMetricFamily(
            "rose_requests_sent_again",
            "Requests given to the next engine because the one before was lost before it had begun them",
            client.num_sent_again,
        )
        status = client.status
        if status is None:
            return
        yield InfoMetricFamily(
            "rose_config",
            "What the engine runs with",
            {
                "model": status.model,
                "context_tokens": str(status.context_tokens),
                "kv_pages": str(status.kv_pages_total),
                "window_pages": str(status.window_pages_total),
                "weights": status.weights_format,
                "kv": status.kv_format,
            },
        )
        yield from _gauges(status)
        yield from _counters(status)
        yield from _histograms(status)


def _gauges(status: EngineStatus) -> Iterator[Metric]:
    gauges = {
        "rose_requests_running": ("Sequences in the engine's batch", status.num_running),
        "rose_requests_waiting": ("Requests in the engine's queue", status.num_waiting),
        "rose_waiting_tokens": ("Tokens of the requests in the queue", status.num_waiting_tokens),
        "rose_kv_pages_used": ("KV pages in use", status.kv_pages_used),
        "rose_kv_pages_total": ("KV pages there are", status.kv_pages_total),
        "rose_kv_pages_idle": (
            "KV pages that no sequence uses and the prefix cache still finds",
            status.kv_pages_idle,
        ),
        "rose_engine_start_seconds": ("How long the engine took to get ready", status.start_s),
    }
    for name, (text, value) in gauges.items():
        yield GaugeMetricFamily(name, text, float(value))
    usage = GaugeMetricFamily(
        "rose_kv_cache_usage_ratio",
        "Share of the KV pages in use, by kind of layer",
        labels=["pool"],
    )
    usage.add_metric(["full"], status.kv_pages_used / max(1, status.kv_pages_total))
    if status.window_pages_total:
        usage.add_metric(["window"], status.window_pages_used / status.window_pages_total)
    yield usage


def _counters(status: EngineStatus) -> Iterator[Metric]:
    counters = {
        "rose_engine_steps": ("Steps since start", status.num_steps),
        "rose_engine_prompt_tokens": ("Prompt tokens computed", status.num_prompt_tokens),
        "rose_prefix_cache_queries_tokens": (
            "Prompt tokens looked up in the prefix cache",
            status.num_queried_tokens,
        ),
        "rose_prefix_cache_hits_tokens": (
            "Prompt tokens found in the prefix cache",
            status.num_cached_tokens,
        ),
        "rose_engine_evicted_pages": (
            "Pages that the prefix cache gave away",
            status.num_evicted_pages,
        ),
        "rose_engine_output_tokens": ("Tokens sampled", status.num_output_tokens),
        "rose_preemptions": (
            "Times that a sequence gave up its pages and was computed anew",
            status.num_preemptions,
        ),
        "rose_admission_rejections": (
            "Requests refused because the queue was full",
            status.num_refused,
        ),
        "rose_grammar_failures": (
            "Requests whose grammar could not be built, or stopped them",
            status.num_grammar_failures,
        ),
        "rose_requests_damaged": (
            "Requests that ended because the model's logits were not finite: weights or device are damaged",
            status.num_damaged,
        ),
        "rose_late_kernels": (
            "Kernels compiled while serving, which every running sequence waited for; each is named in the log",
            status.num_late_kernels,
        ),
        "rose_requests_expired": ("Requests whose time was up", status.num_expired),
        "rose_requests_aborted": (
            "Requests taken back: client gone, stop string found",
            status.num_aborted,
        ),
    }
    for name, (text, value) in counters.items():
        yield CounterMetricFamily(name, text, float(value))


def _histograms(status: EngineStatus) -> Iterator[Metric]:
    found = status.histograms
    steps = HistogramMetricFamily(
        "rose_step_seconds", "Time of a step by what it is made of", labels=["phase"]
    )
    for phase in PHASES:
        name = f"step_seconds_{phase}"
        if name in found:
            steps.add_metric([phase], _cumulated(name, found[name]), found[name].total)
    yield steps
    for name, text in HISTOGRAM_TEXTS.items():
        if name in found:
            family = HistogramMetricFamily(f"rose_{name}", text)
            family.add_metric([], _cumulated(name, found[name]), found[name].total)
            yield family


def _cumulated(name: str, buckets: Buckets) -> list[tuple[str, float]]:
    bounds = [*map(str, BOUNDS[name]), "+Inf"]
    return list(zip(bounds, map(float, itertools.accumulate(buckets.counts)), strict=True))


def _release() -> str:
    try:
        return version("rose-engine")
    except PackageNotFoundError:
        return "unknown"
