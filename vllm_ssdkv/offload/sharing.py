"""Shares of a rank's device in what is attended to, step by step: by an option, or by measuring.

Contexts may be attended to by both, the device and the thread of the forward pass. Chosen pages of
a layer go one way as a whole: they are few, and whoever attends to them has to fetch them.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from typing import Final, Literal

from vllm_ssdkv.base.metrics import TELL_INTERVAL_S, Counters
from vllm_ssdkv.base.sizes import approximate_size
from vllm_ssdkv.offload.share_rule import (
    SMOOTH,
    Attended,
    FixedShare,
    MeasuredShare,
    ShareRule,
    Way,
)

logger = logging.getLogger(__name__)

Kind = Literal["contexts", "pages"]

TOLD_EVERY_S: Final = 60.0
"""Seconds between two lines in the log about the same kind, at least."""

SETTLED: Final = 0.02
"""Change of a share from a step to the next below which it is told."""

NOTABLE: Final = 0.1
"""Change of a share that is worth a line."""


class KindShare:
    """Share of the device in contexts, or in chosen pages. Used by the thread of the forward pass.

    Attributes:
        rule: Decides.
        device_rate: Bytes per second of the device in its latest steps, waits included; 0: none.
    """

    def __init__(
        self,
        kind: Kind,
        rule: ShareRule,
        counters: Counters,
        clock: Callable[[], float] = time.monotonic,
    ):
        """``clock``: monotonic seconds."""
        self.rule = rule
        self._kind: Kind = kind
        self._counters = counters
        self._clock = clock
        self.device_rate = 0.0
        self._sums = [0.0] * 5
        self._before = math.nan
        self._gauges_due = 0.0
        self._told: tuple[Way, float, float] | None = None
        """Way and share of the latest line in the log, and its time."""

    @property
    def share(self) -> float:
        """Share of the device in this step."""
        return self.rule.share

    def note(self, attended: Attended) -> None:
        """A layer of this step has ended."""
        sums = self._sums
        sums[0] += attended.nbytes
        sums[1] += attended.theirs
        sums[2] += attended.seconds
        sums[3] += attended.step_s
        sums[4] += attended.device_s

    def end_step(self) -> tuple[float, float]:
        """Learn from what was noted, and decide for the next step.

        Returns:
            Bytes that were attended to, and those of them that the device attended to.
        """
        if not self._sums[0]:
            return 0.0, 0.0
        step, self._sums = Attended(*self._sums), [0.0] * 5
        now = self._clock()
        if self.rule.trying:
            self._counters.add("offload_trials", of=self._kind)
        elif now >= self._gauges_due:
            self._gauges_due = now + TELL_INTERVAL_S
            self._set_gauges(step)
        self.rule.learn(step)
        if step.theirs and step.device_s:
            rate = step.theirs / step.device_s
            self.device_rate += SMOOTH * (rate - self.device_rate) if self.device_rate else rate
        self._tell(now)
        return step.nbytes, step.theirs

    def _set_gauges(self, step: Attended) -> None:
        self._counters.set("offload_share", step.theirs / step.nbytes, of=self._kind)
        for way, rate in self.rule.rates.items():
            self._counters.set("offload_rate", rate, of=self._kind, way=way.value)

    def _tell(self, now: float) -> None:
        """Say what is decided, and why, where it differs from what was said."""
        rule = self.rule
        way, share, rates = rule.way, rule.share, rule.rates
        if way is None or rule.trying or not rates:
            return
        moved, self._before = abs(share - self._before), share
        if not moved < SETTLED:
            return
        if self._told is not None:
            told, before, at = self._told
            changed = way is not told or abs(share - before) >= NOTABLE
            if not changed or now < at + TOLD_EVERY_S:
                return
        self._told = way, share, now
        logger.info(
            "ssdkv: offload: the device attends to %.0f %% of %s: %s",
            100 * share,
            self._kind,
            ", ".join(
                f"{one.value} {approximate_size(round(rate))}/s" for one, rate in rates.items()
            ),
        )


class Sharing:
    """Shares of a rank's device.

    Attributes:
        contexts: In contexts of rows that attend to everything.
        pages: In pages that rows chose; all of a layer's, or none.
    """

    def __init__(
        self,
        share: float | Literal["auto"],
        counters: Counters,
        clock: Callable[[], float] = time.monotonic,
    ):
        """``share``: the option; ``clock``: monotonic seconds."""

        def rule(*, splits: bool) -> ShareRule:
            return MeasuredShare(splits) if share == "auto" else FixedShare(share)

        self.contexts = KindShare("contexts", rule(splits=True), counters, clock)
        self.pages = KindShare("pages", rule(splits=False), counters, clock)
        for kind in ("contexts", "pages"):
            counters.add("offload_trials", 0, of=kind)

    def end_step(self) -> tuple[float, float]:
        """The step has ended; see :meth:`KindShare.end_step`, for both kinds."""
        contexts, pages = self.contexts.end_step(), self.pages.end_step()
        return contexts[0] + pages[0], contexts[1] + pages[1]
