"""How fast each device really is, as seen from the batches that pass: finds the slow one.

A device that still works on the batch before, or has done a first piece of this one, is at work
until the last piece has ended: bytes per second of that time are its rate, without the latency that
a device with little to do spends on each piece. The ends are noticed when somebody looks. Who looks
late would find all devices equally fast: what was not looked at often enough is not counted.

Two things follow from it. Where new slots lie changes only when several windows agree, since stored
blocks are given up for it. Which of two copies is read costs nothing to change: it follows the
latest window.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass

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
"""Nothing is said to be slower than a twentieth: it needs some load to be seen recovering. Shares
are said in steps of the same size."""

SPARED = 0.1
"""Part of its speed at least that is not asked of a slow device. All wait for it when it gets a
little too much for a moment: from slots that still have its old share, from a stripe that is not
whole. One device of eight at a fifth costs 1 % of the throughput when it gets 0.15, and of one
slot in thirty with the old share it would cost 10 % when it gets 0.2."""

MIN_PART_BYTES = 512 * 1024
"""Smaller parts of a batch are looked at only where a device is known to be slow, and gets little:
or nobody would see it recover."""

BLUR = 0.3
"""Times count if they are known to this fraction."""

MIN_WINDOW_BYTES = 1024 * 1024


_ALL, _AT_WORK = 0, 1
_NOBODY: NDArray[np.int64] = np.zeros(0, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class Part:
    """What one device does for a batch. Seconds of the monotonic clock.

    Attributes:
        nbytes: Its size.
        begin: When it was submitted.
        first: When a piece was first seen to have ended; ``end`` where that is not known well.
        first_bytes: Bytes that had ended by then.
        end: When the last piece was seen to have ended.
    """

    nbytes: int
    begin: float
    first: float
    first_bytes: int
    end: float


class DeviceSpeed:
    """Rates of the devices of one rank, relative to their weights. Thread-safe; never blocks."""

    def __init__(self, paths: Sequence[str], weights: Sequence[float]):
        self._paths = tuple(paths)
        self._weights = np.array(weights, dtype=np.float64)
        self._lock = threading.Lock()
        count = len(paths)
        self._free_at = np.full(count, -np.inf)
        # Of this window, [2, devices]: from submission to end, and only while it was at work.
        self._bytes = np.zeros((2, count))
        self._busy = np.zeros((2, count))
        self._window_end = -np.inf
        self._factor = np.ones(count)
        """What each device was worth of its weight when something was said of it last."""
        self._latest = np.ones(count)
        """The same as of the latest window."""
        self._seen: list[list[float]] = [[] for _ in paths]
        """Of each device, factors of the latest windows that differ from what was said."""
        self._news: dict[int, float] = {}

    @property
    def devices(self) -> int:
        """How many there are."""
        return len(self._paths)

    def telling(self, nbytes: NDArray[np.float64]) -> NDArray[np.int64]:
        """Devices whose parts of a batch, of so many bytes, [devices], tell how fast they are."""
        with self._lock:
            slow = self._slow()
        return np.flatnonzero((nbytes >= MIN_PART_BYTES) | (slow & (nbytes > 0)))

    def _slow(self) -> NDArray[np.bool_]:
        """Which devices were said to be slow, or seemed so lately. Lock held."""
        slow: NDArray[np.bool_] = np.minimum(self._factor, self._latest) < 1 / TOLERANCE
        return slow

    def served(self, device: int, part: Part) -> None:
        """A device has done its part of a batch."""
        with self._lock:
            before = float(self._free_at[device])
            start = max(part.begin, before)
            self._free_at[device] = max(part.end, start)
            self._count(_ALL, device, part.nbytes, part.end - start)
            if before >= part.begin:
                self._count(_AT_WORK, device, part.nbytes, part.end - start)
            else:
                rest = part.nbytes - part.first_bytes
                self._count(_AT_WORK, device, rest, part.end - part.first)
            if part.end >= self._window_end:
                if np.isfinite(self._window_end):
                    self._judge()
                self._window_end = part.end + WINDOW_S

    def _count(self, row: int, device: int, nbytes: int, seconds: float) -> None:
        if seconds > 0:
            self._bytes[row, device] += nbytes
            self._busy[row, device] += seconds

    def rates(self) -> NDArray[np.float64]:
        """What each device was worth lately, [devices], in the unit of the weights."""
        with self._lock:
            rates: NDArray[np.float64] = self._weights * self._latest
            return rates

    def take_news(self) -> list[tuple[int, float]]:
        """Devices whose speed has changed since the last call, and the part of its weight, in
        (0, 1], that each is to get now: less than it is worth, see :data:`SPARED`."""
        with self._lock:
            news, self._news = self._news, {}
            return list(news.items())

    def _judge(self) -> None:
        """A window is over. Lock held."""
        slow = self._slow()
        least = np.where(slow, MIN_PART_BYTES, MIN_WINDOW_BYTES)
        sure = self._bytes[_AT_WORK] >= least
        if not (sure & ~slow).any():
            sure[:] = False  # then all are compared with their latencies
        moved, busy = (np.where(sure, a[_AT_WORK], a[_ALL]) for a in (self._bytes, self._busy))
        known = (moved >= least) | (slow & (moved > 0))
        usual = known & ~slow & (sure | ~sure.any())
        if int(known.sum()) < 2 or not usual.any():
            return  # nothing to compare with; what was counted stays for the next window
        rates = np.zeros(len(known))
        rates[known] = moved[known] / busy[known] / self._weights[known]
        # The upper median: of two devices the faster one.
        full = np.sort(rates[usual])[int(usual.sum()) // 2]
        factors = np.clip(rates / full, LEAST_SHARE, 1.0)
        # With latencies that others are without, a device is at least so fast, no more is known.
        weak = ~sure & ((self._factor < 1) | sure.any())
        latest = np.where(weak, np.maximum(factors, self._latest), factors)
        self._latest = np.where(known, latest, self._latest)
        # One that is read no more is given some work again after a while.
        idle = self._bytes[_ALL] == 0
        self._latest[idle] = np.minimum(1.0, self._latest[idle] * TOLERANCE)
        for device in np.flatnonzero(known & (~weak | (factors > self._factor))).tolist():
            self._compare(device, float(factors[device]))
        self._bytes[:, known] = self._busy[:, known] = 0

    def _compare(self, device: int, factor: float) -> None:
        """What a window says of a device, with what was said of it last."""
        said, seen = float(self._factor[device]), self._seen[device]
        if said / TOLERANCE <= factor <= said * TOLERANCE:
            seen.clear()
            return
        seen.append(factor)
        if len(seen) >= WINDOWS:
            self._say(device, float(np.median(seen)))
            seen.clear()

    def _say(self, device: int, factor: float) -> None:
        if factor > 1 / TOLERANCE:
            self._factor[device] = self._news[device] = 1.0
            logger.info("ssdkv: device %s is as fast again as it should be", self._paths[device])
            return
        share = max(1, math.floor((1 - SPARED) * factor / LEAST_SHARE)) * LEAST_SHARE
        self._factor[device], self._news[device] = factor, share
        logger.warning(
            "ssdkv: device %s is slow: %.2f of what its weight says; of what is stored from now on "
            "it gets %.2f of its share",
            self._paths[device],
            factor,
            share,
        )


class BatchWatch:
    """Notices when each device has done its part of a batch. Belongs to who waits for the batch."""

    def __init__(self, speed: DeviceSpeed, devices: U16, lengths: U32, begin: float):
        """``devices`` and ``lengths`` of the requests, [n]; ``begin`` as in ``served``."""
        self._speed = speed
        self._devices = devices
        self._begin = begin
        self.nbytes = np.bincount(devices, lengths, speed.devices).astype(np.float64)
        """Of each device's part, [devices]."""
        # One device alone has nothing to be compared with.
        self._left = _NOBODY
        if np.count_nonzero(self.nbytes) > 1:
            telling = speed.telling(self.nbytes)
            self._left = telling if telling.size > 1 else _NOBODY
        self._lengths = lengths
        self._last_look = begin
        self._first: dict[int, tuple[float, int, float]] = {}
        """Of a device, when a piece was first seen to have ended, how many bytes had, and how long
        nobody had looked before."""
        self._ended: list[tuple[int, float, float]] = []
        """Device, when its part was seen to have ended, and how long nobody had looked before."""

    @property
    def done(self) -> bool:
        """Whether there is nothing left to notice."""
        return self._left.size == 0

    def look(self, batch: Batch, now: float) -> None:
        """See which parts have ended by ``now``."""
        over = batch.results() != PENDING
        ended = np.bincount(self._devices[over], self._lengths[over], len(self.nbytes))
        gap = now - self._last_look
        self._last_look = now
        for device in self._left[ended[self._left] > 0].tolist():
            self._first.setdefault(device, (now, int(ended[device]), gap))
        whole = ended[self._left] == self.nbytes[self._left]
        self._ended += [(d, now, gap) for d in self._left[whole].tolist()]
        self._left = self._left[~whole]
        if self.done:
            self._tell(BLUR * (now - self._begin))

    def _tell(self, allowed: float) -> None:
        for device, end, gap in self._ended:
            if gap > allowed:
                continue
            first, nbytes, before = self._first[device]
            if max(before, gap) > BLUR * (end - first):
                first, nbytes = end, 0
            part = Part(int(self.nbytes[device]), self._begin, first, nbytes, end)
            self._speed.served(device, part)
