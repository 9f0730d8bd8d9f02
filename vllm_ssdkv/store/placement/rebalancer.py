"""Bringing the segments of a store up to date: striping them anew, one after the other.

Devices that were added, went away or changed their speed change what lanes a segment should have.
A segment that has others is emptied when its place is needed for new slots, which is when something
would have to be evicted in any case, and striped anew over the devices of that day. Until then its
slots can be read, and new ones go there last. Blocks that are read again are stored again, if they
are read faster elsewhere (``connector/scheduler/rewriter.py``); the slots that they leave are free,
so the segments that they have left are the emptiest, and the next ones to be striped anew.

Blocks on a device out of use are masked, and found again with it. Their places count as room: when
blocks are stored, and none is left, segments with nothing but masked blocks are the first to be
striped anew, over the devices that are there.

The journal is told that the old slots are gone, and synced, before the manifest has the new
segment, and the new slots are handed out after the manifest has it. So a restart at any instant
finds each slot where it was written, or not at all.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from vllm_ssdkv.base.errors import StoreError
from vllm_ssdkv.base.metrics import Counters
from vllm_ssdkv.store.format.segment import Segment
from vllm_ssdkv.store.format.slot_geometry import I64
from vllm_ssdkv.store.index.slot_index import EPOCH_COUNTER_BITS, SlotIndex, Usage
from vllm_ssdkv.store.placement.growth import StoreGrowth
from vllm_ssdkv.store.placement.placement import Placement
from vllm_ssdkv.store.placement.segments import best_striping, restriped, speedup

logger = logging.getLogger(__name__)

AHEAD = 4
"""A quarter of a segment's slots is free before the next segment is emptied; or more, where so many
are handed out at a time, or so fast, that it would be used up before the manifest has the next
one."""

MOST_AHEAD = 8
"""But an eighth of the store at most."""

WORTH_REWRITING = 1.15
"""Blocks are rewritten for reads that are so many times faster. Not for less: each is a write. One
device of eight that is as fast again as the others, or a ninth one, gives 1.13."""

LOOK_SHARE = 20
"""Looking for segments that can be emptied takes a twentieth of the time at most while it is in
vain: it takes as long as the store is large."""

SECOND_COPY_AFTER_S = 600.0
"""Blocks with one copy in reach are given up for slots with two only when the device of the other
one has been out of use for so long: most are back by then."""

_RETRY_S = 5.0

LOOK_S = 3.0
"""Interval in which somebody looks whether the manifest and its copies are still there."""


class SegmentSaver(Protocol):
    """Writes segments into the manifest."""

    def put(self, segments: Sequence[Segment]) -> None:
        """Have these in the manifest soon. Never blocks."""

    def saved(self) -> bool:
        """Check whether the manifest has what was put last."""

    def wait(self, timeout_s: float) -> bool:
        """Block until :meth:`saved`; False when the time ran out."""

    def error(self) -> str:
        """Text of the last attempt's error; empty: it did not fail."""

    def close(self, timeout_s: float) -> bool:
        """Save what was put, and stop; False when that was not possible in time."""


