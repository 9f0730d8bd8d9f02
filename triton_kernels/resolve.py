"""Choice of pages from logits to addresses, in one kernel that knows rows by tables.

A program weighs the pages of one list, ranks them as ``choose.py`` does, looks their blocks' frames
up and writes addresses: the host has no part in it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton.language as tl

from vllm_ssdkv.kernels.operands.block_layout import BlockLayout, PartialState
from vllm_ssdkv.triton_kernels.choose import (
    TILE,
    rank,
    taken_of,
    tile_of,
    warps_for,
    weigh_line,
)
from vllm_ssdkv.triton_kernels.launch import inline, jit, on_device_of, padded
from vllm_ssdkv.triton_kernels.misses import HEAD, Misses

_MAIL_HEAD = tl.constexpr(HEAD)


@inline
def _list_pages(
    taken: torch.Tensor,
    start: int,
    at: torch.Tensor,
    head: torch.Tensor,
    frame_ptr: torch.Tensor,
    address_ptr: torch.Tensor,
    position_ptr: torch.Tensor,
    lost_ptr: torch.Tensor,
    miss_ptr: torch.Tensor,
    miss_place_ptr: torch.Tensor,
    miss_key_ptr: torch.Tensor,
    miss_room: int,
    first_key: int,
    offset: int,
    nowhere: int,
    LAYER_PAGES: tl.constexpr,
    GROUPS: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    PAGE_BYTES: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Write addresses and positions of a tile's chosen pages from ``at`` on.

    A page whose block has no frame gets the address of ``nowhere``. It is listed as a miss, or its
    row is lost, where there is no room for it."""
    place = at + tl.cumsum(taken.to(tl.int32), 0) - 1
    column = (start + tl.arange(0, BLOCK)).to(tl.int64)
    frame = tl.load(frame_ptr + column // GROUPS, mask=taken, other=1)
    page = head * GROUPS + column % GROUPS
    address = tl.where(frame == 0, nowhere, frame + offset + page * PAGE_BYTES)
    tl.store(address_ptr + place, address, mask=taken)
    tl.store(position_ptr + place, column * PAGE_TOKENS, mask=taken)
    missing = taken & (frame == 0)
    count = tl.sum(missing.to(tl.int64), 0)
    if count > 0:
        # Threads branch together by a word that one of them has read: other programs write it.
        if (miss_room > 0) & (tl.atomic_add(lost_ptr, 0, sem="relaxed") == 0):
            begin = tl.atomic_add(miss_ptr, count)
            i = begin + tl.cumsum(missing.to(tl.int32), 0) - 1
            listed = missing & (i < miss_room)
            key = first_key + column // GROUPS * LAYER_PAGES + page
            tl.store(miss_key_ptr + i, key, mask=listed)
            tl.store(miss_place_ptr + i, place.to(tl.int64), mask=listed)
            if begin + count > miss_room:
                tl.store(lost_ptr, 1)
        else:
            tl.store(lost_ptr, 1)


@jit
def _resolve_kernel(
    logits_ptr: torch.Tensor,
    seen_m_ptr: torch.Tensor,
    seen_l_ptr: torch.Tensor,
    weights_ptr: torch.Tensor,
    lse_ptr: torch.Tensor,
    row_ptr: torch.Tensor,
    columns_ptr: torch.Tensor,
    least_ptr: torch.Tensor,
    most_ptr: torch.Tensor,
    frame_ptr: torch.Tensor,
    address_ptr: torch.Tensor,
    position_ptr: torch.Tensor,
    end_ptr: torch.Tensor,
    outcome_ptr: torch.Tensor,
    miss_ptr: torch.Tensor,
    service_ptr: torch.Tensor,
    miss_place_ptr: torch.Tensor,
    requests: int,
    miss_room: int,
    layers: int,
    table_rows: int,
    sinks: int,
    wanted: float,
    log_tokens: float,
    width: int,
    room: int,
    queries: int,
    blocks: int,
    offset: int,
    nowhere: int,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    PAGE_BYTES: tl.constexpr,
    BLOCK: tl.constexpr,
    ONE: tl.constexpr,
    SEEN: tl.constexpr,
    ADAPTIVE: tl.constexpr,
) -> None:
    line = tl.program_id(0).to(tl.int64)
    entry = line // KV_HEADS
    row = tl.load(row_ptr + entry).to(tl.int64)
    columns = tl.load(columns_ptr + entry)
    most = tl.maximum(tl.minimum(tl.minimum(tl.load(most_ptr + entry), columns), room), 0)
    at = line * room
    frame_ptr += row * blocks
    lost_ptr = outcome_ptr + row
    chosen_ptr = lost_ptr + table_rows
    LAYER_PAGES: tl.constexpr = KV_HEADS * GROUPS
    # Who answers, if anybody does and has done so far.
    base = tl.load(service_ptr)
    mail = base // layers % 2 * (_MAIL_HEAD + miss_room) + _MAIL_HEAD
    miss_key_ptr = tl.cast(requests, tl.int64).to(tl.pointer_type(tl.int64)) + mail
    miss_room = tl.where((base != 0) & (tl.load(miss_ptr + 1) != base), miss_room, 0)
    least = tl.load(least_ptr + entry)
    if (least < 0) | (tl.minimum(least, most) == columns) | (most == 0):
        # Nothing is ranked: the first pages and the newest ones, which may be none or all.
        tl.store(end_ptr + line, at.to(tl.int32) + most)
        tl.atomic_add(chosen_ptr, most)
        first = tl.minimum(sinks, most)
        for start in range(0, tl.where(most > 0, columns, 0), BLOCK):
            column = start + tl.arange(0, BLOCK)
            newest = (column >= columns - (most - first)) & (column < columns)
            taken = (column < first) | newest
            _list_pages(
                taken,
                start,
                at,
                line % KV_HEADS,
                frame_ptr,
                address_ptr,
                position_ptr,
                lost_ptr,
                miss_ptr,
                miss_place_ptr,
                miss_key_ptr,
                miss_room,
                row * blocks * LAYER_PAGES,
                offset,
                nowhere,
                LAYER_PAGES,
                GROUPS,
                PAGE_TOKENS,
                PAGE_BYTES,
                BLOCK,
            )
            at += tl.sum(taken.to(tl.int32), 0)
        return
    covered = weigh_line(
        logits_ptr,
        seen_m_ptr,
        seen_l_ptr,
        weights_ptr,
        lse_ptr,
        line,
        log_tokens,
        columns,
        width,
        queries,
        GROUP,
        BLOCK,
        SEEN,
        True,
    )
    tl.debug_barrier()  # weights are read by other threads than wrote them
    weights_ptr += line * width
    count, bound, left, first, held, held_mass = rank(
        weights_ptr, weights_ptr, columns, least, most, sinks, covered, wanted, ADAPTIVE, BLOCK, ONE
    )
    tl.store(end_ptr + line, at.to(tl.int32) + count)
    tl.atomic_add(chosen_ptr, count)
    for start in range(0, columns, BLOCK):
        key, mass, there = tile_of(
            weights_ptr, weights_ptr, start, columns, first, held, held_mass, BLOCK, ONE
        )
        taken, left = taken_of(key, there, bound, left)
        if ADAPTIVE:
            covered += tl.sum(tl.where(taken, mass, 0.0), 0)
        _list_pages(
            taken,
            start,
            at,
            line % KV_HEADS,
            frame_ptr,
            address_ptr,
            position_ptr,
            lost_ptr,
            miss_ptr,
            miss_place_ptr,
            miss_key_ptr,
            miss_room,
            row * blocks * LAYER_PAGES,
            offset,
            nowhere,
            LAYER_PAGES,
            GROUPS,
            PAGE_TOKENS,
            PAGE_BYTES,
            BLOCK,
        )
        at += tl.sum(taken.to(tl.int32), 0)
    if ADAPTIVE:
        short = (covered < wanted) & (count < columns)
        tl.atomic_add(chosen_ptr + table_rows, short.to(tl.int32))


@dataclass(frozen=True, slots=True)
class Choice:
    """Tensors of a step's choice, all on the device.

    Attributes:
        row: Row of the tables of each entry of the batch, int32 [R].
        columns, least, most: Pages of its context, and how many each KV head takes, int32 [R].
        frames: Address of the frame of each block of each row, 0 where there is none, int64
            [rows, blocks].
        nowhere: A page of zeros, which is attended to in place of one whose block has no frame.
        outcome: Of each row of the tables, int32 [3, rows]: 1 if it chose such a page, which did
            not come; the pages that it chose, and its lists that ended before they had the mass
            that was ``wanted``, both added to what is there.
        logits, weights: Tables that are used on the way, float32 [R, Hq, n] and [R, Hkv, n].
        lse: Likewise, float32 [R, Hq].
    """

    row: torch.Tensor
    columns: torch.Tensor
    least: torch.Tensor
    most: torch.Tensor
    frames: torch.Tensor
    nowhere: torch.Tensor
    outcome: torch.Tensor
    logits: torch.Tensor
    weights: torch.Tensor
    lse: torch.Tensor


@dataclass(frozen=True, slots=True)
class Listed:
    """Lists of pages at fixed places: list i has ``begin[i] .. end[i]``.

    Attributes:
        begin, end: int32 [R * Hkv]; the lists begin at multiples of the most that one has.
        address, position: Of each page, int64.
    """

    begin: torch.Tensor
    end: torch.Tensor
    address: torch.Tensor
    position: torch.Tensor


def resolve(
    choice: Choice,
    seen: PartialState,
    listed: Listed,
    layout: BlockLayout,
    misses: Misses,
    *,
    offset: int,
    sinks: int,
    wanted: float,
) -> None:
    """Fill ``listed`` with the pages that each row and KV head attends to.

    A row whose ``least`` and ``most`` are not less than its ``columns`` takes all of its pages, one
    whose ``most`` is 0 none, and one whose ``least`` is negative the first ``sinks`` and the newest
    ones. Others choose by ``logits`` as ``ScoringKernels.weigh`` and ``choose`` say. Queued on the
    current stream.

    Args:
        choice: Rows, and what they choose by.
        seen: Partial states of the window, ``[n, R, Hq]`` and so on.
        listed: Is written.
        layout: Layout of a block in a slot.
        misses: Gets the pages whose blocks have no frame.
        offset: Bytes from a frame's start to the layer's first page.
        sinks: First pages of a context that go first.
        wanted: Mass that ends a row's choice between ``least`` and ``most``; 1: it takes ``most``.
    """
    rows, heads, width = choice.logits.shape
    lists = rows * layout.kv_heads
    with on_device_of(choice.logits):
        _resolve_kernel[(lists,)](
            choice.logits,
            seen.m,
            seen.l,
            choice.weights,
            choice.lse,
            choice.row,
            choice.columns,
            choice.least,
            choice.most,
            choice.frames,
            listed.address,
            listed.position,
            listed.end,
            choice.outcome,
            misses.state,
            misses.service,
            misses.place,
            misses.requests.data_ptr(),
            misses.most,
            misses.layers,
            choice.outcome.shape[1],
            sinks,
            wanted,
            math.log(layout.page_tokens),
            width,
            len(listed.address) // lists,
            rows * heads,
            choice.frames.shape[1],
            offset,
            choice.nowhere.data_ptr(),
            KV_HEADS=layout.kv_heads,
            GROUP=heads // layout.kv_heads,
            GROUPS=layout.groups,
            PAGE_TOKENS=layout.page_tokens,
            PAGE_BYTES=layout.page_stride_bytes,
            BLOCK=min(TILE, padded(width)),
            ONE=width <= TILE,
            SEEN=len(seen.m),
            ADAPTIVE=wanted < 1,
            num_warps=warps_for(width),
        )
