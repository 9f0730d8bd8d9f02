"""One step's contexts of which queries choose pages, layer by layer.

What ``ContextStream`` is for rows that attend to everything, this is
for rows that do not: slots, frames and summaries are looked up once per step, pages are fetched
when a layer has chosen them.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vllm_ssdkv import _io
from vllm_ssdkv.store.cache.frames import FrameCache
from vllm_ssdkv.store.cache.selected_pages import Asked, Pages
from vllm_ssdkv.store.cache.summaries import NO_ROW, SummaryTable
from vllm_ssdkv.store.format.slot_geometry import SlotGeometry
from vllm_ssdkv.store.memory.summary_rows import channel_bytes
from vllm_ssdkv.store.read.context_frames import ContextFrames
from vllm_ssdkv.store.read.gpu_pages import GpuFetch, GpuPageCache
from vllm_ssdkv.store.read.page_fetcher import Fetch, PageFetcher
from vllm_ssdkv.store.write.summary_builder import SummaryBuilder

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class PageCounts:
    """Pages of one step, by where they were; a page that several queries chose counts once.

    ``ahead`` were read before anybody chose them, and ``hits`` is how many of such pages, also of
    steps before, were chosen then: they count as ``ssd``.
    """

    hot: int = 0
    frame: int = 0
    cache: int = 0
    ssd: int = 0
    ahead: int = 0
    hits: int = 0


@dataclass(frozen=True, slots=True)
class BlockPages:
    """Pages of contexts' blocks, [n]: where they are, and the index of each one's block in the
    contexts' slots, int32."""

    pages: Pages
    blocks: NDArray[np.int32]

    def part(self, which: slice | NDArray[np.int64]) -> BlockPages:
        """Some of them."""
        return BlockPages(self.pages.part(which), self.blocks[which])


