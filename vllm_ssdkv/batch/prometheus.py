"""The batch metrics as Prometheus objects of the API server's process."""

from __future__ import annotations

import functools
import itertools
from typing import Final

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge

from vllm_ssdkv.base.metrics import BATCH_METRICS, metric_key, parse_key

_GAUGE_MODE: Final = "livemostrecent"
"""Newest value of any API server: only one of several servers runs the batches."""


class BatchCounters:
    """Counters of the runner. Any thread may call."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        self._counters: dict[str, Counter] = {}
        self._gauges: dict[str, Gauge] = {}
        for metric in BATCH_METRICS:
            names = metric.label_names
            if metric.kind == "counter":
                made = Counter(metric.full_name, metric.help, names, registry=registry)
                self._counters[metric.name] = made
                # Shown as 0 from the start, so that rates work.
                for values in itertools.product(*(label.values for label in metric.labels)):
                    made.labels(*values) if values else made.inc(0)
            else:
                self._gauges[metric.name] = Gauge(
                    metric.full_name,
                    metric.help,
                    names,
                    registry=registry,
                    multiprocess_mode=_GAUGE_MODE,
                )

    def add(self, name: str, value: float = 1, **labels: str) -> None:
        """Increase a counter.

        Raises:
            ValueError: it is not declared with these labels.
        """
        metric, values = parse_key(metric_key(name, labels))
        counter = self._counters[metric.name]
        (counter.labels(*values) if values else counter).inc(value)

    def set(self, name: str, value: float) -> None:
        """Set a gauge.

        Raises:
            ValueError: it is not declared.
        """
        self._gauges[parse_key(metric_key(name, {}))[0].name].set(value)


@functools.cache
def server_counters() -> BatchCounters:
    """Counters of this process's ``/metrics``."""
    return BatchCounters()
