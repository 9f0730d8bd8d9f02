"""Throughput of each device, as seen from the batches that pass: finds the slow one.

A device that still works on the batch before, or has done a first piece of this one, is at work
until the last piece has ended: bytes per second of that time are its rate, without the latency that
a device with little to do spends on each piece. The ends are noticed when somebody looks, and who
looks late would find all devices equally fast. So all times are known as two, earliest and latest,
and all rates as bounds: a device is said to be slow, or fast again, where these leave no doubt.

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
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vllm_ssdkv.store.io.engines.protocol import PENDING, U16, U32, Batch

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

SPARED = 0.04
"""Share withheld from a slow device at least. All devices wait for it when it gets a little too
much for a moment: from slots that still have its old share, from a stripe that is not whole. One
device of eight at a fifth costs 1 % of the throughput when it gets 0.15, and of one slot in
thirty with the old share it would cost 10 % when it gets 0.2."""

MIN_PART_BYTES = 512 * 1024
"""Smaller parts of a batch are looked at only where a device is known to be slow, and gets little:
or nobody would see it recover."""

BLUR = 0.3
"""Ends count if they are known to this fraction of the batch's time: others would only blur the
bounds of a window."""

MIN_WINDOW_BYTES = 1024 * 1024


_ALL, _AT_WORK = 0, 1
_NOBODY: NDArray[np.int64] = np.zeros(0, dtype=np.int64)


class Moment(NamedTuple):
    """Time of an event, as far as it is known. Seconds of the monotonic clock."""

    earliest: float
    latest: float


@dataclass(frozen=True, slots=True)
class Part:
    """Share of one device in a batch.

    Attributes:
        nbytes: Its size.
        begin: When it was submitted.
        first: When the last piece had ended of those that were first seen to have.
        first_bytes: Bytes of these; all, where ``first`` is not known well.
        end: When the last piece had ended.
    """

    nbytes: int
    begin: Moment
    first: Moment
    first_bytes: int
    end: Moment


class ThroughputEstimator:
    """Rates of the devices of one rank, relative to their weights. Thread-safe; never blocks."""

    def __init__(self, paths: Sequence[str], weights: Sequence[float]):
        self._paths = tuple(paths)
        self._weights = np.array(weights, dtype=np.float64)
        self._lock = threading.Lock()
        count = len(paths)
        self._free_at = [Moment(-np.inf, -np.inf)] * count
        # Of this window, [2, devices]: from submission to end, and only while it was at work.
        self._bytes = np.zeros((2, count))
        self._least_s = np.zeros((2, count))
        self._most_s = np.zeros((2, count))
        self._window_end = -np.inf
        self._factor = np.ones(count)
        """What each device was worth of its weight when something was said of it last."""
        self._latest = np.ones(count)
        """The same as of the latest window."""
        self._seen: list[list[tuple[float, float, float]]] = [[] for _ in paths]
        """Of each device, the latest windows that differ from what was said: the least that it may
        be worth, what it was taken for, and the most."""
        self._news: dict[int, float] = {}
        self.any_slow = False
        """True if any device is slow, as :meth:`_slow` says."""

    @property
    def devices(self) -> int:
        """Number of devices."""
        return len(self._paths)

    def telling(self, nbytes: NDArray[np.float64]) -> NDArray[np.int64]:
        """Devices whose parts of a batch, of so many bytes, [devices], tell how fast they are."""
        if not self.any_slow and nbytes.max(initial=0) < MIN_PART_BYTES:
            return _NOBODY
        with self._lock:
            slow = self._slow()
        return np.flatnonzero((nbytes >= MIN_PART_BYTES) | (slow & (nbytes > 0)))

    def _slow(self) -> NDArray[np.bool_]:
        """Mask of devices that were said to be slow, or seemed so lately. Lock held."""
        slow: NDArray[np.bool_] = np.minimum(self._factor, self._latest) < 1 / TOLERANCE
        return slow

    def record_completion(self, device: int, part: Part, *, counts: bool = True) -> None:
        """A device has done its part of a batch. One that does not count, because its end is not
        known well, was work all the same, for which the next part had to wait."""
        with self._lock:
            free, begin, end = self._free_at[device], part.begin, part.end
            start = _later(begin, free)
            self._free_at[device] = _later(end, start)
            if not counts:
                return
            self._count(_ALL, device, part.nbytes, start, end)
            if free.earliest >= begin.latest:
                self._count(_AT_WORK, device, part.nbytes, start, end)
            else:
                self._count(_AT_WORK, device, part.nbytes - part.first_bytes, part.first, end)
            if end.latest >= self._window_end:
                if np.isfinite(self._window_end):
                    self._judge()
                self._window_end = end.latest + WINDOW_S

    def _count(self, row: int, device: int, nbytes: int, start: Moment, end: Moment) -> None:
        most = end.latest - start.earliest
        if nbytes > 0 and most > 0:
            self._bytes[row, device] += nbytes
            self._most_s[row, device] += most
            self._least_s[row, device] += max(0.0, end.earliest - start.latest)

    def rates(self) -> NDArray[np.float64]:
        """Rates of the devices lately, [devices], in the unit of the weights."""
        with self._lock:
            rates: NDArray[np.float64] = self._weights * self._latest
            return rates

    def drain_events(self) -> list[tuple[int, float]]:
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
        moved, least_s, most_s = (
            np.where(sure, a[_AT_WORK], a[_ALL]) for a in (self._bytes, self._least_s, self._most_s)
        )
        known = (moved >= least) | (slow & (moved > 0))
        usual = known & ~slow
        if int(known.sum()) < 2 or not usual.any():
            return  # nothing to compare with; what was counted stays for the next window
        # With latencies that others are without, a device is at least so fast, no more is known.
        weak = ~sure & ((self._factor < 1) | sure.any())
        low, high = np.zeros(len(known)), np.full(len(known), np.inf)
        low[known] = moved[known] / most_s[known] / self._weights[known]
        bounded = known & ~weak & (least_s > 0)
        high[bounded] = moved[bounded] / least_s[bounded] / self._weights[bounded]
        full = _upper_median(low[usual])
        full_high = _upper_median(high[usual])
        low = np.clip(low / full_high, LEAST_SHARE, 1.0)
        high = np.clip(high / full, LEAST_SHARE, 1.0)
        news = known & ((self._latest < low) | (self._latest > high))
        self._latest = np.where(news, _within(low, high, self._latest), self._latest)
        # One that is read no more is given some work again after a while.
        idle = self._bytes[_ALL] == 0
        self._latest[idle] = np.minimum(1.0, self._latest[idle] * TOLERANCE)
        factors = _within(low, high, self._factor)
        for device in np.flatnonzero(known).tolist():
            self._compare(device, *(float(a[device]) for a in (low, factors, high)))
        for counted in (self._bytes, self._least_s, self._most_s):
            counted[:, known] = 0
        self.any_slow = bool(self._slow().any())

    def _compare(self, device: int, low: float, factor: float, high: float) -> None:
        """Compare a window of a device, between its bounds, with what was said of it last."""
        said, seen = float(self._factor[device]), self._seen[device]
        near, far = said / TOLERANCE, said * TOLERANCE
        if near <= low and high <= far:
            seen.clear()
        elif not near <= factor <= far:
            if seen and (seen[-1][1] < said) != (factor < said):
                seen.clear()
            seen.append((low, factor, high))
            if len(seen) >= WINDOWS:
                self._say(device, *_verdict(seen, said))
                seen.clear()

    def _say(self, device: int, factor: float, least: float) -> None:
        if factor >= 1 / TOLERANCE:
            self._factor[device] = self._news[device] = 1.0
            logger.info("ssdkv: device %s is as fast again as it should be", self._paths[device])
            return
        share = max(1, math.floor(min(factor - SPARED, least) / LEAST_SHARE)) * LEAST_SHARE
        self._factor[device], self._news[device] = factor, share
        logger.warning(
            "ssdkv: device %s is slow: %.2f of what its weight says; of what is stored from now on "
            "it gets %.2f of its share",
            self._paths[device],
            factor,
            share,
        )


def _later(one: Moment, other: Moment) -> Moment:
    return Moment(max(one.earliest, other.earliest), max(one.latest, other.latest))


def _within(
    low: NDArray[np.float64], high: NDArray[np.float64], before: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Estimate of devices: the middle of bounds that are close. Of others, the nearest to the
    estimate ``before``: so it never passes the truth, and has no reason to return. Of others, what
    is nearest to what they were taken for ``before``: so it never passes the truth, and has no
    reason to return.
    """
    close = high <= TOLERANCE * low
    return np.where(close, np.sqrt(low * high), np.clip(before, low, high))


