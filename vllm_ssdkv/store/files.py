"""The open data files of one rank with everything needed to address them."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vllm_ssdkv import _io
from vllm_ssdkv.metrics import Counters, counter_key
from vllm_ssdkv.store.engine.protocol import PENDING, U16, U64, Batch, IoEngine, Op
from vllm_ssdkv.store.health import DeviceHealth
from vllm_ssdkv.store.joined import submit_joined
from vllm_ssdkv.store.layout import Extents, SlotGeometry
from vllm_ssdkv.store.placement import Placement
from vllm_ssdkv.store.replicas import Replicas
from vllm_ssdkv.store.sealer import Sealer
from vllm_ssdkv.store.speed import BatchWatch, DeviceSpeed, Moment

logger = logging.getLogger(__name__)

GROUP = 64
"""Most whole slots per submission."""

GROUP_BYTES = 64 * 1024 * 1024
"""Most bytes of whole slots per submission: what is queued must end well before the deadline."""

PART_BYTES = 1024 * 1024
"""Of what has arrived of a batch in flight, so much is handed out at a time at least: each part
costs some Python."""

_FIRST_LOOK_S = 0.0002
"""How soon who waits for a batch looks what has arrived, and which devices have done their part;
then in growing intervals."""

_GROWTH = 1.1
"""Of these intervals: the end of a device's part must be seen well before the next look."""

_LOOK_S = 0.1
"""How often a waiting batch looks whether the devices it waits for were given up meanwhile."""

_ALL = slice(None)


@dataclass(frozen=True, slots=True)
class Source:
    """Which copies of slots are meant, where they have two.

    Attributes:
        copy: The first ones, 0, or the second ones, 1.
        without: Devices whose pieces are to come from the other copy all the same.
    """

    copy: int = 0
    without: tuple[int, ...] = ()

    def second(self, first: U16, second: U16) -> NDArray[np.bool_]:
        """Whether the second copy of each piece is meant, [m], given the devices of both."""
        there = second if self.copy else first
        return np.isin(there, self.without) ^ bool(self.copy)


