"""Index of slots and blocks: existence, allocation, pins, eviction. Owned by the scheduler.

Blocks are evicted here, DRAM frames by ``store/cache/frames.py``, single pages by
``store/cache/selected_pages.py``.

A slot is *free*, *writing* (allocated, not yet findable), *ready* (findable by its key), *private*
(in use, but not findable: a duplicate, or dropped while pinned), *masked* (journalled, but on a
device that is out of use) or *lost* (likewise, but empty; or a number that no slot has now).
``publish`` makes it findable in this process; ``durable`` makes it findable after a restart, too. A
slot is handed out again only after the journal was told that its old content is gone.

**Masked slots** are not found, and are found again when their device is back, in this process or
after a restart: the journal keeps them. A block that is stored anew meanwhile takes the key over
when it is durable; only then does the journal hear that the masked slot holds it no more.

**Eviction order** is LRU over ready, unpinned slots. A prefix is useless without its head, so
slots given together (to :meth:`SlotIndex.touch` or :meth:`SlotIndex.unpin`) are taken as a chain,
head first, and entered in reverse: the tail becomes the oldest of them and is evicted first. Touch
a request's whole chain when it ends, since chunks unpinned one by one put later tails above
earlier heads. A restart brings the order back as of the last rewrite of the journal (a clean close
makes one), then in order of storing.

**Retained slots** (:meth:`SlotIndex.retain`) are evicted when no other slot is evictable, in an LRU
order of their own. One whose time has come is ordinary again, as if just used; so is the least
recently used one where more are retained than may be. Only memory knows of it: a restart finds them
as the most recently used.

**Cost**: one cache line of 64 bytes per slot (key, epoch, list, pins, state), and 12 bytes in the
table of keys where the slot holds a block, 4 to 8 more where it is retained; nothing else grows,
and no slot has a Python object.
Recovery needs up to 68 more for a while. A lookup is a hash, one look at the table and one at the
slot.
Rewrites of the journal walk over the slots in steps of some tenths of a millisecond
(``profiling/bench_index.py`` measures all of this).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from enum import IntEnum
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from vllm_ssdkv._index import SlotTable
from vllm_ssdkv.base.errors import StoreFullError
from vllm_ssdkv.store.format.journal_record import Kind
from vllm_ssdkv.store.index.computed_blocks import ComputedBlocks
from vllm_ssdkv.store.index.journal import Journal, LiveRecords

EPOCH_COUNTER_BITS = 40
"""An epoch is the number of this opening of the store, then this many bits of a counter."""

I64 = NDArray[np.int64]

TAKEN = -1
"""Answer in place of a slot: another slot has the key, or gets it."""

FULL = -2
"""Answer in place of a slot: no slot is free."""

NOT_ADMITTED = -3
"""Answer of a node in place of a slot: the block was not seen often enough."""

OVER_BUDGET = -4
"""Answer of a node in place of a slot: a daily write budget is used up."""

PAUSED = -5
"""Answer of a node in place of a slot: writes to its drives are paused."""

NO_SLOT_CAUSES = {
    FULL: "store_full",
    NOT_ADMITTED: "admission",
    OVER_BUDGET: "budget",
    PAUSED: "writes_paused",
}
"""Causes (``stores_skipped``) of the answers with which a block is not stored."""


class SlotState(IntEnum):
    """State of a slot; see the module's text."""

    FREE = 0
    WRITING = 1
    READY = 2
    PRIVATE = 3
    LOST = 4
    MASKED = 5


class Usage(NamedTuple):
    """Numbers of slots by their use.

    Attributes:
        ready: Can be found.
        masked: Hold blocks on devices out of use, and nobody uses them.
        pinned: Are in use.
        obtainable: Are free or evictable, so that reservations count on them.
    """

    ready: int
    masked: int
    pinned: int
    obtainable: int


_NO_SLOTS = np.zeros(0, dtype=np.int64)


class IndexListener(Protocol):
    """Somebody who is told what becomes of durable blocks, in the order in which it happens."""

    def durable(self, slots: Iterable[int]) -> None:
        """Slots are durable."""

    def moved(self, old: Iterable[int], new: Iterable[int]) -> None:
        """Blocks have other slots now, durable or not."""

    def gone(self, slots: Iterable[int]) -> None:
        """Slots hold nothing any more that can be found; some of them did not before."""


