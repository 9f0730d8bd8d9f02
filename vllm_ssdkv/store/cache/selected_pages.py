"""DRAM pages: single pages of slots that have no frame, as sparse decode reads them.

A page that one step needed is likely to be needed by the next one, so what was read stays until
its place is taken for another: which goes first is a policy. The tables are native
(``csrc/cache/page_cache.hpp``); this class adds addresses, and keeps what overdue reads still hold.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from vllm_ssdkv import _io
from vllm_ssdkv.store.format.slot_geometry import SlotGeometry
from vllm_ssdkv.store.memory.memory_plan import PageEvictionPolicy

NO_PLACE = -1


class Memory(Protocol):
    """Memory of the places. The tables never look at it."""

    @property
    def address(self) -> int:
        """Absolute address of its first byte."""
        ...


class Overdue(Protocol):
    """A read that is late, and may still write."""

    def ended(self) -> bool:
        """Check whether it does not any more."""
        ...


@dataclass(frozen=True, slots=True)
class Pages:
    """Pages of slots that queries need, all arrays [n].

    Attributes:
        slots: Slot of each, int64.
        numbers: Its number in the slot, int64.
        frames: Absolute address of the slot's frame, which somebody has borrowed, uint64; 0 where
            it has none.
    """

    slots: NDArray[np.int64]
    numbers: NDArray[np.int64]
    frames: NDArray[np.uint64]

    def __len__(self) -> int:
        """Their number."""
        return len(self.slots)

    def part(self, which: slice | NDArray[np.int64]) -> Pages:
        """Some of them."""
        return Pages(self.slots[which], self.numbers[which], self.frames[which])


@dataclass(frozen=True, slots=True)
class Asked:
    """Answer to :meth:`SelectedPageCache.acquire`. *Entries* are distinct pages outside frames.

    Attributes:
        which: Entry of each page asked for, int32 [n]; ``NO_PLACE`` where it lies in a frame.
        keys: Page of each entry, int64 [m].
        places: Of each entry, taken, int32 [m]; ``NO_PLACE`` where there was no room.
        held: Entries that have their place already; those after them must be read, as far as they
            have one. Neighbours stand side by side.
        framed: Distinct pages that lie in frames.
        coming: Entries of those held that somebody else is reading.
        guessed: Entries of those held that :meth:`SelectedPageCache.prefetch` brought and nobody
            asked for before.
    """

    which: NDArray[np.int32]
    keys: NDArray[np.int64]
    places: NDArray[np.int32]
    held: int
    framed: int
    coming: int
    guessed: int


class SelectedPageCache:
    """Places for pages. Used by the thread that runs the forward pass; never blocks.

    A place is free, holds a page, or one is on its way there. It is *taken* while somebody uses it
    or it is being read into. Time grows with the pages that a call is about, not with the cache.
    """

    def __init__(
        self,
        memory: Memory,
        offset: int,
        geometry: SlotGeometry,
        places: int,
        slots: int,
        policy: PageEvictionPolicy = "lru",
    ):
        """Args:
        memory: The places live in it, from ``offset`` (bytes, 4 KiB multiple) on.
        geometry: Of the slots.
        places: Number of places, of a page each.
        slots: Slots of the store.
        policy: Which page goes when its place is needed.
        """
        self.places = places
        self._offset = offset
        self._page_bytes = geometry.page_bytes
        self._pages = geometry.pages
        self.tables = _io.PageCache(
            memory.address + offset,
            geometry.page_bytes,
            geometry.header_bytes,
            places,
            slots,
            geometry.pages,
            policy,
        )
        self._lent: list[tuple[NDArray[np.int32], Overdue]] = []

    def acquire(self, pages: Pages) -> Asked:
        """Take the places of pages that queries need; the others get one, to be read into."""
        self._collect()
        return Asked(*self.tables.acquire(pages.slots, pages.numbers, pages.frames))

    def prefetch(
        self,
        pages: Pages,
        begin: NDArray[np.int32],
        limit: int,
        devices: NDArray[np.uint16] | None = None,
        quota: NDArray[np.int64] | None = None,
    ) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        """Take places for pages that may soon be needed and that DRAM does not have.

        Args:
            pages: In lists, int32 [lists + 1] edges ``begin``: each list gets as much as the
                others, while it has any.
            limit: Places to take at most. A page in several lists takes one.
            devices: Of each page, [n]; with ``quota``, [devices]: how many each may read.

        Returns:
            Keys and places of those to be read, [m]. What DRAM holds is not touched.
        """
        self._collect()
        if devices is None or quota is None:
            devices, quota = np.zeros(0, dtype=np.uint16), np.zeros(0, dtype=np.int64)
        return self.tables.prefetch(
            pages.slots, pages.numbers, pages.frames, begin, limit, devices, quota
        )

    def slot_and_number(
        self, keys: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Slot of each page, and its number there, [n]."""
        return np.divmod(keys, self._pages)

    def complete(
        self,
        keys: NDArray[np.int64],
        places: NDArray[np.int32],
        good: NDArray[np.bool_],
        devices: NDArray[np.uint16],
    ) -> None:
        """The reads of these pages have ended, [n]: those that are ``good`` are held from now on,
        having come from these devices. All stay taken."""
        self.tables.complete(keys, places, good.view(np.uint8), devices)

    def find(self, asked: Asked, pages: Pages) -> tuple[NDArray[np.uint64], NDArray[np.bool_]]:
        """Absolute address of each page that was asked for, and whether it is there, [n]."""
        address, here = self.tables.find(
            pages.numbers, pages.frames, asked.which, asked.keys, asked.places
        )
        return address, here.view(np.bool_)

    def holds(self, pages: Pages) -> NDArray[np.bool_]:
        """Mask of pages that are held, [n]; they count as used no more than before."""
        return self.tables.holds(pages.slots, pages.numbers).view(np.bool_)

    def release(self, places: NDArray[np.int32]) -> None:
        """End the use of taken places; ``NO_PLACE`` entries are skipped. One call per use."""
        self.tables.release(places)

    def lend(self, places: NDArray[np.int32], batch: Overdue) -> None:
        """Taken places into which a read may still write: they are out of use until it ends."""
        if len(places):
            self._lent.append((places, batch))

    def usable(self) -> int:
        """Places that are open, and that no overdue read holds."""
        self._collect()
        return self.open_places - sum(len(places) for places, _ in self._lent)

    # ---- lending their memory ----

    @property
    def open_places(self) -> int:
        """Places that are not closed."""
        return self.places - self.tables.closed()

    @property
    def evictions(self) -> int:
        """Pages that made room for others since the start."""
        return self.tables.evictions()

    @property
    def asked(self) -> int:
        """Distinct pages outside frames that queries have asked for since the start; those of a
        layer or turn count once."""
        return self.tables.asked()

    def held_in(self, firsts: NDArray[np.int32], length: int) -> NDArray[np.int32]:
        """Pages in the ``length`` places from each of these on, [n]; -1 where one is taken."""
        return self.tables.held_in(firsts, length)

    def close(self, firsts: NDArray[np.int32], length: int) -> NDArray[np.bool_]:
        """Take the ``length`` places from each of these on out of use, whatever they hold, where
        none of them is taken; where that was so, [n]."""
        return self.tables.close(firsts, length).view(np.bool_)

    def open(self, firsts: NDArray[np.int32], length: int) -> None:
        """Closed places may be used again."""
        self.tables.open(firsts, length)

    # ---- counts ----

    def forget(self, slots: NDArray[np.int64]) -> None:
        """The content of these slots changes."""
        self.tables.forget(slots)

    def step(self, rates: NDArray[np.float64]) -> None:
        """Queries of the next token follow. ``rates``: how fast each device is, in any unit."""
        self.tables.step(1.0 / rates)

    def buffer_offset(self, places: NDArray[np.int32]) -> NDArray[np.uint64]:
        """Byte offsets in the arena, as the I/O engine wants them."""
        return np.uint64(self._offset) + places.astype(np.uint64) * np.uint64(self._page_bytes)

    def held(self) -> int:
        """Places that hold a page."""
        return self.tables.held()

    def taken(self) -> int:
        """Places that somebody uses or reads into."""
        return self.tables.taken()

    def _collect(self) -> None:
        if not self._lent:
            return
        for entry in [e for e in self._lent if e[1].ended()]:
            self._lent.remove(entry)
            self.release(entry[0])
