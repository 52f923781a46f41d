"""What is kept of responses, for Prometheus."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client.core import GaugeMetricFamily, Metric

from rose.frontend.responses.store import Store, StoreError
from rose.utils.log import get_logger

logger = get_logger(__name__)


class StoreGauges:
    """The sizes of a store at the moment somebody looks."""

    def __init__(self, store: Store, num_running: Callable[[], int]) -> None:
        self._store = store
        self._num_running = num_running

    def collect(self) -> Iterator[Metric]:
        """Return the gauges; those of a store that cannot be read are left out and logged."""
        gauges = {
            "rose_responses_in_background": ("Background responses running", self._num_running())
        }
        try:
            gauges |= {
                "rose_responses_stored": ("Responses kept", self._store.num_records()),
                "rose_responses_stored_bytes": ("Bytes of responses kept", self._store.num_bytes()),
            }
        except StoreError as error:
            logger.error("no gauges of the store: %s", error)
        for name, (text, value) in gauges.items():
            yield GaugeMetricFamily(name, text, float(value))