def _verdict(seen: Sequence[tuple[float, float, float]], said: float) -> tuple[float, float]:
    """Classification of a device by windows that agree that it is not what was ``said``: its worth,
    and its least worth.

    Who is said to be worth too much has all others wait; who is said to be worth too little costs
    only what is not asked of it. So bounds that are far apart are not taken at the upper one.
    """
    low, factor, high = np.median(np.array(seen), axis=0).tolist()
    return factor if factor > said else math.sqrt(low * high), low


def _upper_median(values: NDArray[np.float64]) -> float:
    """Median; of two, the larger one."""
    return float(np.sort(values)[len(values) // 2])


class BatchWatch:
    """Notices when each device has done its part of a batch. Belongs to who waits for the batch."""

    def __init__(self, speed: ThroughputEstimator, nbytes: NDArray[np.float64], begin: Moment):
        """``nbytes`` are asked of each device, [devices]; ``begin`` is when they were submitted."""
        self._speed = speed
        self.begin = begin
        """As given."""
        self.nbytes = nbytes
        """As given."""
        # One device alone has nothing to be compared with.
        self._left = _NOBODY
        if speed.devices > 1 and np.count_nonzero(nbytes) > 1:
            telling = speed.telling(nbytes)
            if telling.size > 1:
                self._left = telling
        self._last_look = begin.earliest
        self._first: dict[int, tuple[Moment, int]] = {}
        """Of a device, when its first pieces had ended, and their bytes."""
        self._ended: list[tuple[int, Moment]] = []
        """Device, and when its part had ended."""

    @property
    def done(self) -> bool:
        """Check whether there is nothing left to notice."""
        return self._left.size == 0

    def look(self, batch: Batch, devices: U16, lengths: U32, now: float) -> None:
        """See which parts have ended by ``now``; devices and lengths of the requests, [n]."""
        over = batch.results() != PENDING
        ended = np.bincount(devices[over], lengths[over], len(self.nbytes))
        seen, self._last_look = Moment(self._last_look, now), now
        for device in self._left[ended[self._left] > 0].tolist():
            self._first.setdefault(device, (seen, int(ended[device])))
        whole = ended[self._left] == self.nbytes[self._left]
        self._ended += [(d, seen) for d in self._left[whole].tolist()]
        self._left = self._left[~whole]
        if self.done:
            self._tell(BLUR * (now - self.begin.earliest))

    def _tell(self, allowed: float) -> None:
        for device, end in self._ended:
            nbytes = int(self.nbytes[device])
            first, first_bytes = self._first[device]
            blur = max(first.latest - first.earliest, end.latest - end.earliest)
            if blur > BLUR * (end.latest - first.latest):
                first_bytes = nbytes
            part = Part(nbytes, self.begin, first, first_bytes, end)
            self._speed.record_completion(device, part, counts=end.latest - end.earliest <= allowed)
