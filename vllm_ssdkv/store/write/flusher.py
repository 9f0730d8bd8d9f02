"""The write path: held frames become slots on the devices, in a thread of its own."""

from __future__ import annotations

import collections
import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vllm_ssdkv.base.errors import StoreError
from vllm_ssdkv.store.cache.frames import NO_FRAME, FrameCache, FrameState
from vllm_ssdkv.store.devices.health import WriteState
from vllm_ssdkv.store.format.slot_header_batch import key_rows
from vllm_ssdkv.store.integrity.checksum_table import ChecksumTable
from vllm_ssdkv.store.io.buffer_pool import BufferPool
from vllm_ssdkv.store.io.engines.protocol import U64, Op
from vllm_ssdkv.store.io.slot_io import SlotIO
from vllm_ssdkv.store.io.slot_request import SlotRequest
from vllm_ssdkv.store.io.thread_errors import ThreadErrors
from vllm_ssdkv.store.memory.memory_plan import IN_FLIGHT
from vllm_ssdkv.store.write.summary_builder import SummaryBuilder
from vllm_ssdkv.store.write.trim import SlotTrimmer

logger = logging.getLogger(__name__)


_PAUSE_S = 0.005
"""Interval at which the thread checks for new items while it waits for a write."""

_LOOK_S = 0.1
"""Interval at which the thread checks whether an overdue write has ended."""


@dataclass(frozen=True, slots=True)
class Pending:
    """One slot to be written."""

    slot: int
    epoch: int
    key: bytes


@dataclass(frozen=True, slots=True, eq=False)
class _Group:
    """Slots that are written together, from frames, images, or both."""

    items: Sequence[Pending]
    frames: NDArray[np.int32]
    images: U64 | None
    batch: SlotRequest
    stored: bool = False
    """True if another copy was written while this write still hangs."""

    @property
    def slots(self) -> NDArray[np.int64]:
        return _slots(self.items)

    def part(self, which: NDArray[np.bool_], batch: SlotRequest, *, stored: bool = False) -> _Group:
        """Some of them, whose images are somebody else's business."""
        items = [item for item, wanted in zip(self.items, which.tolist(), strict=True) if wanted]
        return _Group(items, self.frames[which], None, batch, stored)


@dataclass(slots=True, eq=False)
class _Outcome:
    """Result of a group's writes, as far as it is known: masks, [items]."""

    good: NDArray[np.bool_]
    """A copy of every byte is written."""
    held: NDArray[np.bool_]
    """An I/O may still touch the slot's memory."""
    late: list[tuple[NDArray[np.bool_], SlotRequest]]
    """These I/Os, and the items of each."""


@dataclass(slots=True, eq=False)
class _Visit:
    """Something that somebody else does with a slot in the writer's thread."""

    slot: int
    work: Callable[[], None]
    under_way: bool = False
    over: bool = False
    done: bool = False


def _slots(items: Sequence[Pending]) -> NDArray[np.int64]:
    return np.array([item.slot for item in items], dtype=np.int64)