class SelectedContexts:
    """Contexts of the rows of a step that choose. Used by one thread at a time.

    That is the thread of the forward pass, or, while that one waits for chosen pages, the thread of
    the device that attends to them (``attention/sparse.py``, ``ChosenPages``).

    After a failure the row is *poisoned*, as in ``ContextStream``.

    Attributes:
        rows: Numbers of the rows, as the step numbers them, ascending, int64 [S].
        begin, end: Blocks of each row in ``slots``, int32 [S].
        slots: Slots of all blocks, row after row, int64 [B].
        in_frames: Whether all have a frame in DRAM: no page of KV is read.
        left_out: Rows for whose summaries DRAM has no room: they must attend to everything.
        poisoned: Rows whose output must be thrown away.
        bad: Slots with wrong bytes, or that are given up.
        unread: Slots that could not be read, and may be later.
        fetched: What was fetched so far of pages of KV.
        fetched_channels, fetched_summaries: The same of channel pages for one layer, and of pages
            that DRAM lacked when the step began.
    """

    def __init__(
        self,
        geometry: SlotGeometry,
        frames: FrameCache,
        summaries: SummaryTable,
        summarizer: SummaryBuilder,
        tails: NDArray[np.uint64],
        fetcher: PageFetcher,
        contexts: Sequence[NDArray[np.int64]],
        rows: Sequence[int],
        hot: GpuPageCache | None = None,
        latest: SelectedContexts | None = None,
    ):
        """``contexts[r]`` are the slots of row r's blocks before its window; ``rows`` choose.
        ``tails``: absolute addresses of memory for some tails, [n]. ``hot``: pages in the memory of
        the device that attends, where it has its own. ``latest``: of the step before, whose
        arrays serve this one where nothing has changed.

        Blocks while summaries that DRAM does not have are read, with the deadline of I/O.
        """
        self._geometry = geometry
        self._frames = frames
        self._summaries = summaries
        self._summarizer = summarizer
        self._tails = tails
        self._fetcher = fetcher
        self._hot = hot
        self.fetched = PageCounts()
        self.fetched_channels = PageCounts()
        self.pages_used = 0
        """Pages of KV that were read for this step, or ahead of it, and are right."""
        self.fetched_summaries = PageCounts()
        self.poisoned: set[int] = set()
        self.bad: list[int] = []
        self.unread: list[int] = []
        self.left_out: set[int] = set()
        self._alive: NDArray[np.int64] | None = None
        self._records: NDArray[np.uint64] | None = None
        """Addresses of layer 0."""
        self._closed = False
        self._choose_rows(contexts, rows)
        self._look_up(contexts, latest)

    def _choose_rows(self, contexts: Sequence[NDArray[np.int64]], rows: Sequence[int]) -> None:
        """As many rows as there is room for summaries, in order."""
        if sum([len(contexts[row]) for row in rows]) <= self._summaries.open_rows:
            self.rows = np.array(rows, dtype=np.int64)
            return
        kept: list[int] = []
        taken = np.zeros(0, dtype=np.int64)
        for row in rows:
            more = np.union1d(taken, contexts[row])  # rows share slots
            if len(more) > self._summaries.open_rows:
                self.left_out.add(row)
                continue
            taken = more
            kept.append(row)
        self.rows = np.array(kept, dtype=np.int64)

    def _look_up(
        self, contexts: Sequence[NDArray[np.int64]], latest: SelectedContexts | None
    ) -> None:
        parts = [contexts[row] for row in self.rows.tolist()]
        known: ContextFrames | None = None if latest is None else latest._held
        self._held: ContextFrames = ContextFrames.borrow(self._frames, parts, known)
        held = self._held
        self.slots, self.begin, self.end = held.slots, held.begin, held.end
        self.in_frames = held.in_frames
        rows = self._summary_rows = self._summaries.pin(self.slots)
        if latest is not None and np.array_equal(rows, latest._summary_rows):
            self._records = latest._records
        if len(rows) and rows.min() == NO_ROW:
            self._records = None
            self._bring_summaries(np.flatnonzero(rows == NO_ROW))

    def _bring_summaries(self, which: NDArray[np.int64]) -> None:
        """Fill in the summaries of blocks ``which``: from their frames, or from their tails."""
        _, first = np.unique(self.slots[which], return_index=True)
        distinct = which[first]
        framed = self.framed[distinct]
        self._make_summaries(distinct[framed])
        self._read_summaries(distinct[~framed])
        rows = self._summaries.pin(self.slots[which])
        self._summary_rows[which] = rows
        self.bad += self._fetcher.take_bad()
        self.unread += self._fetcher.take_unread()
        self._poison(which[rows == NO_ROW])

    def _make_summaries(self, blocks: NDArray[np.int64]) -> None:
        """Make the summaries of blocks in frames, of distinct slots."""
        for start in range(0, len(blocks), len(self._tails)):
            part = blocks[start : start + len(self._tails)]
            tails = self._tails[: len(part)]
            self._summarizer.make_tails(self.frame_address[part], tails)
            self._summaries.put_tails(self.slots[part], tails)
        self.fetched_summaries.frame += len(blocks) * len(self._summaries.pages)

    def _read_summaries(self, blocks: NDArray[np.int64]) -> None:
        """Read the summaries of blocks that are on the devices only, of distinct slots."""
        count = len(self._summaries.pages)
        most = max(1, self._fetcher.room // count)
        for start in range(0, len(blocks), most):
            part = blocks[start : start + most]
            pages = np.tile(self._summaries.pages, len(part))
            fetch = self._start(self._at(np.repeat(part, count), pages), self.fetched_summaries)
            good = self._fetcher.finish(fetch).reshape(len(part), count).all(axis=1)
            address = fetch.address.reshape(len(part), count)
            self._summaries.put(self.slots[part[good]], address[good])
            self._fetcher.release(fetch)

    def lies_as(self, latest: SelectedContexts) -> bool:
        """Check whether these are the contexts of the same rows in a step before, whose blocks lie
        where they did, and none of them was lost."""
        same = self._held is latest._held and not (self.poisoned or latest.poisoned)
        return same and np.array_equal(self.rows, latest.rows)

    def page_records(self, layer: int) -> NDArray[np.uint64]:
        """Address of every block's records of its pages of a layer, [B]."""
        if self._records is None:
            self._records = self._summaries.address(self._summary_rows, 0)
        return self._records + np.uint64(layer * self.record_bytes) if layer else self._records

    @property
    def record_bytes(self) -> int:
        """Bytes from a block's records of a layer to those of the next layer."""
        return self._summaries.layer_bytes

    @property
    def read_in_dram(self) -> bool:
        """Check whether pages are attended to where they lie in DRAM."""
        return self._hot is None

    @property
    def tables(self) -> _io.PageCache | None:
        """Tables of the pages of blocks without a frame; None: all blocks have one."""
        return None if self.in_frames else self._fetcher.tables

    @property
    def frame_address(self) -> NDArray[np.uint64]:
        """Address of the frame of each block, [B]; 0 where it has none."""
        return self._held.address

    @property
    def framed(self) -> NDArray[np.bool_]:
        """Mask of the blocks that have a frame in DRAM, bool [B]."""
        return self._held.framed

    @property
    def shared_slots(self) -> NDArray[np.int32]:
        """Number of each block's slot, from 0, [B]; empty: no two blocks have the same."""
        return self._held.shared

    def settle_reads(self) -> int:
        """Take in pages that were read ahead for who takes places in :attr:`tables` himself;
        :attr:`room`."""
        self._fetcher.settle()
        return self._fetcher.room

    def pass_over(self, at: float) -> None:
        """Note that a layer needed no fetch, as was known at the monotonic time ``at``."""
        self._fetcher.pass_over(at)

    @property
    def layers(self) -> int:
        """Layers of the model."""
        return self._geometry.layers

    @property
    def holds_channels(self) -> bool:
        """Check whether the blocks' channel-major K is in DRAM."""
        return self._summaries.holds_channels

    @property
    def page_payload(self) -> int:
        """Bytes used in a page."""
        return self._geometry.payload_bytes

    def channels(self, layer: int) -> NDArray[np.uint64]:
        """Address of every block's K of a layer, channel-major, [B]."""
        return self._summaries.channels(self._summary_rows, layer)

    @property
    def channel_bytes(self) -> int:
        """Bytes from a block's K of a layer, channel-major, to that of the next layer."""
        return channel_bytes(self._geometry)

    def values(self, layer: int, row: int, head_size: int) -> NDArray[np.float32]:
        """Sum of V of each block of a row, by its position in :attr:`rows`, [blocks, kv_heads,
        head_size]."""
        blocks = self._summary_rows[self.begin[row] : self.end[row]]
        return self._summaries.values(blocks, layer, head_size)

    @property
    def room(self) -> int:
        """Distinct pages that one :meth:`fetch` may be asked for."""
        return self._fetcher.room

    def turns(
        self, pages: Pages, begin: NDArray[np.int32] | None = None, together: int = 1
    ) -> list[slice | NDArray[np.int64]]:
        """Parts of these pages, each for one :meth:`fetch`, that together are all of them.

        Only distinct pages outside frames take places: a part has at most :attr:`room` of them.

        Args:
            pages: Pages of a layer, [n]. They may repeat.
            begin: Edges of the lists that they are in, int32 [lists + 1], no page twice in a list;
                None: they are in none.
            together: Pages of a list, counted from its first one, that stay in one part; fewer
                where :attr:`room` is less, as it is while overdue reads hold places.

        Returns:
            Ascending positions of each part, or one slice of all. Pages of a list are in order.
        """
        room = max(1, self.room)
        outside = pages.frames == 0
        if np.count_nonzero(outside) <= room:
            return [slice(None)] if len(pages) else []
        keys = pages.slots * self._geometry.pages + pages.numbers
        distinct, first, which = np.unique(keys[outside], return_index=True, return_inverse=True)
        if len(distinct) <= room:
            return [slice(None)]
        turn = np.zeros(len(pages), dtype=np.int64)
        if begin is None:
            turn_of = np.empty(len(distinct), dtype=np.int64)
            turn_of[np.argsort(first)] = np.arange(len(distinct)) // room
            turn[outside] = turn_of[which]
        else:
            entry = np.full(len(pages), -1, dtype=np.int64)
            entry[outside] = which
            _cut_lists(turn, entry, begin, min(together, room), room)
        return [np.flatnonzero(turn == number) for number in range(int(turn.max()) + 1)]

    def alive(self) -> NDArray[np.int64]:
        """Positions in :attr:`rows` of those that are not poisoned."""
        if self._alive is None:
            if self.poisoned:
                self._alive = np.flatnonzero(~np.isin(self.rows, list(self.poisoned)))
            else:
                self._alive = np.arange(len(self.rows))
        return self._alive

    def locate(
        self,
        layer: int,
        rows: NDArray[np.int64],
        pages: NDArray[np.int32],
        begin: NDArray[np.int32],
        page_tokens: int,
    ) -> tuple[BlockPages, NDArray[np.int64]]:
        """Pages of a selection, and the position of each one's first token in its request, int64
        [n]. Releases the GIL.

        Args:
            layer: Of the model, from 0.
            rows: Positions in :attr:`rows` of those that selected, [R].
            pages: Numbers of the pages from the start of their row's context, int32 [n].
            begin: Edges of the list of each row and KV head in ``pages``, int32 [R * heads + 1].
            page_tokens: Tokens of a page.

        Raises:
            IndexError: a page is not in the contexts.
        """
        geometry = self._geometry
        slots, numbers, frames, position, blocks = _io.locate(
            self.begin[rows],
            self.slots,
            self.frame_address,
            pages,
            begin,
            geometry.heads,
            geometry.groups,
            page_tokens,
            geometry.first_page(layer),
        )
        return BlockPages(Pages(slots, numbers, frames), blocks), position

    def pages(self, layer: int, blocks: NDArray[np.int64], pages: NDArray[np.int64]) -> BlockPages:
        """Pages of a layer, by the index of each one's block in :attr:`slots` and its number within
        the layer's part of the slot, head * groups + group, [n]."""
        return self._at(blocks, self._geometry.first_page(layer) + pages)

    def channel_pages(
        self, layer: int, blocks: NDArray[np.int64], pages: NDArray[np.int64]
    ) -> BlockPages:
        """The same for pages of the layer's channel-major K, numbered from its first, of blocks
        that have no frame."""
        return self._at(blocks, self._geometry.first_channel_page(layer) + pages)

    def make_channels(self, layer: int, blocks: NDArray[np.int64], pages: int) -> NDArray[np.uint8]:
        """Channel-major K of a layer of these blocks, [n], which have frames: [n, bytes]. For each
        so many ``pages`` are counted as found in a frame."""
        size = channel_bytes(self._geometry)
        made = np.empty((len(blocks), size), dtype=np.uint8)
        target = made.ctypes.data + np.arange(len(made), dtype=np.uint64) * np.uint64(size)
        first = self.frame_address[blocks] + np.uint64(self._geometry.layer_offset(layer))
        self._summarizer.make_channels(first, target)
        self.fetched_channels.frame += len(blocks) * pages
        return made

    def _at(self, blocks: NDArray[np.int64], numbers: NDArray[np.int64]) -> BlockPages:
        """Pages by their numbers in the slot."""
        pages = Pages(self.slots[blocks], numbers, self.frame_address[blocks])
        return BlockPages(pages, blocks.astype(np.int32))

    def fetch(self, wanted: BlockPages, asked: Asked | None = None) -> Fetch:
        """Start to bring at most :attr:`room` pages to DRAM; does not block. End it with
        :meth:`release`.

        Pages may repeat. ``asked``: what the :attr:`tables` have answered already.
        """
        return self._start(wanted, self.fetched, asked)

    def fetch_hot(self, wanted: BlockPages, asked: Asked | None = None) -> Fetch | GpuFetch:
        """The same, to where the device that attends reads them best: its own memory, or DRAM."""
        if self._hot is None:
            return self.fetch(wanted, asked)
        fetch = self._hot.start(wanted.pages)
        self.fetched.hot += fetch.asked.held
        self._count(fetch.below, self.fetched)
        return fetch

    def note_misses(self, held: int, read: int, lost: int) -> None:
        """Count distinct pages that were found in the cache, or read, for who attends to them
        elsewhere and takes these, and those that are lost, for pages of frames; and take in what
        was wrong with their slots."""
        self.fetched.frame -= held + read + lost
        self.fetched.cache += held
        self.fetched.ssd += read
        self.pages_used += read
        self.bad += self._fetcher.take_bad()
        self.unread += self._fetcher.take_unread()

    def fetch_channels(self, wanted: BlockPages) -> Fetch:
        """The same for :meth:`channel_pages`, which are counted apart."""
        return self._start(wanted, self.fetched_channels)

    def _start(self, wanted: BlockPages, counts: PageCounts, asked: Asked | None = None) -> Fetch:
        fetch = self._fetcher.start(wanted.pages, asked)
        self._count(fetch, counts)
        return fetch

    def _count(self, fetch: Fetch, counts: PageCounts) -> None:
        counts.frame += fetch.asked.framed
        counts.cache += fetch.from_cache
        counts.ssd += fetch.from_ssd
        counts.hits += fetch.asked.guessed

    def prefetch(self, wanted: BlockPages, begin: NDArray[np.int32], *, idle: bool) -> None:
        """Start to read pages that may be needed soon, in lists with the edges ``begin``; does not
        block. What is read never changes an answer, but when it comes. ``idle``: no more than the
        devices can do beside what was fetched last and until the next fetch."""
        pages = wanted.pages if self._hot is None else self._hot.wanted_below(wanted.pages)
        self.fetched.ahead += self._fetcher.prefetch(pages, begin, idle=idle)

    def wait_for_io(self, fetch: Fetch | GpuFetch) -> None:
        """Wait for what was submitted, with the deadline of I/O: :meth:`complete` then has its work
        to do, but mostly nothing to wait for."""
        self._fetcher.wait_for_io(fetch.below if isinstance(fetch, GpuFetch) else fetch)

    def complete(
        self, fetch: Fetch | GpuFetch, blocks: NDArray[np.int64] | NDArray[np.int32]
    ) -> NDArray[np.bool_]:
        """Wait for the pages of these blocks, [n], with the deadline of I/O; which are there, [n].

        ``fetch.address`` says where, until they are released. Rows whose pages did not all come
        are poisoned.
        """
        good = fetch.finish() if isinstance(fetch, GpuFetch) else self._fetcher.finish(fetch)
        self.pages_used += (fetch.below if isinstance(fetch, GpuFetch) else fetch).used
        self.bad += self._fetcher.take_bad()
        self.unread += self._fetcher.take_unread()
        if not good.all():
            self._poison(blocks[~good])
        return good

    def release(self, fetch: Fetch | GpuFetch) -> None:
        """The pages are not read any more."""
        if isinstance(fetch, GpuFetch):
            fetch.release()
        else:
            self._fetcher.release(fetch)

    def _poison(self, blocks: NDArray[np.int64] | NDArray[np.int32]) -> None:
        rows = np.searchsorted(self.end, blocks, side="right")
        self.poisoned.update(self.rows[rows].tolist())
        self._alive = None

    def close(self) -> None:
        """End the step: what was borrowed goes back."""
        if not self._closed:
            self._closed = True
            self._held.give_back(self._frames)
            self._summaries.unpin(self._summary_rows)


def _cut_lists(
    turn: NDArray[np.int64],
    entry: NDArray[np.int64],
    begin: NDArray[np.int32],
    together: int,
    room: int,
) -> None:
    """Give each page a turn, so that no turn has more than ``room`` distinct entries.

    Args:
        turn: Written, [n].
        entry: Entry of each page, from 0; -1: it takes no place, [n].
        begin: Edges of the lists, [lists + 1].
        together: Pages of a list that stay in one turn, ``room`` at most.
        room: Entries.
    """
    pieces = -(-np.diff(begin) // together)
    ordinal = np.arange(pieces.sum()) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    first = np.repeat(begin[:-1], pieces) + ordinal * together
    last = np.minimum(first + together, np.repeat(begin[1:], pieces))
    # Rows that share a prefix mostly have the same pages in pieces with the same number: side by
    # side, these are read once.
    order = np.lexsort((entry[first], ordinal))
    latest = np.full(int(entry.max()) + 1, -1, dtype=np.int64)
    now = taken = 0
    for low, high in zip(first[order].tolist(), last[order].tolist(), strict=True):
        wanted = entry[low:high]
        wanted = wanted[wanted >= 0]
        more = int(np.count_nonzero(latest[wanted] != now))
        if taken + more > room:
            now, taken, more = now + 1, 0, len(wanted)
        latest[wanted] = now
        taken += more
        turn[low:high] = now
