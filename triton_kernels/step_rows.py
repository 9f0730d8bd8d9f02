"""A step's tables: changes are applied, and the rows of a batch are found, on the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton.language as tl

from vllm_ssdkv.kernels.operands.block_layout import Rows
from vllm_ssdkv.kernels.operands.step_tables import StepTables
from vllm_ssdkv.triton_kernels.launch import jit, on_device_of, padded

TILE = 1024


@jit
def _change_kernel(
    tables_ptr: torch.Tensor, changes_ptr: torch.Tensor, count: int, TILE: tl.constexpr
) -> None:
    i = tl.program_id(0) * TILE + tl.arange(0, TILE)
    there = i < count
    place = tl.load(changes_ptr + 2 * i, mask=there, other=0)
    value = tl.load(changes_ptr + 2 * i + 1, mask=there, other=0)
    tl.store(tables_ptr + place, value, mask=there)


def change(tables: torch.Tensor, changes: torch.Tensor) -> None:
    """Write ``changes`` (int64 ``[n, 2]``: place, value; no place twice) into ``tables``."""
    count = len(changes)
    with on_device_of(tables):
        _change_kernel[(-(-count // TILE),)](tables, changes, count, TILE=TILE, num_warps=4)


@jit
def _match_kernel(
    tables_ptr: torch.Tensor,
    slot_ptr: torch.Tensor,
    seq_len_ptr: torch.Tensor,
    block_table_ptr: torch.Tensor,
    row_ptr: torch.Tensor,
    position_ptr: torch.Tensor,
    window_end_ptr: torch.Tensor,
    block_offset_ptr: torch.Tensor,
    block_position_ptr: torch.Tensor,
    columns_ptr: torch.Tensor,
    least_ptr: torch.Tensor,
    most_ptr: torch.Tensor,
    scored_begin_ptr: torch.Tensor,
    scored_end_ptr: torch.Tensor,
    outcome_ptr: torch.Tensor,
    rows: int,
    blocks: int,
    fields: int,
    window_blocks: int,
    table_stride: int,
    block_stride: int,
    BLOCK_TOKENS: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK_W: tl.constexpr,
    OUTCOMES: tl.constexpr,
) -> None:
    entry = tl.program_id(0)
    slot = tl.load(slot_ptr + entry)
    row = tl.load(tables_ptr + tl.maximum(slot, 0) // BLOCK_TOKENS)
    there = (slot >= 0) & (row >= 0)
    row = tl.where(there, row, 0)
    field = tables_ptr + fields + row
    held = tl.where(there, tl.load(field), 0)
    first = tl.load(field + rows)
    tokens = tl.load(seq_len_ptr + entry)
    window = tl.where(there, (tokens + BLOCK_TOKENS - 1) // BLOCK_TOKENS - first, 0)
    window = tl.minimum(window, window_blocks)
    tl.store(row_ptr + entry, row.to(tl.int32))
    for i in tl.static_range(OUTCOMES):
        tl.store(outcome_ptr + i * rows + row, 0)
    tl.store(position_ptr + entry, (tokens - 1).to(tl.int64))
    tl.store(window_end_ptr + entry, (entry * window_blocks + window).to(tl.int32))
    tl.store(columns_ptr + entry, (held * GROUPS).to(tl.int32))
    tl.store(least_ptr + entry, tl.load(field + 3 * rows).to(tl.int32))
    tl.store(most_ptr + entry, tl.load(field + 4 * rows).to(tl.int32))
    scored = tl.where(there, tl.load(field + 2 * rows), 0)
    tl.store(scored_begin_ptr + entry, (row * blocks).to(tl.int32))
    tl.store(scored_end_ptr + entry, (row * blocks + scored).to(tl.int32))
    i = tl.arange(0, BLOCK_W)
    known = i < window
    block = tl.load(block_table_ptr + entry * table_stride + first + i, mask=known, other=0)
    to = entry * window_blocks + i
    tl.store(block_offset_ptr + to, block.to(tl.int64) * block_stride, mask=known)
    tl.store(block_position_ptr + to, (first + i).to(tl.int64) * BLOCK_TOKENS, mask=known)


@dataclass(frozen=True, slots=True)
class BatchRows:
    """Rows of a batch of one token each, at fixed places on the device. R entries, of tables with
    at least as many rows.

    Attributes:
        row: Row of the tables, int32 [R]; 0 for an entry that has none.
        window: The entries over their blocks in HBM: no block for an entry that has no row.
        block_offset, block_position: Of these blocks, int64 [R * window_blocks].
        columns, least, most: Pages of the context, and how many each KV head takes, int32 [R].
        scored_begin, scored_end: Blocks whose records are scored, int32 [R].
        outcome: What becomes of each row of the tables, int32 [3, rows]: see ``resolve.Choice``.
    """

    row: torch.Tensor
    window: Rows
    block_offset: torch.Tensor
    block_position: torch.Tensor
    columns: torch.Tensor
    least: torch.Tensor
    most: torch.Tensor
    scored_begin: torch.Tensor
    scored_end: torch.Tensor
    outcome: torch.Tensor

    @classmethod
    def empty(cls, rows: int, window_blocks: int, device: torch.device) -> BatchRows:
        """Memory for ``rows`` entries with windows of at most so many blocks."""
        none = [torch.zeros(rows, dtype=torch.int32, device=device) for _ in range(7)]
        number = torch.arange(rows, dtype=torch.int32, device=device)
        window = Rows(
            number,
            torch.ones_like(number),
            torch.zeros(rows, dtype=torch.int64, device=device),
            number * window_blocks,
            none[0],
            1,
            window_blocks,
        )
        places = torch.zeros((2, rows * window_blocks), dtype=torch.int64, device=device)
        outcome = torch.zeros((3, rows), dtype=torch.int32, device=device)
        of_row = none[2], none[3], none[4], none[5], none[6]
        return cls(none[1], window, places[0], places[1], *of_row, outcome)

    def first(self, rows: int) -> BatchRows:
        """The same memory for a batch of fewer entries."""
        window, here = self.window, slice(rows)
        blocks = slice(rows * window.max_blocks)
        return BatchRows(
            self.row[here],
            Rows(
                window.query_begin[here],
                window.query_count[here],
                window.first_position[here],
                window.block_begin[here],
                window.block_end[here],
                window.max_queries,
                window.max_blocks,
            ),
            self.block_offset[blocks],
            self.block_position[blocks],
            self.columns[here],
            self.least[here],
            self.most[here],
            self.scored_begin[here],
            self.scored_end[here],
            self.outcome,
        )


@dataclass(frozen=True, slots=True)
class Batch:
    """Batch of a step, at fixed places on the device.

    Attributes:
        slots: Where each entry's token is written: block times its tokens plus the token in it;
            negative: nowhere, and the entry is padding. int64 [R].
        seq_lens: Tokens of each entry, the newest included, int32 [R].
        block_table: Blocks of each entry in HBM, from its first token on, int32 [R, n].
    """

    slots: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor


def match(
    batch: Batch,
    tables: torch.Tensor,
    shape: StepTables,
    found: BatchRows,
    *,
    block_tokens: int,
    groups: int,
    block_stride: int,
) -> None:
    """Find the entries' rows in ``tables`` (int64 ``[shape.size]``), and what layers need of them;
    their outcomes begin at 0.

    ``groups`` are pages of a block for each KV head, ``block_stride`` elements from a block in HBM
    to the next. Queued on the current stream.
    """
    rows = len(found.row)
    window_blocks = len(found.block_offset) // rows
    with on_device_of(tables):
        _match_kernel[(rows,)](
            tables,
            batch.slots,
            batch.seq_lens,
            batch.block_table,
            found.row,
            found.window.first_position,
            found.window.block_end,
            found.block_offset,
            found.block_position,
            found.columns,
            found.least,
            found.most,
            found.scored_begin,
            found.scored_end,
            found.outcome,
            shape.rows,
            shape.blocks,
            shape.fields,
            window_blocks,
            batch.block_table.stride(0),
            block_stride,
            BLOCK_TOKENS=block_tokens,
            GROUPS=groups,
            BLOCK_W=padded(window_blocks),
            OUTCOMES=len(found.outcome),
            num_warps=1,
        )
