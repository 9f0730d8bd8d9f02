"""Attention of one layer of a decode step whose rows lie in tables: launches, and nothing else.

Sizes and addresses that change from step to step are read from memory at fixed places, so that a
graph which has captured a layer does the work of any later step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from vllm_ssdkv.kernels.operands.block_layout import BlockLayout, PartialState, Rows
from vllm_ssdkv.kernels.operands.page_list import SPLIT_PAGES
from vllm_ssdkv.kernels.operands.step_tables import StepTables
from vllm_ssdkv.triton_kernels.attend import (
    MIN_SPLIT_KEYS,
    WORKSPACE_BYTES,
    attend_parts,
    pages_of,
)
from vllm_ssdkv.triton_kernels.codes import code_logits, rotated_queries
from vllm_ssdkv.triton_kernels.merge import finish_parts
from vllm_ssdkv.triton_kernels.misses import Misses, wait
from vllm_ssdkv.triton_kernels.resident_pages import ResidentPages
from vllm_ssdkv.triton_kernels.resolve import Choice, Listed, resolve
from vllm_ssdkv.triton_kernels.score import page_logits
from vllm_ssdkv.triton_kernels.step_rows import Batch, BatchRows, match
from vllm_ssdkv.triton_kernels.store_kv import store_kv

WINDOW_SPLITS = 4
"""Parts of a window's keys, at most."""


@dataclass(frozen=True, slots=True)
class Choosing:
    """Manner in which rows choose.

    Attributes:
        record: Data by which pages are scored; empty: no row scores them.
        sinks: First pages of a context that are chosen in any case.
        code_bits: Bits of a channel in codes.
        mass: Share of the attention that ends a choice before a row's most pages; 1: nothing does.
    """

    record: Literal["", "bounds", "spread", "codes"]
    sinks: int
    code_bits: int = 0
    mass: float = 1.0


@dataclass(frozen=True, slots=True)
class _Places:
    """Memory of the batches of one size.

    Attributes:
        rows: See ``BatchRows``.
        choice: What they choose by.
        listed: Pages that they chose.
        pages: The rows over these.
        parts: Partial states of attention, those of the window first.
        rotated: Queries for codes; empty: nobody chooses by these.
    """

    rows: BatchRows
    choice: Choice
    listed: Listed
    pages: Rows
    parts: PartialState
    rotated: torch.Tensor


