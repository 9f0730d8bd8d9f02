"""Numbers of the whole engine, on their way to vLLM."""

from __future__ import annotations

from collections.abc import Sequence

from vllm_ssdkv.connector.messages import RankReport
from vllm_ssdkv.connector.metrics.stats import SSDKVStats
from vllm_ssdkv.connector.metrics.stats_collector import StatsCollector
from vllm_ssdkv.connector.scheduler.scheduler_parts import SchedulerParts
from vllm_ssdkv.store.index_metrics import IndexMetrics


class SchedulerMetrics:
    """Gauges of the scheduler, and counts of all processes. Used by the scheduler's thread."""

    def __init__(self, parts: SchedulerParts):
        self._store, self._weights, self._choice = parts.store, parts.weights, parts.loads.choice
        self._index = IndexMetrics(parts.store.index, parts.store.rebalancer, parts.store.counters)
        self._collector = StatsCollector(parts.store.counters)

    def take_in(self, reports: Sequence[tuple[int, RankReport]]) -> None:
        """The workers' counts of one step."""
        self._collector.take_in(reports)

    def take(self, *, running: bool) -> SSDKVStats | None:
        """Counts, when it is time to tell; ``running``: whether requests run."""
        if not self._collector.due(running=running):
            return None
        self.update_gauges()
        return self._collector.take()

    def update_gauges(self) -> None:
        """Refresh what is told of index and devices."""
        weights, counters = self._store.rebalancer.weights, self._store.counters
        for path, weight in zip(self._weights.paths, weights, strict=True):
            share = weight / sum(weights) if weight else 0.0
            counters.set("device_share", share, device=path)
        self._choice.update_gauges()
        self._store.write_policy.update_gauges(self._weights.paths)
        self._index.update()
