"""Counters of an engine's processes on their way to vLLM: often in, now and then out."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from vllm_ssdkv.base.metrics import MOST_OF_RANKS, TELL_INTERVAL_S, Counters
from vllm_ssdkv.connector.messages import RankReport
from vllm_ssdkv.connector.metrics.stats import SSDKVStats


class StatsCollector:
    """Brings the numbers of scheduler and workers together. Used by the scheduler's thread.

    Here because the reports of all ranks pass here, and because nobody else knows that nothing runs
    any more before vLLM hands out the last tokens: what a request has counted is on ``/metrics``
    when its answer is there.
    """

    def __init__(self, counters: Counters, clock: Callable[[], float] = time.monotonic):
        """``counters`` are those of this process; they take in what workers counted."""
        self._counters = counters
        self._clock = clock
        self._gauges: dict[str, dict[str, float]] = {}
        self._changed = False
        self._due = clock()

    def take_in(self, reports: Sequence[tuple[int, RankReport]]) -> None:
        """The workers' reports of one step; what they counted is taken out of them."""
        most: dict[str, float] = {}
        for rank, report in reports:
            gained = report.gained
            for key in gained.keys() & MOST_OF_RANKS:
                most[key] = max(most.get(key, 0.0), gained.pop(key))
            self._counters.add_keyed(gained, gained.values())
            if report.gauges:
                self._gauges.setdefault(f"rank{rank}", {}).update(report.gauges)
                self._changed = True
        self._counters.add_keyed(most, most.values())

    def due(self, *, running: bool) -> bool:
        """Check whether to tell now: at once when no request is ``running``, else in intervals."""
        return not running or self._clock() >= self._due

    def take(self) -> SSDKVStats | None:
        """Take the counters since the last call, with all gauges; None: nothing has changed.

        With several API servers each of them sees only some of what is told, so gauges that have
        not changed go with those that have.
        """
        self._due = self._clock() + TELL_INTERVAL_S
        own = self._counters.take_gauges()
        if own:
            self._gauges.setdefault("scheduler", {}).update(own)
        gained = self._counters.take_gained()
        changed, self._changed = self._changed or bool(own), False
        return SSDKVStats.of(gained, self._gauges) if gained or changed else None