class DecodeLayer:
    """Layers of steps with at most R rows of one token each, whose logits are plain: no sinks, no
    soft cap and no slopes.

    Batches of all sizes share memory: no two may be under way on a device at a time, unless one
    stream has both.

    Attributes:
        misses: Pages that a layer lacks.
        hot: Places for pages that are chosen again; None: there are none. Set before the first
            step.
        outcome: What became of each row of the tables in the latest step; see ``resolve.Choice``.

    Example::

        layer = DecodeLayer(layout, slots, shape, tables, window_blocks=20, query_heads=32)
        layer.begin(batch, block_stride)  # once a step, then for each layer of the model:
        layer.store(key, value, cache, batch)
        layer.attend(number, query, cache, out, scale, offsets=(frame, record))
    """

    def __init__(
        self,
        layout: BlockLayout,
        slots: BlockLayout,
        shape: StepTables,
        tables: torch.Tensor,
        *,
        window_blocks: int,
        query_heads: int,
        choosing: Choosing | None = None,
        misses: Misses | None = None,
    ) -> None:
        """Take the memory.

        Args:
            layout: Layout of a block in HBM.
            slots: Layout of a block in a slot.
            shape: Sizes of the tables.
            tables: int64 [shape.size].
            window_blocks: Blocks of a row that are read from HBM, at most.
            query_heads: Query heads.
            choosing: How rows choose; None: no row does.
            misses: Where they ask for pages whose blocks have no frame; None: these are lost.
        """
        self.layout, self.shape, self.tables = layout, shape, tables
        self._slots, self._choosing = slots, choosing
        self.misses = Misses.empty(1, 0, shape, tables) if misses is None else misses
        self.hot: ResidentPages | None = None
        device, rows, size = tables.device, shape.rows, layout.head_size
        every = BatchRows.empty(rows, window_blocks, device)
        self.outcome = every.outcome
        columns = max(1, shape.blocks * layout.groups)
        self._records = tables[shape.records :]
        of_query, lists = (rows, query_heads), rows * layout.kv_heads
        choice = Choice(
            every.row,
            every.columns,
            every.least,
            every.most,
            tables[shape.frames : shape.records].view(rows, shape.blocks),
            torch.zeros(slots.page_stride_bytes, dtype=torch.uint8, device=device),
            self.outcome,
            torch.zeros((*of_query, columns), device=device),
            torch.zeros((rows, layout.kv_heads, columns), device=device),
            torch.zeros(of_query, device=device),
        )
        number = torch.arange(lists, dtype=torch.int32, device=device)
        places = torch.zeros((2, lists * columns), dtype=torch.int64, device=device)
        listed = Listed(number * columns, number.clone(), places[0], places[1])
        window = every.window
        pages = Rows(
            window.query_begin,
            window.query_count,
            window.first_position,
            listed.begin,
            listed.end,
            1,
            columns,
        )
        self._split_pages = SPLIT_PAGES
        part = 4 * rows * query_heads * size
        while -(-columns // self._split_pages) * part > WORKSPACE_BYTES:
            self._split_pages *= 2
        keys = window_blocks * layout.block_tokens
        self._of_window = max(1, min(WINDOW_SPLITS, 2 * keys // MIN_SPLIT_KEYS))
        count = self._of_window + -(-columns // self._split_pages)
        parts = PartialState(
            torch.zeros((count, *of_query), device=device),
            torch.zeros((count, *of_query), device=device),
            torch.zeros((count, *of_query, size), device=device),
        )
        by_codes = choosing is not None and choosing.record == "codes"
        rotated = rotated_queries(rows if by_codes else 0, query_heads, layout, device)
        self._sizes = {rows: _Places(every, choice, listed, pages, parts, rotated)}
        self._now = self._sizes[rows]

    def _of(self, rows: int) -> _Places:
        """Memory of the batches of so many rows."""
        if rows not in self._sizes:
            self._sizes[rows] = self._first(self._sizes[self.shape.rows], rows)
        return self._sizes[rows]

    def _first(self, every: _Places, rows: int) -> _Places:
        choice, listed, parts = every.choice, every.listed, every.parts
        here, lists = slice(rows), slice(rows * self.layout.kv_heads)
        found = every.rows.first(rows)
        width = choice.logits.shape[2]
        room = rows * self.layout.kv_heads * width
        part = (len(parts.m), rows, *parts.m.shape[2:])

        def packed(values: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
            return values.flatten()[: int(torch.Size(shape).numel())].view(shape)

        now = Listed(
            listed.begin[lists], listed.end[lists], listed.address[:room], listed.position[:room]
        )
        window = found.window
        return _Places(
            found,
            Choice(
                found.row,
                found.columns,
                found.least,
                found.most,
                choice.frames,
                choice.nowhere,
                choice.outcome,
                choice.logits[here],
                choice.weights[here],
                choice.lse[here],
            ),
            now,
            Rows(
                window.query_begin,
                window.query_count,
                window.first_position,
                now.begin,
                now.end,
                1,
                width,
            ),
            PartialState(
                packed(parts.m, part),
                packed(parts.l, part),
                packed(parts.acc, (*part, self.layout.head_size)),
            ),
            every.rotated[here],
        )

    @property
    def rows(self) -> BatchRows:
        """Rows of the latest batch."""
        return self._now.rows

    def begin(self, batch: Batch, block_stride: int) -> None:
        """Find the rows of a batch, once a step: of as many entries as its ``seq_lens``.

        ``block_stride``: elements from a block in HBM to the next, of every layer.
        """
        self._now = self._of(len(batch.seq_lens))
        if self.hot is not None:
            self.hot.begin()
        match(
            batch,
            self.tables,
            self.shape,
            self._now.rows,
            block_tokens=self.layout.block_tokens,
            groups=self.layout.groups,
            block_stride=block_stride,
        )

    def store(
        self, key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor, batch: Batch
    ) -> None:
        """Store K and V of a layer's new tokens, [R, Hkv, D], in its blocks in HBM, before it is
        attended to."""
        store_kv(key, value, cache, batch.slots, self.layout)

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        cache: torch.Tensor,
        out: torch.Tensor,
        scale: float,
        offsets: tuple[int, int],
    ) -> None:
        """Write a layer's attention to ``out``, for the batch of the latest :meth:`begin`.

        Seven launches with :meth:`store`, six where no row scores pages, and five where none may
        ask for any; eight by codes, which queries are rotated for by a launch of its own: each
        program that scores would else rotate them again. Two more with :attr:`hot`: pages that it
        holds are not asked for.

        Args:
            layer: Its number.
            query: [R, Hq, D].
            cache: The layer's blocks in HBM, [num_blocks, ...].
            out: [R, Hq, D]; entries without a row get zeros.
            scale: Of the logits.
            offsets: Bytes from a frame's start to the layer's first page, and from the records of
                a block's first layer to those of this one.
        """
        now, choosing = self._now, self._choosing
        rows = now.rows
        window = self._part(now.parts, 0, self._of_window)
        pages = self._part(now.parts, self._of_window, None)
        attend_parts(
            query,
            window,
            rows.window,
            cache=cache,
            block_offset=rows.block_offset,
            block_position=rows.block_position,
            layout=self.layout,
            scale=scale,
            splits=len(window.m),
        )
        if choosing is not None and choosing.record:
            self._score(now, choosing, query, scale, offsets[1])
        resolve(
            now.choice,
            window,
            now.listed,
            self._slots,
            self.misses,
            offset=offsets[0],
            sinks=0 if choosing is None else choosing.sinks,
            wanted=1.0 if choosing is None else choosing.mass,
        )
        hot, listed = self.hot, now.listed
        if hot is not None:
            hot.find(layer, listed, now.choice, self._slots)
        if self.misses.most:
            wait(
                self.misses,
                listed.address,
                self.outcome,
                layer=layer,
                row_pages=self.shape.blocks * self.layout.kv_heads * self.layout.groups,
                nowhere=None if hot is None else now.choice.nowhere.data_ptr(),
            )
        if hot is not None:
            hot.fill(layer, listed, now.choice, self._slots)
        attend_parts(
            query,
            pages,
            now.pages,
            cache=None,
            block_offset=listed.address,
            block_position=listed.position,
            layout=pages_of(self.layout),
            scale=scale,
            splits=len(pages.m),
            split_pages=self._split_pages,
        )
        finish_parts(now.parts, out)

    def _score(
        self, now: _Places, choosing: Choosing, query: torch.Tensor, scale: float, offset: int
    ) -> None:
        rows, logits = now.rows, now.choice.logits
        if choosing.record == "codes":
            code_logits(
                query,
                rows.scored_begin,
                rows.scored_end,
                self._records,
                logits,
                layout=self.layout,
                scale=scale,
                bits=choosing.code_bits,
                rotated=now.rotated,
                offset=offset,
            )
        else:
            page_logits(
                query,
                rows.scored_begin,
                rows.scored_end,
                self._records,
                logits,
                layout=self.layout,
                scale=scale,
                spread=choosing.record == "spread",
                offset=offset,
            )

    @staticmethod
    def _part(parts: PartialState, begin: int, end: int | None) -> PartialState:
        return PartialState(parts.m[begin:end], parts.l[begin:end], parts.acc[begin:end])
