"""Slots on their way to the devices."""

from __future__ import annotations


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

    def __contains__(self, slot: int) -> bool:
        """Check whether the slot is one of them."""
        return slot in self._under_way

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
