"""Attention of one layer of a decode step whose rows lie in tables: launches, and nothing else.

Sizes and addresses that change from step to step are read from memory at fixed places, so that a
graph which has captured a layer does the work of any later step.
"""

from __future__ import annotations

from dataclasses import dataclass

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
from vllm_ssdkv.triton_kernels.merge import finish_parts
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
        spread: By mean and variance, not by bounds.
        sinks: First pages of a context that are chosen in any case.
    """

    spread: bool
    sinks: int


class DecodeLayer:
    """Layers of steps with at most R rows of one token each, whose logits are plain: no sinks, no
    soft cap and no slopes.

    Example::

        layer = DecodeLayer(layout, slots, shape, tables, window_blocks=20, query_heads=32)
        layer.begin(batch, block_stride)  # once a step, then for each layer of the model:
        layer.attend(query, key, value, cache, out, batch, scale, offsets=(frame, record))
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
        """
        self.layout, self.shape, self.tables = layout, shape, tables
        self._slots, self._choosing = slots, choosing
        device, rows, size = tables.device, shape.rows, layout.head_size
        self.rows = BatchRows.empty(rows, window_blocks, device)
        self.lost = torch.zeros(rows, dtype=torch.uint8, device=device)
        columns = max(1, shape.blocks * layout.groups)
        self._records = tables[shape.records :]
        stride = slots.page_stride_bytes
        of_query = rows, query_heads
        self._choice = Choice(
            self.rows.row,
            self.rows.columns,
            self.rows.least,
            self.rows.most,
            tables[shape.frames : shape.records].view(rows, shape.blocks),
            torch.zeros(stride, dtype=torch.uint8, device=device),
            self.lost,
            torch.zeros((*of_query, columns), device=device),
            torch.zeros((rows, layout.kv_heads, columns), device=device),
            torch.zeros(of_query, device=device),
        )
        lists = rows * layout.kv_heads
        number = torch.arange(lists, dtype=torch.int32, device=device)
        places = torch.zeros((2, lists * columns), dtype=torch.int64, device=device)
        self._listed = Listed(number * columns, number.clone(), places[0], places[1])
        window = self.rows.window
        self._pages = Rows(
            window.query_begin,
            window.query_count,
            window.first_position,
            self._listed.begin,
            self._listed.end,
            1,
            columns,
        )
        self._split_pages = SPLIT_PAGES
        part = 4 * rows * query_heads * size
        while -(-columns // self._split_pages) * part > WORKSPACE_BYTES:
            self._split_pages *= 2
        keys = window_blocks * layout.block_tokens
        self._of_window = max(1, min(WINDOW_SPLITS, 2 * keys // MIN_SPLIT_KEYS))
        parts = self._of_window + -(-columns // self._split_pages)
        self._parts = PartialState(
            torch.zeros((parts, *of_query), device=device),
            torch.zeros((parts, *of_query), device=device),
            torch.zeros((parts, *of_query, size), device=device),
        )

    def begin(self, batch: Batch, block_stride: int) -> None:
        """Find the rows of a batch, once a step. ``block_stride``: elements from a block in HBM to
        the next, of every layer."""
        match(
            batch,
            self.tables,
            self.shape,
            self.rows,
            block_tokens=self.layout.block_tokens,
            groups=self.layout.groups,
            block_stride=block_stride,
        )

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: torch.Tensor,
        out: torch.Tensor,
        batch: Batch,
        scale: float,
        offsets: tuple[int, int],
    ) -> None:
        """Store the new keys and values of a layer, and write its attention to ``out``.

        Args:
            query: [R, Hq, D].
            key, value: [R, Hkv, D].
            cache: The layer's blocks in HBM, [num_blocks, ...].
            out: [R, Hq, D]; entries without a row get zeros.
            batch: As of :meth:`begin`.
            scale: Of the logits.
            offsets: Bytes from a frame's start to the layer's first page, and from the records of
                a block's first layer to those of this one.
        """
        rows, choosing = self.rows, self._choosing
        store_kv(key, value, cache, batch.slots, self.layout)
        window, pages = self._part(0, self._of_window), self._part(self._of_window, None)
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
        if choosing is not None:
            page_logits(
                query,
                rows.scored_begin,
                rows.scored_end,
                self._records,
                self._choice.logits,
                layout=self.layout,
                scale=scale,
                spread=choosing.spread,
                offset=offsets[1],
            )
        resolve(
            self._choice,
            window,
            self._listed,
            self._slots,
            offset=offsets[0],
            sinks=0 if choosing is None else choosing.sinks,
        )
        attend_parts(
            query,
            pages,
            self._pages,
            cache=None,
            block_offset=self._listed.address,
            block_position=self._listed.position,
            layout=pages_of(self.layout),
            scale=scale,
            splits=len(pages.m),
            split_pages=self._split_pages,
        )
        finish_parts(self._parts, out)

    def _part(self, begin: int, end: int | None) -> PartialState:
        parts = self._parts
        return PartialState(parts.m[begin:end], parts.l[begin:end], parts.acc[begin:end])
