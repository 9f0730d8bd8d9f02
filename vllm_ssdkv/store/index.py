"""Which slot holds which block: existence, allocation, pins, eviction. Owned by the scheduler.

A slot is *free*, *writing* (allocated, not yet findable), *ready* (findable by its key), *private*
(in use, but not findable: a duplicate, or dropped while pinned) or *lost* (on a device that is out
of service, or a number that no slot has now). ``publish`` makes it findable in this process;
``durable`` makes it findable after a restart, too. A slot is handed out again only after the
journal was told that its old content is gone.

**Eviction order** is LRU over ready, unpinned slots. A prefix is useless without its head, so
slots given together (to :meth:`SlotIndex.touch` or :meth:`SlotIndex.unpin`) are taken as a chain,
head first, and entered in reverse: the tail becomes the oldest of them and is evicted first. Touch
a request's whole chain when it ends, since chunks unpinned one by one put later tails above
earlier heads. A restart brings the order back as of the last rewrite of the journal (a clean close
makes one), then in order of storing.

**Cost**: 40 bytes per slot (state, journalled, quarantined, deferred 1 each, pins 4, epoch 8, LRU
list 8, free stack 8, key reference 8) and about 170 more for a ready one (key object, slot number,
dictionary entry). A lookup takes a fraction of a microsecond per key. A rewrite of the journal
takes a snapshot here: about 0.2 s for a million ready slots, once per as many changes.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from vllm_ssdkv.errors import StoreFullError
from vllm_ssdkv.store.header import KEY_BYTES
from vllm_ssdkv.store.journal import Journal
from vllm_ssdkv.store.lru import LruList
from vllm_ssdkv.store.records import Kind

EPOCH_COUNTER_BITS = 40
"""An epoch is the number of this opening of the store, then this many bits of a counter."""

MAX_SLOTS = 2**31 - 2

COUNTERS = (
    "allocated",
    "evictions",
    "published",
    "duplicates",
    "dropped",
    "quarantined",
    "recovered",
    "out_of_range",
)
"""What :attr:`SlotIndex.counters` holds besides the journal's."""

I64 = NDArray[np.int64]


class SlotState(IntEnum):
    """What a slot is; see the module's text."""

    FREE = 0
    WRITING = 1
    READY = 2
    PRIVATE = 3
    LOST = 4