class BackgroundSaver:
    """Saves in a thread, and looks after the manifest in between: the scheduler must not wait for a
    disk. One thread calls the methods."""

    def __init__(
        self,
        save: Callable[[Sequence[Segment]], None],
        look: Callable[[], bool],
        counters: Counters,
    ):
        """``save`` blocks, and raises when it fails; it is tried again then. So does and is
        ``look``, which is called every few seconds in which nothing is to be saved, until it
        returns False."""
        self._save = save
        self._look = look
        self._looks = True
        self._look_failing = False
        self._counters = counters
        self._wake = threading.Condition()
        self._wanted: Sequence[Segment] | None = None
        self._busy = False
        self._stopping = False
        self._error = ""
        self._thread = threading.Thread(target=self._run, name="ssdkv-manifest", daemon=True)
        self._thread.start()

    def put(self, segments: Sequence[Segment]) -> None:
        """See the protocol."""
        with self._wake:
            self._wanted = segments
            self._wake.notify_all()

    def saved(self) -> bool:
        """See the protocol."""
        with self._wake:
            return self._wanted is None and not self._busy

    def wait(self, timeout_s: float) -> bool:
        """See the protocol."""
        with self._wake:
            return self._wake.wait_for(lambda: self._wanted is None and not self._busy, timeout_s)

    def error(self) -> str:
        """See the protocol."""
        with self._wake:
            return self._error

    def close(self, timeout_s: float) -> bool:
        """See the protocol."""
        done = self.wait(timeout_s)
        with self._wake:
            self._stopping = True
            self._wake.notify_all()
        self._thread.join(timeout_s)
        return done

    def _run(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(
                    lambda: self._wanted is not None or self._stopping,
                    LOOK_S if self._looks else None,
                )
                if self._stopping:
                    return
                segments, self._wanted = self._wanted, None
                self._busy = segments is not None
            if segments is None:
                self._look_after()
                continue
            error = self._save_or_error(segments)
            with self._wake:
                self._busy, self._error = False, error
                if error and self._wanted is None:
                    self._wanted = segments
                self._wake.notify_all()
                if error:
                    self._wake.wait_for(lambda: self._stopping, _RETRY_S)

    def _look_after(self) -> None:
        try:
            self._looks = self._look()
        except Exception:  # whatever it is, segments are still to be saved
            self._counters.add("manifest_errors", 1)
            if not self._look_failing:
                logger.exception("ssdkv: store.json cannot be looked after; it is tried again")
            self._look_failing = True
        else:
            self._look_failing = False

    def _save_or_error(self, segments: Sequence[Segment]) -> str:
        try:
            self._save(segments)
        except Exception as error:  # whatever it is, the slots of these segments wait for it
            self._counters.add("manifest_errors", 1)
            logger.exception("ssdkv: store.json cannot be saved; it is tried again")
            return str(error) or type(error).__name__
        return ""


@dataclass(slots=True)
class _Pace:
    """Rate at which slots are handed out.

    Attributes:
        begun: Slots ever handed out when segments were last emptied.
        handed_out: Slots handed out, at most, between that and when they came back.
        looked: Slots ever handed out at the last step.
        at_once: Slots handed out, at most, between two steps while segments had the wrong lanes.
    """

    begun: int
    handed_out: int
    looked: int
    at_once: int


class Rebalancer:
    """Decides which segments are striped anew, and does it. Single-threaded, with the index."""

    def __init__(
        self,
        index: SlotIndex,
        placement: Placement,
        weights: Sequence[float],
        saver: SegmentSaver,
        counters: Counters,
        replicas: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ):
        """``weights`` by device, 0 for one that is not there; ``replicas`` of each slot;
        ``clock``: monotonic seconds."""
        self.placement = placement
        self.weights = list(weights)
        self._replicas = replicas
        self._index = index
        self._saver = saver
        self._counters = counters
        self._stale: list[Segment] = []
        # First slot of a segment that was emptied, and its successor, until the manifest has it.
        self._successors: dict[int, Segment] = {}
        self._pace = _Pace(0, 0, index.counters["allocated"], 0)
        self.growth: StoreGrowth | None = None
        """Of a store that grows as it fills; None: it has its size."""
        self._news = False
        self._look = True
        self._clock = clock
        self._look_from = 0.0
        self._put_at = 0.0
        """Instant at which the manifest was given the successors."""
        self._gone = self.out_of_use()
        """Devices that were out of use when what lies there was masked."""
        self._gone_at = clock()
        self._demand = 0
        """Slots that were asked for until then, or until masked blocks were given up last."""
        self._outdated: list[Segment] = []
        """Segments of which blocks are worth a rewrite, by ascending number."""
        self._firsts = np.zeros(0, dtype=np.int64)
        """First slot of each of them."""
        self._judge()

    def reweigh(self, weights: Sequence[float]) -> None:
        """Devices are to have these shares of what is striped from now on; 0 is for one that is out
        of use, which the manifest must know if there are copies elsewhere."""
        lost = any(old and not new for old, new in zip(self.weights, weights, strict=True))
        self.weights = list(weights)
        self._judge()
        if lost and self.placement.most_copies > 1:
            self._saver.put(self._wanted())

    def out_of_use(self) -> NDArray[np.bool_]:
        """Mask of devices that are not there, or are to be used no more; bool, [devices]."""
        return np.array([not weight for weight in self.weights], dtype=np.bool_)

    def mask_lost(self) -> int:
        """Find nothing that lies on devices out of use only, until they are back; how many blocks.
        What is not durable yet is dropped. Takes time that grows with the store."""
        everything = np.arange(self._index.num_slots, dtype=np.int64)
        self._gone = self.out_of_use()
        self._gone_at = self._clock()
        self._demand = self._asked()
        masked, dropped = self._index.mask(everything[self.placement.lost(self._gone, everything)])
        self._counters.add("slots_dropped", dropped, cause="device_lost")
        return masked

    def take_returned(self) -> int:
        """Have the slots again that devices which are back in use had taken with them; how many
        blocks are found again. Takes time that grows with the store."""
        slots = np.arange(self._index.num_slots, dtype=np.int64)
        back = self.placement.lost(self._gone, slots)
        self._gone = self.out_of_use()
        found = self.unmask(slots[back])
        self._judge()
        return found

    def unmask(self, slots: I64) -> int:
        """Have slots, [n], found again that were masked, unless their devices are out of use; how
        many blocks are found. Numbers whose segment was striped anew into fewer slots are none."""
        slots = slots[self.placement.holds(slots) & ~self.placement.lost(self._gone, slots)]
        for segment in self.placement.segments:
            if segment.first in self._successors:  # they come back with the manifest
                inside = (slots >= segment.first) & (slots < segment.first + segment.slots)
                slots = slots[~inside]
        return self._index.unmask(slots)

    @property
    def slots_to_come(self) -> int:
        """Slots that the store may yet grow by."""
        return 0 if self.growth is None else self.growth.to_come

    def step(self, *, patient: bool = True, wanted: int = 0) -> None:
        """Do what is due. Never blocks. ``wanted``: slots that somebody cannot do without.
        ``patient``: what takes long and was in vain last time is
        not tried again at once: where every segment holds something that is in use, looking at all
        slots in every step would take more time than the step."""
        if self._stale or self._successors:
            allocated = self._index.counters["allocated"]
            self._pace.at_once = max(self._pace.at_once, allocated - self._pace.looked)
            self._pace.looked = allocated
        if self._successors and self._saver.saved():
            self._finish()
        if self._stale and not self._successors:
            self._begin(patient=patient, needed=wanted)
        if self.growth is not None:
            self.growth.step()

    def step_and_wait(self, timeout_s: float) -> None:
        """Do what can be done now, and wait for the manifest: at start, nothing else waits.

        Raises:
            StoreError: the manifest could not be saved in time.
        """
        self.step()
        if not self._saver.wait(timeout_s):
            raise StoreError(f"store.json could not be saved within {timeout_s:g} s")
        self.step()

    @property
    def under_way(self) -> bool:
        """Check whether slots are about to come back, or new ones to come."""
        return bool(self._successors) or (self.growth is not None and self.growth.busy)

    def check_progress(self, deadline_s: float) -> None:
        """Check that what is :attr:`under_way` takes no longer than ``deadline_s``.

        Raises:
            StoreError: it does.
        """
        begun = [self._put_at] if self._successors else []
        if self.growth is not None and self.growth.reserving_since is not None:
            begun.append(self.growth.reserving_since)
        waited = self._clock() - min(begun, default=self._clock())
        if waited > deadline_s:
            error = self._saver.error()
            reason = f"store.json cannot be saved: {error}" if error else "a file system hangs"
            raise StoreError(
                f"there are no new slots since {waited:.0f} s, since {reason}. Have the store's "
                "directories writable, with free space, and restart"
            )

    def grow_for(self, slots: int) -> bool:
        """Check whether new slots are to come, for who wants so many free ones. Never blocks."""
        if self.growth is not None:
            self.growth.step(slots)
        return self.under_way

    @property
    def segments(self) -> Sequence[Segment]:
        """Stores that are in use."""
        return self.placement.segments

    def add(self, segment: Segment) -> bool:
        """Have one more segment, whose space is reserved, when the manifest has it; False: others
        are being saved, ask again. Never blocks."""
        if self._successors:
            return False
        self._put_at = self._clock()
        self._successors[segment.first] = replace(segment, since=self._index.next_epoch)
        self._pace.begun = self._index.counters["allocated"]
        self._saver.put(self._wanted())
        return True

    def forget_stored(self) -> None:
        """The cache was reset: drop everything. Nothing that is stored now, nor in this opening of
        the store from now on, may be found by the headers of slots either. Never blocks; the
        manifest hears of it soon."""
        gauges = self._index.gauges()
        self._counters.add("slots_dropped", gauges["ready"] + gauges["masked"], cause="reset")
        self._index.drop(np.arange(self._index.num_slots, dtype=np.int64))
        since = (self._index.opening + 1) << EPOCH_COUNTER_BITS
        self._successors = {
            first: replace(segment, since=since) for first, segment in self._successors.items()
        }
        self.placement.change([replace(s, since=since) for s in self.placement.segments])
        self._saver.put(self._wanted())

    def take_segments(self) -> tuple[Segment, ...] | None:
        """The segments, if they have changed since the last call: the workers must hear of it
        before they hear of slots that are allocated from now on."""
        if not self._news:
            return None
        self._news = False
        return self.placement.segments

    @property
    def has_outdated(self) -> bool:
        """True if any slot is :meth:`outdated`."""
        return bool(self._outdated)

    def outdated(self, slots: I64) -> NDArray[np.bool_]:
        """Mask of slots, [n], whose blocks would be read faster elsewhere; bool, [n]."""
        if not self._outdated:
            return np.zeros(len(slots), dtype=np.bool_)
        found = np.searchsorted(self._firsts, slots, side="right") - 1
        ends = np.array([s.first + s.slots for s in self._outdated], dtype=np.int64)
        return (found >= 0) & (slots < ends[found])

    def close(self, timeout_s: float = 10.0) -> bool:
        """Save what has changed; False when that was not possible in time."""
        return self._saver.close(timeout_s)

    # ---- how ----

    def _judge(self) -> None:
        """Find the segments that have the wrong lanes."""
        self._stale = [
            s
            for s in self.placement.segments
            if best_striping(self.placement.geometry, s, self.weights, self._replicas)
            != (s.lanes, s.copies, s.rule)
        ]
        self._outdated = sorted(
            (s for s in self._stale if s.slots and self._speedup(s) >= WORTH_REWRITING),
            key=lambda s: s.first,
        )
        self._firsts = np.array([s.first for s in self._outdated], dtype=np.int64)
        self._look = True
        self._pace.looked = self._index.counters["allocated"]
        mask = np.zeros(self._index.num_slots, dtype=np.bool_)
        for segment in self._stale:
            mask[segment.first : segment.first + segment.slots] = True
        self._index.defer(mask)

    def _speedup(self, segment: Segment) -> float:
        striping = best_striping(self.placement.geometry, segment, self.weights, self._replicas)
        return speedup(segment, striping, self.weights)

    def _ahead(self) -> int:
        """Slots that are kept free for new blocks."""
        # Where a device is lost, slots with its lanes either are not handed out, or still hold one
        # copy: neither is worth giving up stored blocks in a hurry.
        hurry = not self.out_of_use().any()
        soon = 2 * (self._pace.at_once + self._pace.handed_out) if hurry else 0
        rush = min(soon, self.placement.slots // MOST_AHEAD)
        return max(max(s.slots for s in self._stale) // AHEAD, rush)

    def _asked(self) -> int:
        """Slots ever handed out, and calls in vain: grows while blocks are to be stored."""
        counters = self._index.counters
        return counters["allocated"] + counters["refused"]

    def _begin(self, *, patient: bool, needed: int) -> None:
        """Empty the segments that hold nothing, and those whose place is needed."""
        index = self._index
        missing = max(0, needed - index.available())
        wanted = self._ahead()
        coming = index.free_now()
        if self._replicas > 1:
            # A place on a lost device still holds the other copy: it serves before stored blocks,
            # of which the same is true, are given up.
            coming = index.gauges()["free"]
        if coming > wanted and not (self._look or missing):
            return
        began = self._clock()
        if patient and not self._look and began < self._look_from:
            return
        self._look = False
        usage = {s.first: index.usage(s.first, s.slots) for s in self._stale}
        asked = self._asked() - self._demand
        away = self.out_of_use().any()
        recently = away and began - self._gone_at < SECOND_COPY_AFTER_S
        for segment in sorted(self._stale, key=lambda s: usage[s.first]):
            found = usage[segment.first]
            if found.pinned or (found.ready and coming > wanted):
                continue
            if found.ready and segment.copies > 1 and recently and not found.masked:
                continue
            if self._awaits_device(segment, found) and (
                (coming > wanted and not missing) or not (missing or asked)
            ):
                continue
            if found.obtainable > index.available():
                continue  # running requests were promised these: they cannot wait for the manifest
            successor = self._successor(segment)
            coming += successor.slots
            missing = max(0, missing - successor.slots)
            dropped = index.quarantine(segment.all_slots())
            self._successors[segment.first] = successor
            self._counters.add("slots_dropped", dropped, cause="restriped")
            logger.info(
                "ssdkv: slots %d to %d are striped anew, %d stored blocks were given up for it",
                segment.first,
                segment.first + segment.slots - 1,
                dropped,
            )
        if self._successors:
            self._demand += asked
        ended = self._clock()
        self._look_from = ended + LOOK_SHARE * (ended - began)
        if self._successors:
            self._put_at = ended
            self._pace.begun = index.counters["allocated"]
            self._saver.put(self._wanted())

    def _awaits_device(self, segment: Segment, usage: Usage) -> bool:
        """Check whether a segment holds blocks of which a device that is away has a part or a copy:
        it may be back before anybody needs the place."""
        out = self.out_of_use()
        return bool(usage.ready or usage.masked) and any(out[lane] for lane in segment.lanes)

    def _wanted(self) -> list[Segment]:
        """The segments with their successors, and those that are new."""
        here = {segment.first for segment in self.placement.segments}
        new = [segment for first, segment in self._successors.items() if first not in here]
        return [*(self._successors.get(s.first, s) for s in self.placement.segments), *new]

    def _successor(self, segment: Segment) -> Segment:
        placement = self.placement
        striping = best_striping(self.placement.geometry, segment, self.weights, self._replicas)
        new = restriped(placement.geometry, segment, striping, placement.devices)
        first, numbers = self._numbers(segment, new.slots)
        slots = min(new.slots, numbers)
        # What headers there say was given up just now.
        since = max(segment.since, self._index.next_epoch)
        return replace(new, first=first, numbers=slots, slots=slots, since=since)

    def _numbers(self, segment: Segment, wanted: int) -> tuple[int, int]:
        """First of ``wanted`` slot numbers that no other segment has, or of as many as there are.

        Its own place where that suffices: the numbers stay together.
        """
        others = [s for s in self.placement.segments if s is not segment]
        taken = [self._successors.get(s.first, s) for s in others]
        gaps: list[tuple[int, int]] = []
        at = 0
        for begin, size in sorted((s.first, s.numbers) for s in taken):
            gaps.append((at, begin - at))
            at = begin + size
        gaps.append((at, self._index.num_slots - at))
        fitting = [gap for gap in gaps if gap[1] >= wanted]
        for begin, size in fitting:
            if begin <= segment.first < begin + size:
                return min(segment.first, begin + size - wanted), wanted
        return (fitting[0][0], wanted) if fitting else max(gaps, key=lambda gap: gap[1])

    def _finish(self) -> None:
        """The manifest has the successors: their slots may be used."""
        self.placement.change(self._wanted())
        slots = np.concatenate([s.all_slots() for s in self._successors.values()])
        self._successors = {}
        self._news = True
        handed_out = self._index.counters["allocated"] - self._pace.begun
        self._pace.handed_out = max(self._pace.handed_out, handed_out)
        # Devices may have been lost meanwhile: what lies on them stays out of use.
        self._index.restore(slots[~self.placement.lost(self.out_of_use(), slots)])
        self._judge()


class FixedRebalancer(Rebalancer):
    """A rebalancer that stripes no segment anew, because other engines rely on it."""

    def _judge(self) -> None:
        """Find none."""
