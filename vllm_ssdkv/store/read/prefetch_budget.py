"""Budget of prefetch: reads of a device beside what was asked for, done before more is asked for.

Pages that queries choose are not spread evenly, so the other devices wait for the busiest one; then
all of them wait until the next layer has chosen. Reads that may be in vain belong there: then they
cost bandwidth and no time.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Final

import numpy as np
from numpy.typing import NDArray

_LATEST: Final = 8
"""Number of fetches from which the devices' time, and the pauses between fetches, are estimated."""


class PrefetchBudget:
    """Watches one fetch after the other. Used by the thread that runs the forward pass."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        """``clock``: monotonic seconds."""
        self._clock = clock
        self._load = np.zeros(0, dtype=np.int64)
        self._begin = 0.0
        self._end: float | None = None
        self._waits: deque[tuple[float, int]] = deque(maxlen=_LATEST)
        self._pauses: deque[float] = deque(maxlen=_LATEST)

    def asked(self, load: NDArray[np.int64], at: float | None = None) -> None:
        """Devices have to read so many pages, [devices], for a fetch that begins now, or ``at``."""
        self._begin = self._clock() if at is None else at
        if self._end is not None:
            self._pauses.append(self._begin - self._end)
            self._end = None
        self._load = load

    def arrived(self) -> None:
        """Note that the fetch has waited for its reads."""
        self._end = self._clock()
        most = int(self._load.max(initial=0))
        if most:
            self._waits.append((self._end - self._begin, most))

    def passed(self, nothing: NDArray[np.int64], at: float) -> None:
        """Note a fetch for which devices had ``nothing`` to read, [devices], at the time ``at``."""
        self.asked(nothing, at)
        self._end = at

    def spare(self, ahead: NDArray[np.int64]) -> NDArray[np.int64]:
        """Pages that each device can read, [devices], until the next fetch begins.

        The shortest pause of late counts: reads must not be late for any layer. Where nothing is
        known of the devices, they can read what levels them.

        Args:
            ahead: Pages that each device reads in any case beside the fetch, [devices].
        """
        pause = 0
        if self._waits and self._pauses:
            waited = sum(seconds for seconds, _ in self._waits)
            pages = sum(count for _, count in self._waits)
            pause = int(min(self._pauses) * pages / max(waited, 1e-9))
        spare: NDArray[np.int64] = self._load.max(initial=0) + pause - self._load - ahead
        return spare.clip(0)
