"""Our numbers on vLLM's way: from the scheduler's process to ``/metrics`` and the log.

Follows ``vllm.distributed.kv_transfer.kv_connector.v1.metrics`` of vLLM 0.32.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypedDict

from prometheus_client import Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from vllm_ssdkv.base.metric import Metric
from vllm_ssdkv.base.metrics import METRICS, bucket_keys, combine_gauges, histogram_of, parse_key

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class Payload(TypedDict):
    """Wire form of the counters: plain and serialisable. Keys are those of ``metrics.metric_key``.

    Gauges are kept by source, the process that set them.
    """

    counters: dict[str, float]
    gauges: dict[str, dict[str, float]]


@dataclass
class SSDKVStats(KVConnectorStats):
    """Counters of an engine's processes over an interval.

    vLLM aggregates them over a log interval: counters add up. Of gauges the newer ones of each
    source replace its older ones, and sources are combined only when they are read.
    """

    data: Payload = field(default_factory=lambda: Payload(counters={}, gauges={}))

    @classmethod
    def of(
        cls, counters: Mapping[str, float], gauges: Mapping[str, Mapping[str, float]]
    ) -> SSDKVStats:
        """Make stats of counters, and of the gauges of each source: ``scheduler``, ``rank0``,
        ..."""
        copied = {source: dict(values) for source, values in gauges.items()}
        return cls(data=Payload(counters=dict(counters), gauges=copied))

    def reset(self) -> None:
        """Forget everything."""
        self.data = Payload(counters={}, gauges={})

    def aggregate(self, other: KVConnectorStats) -> SSDKVStats:
        """Take in stats of a later interval. Changes and returns self.

        Raises:
            TypeError: ``other`` belongs to another connector.
        """
        if not isinstance(other, SSDKVStats):
            raise TypeError(f"cannot aggregate {type(other).__name__} into SSDKVStats")
        counters = dict(self.data["counters"])
        for key, value in other.data["counters"].items():
            counters[key] = counters.get(key, 0) + value
        gauges = dict(self.data["gauges"])
        for source, newer in other.data["gauges"].items():
            gauges[source] = {**gauges.get(source, {}), **newer}
        # New dicts: vLLM's log accumulates into the payload that the Prometheus side also holds.
        self.data = Payload(counters=counters, gauges=gauges)
        return self

    def reduce(self) -> dict[str, int | float]:
        """Counters that gained and all gauges, for vLLM's periodic log line.

        Without histograms and info, which say little on one line.
        """
        gauges = combine_gauges(list(self.data["gauges"].values()))
        counters = {key: value for key, value in self.data["counters"].items() if value}
        return {
            key: value
            for key, value in {**counters, **gauges}.items()
            if parse_key(key)[0].kind in {"counter", "gauge"}
        }

    def is_empty(self) -> bool:
        """Check whether there is nothing to report."""
        return not self.data["counters"] and not self.data["gauges"]


class SSDKVPromMetrics(KVConnectorPromMetrics):
    """Creates the Prometheus objects and feeds them. Lives in the API server process(es).

    The classes come from ``metric_types`` (Prometheus's own or Ray's). In Prometheus's
    multiprocess mode gauges report the most recent value, like vLLM's own.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[type, type],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters: dict[str, Counter] = {
            metric.name: self._counter_cls(
                name=metric.full_name,
                documentation=metric.help,
                labelnames=[*labelnames, *metric.label_names],
            )
            for metric in METRICS
            if metric.kind == "counter"
        }
        self._gauges: dict[str, Gauge] = {
            metric.name: self._gauge_cls(
                name=metric.full_name,
                documentation=metric.help,
                labelnames=[*labelnames, *metric.label_names],
                multiprocess_mode="mostrecent",
            )
            for metric in METRICS
            if metric.kind in {"gauge", "info"}
        }
        self._histograms: dict[str, Histogram] = {
            metric.name: self._histogram_cls(
                name=metric.full_name,
                documentation=metric.help,
                buckets=list(metric.buckets),
                labelnames=[*labelnames, *metric.label_names],
            )
            for metric in METRICS
            if metric.kind == "histogram"
        }
        self._engine_values = per_engine_labelvalues
        self._children: dict[tuple[str, int], Any] = {}
        self._last: dict[int, dict[str, dict[str, float]]] = {}
        for engine_idx, metric in itertools.product(per_engine_labelvalues, METRICS):
            if metric.kind == "counter":
                self._expose_zero(metric, engine_idx)

    def _expose_zero(self, metric: Metric, engine_idx: int) -> None:
        """Show counters with known label values as 0 from the start, so that rates work."""
        if any(not label.values for label in metric.labels):
            return
        for label_values in itertools.product(*(label.values for label in metric.labels)):
            self._counters[metric.name].labels(*self._engine_values[engine_idx], *label_values)

    def observe(self, transfer_stats_data: Payload, engine_idx: int = 0) -> None:
        """Record one payload, the ``data`` of :class:`SSDKVStats`.

        Gauges of a source that is missing from this payload keep their last value.
        """
        histograms: dict[str, list[float]] = {}
        for key, value in transfer_stats_data["counters"].items():
            if parse_key(key)[0].kind == "histogram":
                whole, position = histogram_of(key)
                parts = histograms.setdefault(whole, [0.0] * len(bucket_keys(whole)))
                parts[position] = value
            else:
                self._child(key, engine_idx).inc(value)
        for key, parts in histograms.items():
            _observe_all(self._child(key, engine_idx), parse_key(key)[0].buckets, parts)
        known = self._last.setdefault(engine_idx, {})
        known.update(transfer_stats_data["gauges"])
        # Unchanged ones, too: another API server may have been told other values meanwhile, and
        # the newest are shown.
        for key, value in combine_gauges(list(known.values())).items():
            self._child(key, engine_idx).set(value)

    def _child(self, key: str, engine_idx: int) -> Any:  # noqa: ANN401 - Prometheus's own or Ray's
        """Find the child that takes the values of a key; to find it by its labels takes longer than
        to add."""
        child = self._children.get((key, engine_idx))
        if child is None:
            metric, label_values = parse_key(key)
            of_kind: dict[str, Any] = {"counter": self._counters, "histogram": self._histograms}
            parent = of_kind.get(metric.kind, self._gauges)[metric.name]
            child = parent.labels(*self._engine_values[engine_idx], *label_values)
            self._children[key, engine_idx] = child
        return child


class _OneByOne(Protocol):
    """Common part of every histogram, Ray's too."""

    def observe(self, amount: float) -> None: ...


def _observe_all(
    child: Histogram | _OneByOne, bounds: Sequence[float], parts: Sequence[float]
) -> None:
    """Add what many calls of ``observe`` would; a device ends 10,000 requests between two steps.

    prometheus_client has no public way, so this uses the attributes that its own ``observe`` does.
    Ray's histogram has no way at all: there each value counts as its bucket's bound.

    Args:
        child: With its labels.
        bounds: Of its buckets.
        parts: Values per bucket, in the last one above all bounds, and their sum.
    """
    if not isinstance(child, Histogram):
        for bound, count in zip((*bounds, 2 * bounds[-1]), parts, strict=False):
            for _ in range(int(count)):
                child.observe(bound)
        return
    for bucket, count in zip(child._buckets, parts[:-1], strict=True):
        bucket.inc(count)
    child._sum.inc(parts[-1])
