"""Sparse attention of tokens that are decoded: select, fetch, attend, merge (architecture, 5).

The window is attended to before, as for every row. Its log-sum-exp tells the selector how much of a
head's attention the context can still change. Pages are folded into the same online softmax, so
where they were, and in how many turns they came, changes nothing but the time.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_ssdkv.attention.blocks import BlockLayout, PartialState
from vllm_ssdkv.attention.clock import AttentionClock
from vllm_ssdkv.attention.exact import RowBatch
from vllm_ssdkv.attention.page_kernels import PageKernels
from vllm_ssdkv.attention.pages import PageList
from vllm_ssdkv.selection.protocol import ContextSummaries, Selection, Selector
from vllm_ssdkv.store.chosen import ChosenContexts


@dataclass(slots=True)
class ChoiceCounts:
    """What was chosen in one step, over all layers and KV heads.

    Attributes:
        lists: Lists of pages: one per row, layer and KV head.
        selected: Pages in them.
        context: Pages that there were to choose from.
        missing: Sum over the lists of the softmax mass that, by the selector's estimate, neither
            window nor chosen pages cover.
    """

    lists: int = 0
    selected: int = 0
    context: int = 0
    missing: float = 0.0


class SparseDecode:
    """The rows of one step that choose their pages. Used by the thread of the forward pass."""

    def __init__(
        self,
        selector: Selector,
        contexts: ChosenContexts,
        layout: BlockLayout,
        dense_layers: int,
    ):
        """``layout`` is that of a slot's blocks; ``dense_layers`` layers at first do not choose."""
        self._selector = selector
        self.contexts = contexts
        self._layout = layout
        self._dense_layers = dense_layers
        self.counts = ChoiceCounts()

    def attend(
        self,
        kernels: PageKernels,
        clock: AttentionClock,
        layer: int,
        query: torch.Tensor,
        state: PartialState,
        batch: RowBatch,
        scale: float,
    ) -> None:
        """Fold the chosen pages of a layer into ``state``; blocks until they have arrived.

        Args:
            kernels: Of the device that ``query`` is on, the CPU.
            clock: Gets the time of select, wait and attend.
            layer: From 0.
            query: [T, Hq, D].
            state: Of all T queries; it has seen the window.
            batch: The step's rows; those that choose have one query.
            scale: Of the logits.
        """
        alive = self.contexts.alive()
        if layer < self._dense_layers or len(alive) == 0:
            return
        place = np.full(int(batch.stream_row.max()) + 1, -1, dtype=np.int64)
        place[batch.stream_row] = np.arange(len(batch.stream_row))
        rows = place[self.contexts.rows[alive]]  # in the batch
        token, position = batch.query_begin[rows], batch.first_position[rows]
        index = torch.from_numpy(token.astype(np.int64))
        summaries = self._summaries(layer, alive, position)
        seen = state.m[index] + torch.log(state.l[index])
        selection = self._selector.select(query[index], summaries, scale, seen)
        blocks, pages, starts = self._places(selection, alive)
        self._count(selection, summaries)
        clock.lap("select")
        begin, end = selection.begin[:-1], selection.begin[1:]
        room = max(1, self.contexts.room)
        for first in range(0, len(blocks), room):
            part = slice(first, first + room)
            fetch = self.contexts.fetch(layer, blocks[part], pages[part])
            try:
                self.contexts.arrive(fetch, blocks[part])
                clock.lap("wait")
                # A row that lacks a page is lost, and what came instead must not be looked at.
                lost = np.isin(self.contexts.rows[alive], list(self.contexts.poisoned))
                here = np.repeat(~lost, self._layout.kv_heads)
                listed = PageList(
                    token,
                    position,
                    np.where(here, np.clip(begin - first, 0, room), 0).astype(np.int32),
                    np.where(here, np.clip(end - first, 0, room), 0).astype(np.int32),
                    fetch.address,
                    starts[part],
                )
                kernels.attend_pages(query, state, listed, self._layout, scale)
            finally:
                self.contexts.release(fetch)
            clock.lap("attend")

    def _summaries(
        self, layer: int, alive: NDArray[np.int64], position: NDArray[np.int64]
    ) -> ContextSummaries:
        begin, end = self.contexts.begin[alive], self.contexts.end[alive]
        window = position + 1 - (end - begin).astype(np.int64) * self._layout.block_tokens
        bounds = self.contexts.bounds(layer) if self._selector.needs.bounds else None
        return ContextSummaries(self._layout, begin, end, window.astype(np.int32), bounds)

    def _places(
        self, selection: Selection, alive: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Of each selected page, [P]: index of its block in the contexts' slots, its number within
        the layer's part of the slot, and the position of its first token in the request."""
        heads, groups = self._layout.kv_heads, self._layout.groups
        counts = np.diff(selection.begin)
        row, head = np.divmod(np.repeat(np.arange(len(counts)), counts), heads)
        page = selection.pages.astype(np.int64)
        block, group = np.divmod(page, groups)
        first = self.contexts.begin[alive].astype(np.int64)
        return first[row] + block, head * groups + group, page * self._layout.page_tokens

    def _count(self, selection: Selection, summaries: ContextSummaries) -> None:
        counts, heads = self.counts, self._layout.kv_heads
        counts.lists += len(selection.begin) - 1
        counts.selected += len(selection.pages)
        counts.context += int(summaries.pages.sum()) * heads
        # Where the selector has no estimate, mass is NaN.
        counts.missing += float(np.nansum((1.0 - selection.mass).clip(0.0, 1.0)))
