"""Metrics of the I/O engine's counters."""

from __future__ import annotations

from collections.abc import Sequence

from vllm_ssdkv.base.metrics import Counters
from vllm_ssdkv.store.io.engines.protocol import DEPTH_BOUNDS, LATENCY_BOUNDS, IoEngine, Op


class EngineMetrics:
    """Carries an engine's statistics to the metrics. Used by one thread.

    Args:
        engine: Where the numbers come from.
        paths: Of the devices, in the engine's order.
        counters: Where they go.
    """

    def __init__(self, engine: IoEngine, paths: Sequence[str], counters: Counters):
        self._engine = engine
        self._paths = paths
        self._counters = counters
        self._told: dict[str, int] = {}

    def update(self) -> None:
        """Bring the metrics up to date."""
        now = dict(self._engine.statistics())
        gained = {name: value - self._told.get(name, 0) for name, value in now.items()}
        self._told = now
        for device, path in enumerate(self._paths):
            self._counters.add_all(
                "io_queue_depth",
                [gained[f"depth_{bound}.{device}"] for bound in DEPTH_BOUNDS],
                gained[f"depth_sum.{device}"],
                device=path,
            )
            for direction in (op.name.lower() for op in Op):
                labels = {"device": path, "direction": direction}
                requests = gained[f"{direction}_requests.{device}"]
                self._counters.add("io_requests", requests, **labels)
                self._counters.add_all(
                    "io_latency_seconds",
                    [gained[f"{direction}_latency_{bound}.{device}"] for bound in LATENCY_BOUNDS],
                    gained[f"{direction}_nanoseconds.{device}"] / 1e9,
                    **labels,
                )
