"""Prometheus metrics of the frontend, with the engine's own numbers beside them.

One registry per application, so that tests and several servers in one process do not share counts.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterator
from itertools import accumulate
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from rose.frontend.compat_metrics import Peer, translated
from rose.frontend.engine_metrics import EngineCollector

if TYPE_CHECKING:
    from rose.frontend.client import EngineClient
    from rose.frontend.generation import Job
    from rose.frontend.siblings import Siblings

# gpt-oss on an H200 decodes in single milliseconds: the steps begin well below one.
TOKEN_SECONDS = (
    *(0.00025, 0.0005, 0.00075, 0.001, 0.0015, 0.002, 0.003, 0.004, 0.005, 0.0075),
    *(0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0),
)
FIRST_TOKEN_SECONDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5),
    *(0.75, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0),
)
REQUEST_SECONDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 60.0, 120.0, 300.0, 600.0)


class Metrics:
    """Counters and histograms of one frontend."""

    def __init__(
        self, *, peer: Peer = "none", model: str = "", siblings: Siblings | None = None
    ) -> None:
        self._siblings = siblings
        self._engine: EngineCollector | None = None
        self._peer: Peer = peer
        self._model = model
        registry = self.registry = CollectorRegistry()
        self._requests = Counter(
            "rose_requests",
            "Requests answered, by endpoint, HTTP status and finish reason (empty: none)",
            ["endpoint", "status", "finish"],
            registry=registry,
        )
        self._prompt = Counter("rose_prompt_tokens", "Prompt tokens of answers", registry=registry)
        self._cached = Counter(
            "rose_cached_prompt_tokens",
            "Prompt tokens found in the prefix cache",
            registry=registry,
        )
        self._generated = Counter(
            "rose_generation_tokens", "Tokens generated, by kind", ["kind"], registry=registry
        )
        for kind in ("reasoning", "answer"):
            self._generated.labels(kind)  # there from the start, at 0
        self._recoveries = Counter(
            "rose_harmony_parse_recoveries",
            "Malformed model output read leniently",
            ["kind"],
            registry=registry,
        )
        self._disconnects = Counter(
            "rose_client_disconnects",
            "Clients that left before they had their whole answer",
            registry=registry,
        )
        self._open = Gauge("rose_http_requests_open", "Requests being answered", registry=registry)
        self._first_token = Histogram(
            "rose_time_to_first_token_seconds",
            "From the request's arrival to its first token",
            buckets=FIRST_TOKEN_SECONDS,
            registry=registry,
        )
        self._token = _TokenTimes(
            "rose_inter_token_latency_seconds", "Between tokens of one answer, per token"
        )
        registry.register(self._token)
        self._request = Histogram(
            "rose_request_seconds",
            "From a request's arrival to the end of its answer",
            buckets=REQUEST_SECONDS,
            registry=registry,
        )

    def observe_engine(self, client: EngineClient) -> None:
        """Publish the engine's numbers as they are when somebody looks."""
        self._engine = EngineCollector(client)
        self.registry.register(self._engine)

    def watch(self, started: float) -> TokenWatch:
        """Return a clock for the tokens of one client request."""
        return TokenWatch(self._first_token, self._token, started)

    def opened(self) -> None:
        """Count a request that is being answered."""
        self._open.inc()

    def closed(self) -> None:
        """Count the end of one."""
        self._open.dec()

    def answered(self, endpoint: str, status: int, finish: str = "") -> None:
        """Count an answer."""
        self._requests.labels(endpoint, str(status), finish).inc()

    def disconnected(self, endpoint: str, *, is_answered: bool = False) -> None:
        """Count a client that left; `is_answered`: its answer was made, and is counted as such."""
        self._disconnects.inc()
        if not is_answered:
            self.answered(endpoint, 499)

    def finished(self, job: Job, *, status: int = 200) -> None:
        """Count what a job used, when its last piece is out."""
        usage = job.usage()
        reasoning = usage.completion_tokens_details.reasoning_tokens
        self._prompt.inc(usage.prompt_tokens)
        self._cached.inc(usage.prompt_tokens_details.cached_tokens)
        self._generated.labels("reasoning").inc(reasoning)
        self._generated.labels("answer").inc(usage.completion_tokens - reasoning)
        for run in job.runs:
            for kind in run.recoveries:
                self._recoveries.labels(kind).inc()
        self._request.observe(time.monotonic() - job.started)
        self.answered(job.endpoint, status, job.runs[0].finish_reason or "")

    def render(self) -> bytes:
        """Return everything in Prometheus' text format."""
        return generate_latest(_Page(self))  # type: ignore[arg-type]

    def own_families(self) -> list[Metric]:
        """Return what this process counted, without the engine's numbers, which all processes see."""
        return self._without_engine(self._collected())

    def _without_engine(self, families: list[Metric]) -> list[Metric]:
        names = {family.name for family in self._engine.collect()} if self._engine else set()
        return [family for family in families if family.name not in names]

    def _collected(self) -> list[Metric]:
        """Return what is registered, without the series that tell when each counter was made: they double the page.

        The library can leave those out itself, but only for the whole process.
        """
        families = list(self.registry.collect())
        for family in families:
            family.samples = [s for s in family.samples if not s.name.endswith("_created")]
        return families

    def families(self) -> list[Metric]:
        """Return everything, of all frontends of this server."""
        families = self._collected()
        if self._siblings is not None:
            self._siblings.add_to(self._without_engine(families))
        return [*families, *translated(families, self._peer, model=self._model)]


class _Page:
    """What the library needs of a registry to write one page."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        yield from self._metrics.families()


class _TokenTimes(Collector):
    """A histogram that is written for every token of every stream: several at once, by one thread, without locks."""

    def __init__(self, name: str, text: str) -> None:
        self._name, self._text = name, text
        self.counts = [0] * (len(TOKEN_SECONDS) + 1)
        self.sum = 0.0

    def collect(self) -> Iterator[Metric]:
        bounds = [*map(floatToGoString, TOKEN_SECONDS), "+Inf"]
        buckets = list(zip(bounds, accumulate(self.counts), strict=True))
        yield HistogramMetricFamily(self._name, self._text, buckets=buckets, sum_value=self.sum)


class TokenWatch:
    """Times between the tokens of one client request."""

    def __init__(self, first: Histogram, between: _TokenTimes, started: float) -> None:
        self._first = first
        self._between = between
        self._started = started
        self._last: dict[str, float] = {}

    def tokens(self, request_id: str, count: int) -> None:
        """Take note of tokens that came together."""
        now, last, between = time.monotonic(), self._last, self._between
        if request_id in last:
            seconds = now - last[request_id]
            between.counts[bisect_left(TOKEN_SECONDS, seconds / count)] += count
            between.sum += seconds
        else:
            self._first.observe(now - self._started)
        last[request_id] = now
