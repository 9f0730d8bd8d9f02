"""How fast each device really is, as seen from the batches that pass: finds the slow one.

A device is busy from the submission of its part of a batch, or from the end of its part of the
batch before, until the last request of the part has ended. Bytes per busy second is its rate,
whatever its share of the data is. The end is noticed when somebody looks. Who looks late would find
all devices equally fast: what was not looked at often enough is not counted.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from vllm_ssdkv.store.engine.protocol import PENDING, U16, U32, Batch

logger = logging.getLogger(__name__)

WINDOW_S = 0.5
"""Rates are judged over windows of this length."""

WINDOWS = 3
"""Windows in a row that must agree: a pause of a drive for its own housekeeping is shorter."""

TOLERANCE = 1.5
"""Factor by which a device must differ from what is known of it: less is not worth striping
segments anew, for which stored blocks are given up."""

LEAST_SHARE = 0.05
"""Nothing is said to be slower than a twentieth: it needs some load to be seen recovering."""

MIN_PART_BYTES = 512 * 1024
"""Smaller parts of a batch are dominated by the latency of one request."""

BLUR = 0.3
"""The end of a part counts if it is known to this fraction of the time that the batch took."""

MIN_WINDOW_BYTES = 1024 * 1024


class DeviceSpeed:
    """Rates of the devices of one rank, relative to their weights. Thread-safe; never blocks."""

    def __init__(self, paths: Sequence[str], weights: Sequence[float]):
        self._paths = tuple(paths)
        self._weights = np.array(weights, dtype=np.float64)
        self._lock = threading.Lock()
        count = len(paths)
        self._free_at = np.full(count, -np.inf)
        self._bytes = np.zeros(count)
        self._busy = np.zeros(count)
        self._window_end = -np.inf
        self._factor = np.ones(count)
        """What was said last of each device: the share of its weight that it is worth."""
        self._seen: list[list[float]] = [[] for _ in paths]
        """Of each device, factors of the latest windows that differ from what was said."""
        self._news: dict[int, float] = {}

    def served(self, device: int, nbytes: int, begin: float, end: float) -> None:
        """A device has done its part of a batch.

        Args:
            device: Its number.
            nbytes: Bytes of the part.
            begin: When it was submitted, in seconds of the monotonic clock.
            end: When its last request was seen to have ended.
        """
        with self._lock:
            start = max(begin, float(self._free_at[device]))
            self._free_at[device] = max(end, start)
            if nbytes >= MIN_PART_BYTES and end > start:
                self._bytes[device] += nbytes
                self._busy[device] += end - start
            if end >= self._window_end:
                if np.isfinite(self._window_end):
                    self._judge()
                self._window_end = end + WINDOW_S

    def rates(self) -> NDArray[np.float64]:
        """What each device is worth now, [devices], in the unit of the weights."""
        with self._lock:
            rates: NDArray[np.float64] = self._weights * self._factor
            return rates

    def take_news(self) -> list[tuple[int, float]]:
        """Devices whose factor has changed since the last call: the share of its weight, in
        (0, 1], that a device is worth now."""
        with self._lock:
            news, self._news = self._news, {}
            return list(news.items())

    def _judge(self) -> None:
        """A window is over. Lock held."""
        known = (self._bytes >= MIN_WINDOW_BYTES) & (self._busy > 0)
        if int(known.sum()) < 2:
            return  # nothing to compare with; what was counted stays for the next window
        rates = self._bytes[known] / self._busy[known] / self._weights[known]
        # The upper median: of two devices the faster one.
        factors = np.minimum(1.0, rates / np.sort(rates)[len(rates) // 2])
        for device, factor in zip(np.flatnonzero(known).tolist(), factors.tolist(), strict=True):
            said = float(self._factor[device])
            if said / TOLERANCE <= factor <= said * TOLERANCE:
                self._seen[device] = []
                continue
            self._seen[device].append(factor)
            if len(self._seen[device]) >= WINDOWS:
                self._say(device, float(np.median(self._seen[device])))
        self._bytes[:] = 0
        self._busy[:] = 0

    def _say(self, device: int, factor: float) -> None:
        factor = max(LEAST_SHARE, round(factor / LEAST_SHARE) * LEAST_SHARE)
        self._seen[device] = []
        if factor > 1 / TOLERANCE:
            factor = 1.0
        self._factor[device] = factor
        self._news[device] = factor
        if factor < 1:
            logger.warning(
                "ssdkv: device %s is slow: %.2f of what its weight says; it gets so much less of "
                "what is stored from now on",
                self._paths[device],
                factor,
            )
        else:
            logger.info("ssdkv: device %s is as fast again as it should be", self._paths[device])


class BatchWatch:
    """Notices when each device has done its part of a batch. Belongs to who waits for the batch."""

    def __init__(self, speed: DeviceSpeed, devices: U16, lengths: U32, begin: float):
        """``devices`` and ``lengths`` of the requests, [n]; ``begin`` as in ``served``."""
        self._speed = speed
        self._devices = devices
        self._begin = begin
        self._bytes = np.bincount(devices, lengths)
        # One device alone has nothing to be compared with.
        large = np.flatnonzero(self._bytes >= MIN_PART_BYTES)
        self._left = large if large.size > 1 else large[:0]
        self._last_look = begin
        self._ended: list[tuple[int, float, float]] = []
        """Device, when its part was seen to have ended, and how long nobody had looked before."""

    @property
    def done(self) -> bool:
        """Whether there is nothing left to notice."""
        return self._left.size == 0

    def look(self, batch: Batch, now: float) -> None:
        """See which parts have ended by ``now``."""
        pending = np.unique(self._devices[batch.results() == PENDING])
        ended = np.setdiff1d(self._left, pending)
        self._ended += [(d, now, now - self._last_look) for d in ended.tolist()]
        self._left = np.intersect1d(self._left, pending)
        self._last_look = now
        if self.done:
            allowed = BLUR * (now - self._begin)
            for device, end, gap in self._ended:
                if gap <= allowed:
                    self._speed.served(device, int(self._bytes[device]), self._begin, end)
