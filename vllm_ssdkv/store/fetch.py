"""Fetching chosen pages: where sparse decode gets what its queries need.

Pages of slots that have a frame are used where they lie, pages that were read before from the page
cache. All others are read in one submission: every page once, whoever asks for it, and neighbours
as one request. What arrives is checked like anything else that comes from a device.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vllm_ssdkv.store.engine.protocol import Op
from vllm_ssdkv.store.files import SlotBatch, SlotFiles
from vllm_ssdkv.store.page_cache import NO_PLACE, PageCache
from vllm_ssdkv.store.seal_table import SealTable

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Read:
    """Pages on their way; all arrays [n]."""

    slots: NDArray[np.int64]
    pages: NDArray[np.int64]
    places: NDArray[np.int32]
    batch: SlotBatch


@dataclass(slots=True)
class Fetch:
    """Pages that were asked for, some of them still on their way. Belongs to who asked.

    Attributes:
        address: Absolute address of each page asked for, uint64 [n]; valid once it has arrived.
        from_cache, from_ssd: Distinct pages found in the cache, and read.
    """

    address: NDArray[np.uint64]
    from_cache: int
    from_ssd: int
    _keys: NDArray[np.int64]
    """Distinct pages that lie in no frame, ascending."""
    _places: NDArray[np.int32]
    """Their places; ``NO_PLACE`` where there was no room."""
    _asked: NDArray[np.int64]
    """Entries of ``address`` that lie in no frame."""
    _which: NDArray[np.int64]
    """Page (index into ``_keys``) of each of them."""
    _read: _Read | None


class PageFetcher:
    """Brings pages into memory. Used by the thread that runs the forward pass."""

    def __init__(self, files: SlotFiles, seals: SealTable, cache: PageCache):
        self._files = files
        self._seals = seals
        self._cache = cache
        self.bad: list[int] = []
        """Slots with wrong or unreadable bytes since the last :meth:`take_bad`."""

    @property
    def room(self) -> int:
        """Distinct pages that one fetch can bring at least."""
        return self._cache.usable()

    def start(
        self,
        slots: NDArray[np.int64],
        pages: NDArray[np.int64],
        frame_address: NDArray[np.uint64],
    ) -> Fetch:
        """Start to read what has to be read. Does not block.

        Args:
            slots: Slot of each page, [n]; pages may repeat.
            pages: Number of each page in its slot, [n].
            frame_address: Absolute address of the slot's frame, which somebody has borrowed, [n];
                0 where it has none.
        """
        geometry = self._files.geometry
        inside = np.uint64(geometry.header_bytes) + pages.astype(np.uint64) * np.uint64(
            geometry.page_bytes
        )
        address = frame_address + inside
        asked = np.flatnonzero(frame_address == 0)
        keys, first, which = np.unique(
            self._cache.key(slots[asked], pages[asked]), return_index=True, return_inverse=True
        )
        places = self._cache.find(keys)
        missing = np.flatnonzero(places == NO_PLACE)
        found = len(keys) - len(missing)
        taken = self._cache.take(len(missing))
        missing = missing[: len(taken)]
        places[missing] = taken
        read: _Read | None = None
        if len(missing):
            at = asked[first[missing]]
            read = self._submit(slots[at], pages[at], taken)
        return Fetch(address, found, len(missing), keys, places, asked, which, read)

    def finish(self, fetch: Fetch) -> NDArray[np.bool_]:
        """Wait for the pages, with the deadline of I/O; which of those asked for are there, [n].

        Their memory stays as it is until :meth:`release`.
        """
        good = fetch._places != NO_PLACE
        if fetch._read is not None:
            read = fetch._read
            fetch._read = None
            right = self._arrive(read)
            index = np.searchsorted(fetch._keys, self._cache.key(read.slots, read.pages))
            good[index] = right
            self._cache.bind(read.places[right], fetch._keys[index[right]])
            # Places whose read failed were given back or lent.
            fetch._places[index[~right]] = NO_PLACE
        fetch.address[fetch._asked] = self._cache.address(fetch._places)[fetch._which]
        arrived = np.ones(len(fetch.address), dtype=np.bool_)
        arrived[fetch._asked] = good[fetch._which]
        return arrived

    def release(self, fetch: Fetch) -> None:
        """The pages are not read any more. Also ends a fetch that nobody waits for."""
        if fetch._read is not None:
            read = fetch._read
            fetch._read = None
            index = np.searchsorted(fetch._keys, self._cache.key(read.slots, read.pages))
            fetch._places[index] = NO_PLACE
            self._give_back(read, np.zeros(len(read.places), dtype=np.bool_))
        self._cache.release(fetch._places)
        fetch._places = np.full_like(fetch._places, NO_PLACE)

    def take_bad(self) -> list[int]:
        """Slots with wrong or unreadable bytes since the last call."""
        bad, self.bad = self.bad, []
        return bad

    # ---- reading ----

    def _submit(
        self, slots: NDArray[np.int64], pages: NDArray[np.int64], places: NDArray[np.int32]
    ) -> _Read:
        geometry = self._files.geometry
        offset = geometry.header_bytes + pages * geometry.page_bytes
        buffers = self._cache.buffer_offset(places)
        batch = self._files.submit(
            Op.READ, slots, offset, geometry.page_bytes, buffers, joined=True
        )
        return _Read(slots, pages, places, batch)

    def _arrive(self, read: _Read) -> NDArray[np.bool_]:
        """Wait for a read; which of its pages are right. The places of the others are returned."""
        good = self._verify(read, final=False)
        again = np.flatnonzero(~good & ~read.batch.held() & ~read.batch.out_of_reach())
        if len(again):
            # Once more, only what failed: a neighbour's bad sector may have failed it.
            second = self._submit(read.slots[again], read.pages[again], read.places[again])
            right = self._verify(second, final=True)
            held = second.batch.held()
            self._blame(second.slots[~right & ~held & ~second.batch.out_of_reach()])
            good[again] = right
            self._give_back(second, right)
            rest = np.ones(len(good), dtype=np.bool_)
            rest[again] = False
            first = _Read(read.slots, read.pages, read.places, read.batch)
            self._give_back(first, good | ~rest)
        else:
            self._give_back(read, good)
        return good

    def _verify(self, read: _Read, *, final: bool) -> NDArray[np.bool_]:
        """Wait, check the pages that arrived, and unseal them; which may be used, [n]."""
        good = read.batch.wait()
        at = np.flatnonzero(good)
        seals, known = self._seals.get_pages(read.slots[at], read.pages[at])
        buffers = self._cache.buffer_offset(read.places[at])
        sealer = self._files.sealer
        same = np.zeros(len(at), dtype=np.bool_)
        if self._files.geometry.encrypted:
            # A page's number is in its nonce, and one call opens pages of one number.
            for page in np.unique(read.pages[at]).tolist():
                mine = np.flatnonzero(read.pages[at] == page)
                opened = sealer.unseal(seals.part(mine), page, buffers[mine], final=final)
                same[mine] = opened[:, 0]
        elif len(at):
            same = sealer.unseal(seals, 0, buffers, final=final)[:, 0]
        good[at] = same & known
        wrong = at[~same & known]
        if final:
            self._files.counters.add("checksum_failures", len(wrong))
        read.batch.verified(good, wrong, np.zeros(len(wrong), dtype=np.int64), final=final)
        return good

    def _blame(self, slots: NDArray[np.int64]) -> None:
        if len(slots) == 0:
            return
        blamed = np.unique(slots).tolist()
        self.bad.extend(blamed)
        logger.error(
            "ssdkv: %d slot(s) cannot be read or do not match their checksums, and are dropped: %s",
            len(blamed),
            blamed[:8],
        )

    def _give_back(self, read: _Read, keep: NDArray[np.bool_]) -> None:
        """Return the places of pages that are not kept, at once or when their read ends."""
        held = read.batch.held() & ~keep
        self._cache.release(read.places[~keep & ~held])
        self._cache.lend(read.places[held], read.batch)
