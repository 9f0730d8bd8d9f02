"""Hedged reads: when a node that is slow to answer is overtaken by another one with a copy."""

from __future__ import annotations

from collections import deque
from typing import Final

import numpy as np

SAMPLES: Final = 128
"""Loads that the quantile is taken of, the newest ones of a node."""

LEAST_SAMPLES: Final = 16
"""Number of loads before the latency of a node is known."""

QUANTILE: Final = 0.95

SHARE: Final = 0.25
"""Loads that may be hedged: more would be load upon load where all nodes are slow."""

MOST_SAVED: Final = 8.0
"""Hedges at a time, at most."""

CALL_BLOCKS: Final = 4
"""Blocks that take as long as a call without any, as a guess: small loads are not all latency."""


class LoadTimes:
    """Times of a node's loads, and of what length one is late. Used under the owner's lock.

    Example:
        >>> times = LoadTimes()
        >>> for _ in range(16):
        ...     times.record(0.010, blocks=6)
        >>> round(times.late(blocks=16), 3)
        0.02
    """

    def __init__(self) -> None:
        self._per_block: deque[float] = deque(maxlen=SAMPLES)
        self._quantile: float | None = None
        self._recorded = 0

    def record(self, seconds: float, blocks: int) -> None:
        """A load of so many blocks has taken so long."""
        self._per_block.append(seconds / (blocks + CALL_BLOCKS))
        self._recorded += 1
        if self._recorded % LEAST_SAMPLES == 0:
            self._quantile = float(np.quantile(self._per_block, QUANTILE))

    def late(self, blocks: int) -> float | None:
        """Seconds within which 95 of 100 loads of so many blocks end; None: not known yet."""
        return None if self._quantile is None else self._quantile * (blocks + CALL_BLOCKS)


class HedgeBudget:
    """Limit of hedges to a share of the loads. Used under the owner's lock.

    Example:
        >>> budget = HedgeBudget()
        >>> budget.spend()
        False
        >>> for _ in range(4):
        ...     budget.earn()
        >>> budget.spend()
        True
    """

    def __init__(self) -> None:
        self._saved = 0.0

    def earn(self) -> None:
        """A load begins."""
        self._saved = min(MOST_SAVED, self._saved + SHARE)

    def spend(self) -> bool:
        """Check whether one more may be hedged, and count it."""
        if self._saved < 1:
            return False
        self._saved -= 1
        return True
