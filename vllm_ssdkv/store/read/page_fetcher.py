"""Fetching chosen pages: where sparse decode gets what its queries need.

Pages of slots that have a frame are used where they lie, pages that were read before from the page
cache. All others are read in one submission: every page once, whoever asks for it, and neighbours
as one request. What arrives is checked like anything else that comes from a device.

Pages that a later layer may need are read *ahead*: what was guessed wrong costs the drives' time
and the places that are worth least, and nothing else.

A page whose read hangs, and that has a copy on a device in use, is read from there into another
place. Waiting for reads that do not end is bounded as in ``store/read/context_stream.py``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vllm_ssdkv import _io
from vllm_ssdkv.store.cache.selected_pages import NO_PLACE, Asked, Pages, SelectedPageCache
from vllm_ssdkv.store.integrity.checksum_table import ChecksumTable
from vllm_ssdkv.store.io.digest_source import SlotExtents, TableDigests
from vllm_ssdkv.store.io.slot_io import SlotIO
from vllm_ssdkv.store.io.verified_read import VerifiedRead
from vllm_ssdkv.store.placement.stripe_map import Extents
from vllm_ssdkv.store.read.prefetch_budget import PrefetchBudget

_NO_PLACES: NDArray[np.int32] = np.zeros(0, dtype=np.int32)


@dataclass(slots=True)
class PageRead:
    """Distinct pages on their way into places that are taken for them; all arrays [n]."""

    keys: NDArray[np.int64]
    places: NDArray[np.int32]
    read: VerifiedRead

    def devices(self) -> NDArray[np.uint16]:
        """Device of the first byte of each page."""
        return _first_devices(self.read.request.extents, len(self.keys))


@dataclass(slots=True)
class Fetch:
    """Pages that were asked for, some of them still on their way. Belongs to who asked.

    Attributes:
        asked: What is known of them.
        address: Absolute address of each, uint64 [n], once they have arrived; 0 where one has not.
        from_cache, from_ssd: Distinct pages found in the cache, and read: for this, or ahead of it.
        used: Of those read, once they have arrived, those that are right; each that was read ahead
            when it is asked for first.
    """

    pages: Pages
    asked: Asked
    address: NDArray[np.uint64]
    from_cache: int
    from_ssd: int
    _read: PageRead | None
    used: int = 0
    _again: Fetch | None = None
    """Pages that are read once more: from another copy, or because somebody had begun to read them
    ahead, and they did not come that way."""


class PageFetcher:
    """Brings pages into memory. Used by one thread at a time, see ``SelectedContexts``."""

    def __init__(self, files: SlotIO, seals: ChecksumTable, cache: SelectedPageCache):
        self._files = files
        self._seals = seals
        self._cache = cache
        self._ahead: deque[PageRead] = deque()
        """Reads that nobody has asked for yet; their places are taken."""
        self._idle = PrefetchBudget()
        self.bad: list[int] = []
        """Slots with wrong bytes, or that are given up, since the last :meth:`take_bad`."""
        self.unread: list[int] = []
        """Slots that could not be read, and may be later, since the last :meth:`take_unread`."""

    @property
    def tables(self) -> _io.PageCache:
        """Tables of the pages that are held, for who takes places himself: see :meth:`start`."""
        return self._cache.tables

    @property
    def room(self) -> int:
        """Distinct pages that one fetch can bring at least, whatever is being read ahead. What does
        not fit is fetched in turns."""
        usable = self._cache.usable()
        return usable - usable // 2

    def start(self, pages: Pages, asked: Asked | None = None) -> Fetch:
        """Start to read what has to be read. Does not block. Pages may repeat. ``asked``: what the
        tables have answered already."""
        if asked is None:
            self._settle_ahead(wait=False)
            asked = self._cache.acquire(pages)
        keys, places = asked.keys[asked.held :], asked.places[asked.held :]
        count = int(np.count_nonzero(places != NO_PLACE)) if len(places) else 0  # the first ones
        read = self.submit(keys[:count], places[:count]) if count else None
        self._idle.asked(self._load(() if read is None else (read,)))
        nowhere = np.zeros(len(pages), dtype=np.uint64)
        found = asked.held - asked.guessed
        return Fetch(pages, asked, nowhere, found, asked.guessed + count, read)

    def prefetch(self, pages: Pages, begin: NDArray[np.int32], *, idle: bool) -> int:
        """Start to read pages that may be needed soon. Does not block.

        They get what :attr:`room` leaves of the cache at most, and each of the lists ``begin``
        (int32 [lists + 1], edges in the pages) as much as the others; with ``idle``, no more than
        the devices can do beside the latest fetch and until the next one. Returns how many are
        read.
        """
        limit = max(0, self._cache.usable() // 2 - self.on_the_way())
        devices = quota = None
        if idle:
            quota = self._idle.spare(self._load(self._ahead))
            if not quota.any():
                return 0
            first, _ = self._files.placement.copies(
                pages.slots, self._offset(pages.numbers), self._files.geometry.page_bytes
            )
            devices = _first_devices(first, len(pages))
        keys, places = self._cache.prefetch(pages, begin, limit, devices, quota)
        if len(keys):
            self._ahead.append(self.submit(keys, places))
        return len(keys)

    def settle(self, *, wait: bool = False) -> None:
        """Take in what was read ahead and has arrived by now, or all of it; what uses no fetch
        calls this."""
        self._settle_ahead(wait=wait)

    def pass_over(self, at: float) -> None:
        """Note that a layer needed no fetch, as was known at the monotonic time ``at``: all of its
        pages were in memory."""
        self._idle.passed(self._load(()), at)

    def on_the_way(self) -> int:
        """Pages that are being read ahead."""
        self._settle_ahead(wait=False)
        return sum(len(read.keys) for read in self._ahead)

    def wait_for_io(self, fetch: Fetch) -> None:
        """Block until :meth:`finish` has nothing to wait for, unless something must be read again;
        for at most the deadline of I/O. Who measures time knows waiting from work by it."""
        if fetch.asked.coming:
            for ahead in self._ahead:
                ahead.read.request.wait_for_io()
        if fetch._read is not None:
            fetch._read.read.request.wait_for_io()
        self._idle.arrived()

    def finish(self, fetch: Fetch) -> NDArray[np.bool_]:
        """Wait for the pages, with the deadline of I/O; which of those asked for are there, [n].

        Their memory stays as it is until :meth:`release`. Waits for one more deadline per device
        that hangs, as long as there are other copies.
        """
        fetch.used = fetch.asked.guessed
        if not fetch.asked.coming and fetch._read is None:  # all of it is in memory
            fetch.address, here = self._cache.find(fetch.asked, fetch.pages)
            return here
        if fetch.asked.coming:
            self._settle_ahead(wait=True)
        again = np.full(len(fetch.pages), fetch.asked.coming > 0)
        if fetch._read is not None:
            mine, fetch._read = fetch._read, None
            good = mine.read.finish()
            fetch.used += int(np.count_nonzero(good))
            if not good.all():
                hanging = mine.places[mine.read.hanging]
                entries = np.flatnonzero(np.isin(fetch.asked.places, hanging))
                again |= np.isin(fetch.asked.which, entries)
                slots = mine.read.extents.slots
                self.bad += np.unique(slots[mine.read.bad]).tolist()
                self.unread += np.unique(slots[mine.read.unread]).tolist()
            self._withhold(fetch, self._take_in(mine))
        fetch.address, here = self._cache.find(fetch.asked, fetch.pages)
        missing = np.flatnonzero(again & ~here)
        if len(missing):
            # Of what was read ahead, these did not come.
            lost = len(np.unique(fetch.asked.which[missing]))
            fetch.used -= min(lost, fetch.asked.coming, fetch.used)
            fetch._again = self.start(fetch.pages.part(missing))
            here[missing] = self.finish(fetch._again)
            fetch.used += fetch._again.used
            fetch.address[missing] = fetch._again.address
        return here

    def release(self, fetch: Fetch) -> None:
        """The pages are not read any more. Also ends a fetch that nobody waits for."""
        if fetch._read is not None:
            mine, fetch._read = fetch._read, None
            self._withhold(fetch, self._take_in(mine))
        if fetch._again is not None:
            self.release(fetch._again)
        self._cache.release(fetch.asked.places)
        fetch.asked.places[:] = NO_PLACE

    def take_bad(self) -> list[int]:
        """Slots with wrong bytes, or that are given up, since the last call."""
        bad, self.bad = self.bad, []
        return bad

    def take_unread(self) -> list[int]:
        """Slots that could not be read, and may be later, since the last call."""
        unread, self.unread = self.unread, []
        return unread

    def _withhold(self, fetch: Fetch, lent: NDArray[np.int32]) -> None:
        """These places are lent to reads that have not ended."""
        if len(lent):
            places = fetch.asked.places
            places[np.isin(places, lent)] = NO_PLACE

    def _settle_ahead(self, *, wait: bool) -> None:
        """Take in what was read ahead: all of it, or what has arrived by now.

        What failed is not read again and charges no device: who needs it reads it.
        """
        while self._ahead and (wait or self._ahead[0].read.over()):
            ahead = self._ahead.popleft()
            ahead.read.finish(again=False)
            lent = self._take_in(ahead)
            kept = ahead.places
            self._cache.release(kept[~np.isin(kept, lent)] if len(lent) else kept)

    # ---- reading ----

    def submit(self, keys: NDArray[np.int64], places: NDArray[np.int32]) -> PageRead:
        """Start to read pages into places that are taken for them. Any thread."""
        slots, numbers = self._cache.slot_and_number(keys)
        extents = SlotExtents(slots, numbers, 1, self._cache.buffer_offset(places))
        source = TableDigests(self._files.codec, self._seals, extents)
        return PageRead(keys, places, VerifiedRead(self._files, extents, source, coalesced=True))

    def _offset(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Bytes of the slot before each page."""
        geometry = self._files.geometry
        return geometry.header_bytes + numbers * geometry.page_bytes

    def _load(self, reads: Iterable[PageRead]) -> NDArray[np.int64]:
        """Pages, or parts of them, that each device reads, [devices]."""
        load = np.zeros(self._files.placement.devices, dtype=np.int64)
        for read in reads:
            device = read.read.request.extents.device
            load += np.bincount(device, minlength=len(load))
        return load

    def _take_in(self, mine: PageRead) -> NDArray[np.int32]:
        """A read is over: the cache holds what is good; places that it may still write to."""
        self._cache.complete(mine.keys, mine.places, mine.read.good, mine.devices())
        lent = [_NO_PLACES]
        for request, held in mine.read.holders():
            lent.append(mine.places[held])
            self._cache.lend(lent[-1], request)
        return np.concatenate(lent)


def _first_devices(extents: Extents, pages: int) -> NDArray[np.uint16]:
    """Device of the first byte of each page, [pages]."""
    devices = np.zeros(pages, dtype=np.uint16)
    devices[extents.slot_index[::-1]] = extents.device[::-1]
    return devices