class Flusher:
    """Writes frames to their slots. Methods are thread-safe.

    Every committed slot is reported once, as written or as failed, unless it is discarded while it
    is queued; at the latest after about two deadlines. A write that fails is tried once more,
    alone: the block layer merges requests, so one bad sector fails its neighbours too. The frame of
    a failed write is the only copy: it is ``HELD`` until discarded. A write that misses its
    deadline has failed; its frame is ``WRITING`` until the I/O ends. Of two copies, one that was
    written is enough, after the second attempt.

    While writes to a device are paused (:class:`~vllm_ssdkv.store.devices.health.WriteState`),
    slots that lie there fail, unless the flusher ``keeps`` them: then they wait, and are reported
    when they have been written. The first one that is tried again is alone.

    *Images* are made beside the frames: where slots are encrypted of whole slots, since frames stay
    readable while they are written, else of their tails, which frames do not have.
    """

    def __init__(
        self,
        files: SlotIO,
        frames: FrameCache,
        seals: ChecksumTable,
        images: BufferPool | None = None,
        summarizer: SummaryBuilder | None = None,
        trimmer: SlotTrimmer | None = None,
        *,
        keeps: bool = False,
    ):
        """``images`` are pieces of ``slot_bytes`` each, or of ``tail_bytes``, which only the writer
        uses; None: slots are frames. ``summarizer``: for slots with a tail. With a ``trimmer``,
        dropped slots are trimmed while there is nothing to write. ``keeps``: see the class."""
        self._keeps = keeps
        self._summarizer = summarizer
        self._trimmer = trimmer
        self._files = files
        self._errors = ThreadErrors(files.counters, "writer")
        self._frames = frames
        self._seals = seals
        self._images = images
        self._wake = threading.Condition()
        """Guards everything below; notified of every change."""
        self._queue: collections.deque[Pending] = collections.deque()
        self._kept: list[Pending] = []
        """Items that wait until writes are not paused."""
        self._under_way: dict[Pending, bool] = {}
        """Items taken from the queue and not reported yet, and whether somebody still wants them
        written."""
        self._groups: list[_Group] = []
        self._overdue: list[_Group] = []
        self._busy: set[int] = set()
        """Slots that an I/O may still write to."""
        self._durable: list[tuple[int, int]] = []
        self._failed: list[tuple[int, int]] = []
        self._visits: collections.deque[_Visit] = collections.deque()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="ssdkv-writer", daemon=True)
        self._thread.start()

    def flush(self, items: Iterable[Pending]) -> None:
        """Queue slots whose frames are ``HELD``. Never blocks."""
        new = list(items)
        with self._wake:
            if self._trimmer is not None:
                self._trimmer.keep(np.array([item.slot for item in new], dtype=np.int64))
            self._queue.extend(new)
            self._wake.notify_all()

    def trim(self, slots: NDArray[np.int64]) -> None:
        """Nobody will read these slots before they are written again. Never blocks."""
        with self._wake:
            if self._trimmer is not None:
                self._trimmer.add(slots)
                self._wake.notify_all()

    def abandon(self, slots: NDArray[np.int64]) -> None:
        """These slots will not be needed: drop queued writes and their frames."""
        gone = set(slots.tolist())
        with self._wake:
            self._queue = collections.deque(p for p in self._queue if p.slot not in gone)
            self._kept = [item for item in self._kept if item.slot not in gone]
            self._under_way = {
                item: wanted and item.slot not in gone for item, wanted in self._under_way.items()
            }
            self._wake.notify_all()
        self._frames.forget(slots)

    def pending(self) -> int:
        """Slots queued or in flight, whose outcome is not known yet."""
        with self._wake:
            return len(self._queue) + len(self._kept) + len(self._under_way)

    def writes(self, slot: int) -> bool:
        """Check whether a slot is queued, or an I/O may still write to it."""
        with self._wake:
            queued = (*self._queue, *self._kept)
            return slot in self._busy or any(item.slot == slot for item in queued)

    def visit(self, slot: int, work: Callable[[], None], timeout_s: float) -> bool:
        """Have ``work`` done while no write of the slot is queued or in flight. Blocks.

        It is done in the writer's thread when there is nothing to write, so no write begins before
        its end. It must end by itself; where it raises, that is counted, and it was not done.

        Returns:
            Whether it was done; not if the slot is being written, or the time ran out before.
        """
        mine = _Visit(slot, work)
        with self._wake:
            self._visits.append(mine)
            self._wake.notify_all()
            self._wake.wait_for(lambda: mine.over or self._stopping, timeout_s)
            if not (mine.over or mine.under_way):
                self._visits.remove(mine)
                return False
            self._wake.wait_for(lambda: mine.over)  # the deadlines of the work end it
            return mine.done

    def take_results(self) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """(slot, epoch) pairs written, and pairs that failed, since the last call."""
        with self._wake:
            durable, failed = self._durable, self._failed
            self._durable, self._failed = [], []
            return durable, failed

    def wait_results(self, timeout_s: float) -> bool:
        """Wait until :meth:`take_results` has something to give, or the thread is to end; False
        when the time ran out."""
        with self._wake:
            return self._wake.wait_for(
                lambda: bool(self._durable or self._failed or self._stopping), timeout_s
            )

    def drain(self, timeout_s: float) -> bool:
        """Wait until the outcome of everything is known; False when the time ran out."""
        with self._wake:
            return self._wake.wait_for(
                lambda: not (self._queue or self._kept or self._under_way), timeout_s
            )

    def close(self, timeout_s: float) -> bool:
        """Write what is queued, or try to, then end the thread; False when something never
        ended."""
        self._files.health.try_writes_now()
        with self._wake:
            self._keeps = False
            self._wake.notify_all()
        done = self.drain(timeout_s)
        with self._wake:
            self._stopping = True
            self._queue.clear()
            self._wake.notify_all()
        self._thread.join(timeout_s)
        return done and not self._thread.is_alive() and not self._overdue

    # ---- the thread ----

    def _run(self) -> None:
        while True:
            with self._errors.swallowed("what is queued has failed"):
                if not self._turn():
                    return
                continue
            with self._wake:  # whatever it was, nobody must wait for ever
                self._failed += [(item.slot, item.epoch) for item in self._queue]
                self._queue.clear()
                self._wake.notify_all()
                self._wake.wait(_LOOK_S)

    def _turn(self) -> bool:
        """Do what is next; False when the thread is to end."""
        with self._wake:
            trim = self._wait()
            self._collect_overdue()
            if self._stopping and not (self._queue or self._groups or trim is not None):
                return False
            items = self._next_items() if len(self._groups) < IN_FLIGHT else []
            visit = None if items or self._groups else self._next_visit()
        if visit is not None:
            self._make(visit)
        if self._trimmer is not None and trim is not None:
            # In this thread: no write of such a slot can be started before it is over.
            self._trimmer.discard(trim)
        if items:
            self._start(items)
        elif self._groups:
            self._finish_one()
        return True

    def _make(self, visit: _Visit) -> None:
        done = False
        with self._errors.swallowed(f"slot {visit.slot} was not visited"):
            visit.work()
            done = True
        with self._wake:
            visit.over, visit.done = True, done
            self._wake.notify_all()

    def _wait(self) -> NDArray[np.int64] | None:
        """Wait for something to do; slots to trim, if it is that. Lock held."""
        while not (self._queue or self._groups or self._visits or self._stopping):
            pause = None if self._trimmer is None else self._trimmer.wait_s()
            if self._trimmer is not None and pause == 0:
                return self._trimmer.take(list(self._busy))
            if self._overdue:
                pause = _LOOK_S if pause is None else min(pause, _LOOK_S)
            self._set_aside()
            if self._queue:
                break
            if self._kept:
                trial = self._files.health.next_trial_s()
                waits = _LOOK_S if trial is None else trial
                pause = waits if pause is None else min(pause, waits)
            self._wake.wait(pause)
            self._collect_overdue()
        return None

    def _set_aside(self) -> None:
        """Have in the queue what can be written now, or is to be tried, and keep the rest. Lock
        held."""
        if not (self._kept or (self._keeps and self._files.health.any_writes_paused)):
            return
        waiting = [*self._kept, *self._queue]
        paused = self._paused(waiting, WriteState.PAUSED)
        trial = self._paused(waiting, WriteState.TRIAL) & ~paused
        if not self._groups:
            trial[np.flatnonzero(trial)[:1]] = False
        aside = (paused | trial) & self._keeps
        pairs = list(zip(waiting, aside.tolist(), strict=True))
        self._queue = collections.deque(item for item, waits in pairs if not waits)
        self._kept = [item for item, waits in pairs if waits]

    def _paused(self, items: Sequence[Pending], least: WriteState) -> NDArray[np.bool_]:
        """Mask of items, [n], of which a part cannot be written because writes are in this state,
        or a worse one."""
        health, placement = self._files.health, self._files.placement
        if not health.any_writes_paused:
            return np.zeros(len(items), dtype=np.bool_)
        slots = _slots(items)
        gone = placement.lost(health.cannot_write(WriteState.NEVER), slots)
        return placement.lost(health.cannot_write(least), slots) & ~gone

    def _next_visit(self) -> _Visit | None:
        """Lock held."""
        if not self._visits:
            return None
        visit = self._visits.popleft()
        if visit.slot in self._busy:
            visit.over = True
            self._wake.notify_all()
            return None
        visit.under_way = True
        return visit

    def _next_items(self) -> list[Pending]:
        """Items to write now. Lock held.

        A slot with an older write in flight waits: two writes to one place may land in any order.
        One whose older write is overdue fails: its device is out of use. So does a slot that is
        somebody else's by now.
        """
        self._set_aside()
        if not self._queue:
            return []
        overdue = {item.slot for group in self._overdue for item in group.items}
        items: list[Pending] = []
        kept: list[Pending] = []
        most = self._most_items()
        while self._queue and len(items) < most:
            item = self._queue.popleft()
            if item.slot in overdue or self._is_void(item):
                self._failed.append((item.slot, item.epoch))
            elif item.slot in self._busy:
                kept.append(item)
            else:
                items.append(item)
                self._busy.add(item.slot)
        self._queue.extendleft(reversed(kept))
        self._under_way.update(dict.fromkeys(items, True))
        self._wake.notify_all()
        return items

    def _is_void(self, item: Pending) -> bool:
        """Check whether the slot may be another engine's by now."""
        return item.epoch < self._files.health.writes_since

    def _most_items(self) -> int:
        """Number of slots to write at once: half of the images, so that two groups fit."""
        if self._images is None:
            return self._files.group
        most = min(self._files.group, self._images.free(), self._images.pieces // IN_FLIGHT)
        # Without a group whose end would free some, late writes hold them all: let a group fail.
        return most or (0 if self._groups else self._files.group)

    def _start(self, items: list[Pending]) -> None:
        # Whatever it is, the scheduler must not wait for these slots for ever.
        with self._errors.swallowed(f"{len(items)} slot(s) cannot be written"):
            self._start_group(items)
            return
        self._report_failed([item for item in items if item in self._under_way])

    def _start_group(self, items: list[Pending]) -> None:
        frames = self._frames.start_writing(_slots(items))
        here = frames != NO_FRAME
        if not here.all():  # discarded between queueing and now
            self._report_failed([p for p, ok in zip(items, here.tolist(), strict=True) if not ok])
            items = [p for p, ok in zip(items, here.tolist(), strict=True) if ok]
            frames = frames[here]
        if not items:
            return
        images: U64 | None = None
        try:
            images = self._take_images(frames)
            self._seal(items, frames, images)
            batch = self._submit(items, frames, images, again=False)
        except BaseException as error:
            self._frames.finish_io(frames, FrameState.HELD)
            self._seals.end_write(_slots(items))
            if self._images is not None and images is not None:
                self._images.give(images)
            if not isinstance(error, StoreError):
                raise
            logger.error("ssdkv: %d slot(s) cannot be written: %s", len(items), error)  # noqa: TRY400
            self._report_failed(items)
            return
        with self._wake:
            self._groups.append(_Group(items, frames, images, batch))

    def _submit(
        self,
        items: Sequence[Pending],
        frames: NDArray[np.int32],
        images: U64 | None,
        *,
        again: bool,
    ) -> SlotRequest:
        if any(map(self._is_void, items)):  # since they were taken from the queue
            raise StoreError("slots are another engine's by now")
        size = self._files.geometry.slot_bytes
        places, tails = self._places(frames, images)
        return self._files.submit(
            Op.WRITE, _slots(items), 0, size, places, tails=tails, again=again
        )

    def _places(self, frames: NDArray[np.int32], images: U64 | None) -> tuple[U64, U64 | None]:
        """Arena offsets of what goes to the devices, and of tails that do not lie behind it."""
        if images is not None and self._files.geometry.encrypted:
            return images, None
        return self._frames.buffer_offset(frames), images

    def _take_images(self, frames: NDArray[np.int32]) -> U64 | None:
        """Raises StoreError."""
        if self._images is None:
            return None
        images = self._images.take(len(frames))
        if images is None:
            raise StoreError("writes that do not end hold the memory for slots to be written")
        return images

    def _seal(
        self, items: Sequence[Pending], frames: NDArray[np.int32], images: U64 | None
    ) -> None:
        slots, start = _slots(items), np.uint64(self._frames.arena.address)
        places, tails = self._places(frames, images)
        if self._summarizer is not None:
            if tails is None:
                tails = places + np.uint64(self._files.geometry.frame_bytes)
            self._summarizer.make_tails(self._frames.address(frames), start + tails)
        seals = self._files.codec.seal(
            slots,
            np.array([item.epoch for item in items], dtype=np.int64),
            key_rows([item.key for item in items]),
            self._frames.buffer_offset(frames),
            places,
            tails,
        )
        # In this order: a context that begins to refer to a slot in between adopts its seal.
        self._seals.begin_write(slots, seals)
        self._seals.adopt(slots[self._frames.referenced(slots)])

    def _finish_one(self) -> None:
        """Finish a group, whichever is first, or return soon: there may be more to start."""
        for group in self._groups:
            if self._is_over(group, 0.0):
                self._finish(group)
                return
        if self._groups:
            self._is_over(self._groups[0], _PAUSE_S)

    def _is_over(self, group: _Group, timeout_s: float) -> bool:
        with self._errors.swallowed("a write is given up"):
            return group.batch.over(timeout_s)
        return True

    def _finish(self, group: _Group) -> None:
        none = np.zeros(len(group.items), dtype=np.bool_)
        outcome = _Outcome(none, none.copy(), [])
        awaited = False
        with self._errors.swallowed("slots that are not known to be written have failed"):
            self._await(group, outcome)
            awaited = True
        if not (awaited or outcome.late) and self._may_run(group.batch):
            outcome.held = ~none
            outcome.late = [(outcome.held, group.batch)]
        with self._errors.swallowed("the memory of a write stays out of use"):
            self._settle(group, outcome)
        good, overdue = outcome.good, self._parts(group, outcome)
        paused = ~good & ~outcome.held & self._paused(group.items, WriteState.TRIAL)
        lost = int((~good & ~paused).sum())
        if lost:
            logger.error("ssdkv: %d of %d slot(s) not written", lost, len(good))
        with self._wake:
            self._groups.remove(group)
            self._overdue += overdue
            self._keep(group.items, paused)
            self._report(group.items, good, outcome.held)

    def _keep(self, items: Sequence[Pending], paused: NDArray[np.bool_]) -> None:
        """Keep items, in place of reporting them, that were not written since writes are paused.
        Lock held."""
        if not self._keeps:
            return
        kept = [
            item
            for item, waits in zip(items, paused.tolist(), strict=True)
            if waits and self._under_way[item]
        ]
        self._kept = [*kept, *self._kept]

    def _may_run(self, batch: SlotRequest) -> bool:
        """Ask if the I/O of a batch may still touch memory; true where nobody knows."""
        with self._errors.swallowed("the memory of a write is out of use until its end is known"):
            return not batch.ended()
        return True

    def _await(self, group: _Group, outcome: _Outcome) -> None:
        """Wait for a group's I/O, and try once more, alone, what failed."""
        outcome.good = good = group.batch.wait()
        outcome.held = held = group.batch.held()
        if held.any():
            outcome.late.append((held.copy(), group.batch))
        missing = ~good if group.batch.twin is None else group.batch.incomplete()
        end = time.monotonic() + self._files.deadline_s
        failed = ~good & ~held
        if failed.any():
            failed &= ~group.batch.out_of_reach()
        for i in np.flatnonzero(failed).tolist():
            if self._stopping or time.monotonic() >= end:
                break
            if self._is_void(group.items[i]):
                continue
            alone = np.zeros(len(group.items), dtype=np.bool_)
            alone[i] = True
            images = None if group.images is None else group.images[alone]
            again = self._submit([group.items[i]], group.frames[alone], images, again=True)
            try:
                good[i] = again.wait()[0] or again.readable()[0]
                missing[i] = again.incomplete()[0]
            finally:
                if self._may_run(again):
                    held[i] = True
                    outcome.late.append((alone, again))
        if group.batch.twin is not None:
            good |= group.batch.readable()
            self._files.counters.add("single_copies", int((good & missing).sum()))

    def _settle(self, group: _Group, outcome: _Outcome) -> None:
        """Give back what no I/O touches any more."""
        good, held = outcome.good, outcome.held
        self._frames.finish_io(group.frames[good & ~held], FrameState.CLEAN)
        self._frames.finish_io(group.frames[~good & ~held], FrameState.HELD)
        self._seals.end_write(group.slots)
        if self._images is not None and group.images is not None:
            self._images.give(group.images[~held])
            for which, batch in outcome.late:
                self._images.lend(group.images[which], np.ones(int(which.sum()), np.bool_), batch)

    def _parts(self, group: _Group, outcome: _Outcome) -> list[_Group]:
        """Writes that are overdue, those apart of which another copy is written."""
        parts = [
            group.part(which & (outcome.good == stored), batch, stored=stored)
            for which, batch in outcome.late
            for stored in (False, True)
        ]
        return [part for part in parts if part.items]

    def _report(
        self,
        items: Sequence[Pending],
        good: NDArray[np.bool_],
        held: NDArray[np.bool_],
    ) -> None:
        """Tell which of the items were written. Lock held.

        Slots of which an I/O is ``held`` up stay busy.
        """
        kept = set(self._kept)
        for item, written, late in zip(items, good.tolist(), held.tolist(), strict=True):
            if item not in kept:
                (self._durable if written else self._failed).append((item.slot, item.epoch))
            if not late:
                self._busy.discard(item.slot)
        for item in items:
            self._under_way.pop(item, None)
        self._wake.notify_all()

    def _report_failed(self, items: Sequence[Pending]) -> None:
        none = np.zeros(len(items), dtype=np.bool_)
        with self._wake:
            self._report(items, none, none)

    def _collect_overdue(self) -> None:
        """Take back the frames of overdue writes that have ended. Lock held."""
        for group in [g for g in self._overdue if not self._may_run(g.batch)]:
            self._overdue.remove(group)
            self._busy.difference_update(item.slot for item in group.items)
            # What was reported as failed stays the only copy until discarded.
            state = FrameState.CLEAN if group.stored else FrameState.HELD
            self._frames.finish_io(group.frames, state)
