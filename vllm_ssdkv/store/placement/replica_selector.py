"""Selection of the copy to read: one that is right, on a device that answers, with least to do.

Where a slot has two copies, their bytes are the same, so each piece of a read may come from either.
Pieces that are neighbours choose together: apart, they would be more requests.
A copy is suspect when it was found wrong, could not be written, or was stored while its device was
away; it is read only where there is nothing better, and checksums decide as always.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from vllm_ssdkv.store.devices.health import DeviceHealth
from vllm_ssdkv.store.devices.queue_depths import QueueDepths
from vllm_ssdkv.store.devices.throughput import ThroughputEstimator
from vllm_ssdkv.store.format.slot_geometry import I64, STRIPE_UNIT, U16
from vllm_ssdkv.store.index.slot_index import EPOCH_COUNTER_BITS
from vllm_ssdkv.store.io.engines.protocol import U32, Batch
from vllm_ssdkv.store.placement.stripe_map import Extents

logger = logging.getLogger(__name__)

_SWEEPS = 32
"""Times, at most, that the load of each pair of devices is evened out: what one device is spared
must get around the whole ring of those that share it."""

_BITS = 64


class Replicas:
    """Copies of one rank's slots: suspect ones, and the choice among them. Thread-safe; never
    blocks.

    Memory: up to 16 bytes per slot with two copies, none with one.
    """

    def __init__(
        self,
        health: DeviceHealth,
        speed: ThroughputEstimator,
        num_slots: int,
        gaps: Sequence[tuple[int, int]],
    ):
        """``gaps``: per device the openings of the store [begin, end) in which it was away, or lost
        what it had: what was stored in these has no copy there."""
        self._health = health
        self._speed = speed
        self._in_flight = QueueDepths(speed.devices)
        self._gaps = [
            (device, begin << EPOCH_COUNTER_BITS, end << EPOCH_COUNTER_BITS)
            for device, (begin, end) in enumerate(gaps)
            if begin < end
        ]
        self.any_suspect = False
        """True if a copy is, or was: else the first ones are as good as the second ones."""
        self._lock = threading.Lock()
        # Bit d: the copy on device d. Zeros that were never written take no memory.
        self._suspect = np.zeros(num_slots, dtype=np.uint64)
        # Likewise: it was written, or found right, since a device was away.
        self._proven = np.zeros(num_slots if self._gaps else 0, dtype=np.uint64)

    def stored_in(self, slots: I64, epochs: I64) -> None:
        """Slots, [n], are known to be of these epochs, [n]: some devices were away then."""
        for device, begin, end in self._gaps:
            missed = slots[(epochs >= begin) & (epochs < end)]
            bit = _bits(np.full(1, device, dtype=np.uint16))
            self.any_suspect |= bool(len(missed))
            with self._lock:
                np.bitwise_or.at(self._suspect, missed[(self._proven[missed] & bit) == 0], bit)

    def mark_suspect(self, slots: I64, devices: U16) -> NDArray[np.bool_]:
        """Note that copies of slots, [n], on devices, [n], are wrong; those that are new, [n].

        Entries for one copy count as new together.
        """
        bits = _bits(devices)
        self.any_suspect |= bool(len(slots))
        with self._lock:
            new: NDArray[np.bool_] = (self._suspect[slots] & bits) == 0
            np.bitwise_or.at(self._suspect, slots, bits)
            if self._gaps:
                np.bitwise_and.at(self._proven, slots, ~bits)
        return new

    def mark_valid(self, slots: I64, devices: U16) -> None:
        """The copies of slots, [n], on devices, [n], were written, or found right."""
        with self._lock:
            np.bitwise_and.at(self._suspect, slots, ~_bits(devices))
            if self._gaps:
                np.bitwise_or.at(self._proven, slots, _bits(devices))

    def suspect(self, slots: I64, devices: U16) -> NDArray[np.bool_]:
        """Mask of suspect copies, [n], of slots, [n], on devices, [n]."""
        with self._lock:
            found: NDArray[np.bool_] = (self._suspect[slots] & _bits(devices)) != 0
        return found

    def suspects(self) -> I64:
        """Slots with a suspect copy, ascending."""
        with self._lock:
            return np.flatnonzero(self._suspect)

    def submitted(self, batch: Batch, device: U16, length: U32) -> None:
        """Devices were asked for these requests, [n]: what is read next goes where less is left."""
        self._in_flight.add(batch, device, length)

    def choose(self, slots: I64, first: Extents, second: Extents) -> NDArray[np.bool_]:
        """Mask of pieces, [m], to read from their second copy.

        Args:
            slots: Slot of each piece, [m].
            first: Where the first copies are.
            second: Where the second ones are; the same place for a piece that has none.
        """
        rank = [
            2 * self._health.out_of_use(e.device).astype(np.int8) + self.suspect(slots, e.device)
            for e in (first, second)
        ]
        taken: NDArray[np.bool_] = rank[0] > rank[1]
        free = np.flatnonzero((rank[0] == rank[1]) & (first.device != second.device))
        if len(free):
            rates = self._speed.rates()
            fixed = rank[0] != rank[1]
            fixed |= first.device == second.device
            device = np.where(taken, second.device, first.device)[fixed]
            load = self._in_flight.pending()
            load += np.bincount(device, first.length[fixed], len(rates)).astype(np.int64)
            run = runs(first, second, free)
            _, begin = np.unique(run, return_index=True)
            lengths = np.bincount(run, first.length[free]).astype(np.uint32)
            of = free[begin]
            taken[free] = shared(first.device[of], second.device[of], lengths, rates, load)[run]
        return taken


def runs(first: Extents, second: Extents, which: I64) -> I64:
    """Number of the run that each of some pieces, [n], is in: neighbours on a device, in both
    copies, up to :data:`STRIPE_UNIT` bytes. From 0 on; int64, [n].

    A run is one request. Pieces that chose their copy one by one would be many.
    """
    device, offset = first.device[which].astype(np.int64), first.offset[which].astype(np.int64)
    other, place = second.device[which].astype(np.int64), second.offset[which].astype(np.int64)
    length = first.length[which].astype(np.int64)
    order = np.lexsort((offset, device))
    before, after = order[:-1], order[1:]
    apart = np.ones(len(order), dtype=np.bool_)
    apart[1:] = (device[after] != device[before]) | (other[after] != other[before])
    apart[1:] |= offset[after] != offset[before] + length[before]
    apart[1:] |= place[after] != place[before] + length[before]
    start = offset[order][np.flatnonzero(apart)][np.cumsum(apart) - 1]
    part = (offset[order] - start) // STRIPE_UNIT
    apart[1:] |= part[1:] != part[:-1]
    found = np.empty(len(order), dtype=np.int64)
    found[order] = np.cumsum(apart) - 1
    return found


def shared(
    first: U16, second: U16, length: NDArray[np.uint32], rates: NDArray[np.float64], load: I64
) -> NDArray[np.bool_]:
    """Mask of pieces, [m], that go to their second device so that all devices end at about the same
    time.

    Of each pair of devices, the pieces before a border go to the first; the one on the border goes
    where it makes its device end less late. The borders are found pair by pair, so the cost does
    not depend on the number of pieces.

    Args:
        first: Device of each piece's first copy, [m]; ``second`` likewise, another one.
        length: Bytes, [m].
        rates: Of each device, in any unit, [devices].
        load: Bytes that devices have to read in any case, [>= devices].
    """
    kind, of = np.unique(first.astype(np.int64) << 16 | second, return_inverse=True)
    total = np.bincount(of, length).tolist()
    pace, queue = rates.tolist(), load.astype(np.float64).tolist()
    pairs = [(k >> 16, k & 0xFFFF) for k in kind.tolist()]
    kept = list(total)
    for (a, _), nbytes in zip(pairs, total, strict=True):
        queue[a] += nbytes
    least = float(length.min(initial=0)) / 8
    for _ in range(_SWEEPS):
        moved = 0.0
        for i, (a, b) in enumerate(pairs):
            rest_a, rest_b = queue[a] - kept[i], queue[b] - (total[i] - kept[i])
            even = (pace[a] * (rest_b + total[i]) - pace[b] * rest_a) / (pace[a] + pace[b])
            before, kept[i] = kept[i], min(max(even, 0.0), total[i])
            queue[a], queue[b] = rest_a + kept[i], rest_b + total[i] - kept[i]
            moved = max(moved, abs(kept[i] - before))
        if moved < least:
            break
    order = np.argsort(of, kind="stable")
    end = np.cumsum(length[order], dtype=np.float64)
    begin = end - length[order] - np.concatenate([[0.0], np.cumsum(total)])[of[order]]
    allowed = (rates[second] / (rates[first] + rates[second]) * length)[order]
    taken = np.zeros(len(first), dtype=np.bool_)
    taken[order] = begin + allowed > np.asarray(kept)[of[order]]
    return taken


def _bits(devices: U16) -> NDArray[np.uint64]:
    # More devices than bits share them: that decides which copy is tried first, and no more.
    return np.uint64(1) << (devices.astype(np.uint64) % np.uint64(_BITS))
