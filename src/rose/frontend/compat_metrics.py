"""The core series under the names of vLLM or SGLang, so that boards, autoscalers and gateways made for them work.

A table from our names to theirs; values are ours, summed where theirs have fewer labels. Buckets are ours too: finer
than theirs, which quantiles over buckets do not mind.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal, get_args

from prometheus_client.core import Metric
from prometheus_client.samples import Sample

Peer = Literal["none", "vllm", "sglang"]
PEERS = get_args(Peer)


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One series of a peer."""

    source: str
    """Our name, without _total."""
    name: str
    only: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Label of ours -> values that count."""
    labels: dict[str, str] = field(default_factory=dict)
    """Label of ours -> name that it has there; others are summed over."""


def _same(prefix: str, names: dict[str, str]) -> tuple[Series, ...]:
    return tuple(
        Series(source=f"rose_{ours}", name=prefix + theirs) for ours, theirs in names.items()
    )


_SHARED = {
    "prompt_tokens": "prompt_tokens",
    "generation_tokens": "generation_tokens",
    "time_to_first_token_seconds": "time_to_first_token_seconds",
    "inter_token_latency_seconds": "inter_token_latency_seconds",
    "request_seconds": "e2e_request_latency_seconds",
}
_ENDS = ("stop", "length", "tool_calls")
SERIES: dict[str, tuple[Series, ...]] = {
    "none": (),
    "vllm": (
        *_same("vllm:", _SHARED),
        *_same(
            "vllm:",
            {
                "requests_running": "num_requests_running",
                "requests_waiting": "num_requests_waiting",
                "prefix_cache_queries_tokens": "prefix_cache_queries",
                "prefix_cache_hits_tokens": "prefix_cache_hits",
                "preemptions": "num_preemptions",
                "request_time_per_output_token_seconds": "request_time_per_output_token_seconds",
                "request_queue_seconds": "request_queue_time_seconds",
                "request_prefill_seconds": "request_prefill_time_seconds",
                "request_decode_seconds": "request_decode_time_seconds",
                "request_inference_seconds": "request_inference_time_seconds",
                "step_tokens": "iteration_tokens_total",
            },
        ),
        Series(
            source="rose_kv_cache_usage_ratio",
            name="vllm:kv_cache_usage_perc",
            only={"pool": ("full",)},
        ),
        Series(
            source="rose_requests",
            name="vllm:request_success",
            only={"finish": _ENDS},
            labels={"finish": "finished_reason"},
        ),
    ),
    "sglang": (
        *_same("sglang:", _SHARED),
        *_same(
            "sglang:",
            {
                "requests_running": "num_running_reqs",
                "requests_waiting": "num_queue_reqs",
                "kv_pages_used": "kv_used_pages",
                "preemptions": "num_retracted_requests",
                "requests_aborted": "num_aborted_requests",
                "requests": "num_requests",
                "request_queue_seconds": "queue_time_seconds",
                "request_time_per_output_token_seconds": "time_per_output_token_seconds",
            },
        ),
        Series(
            source="rose_kv_cache_usage_ratio", name="sglang:token_usage", only={"pool": ("full",)}
        ),
        Series(
            source="rose_kv_cache_usage_ratio",
            name="sglang:full_token_usage",
            only={"pool": ("full",)},
        ),
        Series(
            source="rose_kv_cache_usage_ratio",
            name="sglang:swa_token_usage",
            only={"pool": ("window",)},
        ),
    ),
}


def translated(families: Iterable[Metric], peer: str, *, model: str) -> Iterator[Metric]:
    """Yield the peer's series made of ours; families that it has no name for are left out."""
    by_name = {family.name: family for family in families}
    fixed = {"model_name": model} | ({"engine": "0"} if peer == "vllm" else {})
    for series in SERIES[peer]:
        family = by_name.get(series.source)
        if family is not None:
            yield _translated(family, series, fixed)


def _translated(family: Metric, series: Series, fixed: dict[str, str]) -> Metric:
    sums: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
    for sample in family.samples:
        if any(sample.labels.get(label) not in values for label, values in series.only.items()):
            continue
        kept = {series.labels[k]: v for k, v in sample.labels.items() if k in series.labels}
        bound = {"le": sample.labels["le"]} if "le" in sample.labels else {}
        key = (sample.name.removeprefix(family.name), tuple((fixed | kept | bound).items()))
        sums[key] = sums.get(key, 0.0) + sample.value
    metric = Metric(series.name, family.documentation, family.type)
    metric.samples = [
        Sample(series.name + suffix, dict(labels), value)
        for (suffix, labels), value in sums.items()
    ]
    return metric
