"""Slots of new blocks, from their allocation until every rank has written them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from vllm_ssdkv.base.metrics import Counters
from vllm_ssdkv.connector.scheduler.step_draft import StepDraft
from vllm_ssdkv.store.index.computed_blocks import ComputedBlocks
from vllm_ssdkv.store.index.slot_index import NO_SLOT_CAUSES, SlotState
from vllm_ssdkv.store.own_store import ContextIndex, owned
from vllm_ssdkv.store.tier import TierIndex


class UnverifiedBlocks:
    """Marks on slots. If the next check fails, nobody may find these blocks later.

    A byte per slot. Used by the scheduler's thread.

    Example:
        >>> blocks = UnverifiedBlocks(num_slots=4)
        >>> blocks.add(2)
        >>> blocks.slots().tolist()
        [2]
    """

    def __init__(self, num_slots: int):
        self._marks = np.zeros(num_slots, dtype=np.bool_)

    def add(self, slot: int) -> None:
        """A slot has a block that was computed just now."""
        self._marks[slot] = True

    def rewrite(self, old: int, new: int) -> None:
        """A block gets another slot."""
        self._marks[new] = self._marks[old]

    def clear(self) -> None:
        """The check was good."""
        self._marks[:] = False

    def slots(self) -> NDArray[np.int64]:
        """Marked slots, ascending; what they held may have been evicted since."""
        return np.flatnonzero(self._marks)


class PendingWrites:
    """Slots whose writes were ordered and not reported by every rank. Used by the scheduler's
    thread."""

    def __init__(self, ranks: int):
        self._ranks = ranks
        # Slot -> (epoch, ranks that still have to report).
        self._under_way: dict[int, tuple[int, int]] = {}

    def __len__(self) -> int:
        """Number of slots."""
        return len(self._under_way)

    def __contains__(self, slot: object) -> bool:
        """Check whether the slot is one of them."""
        return slot in self._under_way

    def __iter__(self) -> Iterator[int]:
        """Slots, in any order."""
        return iter(self._under_way)

    def slots(self) -> list[int]:
        """Slots that are under way now."""
        return list(self._under_way)

    def awaits(self, slot: int, epoch: int) -> bool:
        """Check whether this use of a slot is one of them."""
        return slot in self and self._under_way[slot][0] == epoch

    def add(self, slot: int, epoch: int) -> None:
        """The next plan orders it."""
        self._under_way[slot] = (epoch, self._ranks)

    def done(self, slot: int, epoch: int) -> bool:
        """A rank has written a slot; whether none is missing now."""
        entry = self._under_way.get(slot)
        if entry is None or entry[0] != epoch:
            return False
        if entry[1] > 1:
            self._under_way[slot] = (epoch, entry[1] - 1)
            return False
        del self._under_way[slot]
        return True

    def drop(self, slot: int) -> bool:
        """Nobody waits for it any more; False when nobody did."""
        return self._under_way.pop(slot, None) is not None


class SlotLedger:
    """Owner of slots that are not published yet, or not written. Used by the scheduler's thread.

    Attributes:
        writing: Published slots on their way to the devices.
        unverified: Marks of this run's blocks, until a verified hit was the same.
        undigested: Marks of blocks, until the weights have been digested.
    """

    def __init__(
        self,
        index: TierIndex,
        own: ContextIndex | None,
        ranks: int,
        draft: StepDraft,
        counters: Counters,
    ):
        """``own``: the same index, where blocks get slots one by one, which page mode needs.
        ``draft`` takes the orders to workers."""
        self.writing = PendingWrites(ranks)
        self.unverified = UnverifiedBlocks(index.num_slots)
        self.undigested = UnverifiedBlocks(index.num_slots)
        self._index, self._own = index, own
        self._draft, self._counters = draft, counters
        # Slot -> epoch, of slots with a copy in DRAM and without a key.
        self._held: dict[int, int] = {}

    def __len__(self) -> int:
        """Allocated slots without a key."""
        return len(self._held)

    def allocate(self, block_id: int, *, index: int = -1, reserved: bool = False) -> int:
        """A slot for a block that this step copies from HBM to DRAM.

        ``index``: its place in its context, where its tokens may be ordered; -1: they are not.

        Raises:
            StoreFullError: no slot can be had.
        """
        slot = int(owned(self._own).allocate(1, reserved=reserved)[0])
        self._held[slot] = self._index.epoch(slot)
        self._draft.copies.append((slot, self._held[slot], block_id, index))
        return slot

    def publish(self, slot: int, key: bytes, *, needed: bool) -> None:
        """Have an allocated slot found under ``key`` and written to the devices.

        Where another slot has this key, the new one is written only if it is ``needed``: a running
        request reads it, and DRAM has no room to keep it.
        """
        epoch = self._held.pop(slot)
        if not owned(self._own).publish(slot, key) and not needed:
            self.unpin([slot])
            return
        self._write(slot, epoch, key)

    def claim(
        self, blocks: Sequence[tuple[bytes, int]], of: ComputedBlocks, *, again: bool
    ) -> list[str]:
        """Have blocks (key, HBM block) of this step found and written, unless they are stored.

        Args:
            blocks: Of one request.
            of: Whose they are.
            again: It was preempted, and may have computed them before.

        Returns:
            Cause, for each block that gets no slot and is not stored.
        """
        if self._index.node_replicas > 1:
            times = range(self._index.node_replicas)
            blocks = [block for block in blocks for _ in times]
            of = replace(of, runs=[run for run in of.runs for _ in times])
        slots = self._index.claim([key for key, _ in blocks], again=again, of=of).tolist()
        for slot, (key, block_id) in zip(slots, blocks, strict=True):
            if slot >= 0:
                epoch = self._index.epoch(slot)
                self._draft.copies.append((slot, epoch, block_id, -1))
                self._write(slot, epoch, key)
        return [NO_SLOT_CAUSES[slot] for slot in slots if slot in NO_SLOT_CAUSES]

    def _write(self, slot: int, epoch: int, key: bytes) -> None:
        self.unverified.add(slot)
        self.undigested.add(slot)
        if slot in self.writing:
            # A node has claimed it anew in another session: nobody reports the write before.
            self.unpin([slot])
        self.writing.add(slot, epoch)
        self._draft.flushes.append((slot, epoch, key))

    def abandon(self, slot: int) -> None:
        """Nobody will need an allocated slot's block."""
        self._held.pop(slot, None)
        self._index.drop(slot)
        self.unpin([slot])

    def replace(self, slot: int) -> None:
        """A published slot's block has been computed anew: another slot gets its key."""
        self._index.drop(slot)
        if self._index.state(slot) is SlotState.FREE:
            self._draft.discard.append(slot)

    def drop(self, slot: int, cause: str) -> None:
        """A slot's block is not to be found any more. Several ranks, or a load and the scrub, may
        tell of the same slot: it is counted once."""
        if self._index.holds(slot, self._index.epoch(slot)):
            self._index.drop(slot)
            self._counters.add("slots_dropped", 1, cause=cause)

    def write_failed(self, slot: int) -> None:
        """A rank could not write a slot, or had no frame for it."""
        self.drop(slot, "write_error")
        if self.writing.drop(slot) or self._held.pop(slot, None) is not None:
            self.unpin([slot])

    def unpin(self, slots: Sequence[int]) -> None:
        """Undo one pin of slots; workers forget those that are free then."""
        self._index.unpin(np.array(slots, dtype=np.int64))
        # What became free without having been evicted holds nothing that anybody will read.
        gone = (SlotState.FREE, SlotState.LOST)
        self._draft.discard.extend(slot for slot in slots if self._index.state(slot) in gone)
