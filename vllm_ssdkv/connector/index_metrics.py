"""What the index counts, as metrics."""

from __future__ import annotations

from vllm_ssdkv.metrics import Counters
from vllm_ssdkv.store.index import SlotIndex

_GAUGES = ("ready", "free", "pinned")
_COUNTERS = (
    ("slots_evicted", "evictions"),
    ("slots_stored", "published"),
    ("recovered_slots", "recovered"),
    ("journal_corrupt_records", "journal_corrupt_records"),
)


class IndexMetrics:
    """Carries an index's numbers to the metrics. Used by the scheduler's thread."""

    def __init__(self, index: SlotIndex, counters: Counters):
        self._index = index
        self._counters = counters
        self._told: dict[str, int] = {}

    def update(self) -> None:
        """Bring the metrics up to date."""
        gauges = self._index.gauges()
        for name in _GAUGES:
            self._counters.set(f"slots_{name}", float(gauges[name]))
        self._counters.set("journal_bytes", float(gauges["journal_bytes"]))
        counts = self._index.counters
        for metric, count in _COUNTERS:
            self._counters.add(metric, counts.get(count, 0) - self._told.get(metric, 0))
            self._told[metric] = counts.get(count, 0)
