"""Existence of blocks in a store of a node, and leases on them: the part that both modes have.

A slot is found by others when it was published, and what a session has pinned or claimed goes with
the session.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import numpy as np

from vllm_ssdkv.base.metrics import Counters
from vllm_ssdkv.node.protocol.messages import MAX_ENTRIES, StoreSpec
from vllm_ssdkv.node.server.chains import ChainTable
from vllm_ssdkv.node.server.claims import Claim, ClaimTable
from vllm_ssdkv.node.server.leases import Lease, pairs_of, slots_of
from vllm_ssdkv.store.format.slot_geometry import I64
from vllm_ssdkv.store.index.slot_index import SlotIndex


class Existence:
    """Index of one store, and the leases of its sessions. Any thread may call; one lock guards all
    numbers.

    Attributes:
        spec: What engines say of the store.
        counters: Of its index.
        path: Directory of its state.
    """

    spec: StoreSpec
    counters: Counters
    path: str
    name_key: bytes = b""
    _index: SlotIndex

    def __init__(self) -> None:
        self._lock = threading.Condition()
        """Guards all numbers; notified when a rank has told its weights."""
        self._claims, self._chains = ClaimTable(), ChainTable()

    @property
    def num_slots(self) -> int:
        """Slot numbers are below this."""
        return self._index.num_slots

    def gauges(self) -> tuple[dict[str, int], dict[str, int]]:
        """Gauges and counters of the index."""
        with self._lock:
            return self._index.gauges(), dict(self._index.counters)

    @property
    def claims(self) -> int:
        """Slots that are claimed and not written yet."""
        with self._lock:
            return len(self._claims)

    def claims_of(self, run: str) -> int:
        """The same of one run."""
        with self._lock:
            return sum(claim.run == run for claim in self._claims)

    # ---- finding ----

    def lookup(self, lease: Lease, keys: Sequence[bytes]) -> tuple[I64, I64]:
        """Slots of the longest prefix of ``keys`` that is there for a session, and their epochs."""
        with self._lock:
            self._look()
            slots = self._index.lookup(keys)
            if lease.since:
                there = [self._is_there(lease, slot) for slot in slots.tolist()]
                slots = slots[: [*there, False].index(False)]
            return slots, self._index.epochs(slots)

    def find_each(self, lease: Lease, keys: Sequence[bytes]) -> tuple[I64, I64]:
        """Slot of each key, -1 where it is not stored, and their epochs, 0 there; both [n]."""
        with self._lock:
            self._look()
            found = [self._index.find(key) for key in keys]
            there = [s is not None and self._is_there(lease, s) for s in found]
            slots = np.array(
                [s if known else -1 for s, known in zip(found, there, strict=True)], dtype=np.int64
            )
            epochs = np.zeros(len(keys), dtype=np.int64)
            epochs[slots >= 0] = self._index.epochs(slots[slots >= 0])
            return slots, epochs

    def lookup_chain(
        self, lease: Lease, chain: int, keys: Sequence[bytes], *, take_over: bool
    ) -> tuple[I64, I64, int]:
        """As :meth:`lookup`, and how many of the keys behind it others are computing.

        0: the request with this number is taken to compute them from now on, as it is with
        ``take_over``.
        """
        with self._lock:  # at one time: a block may be published meanwhile
            slots, epochs = self.lookup(lease, keys)
            missing, now = keys[len(slots) :], time.monotonic()

            def claimed(key: bytes) -> bool:
                claim = self._claims.with_key(key)
                return claim is not None and self._is_there(lease, claim.slot)

            if not take_over:
                others = self._chains.expected(missing, lease, chain, claimed, now)
                if others:
                    return slots, epochs, others
            self._chains.begin(lease, chain, missing, now)
            return slots, epochs, 0

    def go_on(self, lease: Lease, chain: int) -> None:
        """A request still computes what its chain holds."""
        with self._lock:
            self._chains.go_on(lease, chain, time.monotonic())

    def leave(self, lease: Lease, chain: int) -> None:
        """A request computes nothing more."""
        with self._lock:
            self._chains.leave(lease, chain)

    def last(
        self, lease: Lease, keys: Sequence[bytes], first: int, end: int, tags: Sequence[int]
    ) -> int:
        """As :meth:`SlotIndex.last`; ``keys`` begin with that of number ``first``."""
        with self._lock:
            found = self._index.last(keys, 0, min(end - first, len(keys)), tags)
            while lease.since and found and not self._all_there(lease, keys[found - 1], tags):
                found = self._index.last(keys, 0, found - 1, tags)
            return first + found

    def _is_there(self, lease: Lease, slot: int) -> bool:
        """Check whether a slot is not too old for a session."""
        return self._claims.generation(slot) >= lease.since

    def _all_there(self, lease: Lease, key: bytes, tags: Sequence[int]) -> bool:
        slots = [self._index.find(key[:-1] + bytes([key[-1] ^ tag])) for tag in tags]
        return all(slot is not None and self._is_there(lease, slot) for slot in slots)

    def touch(self, lease: Lease, keys: Sequence[bytes]) -> None:
        """Mark what a session finds of a chain, in this node, as just used."""
        slots, _ = self.find_each(lease, keys)
        with self._lock:
            self._index.touch(slots[slots >= 0])

    # ---- using ----

    def pin(self, lease: Lease, slots: I64, epochs: I64) -> None:
        """Keep slots that still have these epochs from eviction."""
        with self._lock:
            pairs = [
                pair
                for pair in pairs_of(slots, epochs)
                if pair[0] < self.num_slots and self._index.holds(*pair)
            ]
            self._index.pin(slots_of(pairs))
            lease.add(pairs)

    def unpin(self, lease: Lease, slots: I64, epochs: I64) -> None:
        """Undo one pin of each entry, and give up what was claimed and not saved by all ranks."""
        with self._lock:
            self._unpin(lease, pairs_of(slots, epochs))

    def end(self, lease: Lease) -> int:
        """The session of a lease is over: undo all of its pins; how many there were."""
        with self._lock:
            self._chains.end(lease)
        released = 0
        while True:  # some at a time: a slot may have been pinned any number of times
            with self._lock:
                left = lease.some(MAX_ENTRIES)
                self._unpin(lease, left)
            released += len(left)
            if not left:
                return released

    def _unpin(self, lease: Lease, pairs: Sequence[tuple[int, int]]) -> None:
        slots = lease.take_back(pairs)
        for slot, epoch in pairs:
            claim = self._claims.find(slot, epoch)
            if claim is None or claim.published or claim.run != lease.run:
                continue
            if not lease.holds(slot, epoch):
                self._give_up(claim)
        self._index.unpin(np.array(slots, dtype=np.int64))
        self._discard(slots)

    def drop(self, slots: I64, epochs: I64, cause: str) -> None:
        """Never find slots again that still have these epochs.

        Raises:
            ValueError: there is no such cause.
        """
        with self._lock:
            self.counters.add("slots_dropped", 0, cause=cause)
            self._drop(pairs_of(slots, epochs), cause)

    def _drop(self, pairs: Sequence[tuple[int, int]], cause: str) -> None:
        for slot, epoch in pairs:
            if slot >= self.num_slots or not self._index.holds(slot, epoch):
                continue
            self.counters.add("slots_dropped", 1, cause=cause)
            claim = self._claims.find(slot, epoch)
            self._index.drop(slot)
            if claim is not None:
                self._dropped(claim)
            self._discard([slot])

    def forget_all(self, lease: Lease) -> None:
        """Show a session nothing any more that has a slot now. Other sessions go on."""
        with self._lock:
            lease.since = self._claims.begin_generation()

    # ---- what the modes do differently ----

    def _look(self) -> None:
        """Somebody asks what is stored. Lock held."""

    def _discard(self, slots: Sequence[int]) -> None:
        """Some of these slots may be free now. Lock held."""

    def _dropped(self, claim: Claim) -> None:
        """A claimed block is not to be found. Lock held."""
        self._give_up(claim)

    def _give_up(self, claim: Claim) -> None:
        """A claimed block will not be stored, or not be found any more. Lock held."""
        self._claims.remove(claim)
        if self._index.holds(claim.slot, claim.epoch):
            self._index.drop(claim.slot)

    def forget_run(self, run: str) -> None:
        """No session of a run is left."""
