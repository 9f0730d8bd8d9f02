"""Least-recently-used order over slot numbers, O(1) per change, 8 bytes per slot."""

from __future__ import annotations

from array import array
from collections.abc import Iterator

_ABSENT = -1


class LruList:
    """A doubly linked list threaded through two integer arrays. Single-threaded.

    Slots are below 2^31 - 1. The entry after the last slot is the list's head and tail.
    """

    def __init__(self, num_slots: int) -> None:
        self._end = num_slots
        self._next = array("i", [_ABSENT]) * (num_slots + 1)
        self._previous = array("i", [_ABSENT]) * (num_slots + 1)
        self._next[num_slots] = self._previous[num_slots] = num_slots
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __contains__(self, slot: int) -> bool:
        return self._next[slot] != _ABSENT

    def __iter__(self) -> Iterator[int]:
        """Slots, the least recently used first. The list must not change meanwhile."""
        slot = self._next[self._end]
        while slot != self._end:
            yield slot
            slot = self._next[slot]

    def append(self, slot: int) -> None:
        """Add an absent slot as the most recently used."""
        last = self._previous[self._end]
        self._next[last] = self._previous[self._end] = slot
        self._previous[slot], self._next[slot] = last, self._end
        self._size += 1

    def remove(self, slot: int) -> None:
        """Take a present slot out."""
        before, after = self._previous[slot], self._next[slot]
        self._next[before], self._previous[after] = after, before
        self._next[slot] = self._previous[slot] = _ABSENT
        self._size -= 1

    def pop(self) -> int:
        """Take out the least recently used slot.

        Raises:
            IndexError: the list is empty.
        """
        slot = self._next[self._end]
        if slot == self._end:
            raise IndexError("pop from an empty LRU list")
        self.remove(slot)
        return slot
