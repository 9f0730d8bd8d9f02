"""DRAM pages: single pages of slots that have no frame, as sparse decode reads them.

A page that one step needed is likely to be needed by the next one, so what was read stays until
its place is taken, least recently used first.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from vllm_ssdkv.store.arena import Arena
from vllm_ssdkv.store.files import SlotBatch

NO_PLACE = -1

_QUEUE_SHARE = 8
"""Victims are looked for an eighth of the cache at a time: a sort for every few of them would cost
more than the reads."""


class PageCache:
    """Places for pages. Used by the thread that runs the forward pass; never blocks.

    A place is free, holds a page, or is *taken*: being read into, or in use until :meth:`release`.
    Time grows with the pages that a call is about, not with the cache, victims excepted.
    """

    def __init__(
        self, arena: Arena, offset: int, page_bytes: int, places: int, slots: int, pages: int
    ):
        """Args:
        arena: Memory the places live in, from ``offset`` (bytes, 4 KiB multiple) on.
        page_bytes: Size of a place.
        places: Number of places.
        slots: Slots of the store, and ``pages`` of a slot.
        """
        self.places = places
        self._address = arena.address
        self._offset = offset
        self._page_bytes = page_bytes
        self._pages = pages
        # Place + 1 of each page of the store; the system gives memory only to what is written.
        self._place_of = np.zeros(slots * pages, dtype=np.int32)
        self._key_of = np.full(places, -1, dtype=np.int64)
        self._taken = np.zeros(places, dtype=np.int32)
        self._used = np.zeros(places, dtype=np.int64)
        self._clock = 0
        self._queue = np.zeros(0, dtype=np.int32)
        """Places that were used longest ago when it was made, and when each of them was used."""
        self._queue_used = np.zeros(0, dtype=np.int64)
        self._lent: list[tuple[NDArray[np.int32], SlotBatch]] = []

    def key(self, slots: NDArray[np.int64], pages: NDArray[np.int64]) -> NDArray[np.int64]:
        """One number for each (slot, page of the slot)."""
        return slots * self._pages + pages

    def find(self, keys: NDArray[np.int64]) -> NDArray[np.int32]:
        """Place of each page, [n], or ``NO_PLACE``; the places found are taken."""
        places = self._places(keys)
        self._take(places[places != NO_PLACE])
        return places

    def take(self, count: int) -> NDArray[np.int32]:
        """Up to ``count`` places for pages to be read into; what they held is dropped."""
        self._collect()
        parts: list[NDArray[np.int32]] = []
        refilled = False
        while count > 0:
            if len(self._queue) == 0:
                if refilled:
                    break
                self._fill_queue(count)
                refilled = True
                continue
            part, used = self._queue[:count], self._queue_used[:count]
            self._queue, self._queue_used = self._queue[count:], self._queue_used[count:]
            part = part[(self._taken[part] == 0) & (self._used[part] == used)]
            self._drop(part)
            self._take(part)
            parts.append(part)
            count -= len(part)
            refilled = refilled and len(part) == 0
        taken: NDArray[np.int32] = np.concatenate([*parts, np.zeros(0, dtype=np.int32)])
        return taken

    def bind(self, places: NDArray[np.int32], keys: NDArray[np.int64]) -> None:
        """These taken places, [n], hold these pages now, checked and readable."""
        self._key_of[places] = keys
        self._place_of[keys] = places + 1

    def release(self, places: NDArray[np.int32]) -> None:
        """End the use of taken places; ``NO_PLACE`` entries are skipped. One call per use."""
        np.subtract.at(self._taken, places[places != NO_PLACE], 1)

    def lend(self, places: NDArray[np.int32], batch: SlotBatch) -> None:
        """Taken places into which a read may still write: they are out of use until it ends."""
        if len(places):
            self._lent.append((places, batch))

    def usable(self) -> int:
        """Places that no overdue read holds."""
        self._collect()
        return self.places - sum(len(places) for places, _ in self._lent)

    def forget(self, slots: NDArray[np.int64]) -> None:
        """The content of these slots changes."""
        keys = (slots[:, None] * self._pages + np.arange(self._pages)[None, :]).ravel()
        places = self._places(keys)
        self._drop(places[places != NO_PLACE])

    def address(self, places: NDArray[np.int32]) -> NDArray[np.uint64]:
        """Absolute addresses."""
        return np.uint64(self._address) + self.buffer_offset(places)

    def buffer_offset(self, places: NDArray[np.int32]) -> NDArray[np.uint64]:
        """Byte offsets in the arena, as the I/O engine wants them."""
        return np.uint64(self._offset) + places.astype(np.uint64) * np.uint64(self._page_bytes)

    def held(self) -> int:
        """Places that hold a page."""
        return int((self._key_of >= 0).sum())

    def _places(self, keys: NDArray[np.int64]) -> NDArray[np.int32]:
        places: NDArray[np.int32] = self._place_of[keys] - 1
        return places

    def _take(self, places: NDArray[np.int32]) -> None:
        self._clock += 1
        self._used[places] = self._clock
        np.add.at(self._taken, places, 1)

    def _drop(self, places: NDArray[np.int32]) -> None:
        keys = self._key_of[places]
        self._place_of[keys[keys >= 0]] = 0
        self._key_of[places] = -1
        self._used[places] = 0

    def _fill_queue(self, count: int) -> None:
        free = np.flatnonzero(self._taken == 0).astype(np.int32)
        wanted = max(count, self.places // _QUEUE_SHARE)
        used = self._used[free]
        if wanted < len(free):
            free = free[np.argpartition(used, wanted)[:wanted]]
        # In this order neighbours are taken together, so that adjacent pages are one read.
        self._queue = np.sort(free)
        self._queue_used = self._used[self._queue]

    def _collect(self) -> None:
        for entry in [e for e in self._lent if e[1].ended()]:
            self._lent.remove(entry)
            self.release(entry[0])
