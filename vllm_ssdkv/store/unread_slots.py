"""Slots that could not be read: nobody finds them for a while, and then they are tried again."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Final, Protocol

import numpy as np

from vllm_ssdkv.base.metrics import Counters
from vllm_ssdkv.store.format.slot_geometry import I64
from vllm_ssdkv.store.placement.rebalancer import Rebalancer

RETRY_S: Final = 10.0
"""Seconds for which a slot is not found after a read of it has failed."""


class MaskedIndex(Protocol):
    """Index whose slots can be masked; see :class:`SlotIndex`."""

    @property
    def counters(self) -> Mapping[str, int]:
        """Events since the start."""

    def epoch(self, slot: int) -> int:
        """Epoch of the slot."""

    def holds(self, slot: int, epoch: int) -> bool:
        """Check whether the slot has a block of this epoch."""

    def available(self) -> int:
        """Slots that nobody was promised."""

    def mask(self, slots: I64) -> tuple[int, int]:
        """Slots cannot be read now."""

    def drop(self, slot: int | I64) -> None:
        """Never find these slots again."""


class UnreadSlots:
    """Masks slots whose reads failed. Used by the thread of the index; never blocks.

    The block stays in the journal. Who needs it meanwhile computes it, and stores it elsewhere. A
    slot that cannot be read again and again is said to be bad by the worker, which counts.

    Example:
        unread = UnreadSlots(index, rebalancer, counters)
        unread.failed([(3, epoch)])
        unread.step()
    """

    def __init__(
        self,
        index: MaskedIndex,
        placement: Rebalancer,
        counters: Counters,
        clock: Callable[[], float] = time.monotonic,
        *,
        shared: bool = False,
    ):
        """``clock``: monotonic seconds; ``shared``: other engines have the slots, too, so that the
        index alone says what becomes of them."""
        self._index, self._placement, self._shared = index, placement, shared
        self._counters, self._clock = counters, clock
        self._due: dict[int, float] = {}
        """Instants at which slots are tried again, ascending."""

    def failed(self, pairs: Iterable[tuple[int, int]]) -> None:
        """These slots with their epochs, -1 for the present one, could not be read.

        What is not durable yet is dropped. So is all of it where there is no room beside what
        requests were promised.
        """
        held = [
            slot
            for slot, epoch in dict.fromkeys(pairs)
            if self._index.holds(slot, self._index.epoch(slot) if epoch == -1 else epoch)
        ]
        if not held:
            return
        index, slots = self._index, np.array(held, dtype=np.int64)
        if index.available() < len(held) and not self._shared:
            index.drop(slots)
            self._counters.add("slots_dropped", len(held), cause="read_error")
            return
        _, dropped = index.mask(slots)
        self._counters.add("slots_dropped", dropped, cause="read_error")
        for slot in () if self._shared else held:
            self._due.pop(slot, None)
            self._due[slot] = self._clock() + RETRY_S

    def step(self) -> bool:
        """Have slots found again whose time has come; whether there were any."""
        if not self._due:
            return False
        now = self._clock()
        slots = [slot for slot, due in self._due.items() if due <= now]
        self._show(slots)
        return bool(slots)

    def give_up(self) -> bool:
        """Drop all of them, because a request needs room; whether there were any."""
        slots = list(self._due)
        if slots:
            index = self._index
            before = index.counters["dropped"]
            index.drop(np.array(slots, dtype=np.int64))
            dropped = index.counters["dropped"] - before
            self._counters.add("slots_dropped", dropped, cause="read_error")
            self._show(slots)
        return bool(slots)

    def _show(self, slots: list[int]) -> None:
        for slot in slots:
            del self._due[slot]
        if slots:
            self._placement.unmask(np.array(slots, dtype=np.int64))
