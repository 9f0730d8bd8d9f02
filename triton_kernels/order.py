"""Order of the tokens of blocks by likeness, and blocks copied in that order.

As ``csrc/attention/token_order.hpp`` has it: tokens are halved across the direction in which their
rows vary most, by power iteration, down to pages. One program orders one head of one block.
"""

from __future__ import annotations

import functools
import math

import torch
import triton.language as tl

from vllm_ssdkv.kernels.operands.block_layout import BlockLayout
from vllm_ssdkv.triton_kernels.launch import TL_DTYPES, jit, on_device_of, padded, require

TURNS = 3
"""Turns of power iteration (``kPowerTurns``)."""

_TILE = 64


@jit
def _order_kernel(
    rows_ptr: torch.Tensor,
    kept_ptr: torch.Tensor,
    place_ptr: torch.Tensor,
    projection_ptr: torch.Tensor,
    splits_ptr: torch.Tensor,
    begin_ptr: torch.Tensor,
    TOKENS: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    PAGE_STRIDE: tl.constexpr,
    WIDTH: tl.constexpr,
    TURNS: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROW: tl.constexpr,
) -> None:
    block = tl.program_id(0)
    head = tl.program_id(1)
    program = block * tl.num_programs(1) + head
    rows = tl.load(rows_ptr + block).to(tl.pointer_type(ROW))
    rows += head * (TOKENS // PAGE_TOKENS * PAGE_STRIDE)
    place_ptr += program * TOKENS
    projection_ptr += program * TOKENS
    column = tl.arange(0, BLOCK_D)
    in_row = column < WIDTH
    lane = tl.arange(0, TILE)
    for start in range(0, TOKENS, TILE):
        token = start + lane
        tl.store(place_ptr + token, token, mask=token < TOKENS)
    tl.debug_barrier()
    kept = tl.load(kept_ptr + block)
    for split in range(tl.load(begin_ptr + kept), tl.load(begin_ptr + kept + 1)):
        low = tl.load(splits_ptr + 2 * split) * PAGE_TOKENS
        pages = tl.load(splits_ptr + 2 * split + 1)
        count = pages * PAGE_TOKENS
        left = (pages - pages // 2) * PAGE_TOKENS
        total = tl.zeros([BLOCK_D], tl.float32)
        one = tl.zeros([BLOCK_D], tl.float32)
        other = tl.zeros([BLOCK_D], tl.float32)
        for start in range(0, TOKENS, TILE):
            token = start + lane
            place = tl.load(place_ptr + token, mask=token < TOKENS, other=-1) - low
            member = (place >= 0) & (place < count)
            at = token // PAGE_TOKENS * PAGE_STRIDE + token % PAGE_TOKENS * WIDTH
            there = member[:, None] & in_row[None, :]
            x = tl.load(rows + at[:, None] + column[None, :], mask=there, other=0).to(tl.float32)
            total += tl.sum(x, 0)
            one += tl.sum(tl.where((place == 0)[:, None], x, 0.0), 0)
            other += tl.sum(tl.where((place == count // 2)[:, None], x, 0.0), 0)
        mean = total / count
        along = tl.where(in_row, one - other + 1e-3, 0.0)
        along /= tl.sqrt(tl.sum(along * along, 0))
        for turn in range(TURNS + 1):
            following = tl.zeros([BLOCK_D], tl.float32)
            for start in range(0, TOKENS, TILE):
                token = start + lane
                place = tl.load(place_ptr + token, mask=token < TOKENS, other=-1) - low
                member = (place >= 0) & (place < count)
                at = token // PAGE_TOKENS * PAGE_STRIDE + token % PAGE_TOKENS * WIDTH
                there = member[:, None] & in_row[None, :]
                x = tl.load(rows + at[:, None] + column[None, :], mask=there, other=0)
                x = tl.where(there, x.to(tl.float32) - mean[None, :], 0.0)
                projection = tl.sum(x * along[None, :], 1)
                following += tl.sum(x * projection[:, None], 0)
                # What is not finite comes last.
                finite = tl.abs(projection) < float("inf")
                projection = tl.where(finite, projection, 3.0e38)
                tl.store(projection_ptr + token, projection, mask=token < TOKENS)
            if turn < TURNS:
                length = tl.sqrt(tl.sum(following * following, 0))
                along = tl.where(length > 0, following / tl.where(length > 0, length, 1.0), 0.0)
        tl.debug_barrier()
        front = low
        back = low + left
        for start in range(0, TOKENS, TILE):
            token = start + lane
            place = tl.load(place_ptr + token, mask=token < TOKENS, other=-1) - low
            member = (place >= 0) & (place < count)
            mine = tl.load(projection_ptr + token, mask=member, other=0)
            before = tl.zeros([TILE], tl.int32)
            for against in range(0, TOKENS, TILE):
                opponent = against + lane
                seat = tl.load(place_ptr + opponent, mask=opponent < TOKENS, other=-1) - low
                counts = (seat >= 0) & (seat < count)
                theirs = tl.load(projection_ptr + opponent, mask=counts, other=0)
                less = theirs[None, :] < mine[:, None]
                equal = (theirs[None, :] == mine[:, None]) & (opponent[None, :] < token[:, None])
                before += tl.sum(((less | equal) & counts[None, :]).to(tl.int32), 1)
            first = (member & (before < left)).to(tl.int32)
            second = (member & (before >= left)).to(tl.int32)
            to = tl.where(first > 0, front + tl.cumsum(first, 0), back + tl.cumsum(second, 0)) - 1
            # The new place is among those of the members, too: whoever looks meanwhile sees one.
            tl.store(place_ptr + token, to, mask=member)
            front += tl.sum(first, 0)
            back += tl.sum(second, 0)
        tl.debug_barrier()


@jit
def _gather_kernel(
    source_ptr: torch.Tensor,
    target_ptr: torch.Tensor,
    place_ptr: torch.Tensor,
    TOKENS: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    ALIGN: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    KV: tl.constexpr,
) -> None:
    block = tl.program_id(0)
    head = tl.program_id(1)
    heads = tl.num_programs(1)
    page_size: tl.constexpr = 2 * PAGE_TOKENS * HEAD_SIZE
    begin = head * (TOKENS // PAGE_TOKENS * page_size)
    source = tl.load(source_ptr + block).to(tl.pointer_type(KV))
    source = tl.multiple_of(source + begin, ALIGN)
    target = target_ptr + block.to(tl.int64) * (heads * 2 * TOKENS * HEAD_SIZE) + begin
    place_ptr += (block * heads + head) * TOKENS
    column = tl.arange(0, BLOCK_D)
    for start in range(0, TOKENS, TILE):
        token = start + tl.arange(0, TILE)
        place = tl.load(place_ptr + token, mask=token < TOKENS, other=0)
        there = (token < TOKENS)[:, None] & (column < HEAD_SIZE)[None, :]
        at = token // PAGE_TOKENS * page_size + token % PAGE_TOKENS * HEAD_SIZE
        to = place // PAGE_TOKENS * page_size + place % PAGE_TOKENS * HEAD_SIZE
        for part in range(2):
            behind = part * (PAGE_TOKENS * HEAD_SIZE) + column[None, :]
            x = tl.load(source + at[:, None] + behind, mask=there, other=0)
            tl.store(target + to[:, None] + behind, x, mask=there)


@functools.cache
def _splits(groups: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Splits of a block's pages, (first page, pages) one after the other, for each number of pages
    that keep their tokens; and where each number's begin. Both int32 on the device."""
    table: list[int] = []
    begin = [0]
    for kept in range(groups + 1):
        pending = [(kept, groups - kept)]
        while pending:
            first, pages = pending.pop()
            if pages > 1:
                left = pages - pages // 2
                table += [first, pages]
                pending += [(first + left, pages - left), (first, left)]
        begin.append(len(table) // 2)
    made = (torch.tensor(part or [0], dtype=torch.int32) for part in (table, begin))
    splits, begins = (part.to(device) for part in made)
    return splits, begins


def order_blocks(
    rows: torch.Tensor, kept: torch.Tensor, layout: BlockLayout, width: int | None = None
) -> torch.Tensor:
    """The place of each token in its order, int32 ``[n, kv_heads, block_tokens]``.

    ``rows``: addresses of n blocks of one layer, int64 ``[n]``, whose K says which tokens are
    alike; with a ``width`` of float32 rows ``[kv_heads, block_tokens, width]`` instead. ``kept``:
    first pages of each that keep their tokens, int32 ``[n]`` on the same device. Queued on the
    current stream; raises ``ValueError`` on wrong shapes or devices.
    """
    require(
        rows.dtype == torch.int64 and kept.dtype == torch.int32 and rows.shape == kept.shape,
        "rows must be int64 [n] and kept int32 [n]",
    )
    shape = (len(rows), layout.kv_heads, layout.block_tokens)
    place = torch.empty(shape, dtype=torch.int32, device=rows.device)
    if not len(rows):
        return place
    projection = torch.empty(shape, dtype=torch.float32, device=rows.device)
    splits, begin = _splits(layout.groups, rows.device)
    with on_device_of(rows):
        _order_kernel[(len(rows), layout.kv_heads)](
            rows,
            kept,
            place,
            projection,
            splits,
            begin,
            TOKENS=layout.block_tokens,
            PAGE_TOKENS=layout.page_tokens,
            PAGE_STRIDE=layout.page_stride if width is None else layout.page_tokens * width,
            WIDTH=layout.head_size if width is None else width,
            TURNS=TURNS,
            TILE=_TILE,
            BLOCK_D=padded(layout.head_size if width is None else width),
            ROW=TL_DTYPES[layout.dtype if width is None else torch.float32],
            num_warps=4,
        )
    return place


def reorder(source: torch.Tensor, place: torch.Tensor, layout: BlockLayout) -> torch.Tensor:
    """Copies of n blocks of one layer, ``[n, block]`` of the layout's dtype, tokens at ``place``.

    ``source``: addresses of the blocks, int64 ``[n]``; pages lie back to back, there and in the
    copy. Queued on the current stream; raises ``ValueError`` on wrong shapes or devices.
    """
    require(
        layout.page_stride_bytes == layout.page_payload_bytes,
        "blocks that are reordered have their pages back to back",
    )
    require(
        place.dtype == torch.int32
        and tuple(place.shape) == (len(source), layout.kv_heads, layout.block_tokens)
        and place.device == source.device,
        f"place must be int32 [{len(source)}, kv_heads, block_tokens] on {source.device}",
    )
    size = layout.block_bytes // layout.dtype.itemsize
    made = torch.empty((len(source), size), dtype=layout.dtype, device=source.device)
    if not len(source):
        return made
    with on_device_of(source):
        _gather_kernel[(len(source), layout.kv_heads)](
            source,
            made,
            place,
            TOKENS=layout.block_tokens,
            PAGE_TOKENS=layout.page_tokens,
            HEAD_SIZE=layout.head_size,
            ALIGN=math.gcd(16, layout.head_size * layout.dtype.itemsize),
            TILE=_TILE,
            BLOCK_D=padded(layout.head_size),
            KV=TL_DTYPES[layout.dtype],
            num_warps=4,
        )
    return made
