"""Pages that are attended to on a node: where they lie, their digests, and their places in DRAM.

The engine says where the pages of its blocks lie in its volumes, and what their digests are. The
node reads those that are needed, checks them, and keeps them in DRAM as long as there is room.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vllm_ssdkv.base.checksum import wrong_checksums
from vllm_ssdkv.base.errors import ProtocolError
from vllm_ssdkv.node.server.volumes import VolumeSet
from vllm_ssdkv.store.cache.selected_pages import NO_PLACE, Asked, Pages, SelectedPageCache
from vllm_ssdkv.store.format.slot_geometry import PAGE_ALIGN, SlotGeometry
from vllm_ssdkv.store.io.coalescing import CoalescedBatch, submit_coalesced
from vllm_ssdkv.store.io.engines.protocol import Op
from vllm_ssdkv.store.memory.arena import Arena

logger = logging.getLogger(__name__)

I64 = NDArray[np.int64]
U64 = NDArray[np.uint64]

OFFSET_BITS = 48
"""Bits of a place for the offset in the volume; the number of the drive is in the bits above."""


class ToldBlocks:
    """Places and digests of blocks, as an engine has told them. One thread at a time.

    A block that is known has a number, from 1, which stays until it is forgotten.

    Example:
        told = ToldBlocks(geometry, slots=1000, most=100, volumes=volumes)
        told.put(slots, places, digests)
    """

    def __init__(self, geometry: SlotGeometry, slots: int, most: int, volumes: VolumeSet):
        """``slots``: numbers are below it; ``most`` blocks are known at a time."""
        self._page_bytes = geometry.page_bytes
        self._sizes = np.array(
            [volumes.nbytes(drive) for drive in range(len(volumes.paths))], dtype=np.int64
        )
        self.most = most
        # 0 is the number of unknown slots. Zeros that were never written take no memory.
        self._number_of = np.zeros(slots, dtype=np.int32)
        have = min(64, most + 1)
        self._free = list(range(have - 1, 0, -1))
        self.slots: I64 = np.full(have, -1, dtype=np.int64)
        self.places: I64 = np.full((have, geometry.kv_pages), -1, dtype=np.int64)
        self.digests: U64 = np.zeros((have, geometry.kv_pages), dtype=np.uint64)

    def numbers(self, slots: I64) -> NDArray[np.int32]:
        """Numbers of blocks, [n], in :attr:`slots`, :attr:`places` and :attr:`digests`; 0: it is
        unknown.

        Raises:
            ProtocolError: there are no such slots.
        """
        if len(slots) and not 0 <= int(slots.min()) <= int(slots.max()) < len(self._number_of):
            raise ProtocolError("body", "slots are not those of the store")
        return self._number_of[slots]

    def put(self, slots: I64, places: I64, digests: U64) -> None:
        """Remember places and digests, [n, pages], of distinct slots, [n].

        Raises:
            ProtocolError: a place is not in the volumes, or there are too many blocks.
        """
        self._check(places)
        new = slots[self.numbers(slots) == 0]
        if len(new) != len(np.unique(new)):
            raise ProtocolError("body", "a block was told twice at once")
        while len(new) > len(self._free):
            self._grow()
        if len(new):
            self._number_of[new] = self._free[-len(new) :]
            del self._free[-len(new) :]
        numbers = self._number_of[slots]
        self.slots[numbers] = slots
        self.places[numbers], self.digests[numbers] = places, digests

    def _grow(self) -> None:
        have = len(self.slots)
        more = min(have, self.most + 1 - have)
        if more <= 0:
            raise ProtocolError("limit", f"more than {self.most} blocks were told")
        self._free.extend(range(have + more - 1, have - 1, -1))
        self.slots = np.concatenate([self.slots, np.full_like(self.slots[:more], -1)])
        self.places = np.concatenate([self.places, np.full_like(self.places[:more], -1)])
        self.digests = np.concatenate([self.digests, np.zeros_like(self.digests[:more])])

    def _check(self, places: I64) -> None:
        here = places[places >= 0]
        drive, offset = here >> OFFSET_BITS, here & ((1 << OFFSET_BITS) - 1)
        if len(here) == 0:
            return
        if int(drive.max()) >= len(self._sizes) or (offset % PAGE_ALIGN).any():
            raise ProtocolError("body", "places of pages are on no drive, or between pages")
        if (offset + self._page_bytes > self._sizes[drive]).any():
            raise ProtocolError("body", "places of pages are outside the volumes")

    def forget(self, slots: I64) -> None:
        """These slots get other bytes."""
        numbers = self.numbers(slots)
        known = np.unique(numbers[numbers != 0])
        self.slots[known], self.places[known] = -1, -1
        self._free.extend(known.tolist())
        self._number_of[slots] = 0


@dataclass(slots=True)
class Fetch:
    """Pages on their way into DRAM. Belongs to who asked.

    Attributes:
        pages: What was asked for; may repeat.
        asked: Their places.
        batch: The reads; None: nothing is read.
        count: Entries that are read, behind those held.
        drives: Drive of each of these.
        known: Digest of each of these.
        sent: Of these, the ones whose drive is in use.
    """

    pages: Pages
    asked: Asked
    batch: CoalescedBatch | None
    count: int
    drives: NDArray[np.uint16]
    known: U64
    sent: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _Overdue:
    """A read that may still write to its places, see :meth:`SelectedPageCache.lend`."""

    batch: CoalescedBatch

    def ended(self) -> bool:
        """Check whether it has ended."""
        return self.batch.done()


class NodePages:
    """Pages of one worker's volumes, in memory of the node. One thread at a time.

    Blocks have the numbers that ``told`` gives them, so tables grow with what is told alone.

    Example:
        pages = NodePages(geometry, told, volumes, nbytes=1 << 30, deadline_s=5.0)
        fetch = pages.start(told.numbers(slots), numbers)
        address, here = pages.finish(fetch)
        pages.release(fetch)
    """

    def __init__(
        self,
        geometry: SlotGeometry,
        told: ToldBlocks,
        volumes: VolumeSet,
        nbytes: int,
        deadline_s: float,
    ):
        """``nbytes`` of memory; ``deadline_s`` of a read: a drive that misses it is read no more.

        Raises:
            StoreError: there is not so much memory, or no I/O engine.
        """
        self._geometry, self._told, self._volumes = geometry, told, volumes
        self._deadline_s = deadline_s
        places = max(8, nbytes // geometry.page_bytes)
        self._arena = Arena(places * geometry.page_bytes)
        self._engine = volumes.open_engine(self._arena)
        self._cache = SelectedPageCache(self._arena, 0, geometry, places, told.most + 1)
        self._hangs = np.zeros(len(volumes.paths), dtype=np.bool_)
        self.wait_s = 0.0
        """Seconds for which reads were waited for, in all."""

    @property
    def room(self) -> int:
        """Distinct pages of one fetch, where two are under way."""
        return self._cache.usable() // 2

    def start(self, blocks: I64, numbers: I64) -> Fetch:
        """Start to read what is not in memory, of pages that are here: number of their block, and
        in it. Does not block."""
        pages = Pages(blocks, numbers, np.zeros(len(blocks), dtype=np.uint64))
        asked = self._cache.acquire(pages)
        keys, places = asked.keys[asked.held :], asked.places[asked.held :]
        count = int(np.count_nonzero(places != NO_PLACE)) if len(places) else 0
        if not count:
            none = np.zeros(0, dtype=np.uint16)
            return Fetch(pages, asked, None, 0, none, none.astype(np.uint64), keys[:0])
        of, page = self._cache.slot_and_number(keys[:count])
        at = self._told.places[of, page]
        drives = (at >> OFFSET_BITS).astype(np.uint16)
        sent = np.flatnonzero((at >= 0) & ~self._hangs[np.maximum(at, 0) >> OFFSET_BITS])
        batch = None
        if len(sent):
            batch = submit_coalesced(
                self._engine,
                Op.READ,
                drives[sent],
                (at[sent] & ((1 << OFFSET_BITS) - 1)).astype(np.uint64),
                np.full(len(sent), self._geometry.page_bytes, dtype=np.uint32),
                self._cache.buffer_offset(places[sent]),
            )
        known = self._told.digests[of, page]
        return Fetch(pages, asked, batch, count, drives, known, sent)

    def finish(self, fetch: Fetch) -> tuple[U64, NDArray[np.bool_]]:
        """Wait for the pages, for the deadline at most: absolute address of each, and which are
        here and right, [n]."""
        if fetch.count:
            self._take_in(fetch)
        return self._cache.find(fetch.asked, fetch.pages)

    def _take_in(self, fetch: Fetch) -> None:
        """The reads end: hold what is right."""
        asked, count = fetch.asked, fetch.count
        begin = asked.held
        keys, places = asked.keys[begin : begin + count], asked.places[begin : begin + count]
        good = np.zeros(count, dtype=np.bool_)
        overdue = places[:0]
        if fetch.batch is not None:
            began = time.perf_counter()
            ended = fetch.batch.wait(self._deadline_s)
            self.wait_s += time.perf_counter() - began
            results = fetch.batch.results()
            whole = fetch.sent[results == self._geometry.page_bytes]
            address = np.uint64(self._arena.address) + self._cache.buffer_offset(places[whole])
            wrong = wrong_checksums(address, fetch.known[whole], self._geometry.payload_bytes)
            good[whole] = True
            good[whole[wrong]] = False
            if not ended:
                late = fetch.sent[results == np.iinfo(np.int32).min]
                overdue = places[late]
                self._give_up(np.unique(fetch.drives[late]))
        self._cache.complete(keys, places, good, fetch.drives)
        if len(overdue) and fetch.batch is not None:
            self._cache.lend(overdue.copy(), _Overdue(fetch.batch))
            mine = fetch.asked.places
            mine[np.isin(mine, overdue)] = NO_PLACE
        fetch.count = 0

    def _give_up(self, drives: NDArray[np.uint16]) -> None:
        for drive in drives.tolist():
            self._hangs[drive] = True
            logger.error(
                "ssdkv node: drive %s has not answered for %g s: contexts are not attended to "
                "there until the engine connects again",
                self._volumes.paths[drive],
                self._deadline_s,
            )

    def release(self, fetch: Fetch) -> None:
        """The pages are not read any more. Also ends a fetch that nobody waits for."""
        if fetch.count:
            self._take_in(fetch)
        self._cache.release(fetch.asked.places)

    def forget(self, slots: I64) -> None:
        """These slots get other bytes. ``told`` forgets them later, if at all."""
        numbers = np.unique(self._told.numbers(slots))
        self._cache.forget(numbers[numbers != 0].astype(np.int64))

    def close(self) -> bool:
        """End the engine; False: a read still runs, and its memory stays."""
        ended = self._engine.close(self._deadline_s)
        if ended:
            self._arena.close()
        else:
            self._volumes.hang(np.flatnonzero(self._hangs).tolist())
        return ended