class SlotIndex:
    """The index of one store. Single-threaded; lookups and pins touch memory only.

    Methods that change what a restart may find append to the journal: one write into the page
    cache per call, no waiting for a device, and no exception on I/O errors (the journal counts
    them and recovers by itself). Slot numbers outside the store raise IndexError everywhere.
    """

    node_replicas = 1
    """Attribute of the protocol ``TierIndex``."""

    def __init__(
        self,
        num_slots: int,
        journal: Journal | None,
        *,
        open_number: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Recover from what the journal said when it was opened.

        Args:
            num_slots: Slots of the store; at least as many as the journal was opened with.
            journal: None: nothing survives a restart.
            open_number: How often the store was opened, from the manifest; makes epochs unique
                even for slots that were never journalled. The journal's own epochs raise it.
            clock: Seconds, by which the time of retained slots passes.

        Raises:
            ValueError: ``num_slots`` is not in [1, 2^31 - 2], or below the journal's.
        """
        self.num_slots = num_slots
        self.listener: IndexListener | None = None
        self.unwritten: Collection[int] = ()
        """Slots that :meth:`lookup` leaves out, since somebody reads them from the devices who has
        not written them."""
        self._journal = journal
        self._table = SlotTable(num_slots)
        self._clock, self._began = clock, clock()
        self._reserved = 0
        self._refused = 0
        self._out_of_range = 0
        number = open_number
        if journal is not None:
            found = journal.recovered
            self._table.recover(found)
            self._out_of_range = found.out_of_range
            number = max(number, (found.newest_epoch >> EPOCH_COUNTER_BITS) + 1)
        self._table.set_last_epoch(number << EPOCH_COUNTER_BITS)
        self.opening = number
        """Number of this opening of the store, in all epochs of it."""
        if journal is not None:
            # A record that another slot's newer one has replaced must not come back when that one
            # is gone: by then its slot may be half overwritten.
            journal.attach(self._table, stale=self._out_of_range + found.superseded > 0)

    # ---- finding ----

    def find(self, key: bytes) -> int | None:
        """Slot that is ready and holds the key, if there is one.

        Raises:
            ValueError: the key has not 32 bytes.
        """
        return self._table.find(key)

    def lookup(self, keys: Sequence[bytes]) -> I64:
        """Slots of the longest prefix of ``keys`` that is ready, and not one of :attr:`unwritten`;
        int64, shape [<= n].

        Raises:
            ValueError: a key has not 32 bytes.
        """
        slots = self._ready(keys)
        if self.unwritten:
            pending = np.fromiter(self.unwritten, np.int64, len(self.unwritten))
            behind = np.flatnonzero(np.isin(slots, pending))
            slots = slots[: behind[0]] if len(behind) else slots
        return slots

    def _ready(self, keys: Sequence[bytes]) -> I64:
        return self._table.lookup(keys if isinstance(keys, list) else list(keys))

    def awaits(
        self,
        name: str,
        keys: Sequence[bytes],
        seconds: Callable[[], float | None],
        head: bytes = b"",
    ) -> bool:
        """False: the index is one engine's, whose own requests find each other's blocks in HBM."""
        return False

    def computes_no_more(self, name: str) -> None:
        """Nothing: see :meth:`awaits`."""

    def last(self, keys: Sequence[bytes], first: int, end: int, tags: Sequence[int]) -> int:
        """The last n of ``first`` < n <= ``end`` for which key n - 1 is ready with each of ``tags``
        exclusive-or'd into its last byte; else ``first``.

        Raises:
            ValueError: a key that is looked at has not 32 bytes.
        """
        return self._table.last(keys if isinstance(keys, list) else list(keys), first, end, tags)

    def epoch(self, slot: int) -> int:
        """Epoch of the slot's last allocation; 0 when it never had one. Goes into its header."""
        return self._table.epoch(slot)

    def epochs(self, slots: I64) -> I64:
        """Epoch of each slot, int64, shape [n]."""
        return self._table.epochs(slots)

    def key(self, slot: int) -> bytes:
        """Key of a ready slot.

        Raises:
            ValueError: it is not ready.
        """
        return self._table.key(slot)

    def state(self, slot: int) -> SlotState:
        """State of the slot now."""
        return SlotState(self._table.state(slot))

    def holds(self, slot: int, epoch: int) -> bool:
        """Check whether the slot holds a block of this epoch, or is being filled with it."""
        filled = self.state(slot) in (SlotState.READY, SlotState.WRITING)
        return filled and epoch == self.epoch(slot)

    def order(self) -> I64:
        """Evictable slots in the order of eviction: ordinary ones, then retained ones, and of each
        the least recently used first; int64, shape [n]."""
        return self._table.order()

    def free_slots(self) -> I64:
        """Slots that hold nothing and nobody uses, int64, shape [n]."""
        return self._table.free_slots()

    def touch(self, slots: I64) -> None:
        """Mark a chain, head first, as just used. Slots that are not evictable are skipped."""
        self._table.touch(slots)

    def touch_chain(self, keys: Sequence[bytes]) -> None:
        """Mark the longest prefix of a chain of keys that is ready, head first, as just used.

        Raises:
            ValueError: a key has not 32 bytes.
        """
        self.touch(self._ready(keys))

    def retain(self, slots: I64, seconds: float, share: float) -> None:
        """Keep the ready slots of a chain, head first, from eviction for so long, while ordinary
        slots can be evicted in their place. A time that ends later stays.

        ``share``: of the slots on devices in use, so many are retained at most. More are while
        requests use them.
        """
        self._end_retentions()
        most = int(share * (self.num_slots - self._table.lost - self._table.masked))
        until = math.ceil(self._clock() - self._began + seconds)
        self._table.retain(slots, until, most)

    def retain_chain(self, keys: Sequence[bytes], seconds: float, share: float) -> None:
        """:meth:`retain` the longest prefix of a chain of keys that is ready, head first.

        Raises:
            ValueError: a key has not 32 bytes.
        """
        self.retain(self._ready(keys), seconds, share)

    def _end_retentions(self) -> None:
        if self._table.retained:
            self._table.expire(int(self._clock() - self._began))

    # ---- allocating ----

    def available(self) -> int:
        """Slots that :meth:`allocate` could hand out now without touching reservations."""
        return max(0, self._table.obtainable - self._reserved)

    def reserve(self, n: int) -> None:
        """Keep ``n`` slots for later ``allocate(reserved=True)``, free or evictable ones.

        Raises:
            StoreFullError: fewer are available.
            ValueError: ``n`` is negative.
        """
        if n < 0:
            raise ValueError(f"reserve {n} slots")
        if n > self.available():
            self._refused += 1
            raise StoreFullError(f"{n} slots are to be reserved: {self._situation()}")
        self._reserved += n

    def unreserve(self, n: int) -> None:
        """Give up a part of the reservations.

        Raises:
            ValueError: more than is reserved.
        """
        if not 0 <= n <= self._reserved:
            raise ValueError(f"unreserve {n} of {self._reserved} reserved slots")
        self._reserved -= n

    def allocate(self, n: int, *, reserved: bool = False) -> I64:
        """Take ``n`` slots for writing, each pinned once and with a new epoch.

        Free slots first, of these the deferred ones last, then slots are evicted in the order of
        :meth:`order`. All or nothing.

        Args:
            n: How many.
            reserved: Take them out of the reservations.

        Returns:
            Slot numbers, int64, shape [n].

        Raises:
            StoreFullError: not enough are free or evictable; with ``reserved`` only when a
                quarantine or unbalanced pins have taken them away. Nothing is changed.
            ValueError: ``n`` is negative or exceeds the reservations.
        """
        if n < 0 or (reserved and n > self._reserved):
            raise ValueError(f"allocate {n} slots, {self._reserved} are reserved")
        if n > (self._table.obtainable if reserved else self.available()):
            self._refused += 1
            raise StoreFullError(f"{n} slots are needed: {self._situation()}")
        self._end_retentions()
        slots, gone, epochs = self._table.allocate(n)
        self._tell_gone(gone, epochs)
        if reserved:
            self._reserved -= n
        return slots

    def _situation(self) -> str:
        table = self._table
        return (
            f"of {self.num_slots} slots {table.free + table.deferred} are free, {table.evictable} "
            f"evictable, {table.pinned} pinned, {self._reserved} reserved, "
            f"{table.lost + table.masked} on lost devices"
        )

    def pin(self, slots: I64) -> None:
        """Keep slots from being evicted or handed out, once per call and entry. All or nothing.

        Reservations count on evictable slots. Who pins such slots instead of allocating gives up
        as many reservations in the same step, or a reserved allocation may fail later.

        Raises:
            ValueError: a slot is free, masked or lost.
        """
        self._table.pin(slots)

    def unpin(self, slots: I64) -> None:
        """Undo one pin of each entry of a chain, head first.

        At a slot's last unpin, a ready one becomes evictable as the most recently used; a writing
        one was abandoned and, like a private one, becomes free.

        Raises:
            ValueError: a slot is not pinned; the entries behind it are unpinned by then.
        """
        self._table.unpin(slots)

    # ---- content ----

    def publish(self, slot: int, key: bytes) -> bool:
        """Make a writing slot findable: its data is held or durable on every rank.

        Returns:
            False when the slot stays private: the key already has a ready slot (counted), or the
            slot was dropped meanwhile. Its last unpin frees it.

        Raises:
            ValueError: the slot is free or ready, or the key has not 32 bytes.
        """
        return self._table.publish(slot, key)

    def others(self, slots: I64) -> tuple[I64, I64]:
        """None: a block has one slot."""
        return _NO_SLOTS, _NO_SLOTS

    def claim(
        self, keys: Sequence[bytes], *, again: bool = False, of: ComputedBlocks | None = None
    ) -> I64:
        """Allocate a slot for each key and publish it. ``again``: a request that was preempted has
        computed them once more; ``of``: whose they are. Neither changes anything here.

        Returns:
            The slots, int64, [n]: :data:`TAKEN` where the key has one, :data:`FULL` where no slot
            is to be had.

        Raises:
            ValueError: a key has not 32 bytes.
        """
        found = np.full(len(keys), TAKEN, dtype=np.int64)
        for at, key in enumerate(keys):
            if self._table.find(key) is not None:
                continue
            if not self.available():
                self._refused += 1
                found[at] = FULL
                continue
            found[at] = self.allocate(1)[0]
            self.publish(int(found[at]), key)
        return found

    def durable(self, slot: int | I64) -> None:
        """Journal ready slots whose data every rank has written to its devices.

        Give all that are known together: they are one write. Slots that are no longer ready, or
        journalled already, are skipped. Keep slots pinned until
        here: an unpinned slot may be evicted and handed out while its write is still in flight.

        Raises:
            ValueError: a slot is still writing (publish comes first).
        """
        slots, epochs, keys, older = self._table.durable(np.atleast_1d(slot))
        if slots.size and self._journal is not None:
            self._journal.append(Kind.PUT, slots, epochs, keys)
        if self.listener is not None:
            self.listener.durable(slots.tolist())
        if older.size:
            self._tell_gone(*self._table.retire(older))

    def replace(self, old: I64, new: I64) -> NDArray[np.bool_]:
        """Blocks have moved: every rank has written what slots ``old`` hold into slots ``new``.

        Each key names its new slot from now on. The old one stays with its users, private, and is
        freed at its last unpin. The journal is told of the new slots before it is told that the
        old ones are gone, so a crash in between leaves both, of which a restart takes the newer
        one; what is not journalled stays so.

        Args:
            old: Slots, [n], which the caller has pinned since before they were copied.
            new: Slots that are writing, [n].

        Returns:
            Which have moved, bool, [n]; not those of which one was dropped meanwhile.

        Raises:
            ValueError: an old slot is not pinned, or lengths differ.
        """
        which, gone, slots, epochs, keys = self._table.replace(old, new)
        if slots.size and self._journal is not None:
            self._journal.append(Kind.PUT, slots, epochs, keys)
        moved = np.array(which, dtype=np.bool_)
        if self.listener is not None:
            self.listener.moved(old[moved].tolist(), new[moved].tolist())
        self._tell_gone(*self._table.retire(gone))
        return moved

    def drop(self, slot: int | I64) -> None:
        """Never find these slots again: their data is bad, or was not written.

        A pinned slot stays with its users, private, and is freed at the last unpin; an unpinned
        one is free at once, one of a device out of use when that is back. Slots that are free,
        private or lost already are skipped.
        """
        slots = np.atleast_1d(slot)
        self._tell_gone(*self._table.drop(slots), slots)

    def _tell_gone(self, slots: I64, epochs: I64, dropped: I64 = _NO_SLOTS) -> None:
        """Have the journal forget slots, and tell of them and of those that it need not know."""
        if slots.size and self._journal is not None:
            self._journal.append(Kind.DEL, slots, epochs)
        if self.listener is not None and (slots.size or dropped.size):
            self.listener.gone([*slots.tolist(), *dropped.tolist()])

    def mask(self, slots: I64) -> tuple[int, int]:
        """Take slots out of use until :meth:`unmask`: their device is. What is journalled is kept,
        and not found meanwhile; what is not is dropped as by :meth:`drop`.

        Args:
            slots: Numbers, int64, shape [n].

        Returns:
            How many blocks are masked now, and how many were dropped.
        """
        found = self._table.mask(slots)
        if self.listener is not None:
            self.listener.gone(slots.tolist())
        return found

    def unmask(self, slots: I64) -> int:
        """Have slots in use again that were masked or quarantined; how many are found again.

        They are the next to be evicted, in their old order. One whose key is being stored anew is
        found in place of the new one, which is not durable yet. Others are skipped.

        Args:
            slots: Numbers, int64, shape [n].
        """
        return self._table.unmask(slots)

    def quarantine(self, mask_or_slots: NDArray[np.bool_] | I64) -> int:
        """Take slots out of use until :meth:`restore`; how many were ready, writing or masked.

        They are dropped as by :meth:`drop` and not handed out. Reservations may now exceed what is
        left; :meth:`allocate` then says so.

        Args:
            mask_or_slots: bool, shape [num_slots], or slot numbers, int64, shape [n].

        Raises:
            ValueError: a mask has another shape.
        """
        slots = mask_or_slots
        if slots.dtype == np.bool_:
            slots = self._numbers(slots)
        slots = slots.astype(np.int64, copy=False)
        dropped, gone, epochs = self._table.quarantine(slots)
        self._tell_gone(gone, epochs, slots)
        return dropped

    def _numbers(self, mask: NDArray[np.generic]) -> I64:
        if mask.shape != (self.num_slots,):
            raise ValueError(f"mask of shape {mask.shape} for {self.num_slots} slots")
        return np.flatnonzero(mask)

    def restore(self, slots: I64) -> None:
        """Slots that were quarantined may be handed out again, before all others and not deferred.

        Args:
            slots: Numbers, int64, shape [n].

        Raises:
            ValueError: one is not lost; nothing is changed.
        """
        self._table.restore(slots)

    def defer(self, mask: NDArray[np.bool_]) -> None:
        """Hand out these slots, and no others, only when no other slot is free.

        Args:
            mask: bool, shape [num_slots].

        Raises:
            ValueError: the mask has another shape.
        """
        self._table.defer(mask)

    # ---- numbers and ends ----

    def usage(self, first: int, slots: int) -> Usage:
        """Usage of the slots ``[first, first + slots)``."""
        return Usage(*self._table.usage(first, slots))

    def free_now(self) -> int:
        """Slots that are free and not deferred."""
        return self._table.free

    @property
    def next_epoch(self) -> int:
        """Epochs from now on are not below this."""
        return (self.opening << EPOCH_COUNTER_BITS) + self._table.counts()["allocated"] + 1

    @property
    def nbytes(self) -> int:
        """Bytes of memory, all slots together."""
        return self._table.nbytes

    @property
    def live_records(self) -> LiveRecords:
        """Records that a compaction of the journal walks over."""
        return self._table

    @property
    def counters(self) -> dict[str, int]:
        """Counts since the start, a copy: ``allocated``, ``evictions``, ``published``,
        ``duplicates``, ``dropped``, ``quarantined``, ``recovered``, ``retentions_cut`` (slots that
        were to be retained for longer), ``out_of_range``, ``refused`` (calls for slots that were
        not to be had), and those of the journal with the prefix ``journal_``.
        """
        counts = self._table.counts() | {
            "out_of_range": self._out_of_range,
            "refused": self._refused,
        }
        if self._journal is None:
            return counts
        return counts | {f"journal_{k}": v for k, v in self._journal.counters.items()}

    def gauges(self) -> dict[str, int]:
        """Gauges of now: numbers of slots, ``journal_bytes``, and ``journal_degraded`` (0 or 1)."""
        journal, table = self._journal, self._table
        self._end_retentions()
        return {
            "free": table.free + table.deferred,
            "ready": table.ready,
            "writing": table.writing,
            "pinned": table.pinned,
            "evictable": table.evictable,
            "retained": table.retained,
            "reserved": self._reserved,
            "masked": table.masked,
            "lost": table.lost,
            "journal_bytes": 0 if journal is None else journal.nbytes,
            "journal_degraded": int(journal is not None and journal.degraded),
        }

    def flush(self, timeout_s: float = 10.0) -> bool:
        """Make what is journalled survive a power loss. Blocks; False on error or timeout."""
        return self._journal is None or self._journal.sync(timeout_s)

    def close(self, timeout_s: float = 10.0) -> bool:
        """Write the eviction order into the journal and close it. Blocks; False on error."""
        return self._journal is None or self._journal.close(timeout_s)
