"""Requests for bytes of slots that are on their way, and what becomes of them."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import EllipsisType
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from vllm_ssdkv import _io
from vllm_ssdkv.base.metrics import counter_key
from vllm_ssdkv.store.devices.throughput import BatchWatch
from vllm_ssdkv.store.io.coalescing import CoalescedBatch
from vllm_ssdkv.store.io.engines.protocol import PENDING, U16, U64, Batch, Op
from vllm_ssdkv.store.placement.stripe_map import Extents

if TYPE_CHECKING:
    from vllm_ssdkv.store.io.slot_io import SlotIO

PART_BYTES = 1024 * 1024
"""Minimum size of arrived data that is handed out at a time: each hand-out costs some Python."""

_FIRST_LOOK_S = 0.0002
"""Delay until a waiting batch first checks its arrived data and finished devices; the intervals
then grow."""

_GROWTH = 1.1
"""Growth of these intervals: the end of a device's part must be seen well before the next check."""

_LOOK_S = 0.1
"""Interval at which a waiting batch checks whether the devices it waits for were given up."""


@dataclass(slots=True, eq=False)
class SlotRequest:
    """One batch of slot requests in flight."""

    files: SlotIO
    op: Op
    slots: NDArray[np.int64]
    """Slot numbers, [slots]."""
    length: int
    """Bytes per slot."""
    watch: BatchWatch
    batch: Batch
    placed: Extents | _io.StripedExtents
    """Pieces, [m]; as they were found natively, all of them sent, until somebody asks for them."""
    again: bool = False
    """It was tried before, and has failed."""
    without: tuple[int, ...] = ()
    """Devices that were avoided on purpose."""
    others: U16 | None = None
    """Device of each piece's other copy, [m]; its own where there is none. None: none has one."""
    twin: NDArray[np.int64] | None = None
    """Number of the piece that is each one's other copy, [m]; None where one copy is enough."""
    sent: NDArray[np.int64] | EllipsisType = ...
    """Pieces that were sent to a device."""
    deadline: float = field(init=False)
    """Time of the monotonic clock, counted from the submission."""
    _found: _io.StripedExtents | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.deadline = self.watch.begin.latest + self.files.deadline_s
        if not isinstance(self.placed, Extents):
            self._found = self.placed

    @property
    def extents(self) -> Extents:
        """Pieces, [m]."""
        if not isinstance(self.placed, Extents):
            self.placed = Extents(*self.placed.extents())
        return self.placed

    @property
    def other(self) -> U16:
        """Device of each piece's other copy, [m]; its own where there is none."""
        return self.extents.device if self.others is None else self.others

    def wait(self, beside: Sequence[SlotRequest] = ()) -> NDArray[np.bool_]:
        """Wait until all has ended or the deadline passes; which slots succeeded, shape [slots].

        Ends early when only devices out of use are still to answer. Call it once: failures are
        counted here. Of two copies that are written, one is enough where the other one's device is
        out of use, or takes no writes.

        Args:
            beside: Batches in flight whose turn comes later: the speed of the devices is seen from
                when their parts end.
        """
        self.wait_for_io(beside)
        done = self.watch.nbytes
        keys = _byte_keys(self.op, self.files.health.paths)
        if self._found is not None and self._all_moved(self._found):
            self.files.health.answered(self.op, done > 0)
            self.files.counters.add_keyed(keys, done.tolist())
            return np.ones(len(self.slots), dtype=np.bool_)
        device, length = self.extents.device[self.sent], self.extents.length[self.sent]
        moved = self.files.health.judge(
            self.op, device, self.batch.results(), length, self.batch, again=self.again
        )
        if not moved.all():
            done = np.bincount(device[moved], length[moved], len(done)).astype(np.float64)
        self.files.counters.add_keyed(keys, done.tolist())
        good = np.zeros(len(self.extents.device), dtype=np.bool_)
        good[self.sent] = moved
        self._learn(good)
        if self.twin is not None:
            good |= good[self.twin] & self.files.health.avoided(self.op, self.extents.device)
        return ~self._slots_of(~good)

    def wait_for_io(self, beside: Sequence[SlotRequest] = ()) -> None:
        """Block until :meth:`wait` would return at once; ``beside`` as there."""
        pause = _FIRST_LOOK_S
        while not self.over(pause):
            pause = min(_LOOK_S, _GROWTH * pause)
            for later in beside:
                later.look()

    def feed(self, verifier: _io.ArrivalVerifier, beside: Sequence[SlotRequest] = ()) -> None:
        """Have a verifier made with :meth:`parts` look at slots as they arrive, without the GIL.
        Ends when :meth:`wait`, which is still to be called, would return at once.

        Args:
            beside: As there.
        """
        pause, ended = _FIRST_LOOK_S, False
        while not ended:
            over = self.over(0.0)
            # Without the interpreter for as long as nobody must look how fast the devices are.
            watched = not (self.watch.done and all(later.watch.done for later in beside))
            patience = 0.0 if over else pause if watched else _LOOK_S
            patience = max(0.0, min(patience, self.deadline - time.monotonic()))
            if isinstance(self.batch, _io.Batch):
                ended = verifier.follow(self.batch, patience) or over
            else:  # a twin, or an engine in Python
                self.batch.wait(min(patience, pause))
                verifier.take(self.batch.results())
                ended = over
            for later in beside:
                later.look()
            pause = min(_LOOK_S, _GROWTH * pause)

    def parts(self) -> tuple[NDArray[np.int64], U64, NDArray[np.uint32]]:
        """Extents of the requests that were sent: the slot, by place in the batch, the first byte
        in it, and the number of bytes."""
        slot_of = self.extents.slot_index[self.sent]
        begin = self.extents.buffer[self.sent] - slot_of.astype(np.uint64) * np.uint64(self.length)
        return slot_of, begin, self.extents.length[self.sent]

    def arriving(self, beside: Sequence[SlotRequest] = ()) -> Iterator[NDArray[np.intp]]:
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
        """Check whether :meth:`wait` would return at once; blocks for ``timeout_s`` at most."""
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
            device, length = self.extents.device[self.sent], self.extents.length[self.sent]
            self.watch.look(self.batch, device, length, time.monotonic())

    def held(self) -> NDArray[np.bool_]:
        """Slots, [slots], whose buffers an I/O may still touch now."""
        if self.batch.done():
            return np.zeros(len(self.slots), dtype=np.bool_)
        mask = np.zeros(len(self.extents.device), dtype=np.bool_)
        mask[self._pending()] = True
        return self._slots_of(mask)

    def out_of_reach(self) -> NDArray[np.bool_]:
        """Slots, [slots], a part of which lies only on devices that are avoided now."""
        out, op = self.files.health.avoided, self.op
        return self._slots_of(out(op, self.extents.device) & out(op, self.other))

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
        if not (self.without or len(wrong_slot) or self.files.health.content_accused):
            return
        device = self.extents.device.astype(np.intp)
        if not (self.without or len(wrong_slot)):
            self.files.health.judge_content(device[right[self.extents.slot_index]], device[:0])
            return
        at = wrong_slot * self.length + wrong_offset
        begin, end = self._piece_at(at), self._piece_at(at + self.files.geometry.page_bytes - 1)
        # A page that begins on one device may end on another: then neither is charged.
        charged = np.unique(begin[begin == end])
        new = self._mark_suspect(charged)
        if right.any():
            # It was wrong before, and all that has changed is where these devices' pieces are from.
            slots = self.slots[right]
            for avoided in self.without:
                self.files.mark_suspect(slots, np.full(len(slots), avoided, dtype=np.uint16))
        if final:
            alone = charged[self.extents.device[charged] == self.other[charged]]
            new = np.concatenate([new, alone])
        charged = np.intersect1d(charged, new)
        self.files.health.judge_content(device[right[self.extents.slot_index]], device[charged])

    def wrong_headers(self, slots: NDArray[np.intp]) -> None:
        """The headers of these slots, by place in the batch, are not those that were looked for."""
        if not len(slots):
            return
        begin = slots * self.length
        last = begin + min(self.length, self.files.geometry.header_bytes) - 1
        first, last = self._piece_at(begin), self._piece_at(last)
        pieces = [np.arange(a, b + 1) for a, b in zip(first, last, strict=True)]
        self._mark_suspect(np.concatenate(pieces))

    def _piece_at(self, at: NDArray[np.int64]) -> NDArray[np.intp]:
        """Piece that each byte of the batch, counted over all slots, belongs to (of a read)."""
        return np.searchsorted(self.extents.buffer.astype(np.int64), at, side="right") - 1

    def _mark_suspect(self, pieces: NDArray[np.intp]) -> NDArray[np.intp]:
        """These pieces are wrong where they have been read; those of which nobody knew."""
        pieces = pieces[self.extents.device[pieces] != self.other[pieces]]
        if not len(pieces):
            return pieces
        slots = self.slots[self.extents.slot_index[pieces]]
        found: NDArray[np.intp] = pieces[
            self.files.mark_suspect(slots, self.extents.device[pieces])
        ]
        return found

    def _all_moved(self, found: _io.StripedExtents) -> bool:
        batch = self.batch.batch if isinstance(self.batch, CoalescedBatch) else self.batch
        return found.whole(batch.results())

    def _learn(self, good: NDArray[np.bool_]) -> None:
        """Remember which copies could not be read, or which were written."""
        if self.others is None:
            return
        doubled = self.extents.device != self.others
        slots = self.slots[self.extents.slot_index]
        if self.op is Op.WRITE:
            there = doubled & good
            self.files.replicas.mark_valid(slots[there], self.extents.device[there])
        gone = doubled & ~good
        self.files.replicas.mark_suspect(slots[gone], self.extents.device[gone])

    def ended(self) -> bool:
        """Check whether all buffers are free again."""
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
