"""Metrics of the index's counters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Protocol

from vllm_ssdkv.base.metrics import Counters

_GAUGES = ("ready", "free", "pinned", "masked", "retained")
_COUNTERS: Final[tuple[tuple[str, str, dict[str, str]], ...]] = (
    ("slots_evicted", "evictions", {}),
    ("retentions_cut", "retentions_cut", {}),
    ("slots_stored", "published", {}),
    ("recovered_slots", "recovered", {}),
    ("journal_corrupt_records", "journal_corrupt_records", {}),
    ("journal_resets", "journal_resets", {}),
    ("journal_lost_records", "journal_lost_records", {}),
    ("journal_errors", "journal_append_errors", {"call": "append"}),
    ("journal_errors", "journal_sync_errors", {"call": "sync"}),
    ("journal_errors", "journal_rewrite_errors", {"call": "rewrite"}),
    ("journal_errors", "journal_look_errors", {"call": "look"}),
    ("state_files_restored", "journal_restores", {"file": "journal"}),
)
"""Metric, the index's count of it, and labels."""


class CountedIndex(Protocol):
    """Index with numbers."""

    @property
    def num_slots(self) -> int:
        """Slot numbers are below this."""

    @property
    def counters(self) -> Mapping[str, int]:
        """Events since the start, by name."""

    def gauges(self) -> dict[str, int]:
        """Numbers of slots by state, and of the journal."""


class GrowingPlacement(Protocol):
    """Placement of a store that may grow."""

    @property
    def slots_to_come(self) -> int:
        """Slots that the store may yet grow by."""


def start_at_zero(counters: Counters) -> None:
    """Let the counters of an index exist where it is elsewhere."""
    for metric, _, labels in _COUNTERS:
        counters.add(metric, 0, **labels)


class IndexMetrics:
    """Carries an index's numbers to the metrics. Used by the scheduler's thread."""

    def __init__(self, index: CountedIndex, placement: GrowingPlacement, counters: Counters):
        self._index = index
        self._placement = placement
        self._counters = counters
        self._told: dict[str, int] = {}

    def update(self) -> None:
        """Bring the metrics up to date."""
        self._tell_slots(self._index.gauges())
        counts = self._index.counters
        for metric, count, labels in _COUNTERS:
            total = counts.get(count, 0)
            self._counters.add(metric, total - self._told.get(count, 0), **labels)
            self._told[count] = total

    def _tell_slots(self, gauges: dict[str, int]) -> None:
        to_come = self._placement.slots_to_come
        # Not every number has a slot: some are spare, for segments that will be striped anew.
        gauges["free"] += to_come
        self._counters.set("slots", float(self._index.num_slots - gauges["lost"] + to_come))
        self._counters.set("slots_to_come", float(to_come))
        for name in _GAUGES:
            self._counters.set(f"slots_{name}", float(gauges[name]))
        self._counters.set("journal_bytes", float(gauges["journal_bytes"]))
