"""One step's contexts of which queries choose pages, layer by layer.

What :class:`vllm_ssdkv.store.stream.ContextStream` is for rows that attend to everything, this is
for rows that do not: slots, frames and summaries are looked up once per step, pages are fetched
when a layer has chosen them.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vllm_ssdkv.store.cache import NO_FRAME, FrameCache
from vllm_ssdkv.store.fetch import Fetch, PageFetcher
from vllm_ssdkv.store.layout import SlotGeometry
from vllm_ssdkv.store.summaries import NO_ROW, SummaryTable

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class PageCounts:
    """Pages of one step, by where they were; a page that several queries chose counts once."""

    frame: int = 0
    cache: int = 0
    ssd: int = 0


class ChosenContexts:
    """Contexts of the rows of a step that choose. Used by the thread of the forward pass.

    After a failure the row is *poisoned*, as in ``ContextStream``.

    Attributes:
        rows: Numbers of the rows, as the step numbers them, ascending, int64 [S].
        begin, end: Blocks of each row in ``slots``, int32 [S].
        slots: Slots of all blocks, row after row, int64 [B].
        left_out: Rows for whose summaries DRAM has no room: they must attend to everything.
        poisoned: Rows whose output must be thrown away.
        bad: Slots with wrong or unreadable bytes.
        fetched: What was fetched so far.
    """

    def __init__(
        self,
        geometry: SlotGeometry,
        frames: FrameCache,
        summaries: SummaryTable,
        fetcher: PageFetcher,
        contexts: Sequence[NDArray[np.int64]],
        rows: Sequence[int],
    ):
        """``contexts[r]`` are the slots of row r's blocks before its window; ``rows`` choose.

        Blocks while summaries that DRAM does not have are read, with the deadline of I/O.
        """
        self._geometry = geometry
        self._frames = frames
        self._summaries = summaries
        self._fetcher = fetcher
        self.fetched = PageCounts()
        self.poisoned: set[int] = set()
        self.bad: list[int] = []
        self.left_out: set[int] = set()
        self._borrowed = np.zeros(0, dtype=np.int32)
        self._summary_rows = np.zeros(0, dtype=np.int32)
        self._choose_rows(contexts, rows)
        self._look_up(contexts)

    def _choose_rows(self, contexts: Sequence[NDArray[np.int64]], rows: Sequence[int]) -> None:
        """As many rows as there is room for summaries, in order."""
        kept: list[int] = []
        taken = np.zeros(0, dtype=np.int64)
        for row in rows:
            more = np.union1d(taken, contexts[row])  # rows share slots
            if len(more) > self._summaries.rows:
                self.left_out.add(row)
                continue
            taken = more
            kept.append(row)
        self.rows = np.array(kept, dtype=np.int64)

    def _look_up(self, contexts: Sequence[NDArray[np.int64]]) -> None:
        lengths = [len(contexts[row]) for row in self.rows.tolist()]
        edges = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        self.begin, self.end = edges[:-1], edges[1:]
        parts = [contexts[row] for row in self.rows.tolist()]
        self.slots = np.concatenate([*parts, np.zeros(0, dtype=np.int64)]).astype(np.int64)
        self._borrowed = self._frames.borrow(self.slots)
        self._frame_address = np.zeros(len(self.slots), dtype=np.uint64)
        here = self._borrowed != NO_FRAME
        self._frame_address[here] = self._frames.address(self._borrowed[here])
        self._summary_rows = self._summaries.pin(self.slots)
        missing = self._summary_rows == NO_ROW
        if missing.any():
            self._bring_summaries(np.flatnonzero(missing))

    def _bring_summaries(self, which: NDArray[np.int64]) -> None:
        """Fill in the summaries of blocks ``which``, from their summary pages."""
        count = self._geometry.summary_pages
        most = max(1, self._fetcher.room // count)
        _, first = np.unique(self.slots[which], return_index=True)
        distinct = which[first]
        for start in range(0, len(distinct), most):
            part = distinct[start : start + most]
            pages = np.tile(np.arange(count, dtype=np.int64), len(part))
            blocks = np.repeat(part, count)
            fetch = self._fetcher.start(self.slots[blocks], pages, self._frame_address[blocks])
            good = self._fetcher.finish(fetch).reshape(len(part), count).all(axis=1)
            address = fetch.address.reshape(len(part), count)
            self._summaries.put(self.slots[part[good]], address[good])
            self._fetcher.release(fetch)
        rows = self._summaries.pin(self.slots[which])
        self._summary_rows[which] = rows
        self.bad += self._fetcher.take_bad()
        self._poison(which[rows == NO_ROW])

    def bounds(self, layer: int) -> NDArray[np.uint64]:
        """Address of every block's page bounds of a layer, [B]."""
        return self._summaries.address(self._summary_rows, layer)

    @property
    def room(self) -> int:
        """Pages that one :meth:`fetch` may be asked for."""
        return self._fetcher.room

    def alive(self) -> NDArray[np.int64]:
        """Positions in :attr:`rows` of those that are not poisoned."""
        return np.flatnonzero(~np.isin(self.rows, list(self.poisoned)))

    def fetch(self, layer: int, blocks: NDArray[np.int64], pages: NDArray[np.int64]) -> Fetch:
        """Start to bring pages of a layer; does not block. End it with :meth:`release`.

        Args:
            layer: Of the model, from 0.
            blocks: Index in :attr:`slots` of each page's block, [n], n at most :attr:`room`.
            pages: Number of each page within the layer's part of its slot, head * groups + group.
        """
        numbers = self._geometry.first_page(layer) + pages
        frame = self._frame_address[blocks]
        fetch = self._fetcher.start(self.slots[blocks], numbers, frame)
        here = frame != 0
        self.fetched.frame += len(
            np.unique(self.slots[blocks[here]] * self._geometry.pages + numbers[here])
        )
        self.fetched.cache += fetch.from_cache
        self.fetched.ssd += fetch.from_ssd
        return fetch

    def arrive(self, fetch: Fetch, blocks: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Wait for the pages of these blocks, [n], with the deadline of I/O; which are there, [n].

        ``fetch.address`` says where, until they are released. Rows whose pages did not all come
        are poisoned.
        """
        good = self._fetcher.finish(fetch)
        self.bad += self._fetcher.take_bad()
        self._poison(blocks[~good])
        return good

    def release(self, fetch: Fetch) -> None:
        """The pages are not read any more."""
        self._fetcher.release(fetch)

    def _poison(self, blocks: NDArray[np.int64]) -> None:
        rows = np.searchsorted(self.end, blocks, side="right")
        self.poisoned.update(self.rows[rows].tolist())

    def close(self) -> None:
        """End the step: what was borrowed goes back."""
        self._frames.give_back(self._borrowed)
        self._summaries.unpin(self._summary_rows)
        self._borrowed = self._borrowed[:0]
        self._summary_rows = self._summary_rows[:0]