class SlotIndex:
    """The index of one store. Single-threaded; lookups and pins touch memory only.

    Methods that change what a restart may find append to the journal: one write into the page
    cache per call, no waiting for a device, and no exception on I/O errors (the journal counts
    them and recovers by itself).
    """

    def __init__(self, num_slots: int, journal: Journal | None, *, open_number: int = 0) -> None:
        """Recover from what the journal said when it was opened.

        Args:
            num_slots: Slots of the store; journalled slots beyond are forgotten and counted.
            journal: None: nothing survives a restart.
            open_number: How often the store was opened, from the manifest; makes epochs unique
                even for slots that were never journalled. The journal's own epochs raise it.

        Raises:
            ValueError: ``num_slots`` is not in [1, 2^31 - 2].
        """
        if not 1 <= num_slots <= MAX_SLOTS:
            raise ValueError(f"num_slots is {num_slots}, not in [1, {MAX_SLOTS}]")
        self.num_slots = num_slots
        self._journal = journal
        self._state = bytearray(num_slots)
        self._journalled = bytearray(num_slots)
        self._quarantined = bytearray(num_slots)
        self._deferred = bytearray(num_slots)
        self._pins = array("i", [0]) * num_slots
        self._epoch = array("q", [0]) * num_slots
        self._key: list[bytes | None] = [None] * num_slots
        self._slot_of: dict[bytes, int] = {}
        self._lru = LruList(num_slots)
        self._reserved = 0
        self._writing = 0
        self._pinned = 0
        self._lost = 0
        self._counts = dict.fromkeys(COUNTERS, 0)
        newest = self._recover(journal) if journal is not None else 0
        number = max(open_number, (newest >> EPOCH_COUNTER_BITS) + 1)
        self._last_epoch = number << EPOCH_COUNTER_BITS
        states = np.frombuffer(self._state, dtype=np.uint8)
        # Two stacks in one array: from its front, and from its end the deferred ones.
        self._free: I64 = np.zeros(num_slots, dtype=np.int64)
        self._deferred_count = 0
        empty = np.flatnonzero(states == SlotState.FREE)[::-1]  # a stack: the lowest is on top
        self._free_count = empty.size
        self._free[: empty.size] = empty
        if journal is not None:
            journal.attach(self._live, stale=self._counts["out_of_range"] > 0)

    def _recover(self, journal: Journal) -> int:
        found = journal.recovered
        for slot, epoch, key in zip(
            found.slots.tolist(), found.epochs.tolist(), found.keys, strict=True
        ):
            if slot >= self.num_slots:
                self._counts["out_of_range"] += 1
                continue
            self._state[slot] = SlotState.READY
            self._journalled[slot] = 1
            self._epoch[slot] = epoch
            self._key[slot] = key
            self._slot_of[key] = slot
            self._lru.append(slot)
            self._counts["recovered"] += 1
        return found.newest_epoch

    def _live(self) -> tuple[I64, I64, list[bytes]]:
        """Journalled slots, least recently used first, pinned ones last; epochs; keys."""
        journalled = np.frombuffer(self._journalled, dtype=np.bool_)
        order = np.fromiter(self._lru, dtype=np.int64, count=len(self._lru))
        listed = np.zeros(self.num_slots, dtype=np.bool_)
        listed[order] = True
        slots = np.concatenate([order[journalled[order]], np.flatnonzero(journalled & ~listed)])
        keys = [key for key in map(self._key.__getitem__, slots.tolist()) if key is not None]
        return slots, self.epochs(slots), keys

    # ---- finding ----

    def lookup(self, keys: Sequence[bytes]) -> I64:
        """Slots of the longest prefix of ``keys`` that is ready; int64, shape [<= n]."""
        slot_of = self._slot_of
        found: list[int] = []
        for key in keys:
            slot = slot_of.get(key)
            if slot is None:
                break
            found.append(slot)
        return np.array(found, dtype=np.int64)

    def epoch(self, slot: int) -> int:
        """Epoch of the slot's last allocation; 0 when it never had one. Goes into its header."""
        return self._epoch[slot]

    def epochs(self, slots: I64) -> I64:
        """Epoch of each slot, int64, shape [n]."""
        chosen: I64 = np.frombuffer(self._epoch, dtype=np.int64)[slots]
        return chosen

    def state(self, slot: int) -> SlotState:
        """What the slot is now."""
        return SlotState(self._state[slot])

    def touch(self, slots: I64) -> None:
        """Mark a chain, head first, as just used. Slots that are not evictable are skipped."""
        for slot in reversed(slots.tolist()):
            if slot in self._lru:
                self._lru.remove(slot)
                self._lru.append(slot)

    # ---- allocating ----

    def available(self) -> int:
        """Slots that :meth:`allocate` could hand out now without touching reservations."""
        return max(0, self._obtainable() - self._reserved)

    def _obtainable(self) -> int:
        return self._free_count + self._deferred_count + len(self._lru)

    def reserve(self, n: int) -> None:
        """Keep ``n`` slots for later ``allocate(reserved=True)``, free or evictable ones.

        Raises:
            StoreFullError: fewer are available.
            ValueError: ``n`` is negative.
        """
        if n < 0:
            raise ValueError(f"reserve {n} slots")
        if n > self.available():
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

        Free slots first, of these the deferred ones last, then the least recently used ones are
        evicted. All or nothing.

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
        if n > (self._obtainable() if reserved else self.available()):
            raise StoreFullError(f"{n} slots are needed: {self._situation()}")
        from_stack = min(n, self._free_count)
        self._free_count -= from_stack
        taken = self._free[self._free_count : self._free_count + from_stack][::-1].copy()
        deferred = min(n - from_stack, self._deferred_count)
        bottom = self.num_slots - self._deferred_count
        self._deferred_count -= deferred
        taken = np.concatenate([taken, self._free[bottom : bottom + deferred]])
        evicted = np.array([self._lru.pop() for _ in range(n - taken.size)], dtype=np.int64)
        self._forget(evicted)
        self._counts["evictions"] += evicted.size
        slots: I64 = np.concatenate([taken, evicted])
        for slot in slots.tolist():
            self._last_epoch += 1
            self._epoch[slot] = self._last_epoch
            self._state[slot] = SlotState.WRITING
            self._pins[slot] = 1
        if reserved:
            self._reserved -= n
        self._writing += n
        self._pinned += n
        self._counts["allocated"] += n
        return slots

    def _situation(self) -> str:
        return (
            f"of {self.num_slots} slots {self._free_count + self._deferred_count} are free, "
            f"{len(self._lru)} evictable, "
            f"{self._pinned} pinned, {self._reserved} reserved, {self._lost} on lost devices"
        )

    def pin(self, slots: I64) -> None:
        """Keep slots from being evicted or handed out, once per call and entry. All or nothing.

        Reservations count on evictable slots. Who pins such slots instead of allocating gives up
        as many reservations in the same step, or a reserved allocation may fail later.

        Raises:
            ValueError: a slot is free or lost.
        """
        wanted = slots.tolist()
        if any(self._state[s] in (SlotState.FREE, SlotState.LOST) for s in wanted):
            raise ValueError("pin of a slot that holds nothing")
        newly = {s for s in wanted if s in self._lru}
        for slot in newly:
            self._lru.remove(slot)
        self._pinned += len(newly)
        for slot in wanted:
            self._pins[slot] += 1

    def unpin(self, slots: I64) -> None:
        """Undo one pin of each entry of a chain, head first.

        At a slot's last unpin, a ready one becomes evictable as the most recently used; a writing
        one was abandoned and, like a private one, becomes free.

        Raises:
            ValueError: a slot is not pinned; the entries behind it are unpinned by then.
        """
        for slot in reversed(slots.tolist()):
            if self._pins[slot] <= 0:
                raise ValueError(f"unpin of slot {slot}, which is not pinned")
            self._pins[slot] -= 1
            if self._pins[slot]:
                continue
            self._pinned -= 1
            if self._state[slot] == SlotState.READY:
                self._lru.append(slot)
            else:
                self._writing -= self._state[slot] == SlotState.WRITING
                self._release(slot)

    def _release(self, slot: int) -> None:
        """An unpinned slot that nothing refers to becomes free, or lost."""
        if self._quarantined[slot]:
            self._state[slot] = SlotState.LOST
            self._lost += 1
            return
        self._state[slot] = SlotState.FREE
        if self._deferred[slot]:
            self._deferred_count += 1
            self._free[self.num_slots - self._deferred_count] = slot
            return
        self._free[self._free_count] = slot
        self._free_count += 1

    # ---- content ----

    def publish(self, slot: int, key: bytes) -> bool:
        """Make a writing slot findable: its data is held or durable on every rank.

        Returns:
            False when the slot stays private: the key already has a ready slot (counted), or the
            slot was dropped meanwhile. Its last unpin frees it.

        Raises:
            ValueError: the slot is free or ready, or the key has not 32 bytes.
        """
        if len(key) != KEY_BYTES:
            raise ValueError(f"key of {len(key)} bytes")
        if self._state[slot] == SlotState.PRIVATE:
            return False
        if self._state[slot] != SlotState.WRITING:
            raise ValueError(f"publish of slot {slot}, which is {self.state(slot).name}")
        self._writing -= 1
        if key in self._slot_of:
            self._state[slot] = SlotState.PRIVATE
            self._counts["duplicates"] += 1
            return False
        self._state[slot] = SlotState.READY
        self._key[slot] = key
        self._slot_of[key] = slot
        self._counts["published"] += 1
        return True

    def durable(self, slot: int | I64) -> None:
        """Journal ready slots whose data every rank has written to its devices.

        Slots that are no longer ready, or journalled already, are skipped. Keep slots pinned until
        here: an unpinned slot may be evicted and handed out while its write is still in flight.

        Raises:
            ValueError: a slot is still writing (publish comes first).
        """
        slots: list[int] = []
        keys: list[bytes] = []
        for one in np.atleast_1d(slot).tolist():
            key = self._key[one]  # only ready slots have one
            if self._state[one] == SlotState.WRITING:
                raise ValueError(f"slot {one} is durable before it was published")
            if key is not None and not self._journalled[one]:
                self._journalled[one] = 1
                slots.append(one)
                keys.append(key)
        if slots and self._journal is not None:
            array_of = np.array(slots, dtype=np.int64)
            self._journal.append(Kind.PUT, array_of, self.epochs(array_of), keys)

    def drop(self, slot: int | I64) -> None:
        """Never find these slots again: their data is bad, or was not written.

        A pinned slot stays with its users, private, and is freed at the last unpin; an unpinned
        one is free at once. Slots that are free, private or lost already are skipped.
        """
        self._counts["dropped"] += self._drop(np.atleast_1d(slot))

    def _drop(self, slots: I64) -> int:
        """Drop; how many slots were ready or writing."""
        ready: list[int] = []
        writing = 0
        for slot in slots.tolist():
            if self._state[slot] == SlotState.READY:
                self._state[slot] = SlotState.PRIVATE
                ready.append(slot)
            elif self._state[slot] == SlotState.WRITING:
                self._state[slot] = SlotState.PRIVATE
                writing += 1
        self._writing -= writing
        self._forget(np.array(ready, dtype=np.int64))
        for slot in ready:
            if slot in self._lru:
                self._lru.remove(slot)
                self._release(slot)
        return len(ready) + writing

    def _forget(self, slots: I64) -> None:
        """Make slots unfindable, now and after a restart."""
        gone: list[int] = []
        for slot in slots.tolist():
            key = self._key[slot]
            if key is not None:
                del self._slot_of[key]
                self._key[slot] = None
            if self._journalled[slot]:
                self._journalled[slot] = 0
                gone.append(slot)
        if gone and self._journal is not None:
            array_of = np.array(gone, dtype=np.int64)
            self._journal.append(Kind.DEL, array_of, self.epochs(array_of))

    def quarantine(self, mask_or_slots: NDArray[np.bool_] | I64) -> int:
        """Take slots out of use until :meth:`restore`; how many were ready or writing.

        They are dropped as by :meth:`drop` and not handed out. Reservations may now exceed what is
        left; :meth:`allocate` then says so.

        Args:
            mask_or_slots: bool, shape [num_slots], or slot numbers, int64, shape [n].

        Raises:
            ValueError: a mask has another shape.
        """
        mask = np.zeros(self.num_slots, dtype=np.bool_)
        if mask_or_slots.dtype == np.bool_ and mask_or_slots.shape != mask.shape:
            raise ValueError(f"mask of shape {mask_or_slots.shape} for {self.num_slots} slots")
        mask[mask_or_slots] = True
        mask &= np.frombuffer(self._quarantined, dtype=np.uint8) == 0
        slots = np.flatnonzero(mask)
        np.frombuffer(self._quarantined, dtype=np.uint8)[slots] = 1
        idle = self._take_free(mask)
        np.frombuffer(self._state, dtype=np.uint8)[idle] = SlotState.LOST
        self._lost += idle.size
        dropped = self._drop(slots)
        self._counts["quarantined"] += slots.size
        self._counts["dropped"] += dropped
        return dropped

    def restore(self, slots: I64) -> None:
        """Slots that were quarantined may be handed out again, before all others and not deferred.

        Args:
            slots: Numbers, int64, shape [n].

        Raises:
            ValueError: one is not lost; nothing is changed.
        """
        states = np.frombuffer(self._state, dtype=np.uint8)
        if bool((states[slots] != SlotState.LOST).any()):
            raise ValueError("restore of a slot that is not lost")
        np.frombuffer(self._quarantined, dtype=np.uint8)[slots] = 0
        np.frombuffer(self._deferred, dtype=np.uint8)[slots] = 0
        states[slots] = SlotState.FREE
        self._lost -= slots.size
        self._free[self._free_count : self._free_count + slots.size] = slots[::-1]
        self._free_count += slots.size

    def defer(self, mask: NDArray[np.bool_]) -> None:
        """Hand out these slots, and no others, only when no other slot is free.

        Args:
            mask: bool, shape [num_slots].

        Raises:
            ValueError: the mask has another shape.
        """
        if mask.shape != (self.num_slots,):
            raise ValueError(f"mask of shape {mask.shape} for {self.num_slots} slots")
        free = self._take_free(np.ones(self.num_slots, dtype=np.bool_))
        np.frombuffer(self._deferred, dtype=np.uint8)[:] = mask
        now, later = free[~mask[free]], free[mask[free]]
        self._free_count, self._deferred_count = now.size, later.size
        self._free[: now.size] = now
        self._free[self.num_slots - later.size :] = later[::-1]

    def _take_free(self, mask: NDArray[np.bool_]) -> I64:
        """Those of the free slots that the mask names, which are not among them afterwards."""
        stack = self._free[: self._free_count].copy()
        later = self._free[self.num_slots - self._deferred_count :].copy()
        kept, kept_later = stack[~mask[stack]], later[~mask[later]]
        self._free_count, self._deferred_count = kept.size, kept_later.size
        self._free[: kept.size] = kept
        self._free[self.num_slots - kept_later.size :] = kept_later
        both: I64 = np.concatenate([later[mask[later]][::-1], stack[mask[stack]]])
        return both

    # ---- numbers and ends ----

    def usage(self, first: int, slots: int) -> tuple[int, int]:
        """How many of the slots ``[first, first + slots)`` can be found, and are pinned."""
        part = slice(first, first + slots)
        ready = np.frombuffer(self._state, dtype=np.uint8)[part] == SlotState.READY
        pinned = np.frombuffer(self._pins, dtype=np.int32)[part] > 0
        return int(ready.sum()), int(pinned.sum())

    def free_now(self) -> int:
        """Slots that are free and not deferred."""
        return self._free_count

    @property
    def counters(self) -> dict[str, int]:
        """Counts since the start, a copy: :data:`COUNTERS`, and those of the journal with the
        prefix ``journal_``.
        """
        if self._journal is None:
            return dict(self._counts)
        return self._counts | {f"journal_{k}": v for k, v in self._journal.counters.items()}

    def gauges(self) -> dict[str, int]:
        """What is now: numbers of slots, ``journal_bytes``, and ``journal_degraded`` (0 or 1)."""
        journal = self._journal
        return {
            "free": self._free_count + self._deferred_count,
            "ready": len(self._slot_of),
            "writing": self._writing,
            "pinned": self._pinned,
            "evictable": len(self._lru),
            "reserved": self._reserved,
            "lost": self._lost,
            "journal_bytes": 0 if journal is None else journal.nbytes,
            "journal_degraded": int(journal is not None and journal.degraded),
        }

    def flush(self, timeout_s: float = 10.0) -> bool:
        """Make what is journalled survive a power loss. Blocks; False on error or timeout."""
        return self._journal is None or self._journal.sync(timeout_s)

    def close(self, timeout_s: float = 10.0) -> bool:
        """Write the eviction order into the journal and close it. Blocks; False on error."""
        return self._journal is None or self._journal.close(timeout_s)