@dataclass(frozen=True, slots=True)
class SlotFiles:
    """Slots on the devices of one rank. Only the placement ever changes, when the scheduler says so
    (:meth:`Placement.change`). Methods may be called from any thread."""

    geometry: SlotGeometry
    placement: Placement
    engine: IoEngine
    health: DeviceHealth
    speed: DeviceSpeed
    counters: Counters
    fingerprint: bytes
    rank: int
    deadline_s: float
    sealer: Sealer
    replicas: Replicas

    def retries(self, slot: int) -> list[Source | None]:
        """Where to read a slot that was wrong, one after the other.

        Once more in any case: the block layer fails neighbours of a bad sector too. With two
        copies also without each of its devices: a page that lies on two of them accuses neither,
        and behind a wrong header nothing is known of the pages.
        """
        slots = np.array([slot], dtype=np.int64)
        first, second = self.placement.copies(slots, 0, self.geometry.slot_bytes)
        if second is None or bool((first.device == second.device).all()):
            return [None]
        devices = np.union1d(first.device, second.device).tolist()
        return [None, *(Source(without=(device,)) for device in devices)]

    def doubt(self, slots: NDArray[np.int64], devices: U16) -> NDArray[np.bool_]:
        """Copies of slots, [n], on devices, [n], are wrong or out of date, but there are others;
        which of them were believed, [n]. Counted and logged once."""
        new = self.replicas.doubt(slots, devices)
        for copy in np.unique(slots[new] << 16 | devices[new]).tolist():
            slot, path = copy >> 16, self.health.paths[copy & 0xFFFF]
            self.counters.add("bad_copies", 1, device=path)
            logger.warning(
                "ssdkv: the copy of slot %d on %s is wrong or out of date, the other one is read",
                slot,
                path,
            )
        return new

    @property
    def group(self) -> int:
        """Whole slots to submit at once."""
        return max(1, min(GROUP, GROUP_BYTES // self.geometry.slot_bytes))

    def submit(
        self,
        op: Op,
        slots: NDArray[np.int64],
        offset: int | NDArray[np.int64],
        length: int,
        buffers: U64,
        *,
        source: Source | None = None,
        joined: bool = False,
        merged: bool = True,
    ) -> SlotBatch:
        """Start reading or writing bytes [offset, offset + length) of each slot.

        Nothing is sent to a device that is out of use: it might never answer, and would keep the
        buffers. What lies there fails at once. Both copies of a slot are written; of what is read,
        each piece comes from the copy that is likely to be right, on the device with less to do.

        Args:
            op: Direction.
            slots: Slot numbers, [n].
            offset: Byte offset within each slot, one for all or one each, [n]: multiples of 4096.
            length: Bytes per slot, a multiple of 4096.
            buffers: Arena offset per slot, [n].
            source: Read these copies, or write them, and no others.
            joined: Neighbours, on the device and in the arena, go to the engine as one request.
            merged: As in :meth:`Placement.extents`.
        """
        first, second = self.placement.copies(slots, offset, length, merged=merged)
        extents, other, twin = first, first.device, None
        if second is not None and source is not None:
            extents = _either(source.second(first.device, second.device), second, first)
            other = extents.device
        elif second is not None and op is Op.WRITE:
            extents, twin = _both(first, second)
            other = extents.device[twin]
        elif second is not None:
            take = self.replicas.choose(slots[first.slot_index], first, second)
            extents = _either(take, second, first)
            other = np.where(take, first.device, second.device)
        inside = extents.buffer - extents.slot_index.astype(np.uint64) * np.uint64(length)
        sent: NDArray[np.int64] | slice = _ALL
        if self.health.any_out_of_use:
            sent = np.flatnonzero(~self.health.out_of_use(extents.device))
        device, lengths = extents.device[sent], extents.length[sent]
        at = buffers[extents.slot_index[sent]] + inside[sent]
        requests = (device, extents.offset[sent], lengths, at)
        asked = time.monotonic()
        batch: Batch
        if joined:
            batch = submit_joined(self.engine, op, *requests)
        else:
            batch = self.engine.submit(op, *requests)
        if second is not None:
            self.replicas.submitted(batch, device, lengths)
        now = time.monotonic()
        watch = BatchWatch(self.speed, device, lengths, Moment(asked, now))
        deadline = now + self.deadline_s
        return SlotBatch(
            self,
            op,
            slots.copy(),
            length,
            extents,
            other,
            twin,
            sent,
            batch,
            watch,
            deadline,
            () if source is None else source.without,
        )


def _both(first: Extents, second: Extents) -> tuple[Extents, NDArray[np.int64]]:
    """Pieces of both copies, and which piece is the same of the other copy; its own number, where
    there is none."""
    doubled = np.flatnonzero(first.device != second.device)
    extents = Extents(
        *(
            np.concatenate([getattr(first, name), getattr(second, name)[doubled]])
            for name in ("device", "offset", "length", "slot_index", "buffer")
        )
    )
    twin = np.arange(len(extents.device), dtype=np.int64)
    behind = np.arange(len(first.device), len(extents.device), dtype=np.int64)
    twin[doubled], twin[behind] = behind, doubled
    return extents, twin


def _either(take: NDArray[np.bool_], second: Extents, first: Extents) -> Extents:
    return Extents(
        np.where(take, second.device, first.device),
        np.where(take, second.offset, first.offset),
        first.length,
        first.slot_index,
        first.buffer,
    )


@dataclass(frozen=True, slots=True, eq=False)
class SlotBatch:
    """One batch of slot requests in flight."""

    files: SlotFiles
    op: Op
    slots: NDArray[np.int64]
    """Slot numbers, [slots]."""
    length: int
    """Bytes per slot."""
    extents: Extents
    """Pieces, [m]."""
    other: NDArray[np.uint16]
    """Device of each piece's other copy, [m]; its own where there is none."""
    twin: NDArray[np.int64] | None
    """Number of the piece that is each one's other copy, [m]; None where one copy is enough."""
    sent: NDArray[np.int64] | slice
    """Pieces that were sent to a device."""
    batch: Batch
    watch: BatchWatch
    deadline: float
    """Time of the monotonic clock, counted from the submission."""
    without: tuple[int, ...]
    """Devices that were avoided on purpose."""

    def wait(self, beside: Sequence[SlotBatch] = ()) -> NDArray[np.bool_]:
        """Wait until all has ended or the deadline passes; which slots succeeded, shape [slots].

        Ends early when only devices out of use are still to answer. Call it once: failures are
        counted here. Of two copies that are written, one is enough where the other one's device is
        out of use.

        Args:
            beside: Batches in flight whose turn comes later: the speed of the devices is seen from
                when their parts end.
        """
        self.settle(beside)
        name = "read" if self.op is Op.READ else "write"
        device, length = self.extents.device[self.sent], self.extents.length[self.sent]
        moved = self.files.health.judge(device, self.batch.results(), length, name)
        done, all_moved = self.watch.nbytes, bool(moved.all())
        if not all_moved:
            done = np.bincount(device[moved], length[moved], len(done)).astype(np.float64)
        keys = _byte_keys(self.op, self.files.health.paths)
        self.files.counters.add_keyed(keys, done.tolist())
        if all_moved and len(moved) == len(self.extents.device) and self._alone:
            return np.ones(len(self.slots), dtype=np.bool_)
        good = np.zeros(len(self.extents.device), dtype=np.bool_)
        good[self.sent] = moved
        self._learn(good)
        if self.twin is not None:
            good |= good[self.twin] & self.files.health.out_of_use(self.extents.device)
        return ~self._slots_of(~good)

    def settle(self, beside: Sequence[SlotBatch] = ()) -> None:
        """Block until :meth:`wait` would return at once; ``beside`` as there."""
        pause = _FIRST_LOOK_S
        while not self.over(pause):
            pause = min(_LOOK_S, _GROWTH * pause)
            for later in beside:
                later.look()

    def feed(self, intake: _io.Intake, beside: Sequence[SlotBatch] = ()) -> None:
        """Have an intake made with :meth:`parts` look at slots as they arrive, without the GIL.
        Ends when :meth:`wait`, which is still to be called, would return at once.

        Args:
            beside: As there.
        """
        pause, over = _FIRST_LOOK_S, False
        while not over:
            over = self.over(0.0)
            # Without the interpreter for as long as nobody must look how fast the devices are.
            watched = not (self.watch.done and all(later.watch.done for later in beside))
            patience = 0.0 if over else pause if watched else _LOOK_S
            patience = max(0.0, min(patience, self.deadline - time.monotonic()))
            if isinstance(self.batch, _io.Batch):
                intake.follow(self.batch, patience)
            else:  # a twin, or an engine in Python
                self.batch.wait(min(patience, pause))
                intake.take(self.batch.results())
            for later in beside:
                later.look()
            pause = min(_LOOK_S, _GROWTH * pause)

    def parts(self) -> tuple[NDArray[np.int64], U64, NDArray[np.uint32]]:
        """Of each request that was sent, the slot it is a part of, by place in the batch, where it
        begins in it, in bytes, and how many they are."""
        slot_of = self.extents.slot_index[self.sent]
        begin = self.extents.buffer[self.sent] - slot_of.astype(np.uint64) * np.uint64(self.length)
        return slot_of, begin, self.extents.length[self.sent]

    def arriving(self, beside: Sequence[SlotBatch] = ()) -> Iterator[NDArray[np.intp]]:
        """Slots, by place in the batch, as they become :meth:`readable`: each once, and all that
        have arrived since the last look, as soon as these are :data:`PART_BYTES`. Ends when
        :meth:`wait`, which is still to be called, would return at once.

        Args:
            beside: As there.
        """
        left = np.ones(len(self.slots), dtype=np.bool_)
        least = -(-PART_BYTES // self.length)
        pause, wait, over = _FIRST_LOOK_S, 0.0, False
        while not over:
            over = self.over(wait)
            for later in beside:
                later.look()
            came = np.flatnonzero(left & self.readable())
            if len(came) >= least or (over and len(came)):
                left[came] = False
                yield came
                wait = 0.0  # by now there may be more
            else:
                wait, pause = pause, min(_LOOK_S, _GROWTH * pause)

    def readable(self) -> NDArray[np.bool_]:
        """Slots, [slots], of which a copy of every byte has arrived by now, or was written."""
        good = np.zeros(len(self.extents.device), dtype=np.bool_)
        good[self.sent] = self.batch.results() == self.extents.length[self.sent].astype(np.int64)
        if self.twin is not None:
            good |= good[self.twin]
        return ~self._slots_of(~good)

    def over(self, timeout_s: float) -> bool:
        """Whether :meth:`wait` would return at once; blocks for ``timeout_s`` at most."""
        remaining = self.deadline - time.monotonic()
        done = self.batch.wait(max(0.0, min(timeout_s, remaining)))
        self.look()
        if done or remaining <= timeout_s:
            return True
        if not self.files.health.any_out_of_use:
            return False
        return bool(self.files.health.out_of_use(self.extents.device[self._pending()]).all())

    def look(self) -> None:
        """See which devices have done their part by now."""
        if not self.watch.done:
            self.watch.look(self.batch, time.monotonic())

    def held(self) -> NDArray[np.bool_]:
        """Slots, [slots], whose buffers an I/O may still touch now."""
        if self.batch.done():
            return np.zeros(len(self.slots), dtype=np.bool_)
        mask = np.zeros(len(self.extents.device), dtype=np.bool_)
        mask[self._pending()] = True
        return self._slots_of(mask)

    def out_of_reach(self) -> NDArray[np.bool_]:
        """Slots, [slots], a part of which lies only on devices that are out of use now."""
        out = self.files.health.out_of_use
        return self._slots_of(out(self.extents.device) & out(self.other))

    def incomplete(self) -> NDArray[np.bool_]:
        """Slots, [slots], of which a copy of some byte was not written."""
        good = np.zeros(len(self.extents.device), dtype=np.bool_)
        good[self.sent] = self.batch.results() == self.extents.length[self.sent].astype(np.int64)
        return self._slots_of(~good)

    def verified(
        self,
        right: NDArray[np.bool_],
        wrong_slot: NDArray[np.intp],
        wrong_offset: NDArray[np.int64],
        *,
        final: bool = True,
    ) -> None:
        """Tell what the checksums of this read said, so that a device that garbles is found, and
        what is read again comes from the other copy.

        Args:
            right: Slots of the batch whose bytes are right, [slots].
            wrong_slot: Slot of each wrong page, as an index into the batch, [n].
            wrong_offset: Where that page begins in the slot's bytes, [n].
            final: Whether it is not read again. A wrong page is no device's fault before that,
                unless it has another copy: then the same place is not read again.
        """
        device = self.extents.device.astype(np.intp)
        if not (self.without or len(wrong_slot)):
            if self.files.health.content_accused:
                good = device[right[self.extents.slot_index]]
                self.files.health.judge_content(good, device[:0])
            return
        at = wrong_slot * self.length + wrong_offset
        begin, end = self._piece_at(at), self._piece_at(at + self.files.geometry.page_bytes - 1)
        # A page that begins on one device may end on another: then neither is accused.
        accused = np.unique(begin[begin == end])
        new = self._doubt(accused)
        if right.any():
            # It was wrong before, and all that has changed is where these devices' pieces are from.
            slots = self.slots[right]
            for avoided in self.without:
                self.files.doubt(slots, np.full(len(slots), avoided, dtype=np.uint16))
        if final:
            alone = accused[self.extents.device[accused] == self.other[accused]]
            new = np.concatenate([new, alone])
        accused = np.intersect1d(accused, new)
        self.files.health.judge_content(device[right[self.extents.slot_index]], device[accused])

    def wrong_headers(self, slots: NDArray[np.intp]) -> None:
        """The headers of these slots, by place in the batch, are not those that were looked for."""
        if not len(slots):
            return
        begin = slots * self.length
        last = begin + min(self.length, self.files.geometry.header_bytes) - 1
        first, last = self._piece_at(begin), self._piece_at(last)
        pieces = [np.arange(a, b + 1) for a, b in zip(first, last, strict=True)]
        self._doubt(np.concatenate(pieces))

    def _piece_at(self, at: NDArray[np.int64]) -> NDArray[np.intp]:
        """Piece that each byte of the batch, counted over all slots, belongs to (of a read)."""
        return np.searchsorted(self.extents.buffer.astype(np.int64), at, side="right") - 1

    def _doubt(self, pieces: NDArray[np.intp]) -> NDArray[np.intp]:
        """These pieces are wrong where they have been read; those of which nobody knew."""
        pieces = pieces[self.extents.device[pieces] != self.other[pieces]]
        if not len(pieces):
            return pieces
        slots = self.slots[self.extents.slot_index[pieces]]
        found: NDArray[np.intp] = pieces[self.files.doubt(slots, self.extents.device[pieces])]
        return found

    @property
    def _alone(self) -> bool:
        """Whether no piece has another copy."""
        return self.other is self.extents.device

    def _learn(self, good: NDArray[np.bool_]) -> None:
        """Remember which copies could not be read, or which were written."""
        doubled = self.extents.device != self.other
        if not doubled.any():
            return
        slots = self.slots[self.extents.slot_index]
        if self.op is Op.WRITE:
            there = doubled & good
            self.files.replicas.trust(slots[there], self.extents.device[there])
        gone = doubled & ~good
        self.files.replicas.doubt(slots[gone], self.extents.device[gone])

    def ended(self) -> bool:
        """Whether all buffers are free again."""
        return self.batch.done()

    def _pending(self) -> NDArray[np.int64]:
        sent = np.arange(len(self.extents.device))[self.sent]
        pending: NDArray[np.int64] = sent[self.batch.results() == PENDING]
        return pending

    def _slots_of(self, extents: NDArray[np.bool_]) -> NDArray[np.bool_]:
        mask = np.zeros(len(self.slots), dtype=np.bool_)
        mask[self.extents.slot_index[extents]] = True
        return mask


@functools.lru_cache(maxsize=64)
def _byte_keys(op: Op, paths: tuple[str, ...]) -> tuple[str, ...]:
    """Key of what was moved, for each device."""
    name = "bytes_read" if op is Op.READ else "bytes_written"
    return tuple(counter_key(name, device=path) for path in paths)
