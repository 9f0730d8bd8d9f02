"""Times of the parts of a step's attention.

Choosing pages, what fetching them costs the processor (looking them up, submitting, checking),
guessing what will be chosen next while they are being read, waiting for bytes, attending, merging.

The clock is native: a step reads it five times and more per layer, each time behind kernels that
have emptied the processor's caches, where some lines of Python take 2 us.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

from vllm_ssdkv._kernels import AttentionClock

__all__ = [
    "AHEAD",
    "ATTEND",
    "FETCH",
    "MERGE",
    "PARTS",
    "SELECT",
    "WAIT",
    "AttentionClock",
    "StepClock",
]

PARTS: Final = ("select", "fetch", "ahead", "wait", "attend", "merge")
SELECT, FETCH, AHEAD, WAIT, ATTEND, MERGE = range(len(PARTS))


class StepClock(Protocol):
    """Clock of a step's attention: :class:`AttentionClock`, or a bench's own."""

    def start(self) -> None:
        """Attention of a layer begins."""

    def lap(self, part: int) -> None:
        """Charge the time since the last call to this part."""

    @property
    def seconds(self) -> Sequence[float]:
        """Seconds of every part, so far."""
