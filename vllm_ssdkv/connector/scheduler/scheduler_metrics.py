"""Numbers of the whole engine, on their way to vLLM."""

from __future__ import annotations

from collections.abc import Sequence

from vllm_ssdkv.connector.messages import RankReport
from vllm_ssdkv.connector.metrics.stats import SSDKVStats
from vllm_ssdkv.connector.metrics.stats_collector import StatsCollector
from vllm_ssdkv.connector.scheduler.scheduler_parts import SchedulerParts
from vllm_ssdkv.store.index_metrics import IndexMetrics, start_at_zero


class SchedulerMetrics:
    """Gauges of the scheduler, and counts of all processes. Used by the scheduler's thread."""

    def __init__(self, parts: SchedulerParts):
        self._own, self._choice = parts.store.own, parts.loads.choice
        self._counters, self._policy = parts.store.counters, parts.store.write_policy
        if self._own is None:
            start_at_zero(self._counters)
        else:
            self._index = IndexMetrics(self._own.index, self._own.rebalancer, self._counters)
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
        self._choice.update_gauges()
        if self._own is None:
            return
        paths, weights = self._own.weights.paths, self._own.rebalancer.weights
        for path, weight in zip(paths, weights, strict=True):
            share = weight / sum(weights) if weight else 0.0
            self._counters.set("device_share", share, device=path)
        self._policy.update_gauges(paths)
        self._index.update()
