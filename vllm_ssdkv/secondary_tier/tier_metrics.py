"""The store's metrics on the way of vLLM's offloading to ``/metrics``."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import (
    OffloadingCounterMetadata,
    OffloadingGaugeMetadata,
    OffloadingHistogramMetadata,
    OffloadingMetricMetadata,
)

from vllm_ssdkv.base.metric import Metric
from vllm_ssdkv.base.metrics import (
    METRICS,
    TELL_INTERVAL_S,
    Counters,
    bucket_keys,
    histogram_of,
    parse_key,
)

_LEAST: Final = 1e-9
"""A value on the bound between two buckets belongs to the lower one."""


def definitions() -> dict[str, OffloadingMetricMetadata]:
    """The store's metrics as vLLM wants a tier to declare them, by full name."""
    return {metric.full_name: _definition(metric) for metric in METRICS}


def _definition(metric: Metric) -> OffloadingMetricMetadata:
    given = {"documentation": metric.help, "labelnames": metric.label_names}
    if metric.kind == "counter":
        return OffloadingCounterMetadata(**given)
    if metric.kind == "histogram":
        return OffloadingHistogramMetadata(**given, buckets=metric.buckets)
    return OffloadingGaugeMetadata(**given)


def observations(buckets: Sequence[float], parts: Sequence[float]) -> Iterator[float]:
    """Values that fill a histogram's buckets with these counts and have this sum, the last part.

    vLLM takes a histogram of a tier as single values. Each lies at the same fraction of its bucket.
    """
    *counts, total = parts
    bounds = [0.0, *buckets, 2 * buckets[-1]]
    low = sum(n * a for n, a in zip(counts, bounds, strict=False))
    high = sum(n * b for n, b in zip(counts, bounds[1:], strict=True))
    at = min(1.0, max(_LEAST, (total - low) / (high - low))) if high > low else 1.0
    for count, lower, upper in zip(counts, bounds, bounds[1:], strict=False):
        yield from [lower + at * (upper - lower)] * round(count)


class TierMetrics:
    """Numbers of one store on their way to vLLM. Used by the scheduler's thread."""

    def __init__(self, counters: Counters, update_gauges: Callable[[], None]):
        self._counters, self._update_gauges = counters, update_gauges
        self._due = time.monotonic()

    def take(self, *, running: bool) -> OffloadingConnectorStats | None:
        """The numbers since the last call; None while it is not time to tell. ``running``: jobs
        are under way."""
        now = time.monotonic()
        if running and now < self._due:
            return None
        self._due = now + TELL_INTERVAL_S
        self._update_gauges()
        counters = self._counters
        stats = OffloadingConnectorStats()
        histograms: dict[str, list[float]] = {}
        for key, value in counters.take_gained().items():
            metric, labels = parse_key(key)
            if metric.kind == "histogram":
                whole, position = histogram_of(key)
                histograms.setdefault(whole, [0.0] * len(bucket_keys(whole)))[position] = value
            else:
                stats.increase_counter(metric.full_name, value, labels)
        for key, parts in histograms.items():
            metric, labels = parse_key(key)
            for observed in observations(metric.buckets, parts):
                stats.observe_histogram(metric.full_name, observed, labels)
        for key, value in counters.take_gauges().items():
            metric, labels = parse_key(key)
            stats.set_gauge(metric.full_name, value, labels)
        return None if stats.is_empty() else stats
