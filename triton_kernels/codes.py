"""K in a few bits, and logits of context pages from it: ``ScoringKernels.code_logits``.

The record is that of ``csrc/attention/codes.hpp``. Rotations are products with a matrix here, sums
have another order: codes differ from the native kernels' where a number lies on an edge.
"""

from __future__ import annotations

import functools
import math

import torch
import triton.language as tl

from vllm_ssdkv import _kernels
from vllm_ssdkv.kernels.operands.block_layout import BlockLayout
from vllm_ssdkv.triton_kernels.launch import TL_DTYPES, jit, on_device_of, padded, require

CODE_TILE = tl.constexpr(16)
ROUNDING = tl.constexpr(1.5 * 2**23)
"""Adding it to a float32 rounds to a whole number, to the even one of two."""
TILE_TOKENS = 256
LEAST_DOT = tl.constexpr(16)
"""Least size of every dimension of a product on tensor cores."""


@functools.cache
def rotation(head_size: int, device: torch.device) -> torch.Tensor:
    """The transpose of the matrix that keys and queries are rotated by, float32, zeros around it up
    to powers of two: a row of keys times it is rotated."""
    size = padded(head_size, LEAST_DOT.value)
    matrix = _kernels.rotation(head_size)
    held = torch.zeros((size, size), dtype=torch.float32)
    held[:head_size, :head_size] = torch.from_numpy(matrix).view(head_size, head_size).T
    return held.to(device)


@functools.cache
def levels(bits: int, device: torch.device) -> torch.Tensor:
    """The levels that codes stand for, float32 ``[2 ** bits]``."""
    return torch.from_numpy(_kernels.code_levels(bits)).to(device)


@jit
def _encode_kernel(
    source_ptr: torch.Tensor,
    codes_ptr: torch.Tensor,
    rotation_ptr: torch.Tensor,
    levels_ptr: torch.Tensor,
    GROUPS: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    PAGE_STRIDE: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BITS: tl.constexpr,
    TILES: tl.constexpr,
    LINES: tl.constexpr,
    RECORD: tl.constexpr,
    KV: tl.constexpr,
) -> None:
    block = tl.program_id(0)
    head = tl.program_id(1)
    source = tl.load(source_ptr + block).to(tl.pointer_type(KV)) + head * (GROUPS * PAGE_STRIDE)
    record = tl.load(codes_ptr + block).to(tl.pointer_type(tl.uint8)) + head * RECORD
    channel = tl.arange(0, BLOCK_D)
    in_head = channel < HEAD_SIZE
    token = tl.arange(0, CODE_TILE)
    TOKENS: tl.constexpr = GROUPS * PAGE_TOKENS
    MEAN: tl.constexpr = TILES * CODE_TILE * (LINES + 2)
    STEP: tl.constexpr = MEAN + (HEAD_SIZE + 3) // 4 * 4
    # In every row of a tile.
    means = tl.zeros([CODE_TILE, BLOCK_D], tl.float32)
    for first in range(0, BLOCK_D, LEAST_DOT):
        part = first + tl.arange(0, LEAST_DOT)
        total = tl.zeros([LEAST_DOT], tl.float32)
        for tile in range(TILES):
            place = tile * CODE_TILE + token
            key_at = source + place // PAGE_TOKENS * PAGE_STRIDE + place % PAGE_TOKENS * HEAD_SIZE
            mask = (place < TOKENS)[:, None] & (part < HEAD_SIZE)[None, :]
            key = tl.load(key_at[:, None] + part[None, :], mask=mask, other=0)
            total += tl.sum(key.to(tl.float32), 0)
        mean_of = tl.div_rn(total, TOKENS * 1.0)
        mean_of = tl.where(mean_of - mean_of == 0, mean_of, 0.0)
        rows = tl.broadcast_to(mean_of[None, :], [CODE_TILE, LEAST_DOT])
        turn = tl.load(rotation_ptr + part[:, None] * BLOCK_D + channel[None, :])
        means += tl.dot(rows, turn, input_precision="ieee")
    mean = tl.max(means, 0)
    most = tl.max(tl.abs(mean), 0)
    step = tl.where(most < float("inf"), tl.div_rn(most, 127.0), 0.0)
    whole = (tl.div_rn(mean, tl.where(step > 0, step, 1.0)) + ROUNDING) - ROUNDING
    whole = tl.where(step > 0, tl.minimum(tl.maximum(whole, -127.0), 127.0), 0.0)
    mean_at = (record + MEAN).to(tl.pointer_type(tl.int8), bitcast=True) + channel
    tl.store(mean_at, whole.to(tl.int8), mask=channel < STEP - MEAN)
    # Bytes, as records begin anywhere.
    bits = step.to(tl.uint32, bitcast=True)
    quarter = tl.arange(0, 4)
    tl.store(record + STEP + quarter, ((bits >> (8 * quarter)) & 0xFF).to(tl.uint8))
    mean = whole * step

    SHARED: tl.constexpr = 8 // BITS
    HALF: tl.constexpr = 2 ** (BITS - 1)
    line = tl.arange(0, BLOCK_D // SHARED)
    for tile in range(TILES):
        place = tile * CODE_TILE + token
        there = place < TOKENS
        key_at = source + place // PAGE_TOKENS * PAGE_STRIDE + place % PAGE_TOKENS * HEAD_SIZE
        y = tl.zeros([CODE_TILE, BLOCK_D], tl.float32)
        for first in range(0, BLOCK_D, LEAST_DOT):
            part = first + tl.arange(0, LEAST_DOT)
            mask = there[:, None] & (part < HEAD_SIZE)[None, :]
            key = tl.load(key_at[:, None] + part[None, :], mask=mask, other=0)
            turn = tl.load(rotation_ptr + part[:, None] * BLOCK_D + channel[None, :])
            y += tl.dot(key.to(tl.float32), turn, input_precision="ieee")
        y -= mean[None, :]
        square = tl.sum(y * y, 1)
        root = tl.sqrt_rn(tl.div_rn(square, HEAD_SIZE * 1.0))
        unit = tl.where(root > 0, tl.div_rn(1.0, tl.where(root > 0, root, 1.0)), 0.0)
        u = y * unit[:, None]
        size = tl.abs(u)
        above = tl.zeros([CODE_TILE, BLOCK_D], tl.int32)
        level = tl.zeros([CODE_TILE, BLOCK_D], tl.float32) + tl.load(levels_ptr + HALF)
        for k in tl.static_range(1, HALF):
            low, high = tl.load(levels_ptr + HALF + k - 1), tl.load(levels_ptr + HALF + k)
            over = size > 0.5 * (low + high)
            above = tl.where(over, k, above)
            level = tl.where(over, high, level)
        number = tl.where(u < 0, HALF - 1 - above, HALF + above)
        level = tl.where(u < 0, -level, level)
        along = tl.sum(tl.where(in_head[None, :], level * y, 0.0), 1)
        number = tl.where(in_head[None, :], number, 0) << (BITS * (channel % SHARED))[None, :]
        packed = tl.sum(tl.reshape(number, [CODE_TILE, BLOCK_D // SHARED, SHARED]), 2)
        at = record + (tile * LINES + line)[None, :] * CODE_TILE + token[:, None]
        tl.store(at, packed.to(tl.uint8), mask=(line < LINES)[None, :])
        weight = tl.where(square == 0, 0.0, tl.div_rn(square, along))
        weight = tl.where(weight - weight == 0, weight, float("nan"))
        half = weight.to(tl.bfloat16).to(tl.uint16, bitcast=True)
        at = record + TILES * CODE_TILE * LINES + 2 * place
        tl.store(at, (half & 0xFF).to(tl.uint8))
        tl.store(at + 1, (half >> 8).to(tl.uint8))


def encode(source: torch.Tensor, layout: BlockLayout, codes: torch.Tensor, bits: int) -> None:
    """K of n complete blocks of one layer in ``bits`` a number: ``PageKernels.encode``.

    Both are absolute addresses, int64 ``[n]`` on one device, of memory that it reaches. Queued on
    the current stream.
    """
    tiles, lines, record = _shape(layout, bits)
    with on_device_of(source):
        _encode_kernel[(len(source), layout.kv_heads)](
            source,
            codes,
            rotation(layout.head_size, source.device),
            levels(bits, source.device),
            GROUPS=layout.groups,
            PAGE_TOKENS=layout.page_tokens,
            PAGE_STRIDE=layout.page_stride,
            HEAD_SIZE=layout.head_size,
            BLOCK_D=padded(layout.head_size, LEAST_DOT.value),
            BITS=bits,
            TILES=tiles,
            LINES=lines,
            RECORD=record,
            KV=TL_DTYPES[layout.dtype],
            num_warps=4,
            num_stages=1,
        )


def _shape(layout: BlockLayout, bits: int) -> tuple[int, int, int]:
    """Tiles of a block, lines of a tile, and bytes of a head's record."""
    tiles = -(-layout.block_tokens // CODE_TILE.value)
    lines = -(-layout.head_size * bits // 32) * 4
    return tiles, lines, _kernels.code_bytes(layout.shape, bits)


@jit
def _rotate_kernel(
    q_ptr: torch.Tensor,
    rotation_ptr: torch.Tensor,
    rotated_ptr: torch.Tensor,
    queries: int,
    scale: float,
    HEAD_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    line = (tl.program_id(0) * LEAST_DOT + tl.arange(0, LEAST_DOT)).to(tl.int64)
    channel = tl.arange(0, BLOCK_D)
    total = tl.zeros([LEAST_DOT, BLOCK_D], tl.float32)
    for first in range(0, BLOCK_D, LEAST_DOT):
        part = first + tl.arange(0, LEAST_DOT)
        mask = (line < queries)[:, None] & (part < HEAD_SIZE)[None, :]
        q = tl.load(q_ptr + line[:, None] * HEAD_SIZE + part[None, :], mask=mask, other=0.0)
        turn = tl.load(rotation_ptr + part[:, None] * BLOCK_D + channel[None, :])
        total += tl.dot(q.to(tl.float32) * scale, turn, input_precision="ieee")
    at = rotated_ptr + line[:, None] * BLOCK_D + channel[None, :]
    tl.store(at, total, mask=(line < queries)[:, None])


@jit
def _logits_kernel(
    q_ptr: torch.Tensor,
    levels_ptr: torch.Tensor,
    row_begin_ptr: torch.Tensor,
    row_end_ptr: torch.Tensor,
    records_ptr: torch.Tensor,
    logits_ptr: torch.Tensor,
    columns: int,
    offset: int,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    GROUPS: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    BITS: tl.constexpr,
    TILES: tl.constexpr,
    LINES: tl.constexpr,
    RECORD: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_T: tl.constexpr,
    PAGES: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    head = tl.program_id(1)
    begin = tl.load(row_begin_ptr + row)
    count = (tl.load(row_end_ptr + row) - begin) * GROUPS
    MEAN: tl.constexpr = TILES * CODE_TILE * (LINES + 2)
    STEP: tl.constexpr = MEAN + (HEAD_SIZE + 3) // 4 * 4
    SHARED: tl.constexpr = 8 // BITS
    # So many tokens of each page at a time.
    place = tl.arange(0, PAGES * BLOCK_T)
    page = tl.program_id(2) * PAGES + place // BLOCK_T
    record = tl.load(records_ptr + begin + page // GROUPS, mask=page < count, other=0) + offset
    record = record.to(tl.pointer_type(tl.uint8)) + head * RECORD
    step = tl.zeros([PAGES * BLOCK_T], tl.uint32)
    for i in tl.static_range(4):
        byte_of = tl.load(record + STEP + i, mask=page < count, other=0)
        step |= byte_of.to(tl.uint32) << (8 * i)
    step = step.to(tl.float32, bitcast=True)
    g = tl.arange(0, BLOCK_G)
    query_head = (row * KV_HEADS + head).to(tl.int64) * GROUP + g
    most = tl.full([BLOCK_G, PAGES], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_G, PAGES], tl.float32)
    for begin_token in range(0, PAGE_TOKENS, BLOCK_T):
        inside = begin_token + place % BLOCK_T
        there = (page < count) & (inside < PAGE_TOKENS)
        token = page % GROUPS * PAGE_TOKENS + inside
        weight_at = record + TILES * CODE_TILE * LINES + 2 * token
        weight = tl.load(weight_at, mask=there, other=0).to(tl.uint32)
        weight |= tl.load(weight_at + 1, mask=there, other=0).to(tl.uint32) << 8
        weight = (weight << 16).to(tl.float32, bitcast=True)
        codes_at = record + token // CODE_TILE * (LINES * CODE_TILE) + token % CODE_TILE
        logits = tl.zeros([BLOCK_G, PAGES * BLOCK_T], tl.float32)
        for first in range(0, BLOCK_L, LEAST_DOT):
            line = first + tl.arange(0, LEAST_DOT)
            held = (line < LINES)[:, None] & there[None, :]
            byte = tl.load(codes_at[None, :] + line[:, None] * CODE_TILE, mask=held, other=0)
            byte = byte.to(tl.int32)
            for j in tl.static_range(SHARED):
                channel = line * SHARED + j
                in_head = channel < HEAD_SIZE
                number = (byte >> (BITS * j)) & (2**BITS - 1)
                mean = tl.load(
                    record[None, :] + MEAN + channel[:, None],
                    mask=in_head[:, None] & there[None, :],
                    other=0,
                )
                mean = mean.to(tl.int8, bitcast=True).to(tl.float32) * step[None, :]
                key = weight[None, :] * tl.load(levels_ptr + number) + mean
                q = tl.load(
                    q_ptr + query_head[:, None] * BLOCK_D + channel[None, :],
                    mask=(g < GROUP)[:, None] & in_head[None, :],
                    other=0.0,
                )
                logits += tl.dot(q, tl.where(in_head[:, None], key, 0.0))
        logits = tl.where(there[None, :], logits, float("-inf"))
        logits = tl.reshape(logits, [BLOCK_G, PAGES, BLOCK_T])
        top = tl.maximum(most, tl.max(logits, 2))
        shift = tl.where(top == float("-inf"), 0.0, top)
        total = total * tl.exp(most - shift) + tl.sum(tl.exp(logits - shift[:, :, None]), 2)
        most = top
    page = tl.program_id(2) * PAGES + tl.arange(0, PAGES)
    tl.store(
        logits_ptr + query_head[:, None] * columns + page[None, :],
        most + tl.log(tl.div_rn(total, PAGE_TOKENS * 1.0)),
        mask=(g < GROUP)[:, None] & (page < columns)[None, :],
    )


def rotated_queries(
    rows: int, query_heads: int, layout: BlockLayout, device: torch.device
) -> torch.Tensor:
    """Memory for the rotated queries of :func:`code_logits`."""
    size = padded(layout.head_size, LEAST_DOT.value)
    return torch.empty((rows, query_heads, size), dtype=torch.float32, device=device)


def code_logits(
    query: torch.Tensor,
    row_begin: torch.Tensor,
    row_end: torch.Tensor,
    codes: torch.Tensor,
    logits: torch.Tensor,
    *,
    layout: BlockLayout,
    scale: float,
    bits: int,
    rotated: torch.Tensor | None = None,
    offset: int = 0,
) -> None:
    """Write logits of each context page from codes to ``logits``, float32 ``[R, Hq, columns]``.

    Arguments as of ``score.page_logits``, with records of codes; ``rotated``, of
    :func:`rotated_queries` or its own, is written. Two launches, queued on the current stream.
    """
    rows, heads, size = query.shape
    require(
        query.is_contiguous() and size == layout.head_size and heads % layout.kv_heads == 0,
        f"a query of {tuple(query.shape)} does not fit {layout}",
    )
    columns = logits.shape[2]
    if not logits.numel():
        return
    turn = rotation(size, query.device)
    if rotated is None:
        rotated = rotated_queries(rows, heads, layout, query.device)
    tiles, lines, record = _shape(layout, bits)
    room = min(padded(layout.page_tokens), TILE_TOKENS)
    pages = TILE_TOKENS // room
    with on_device_of(query):
        _rotate_kernel[(-(-rows * heads // LEAST_DOT.value),)](
            query,
            turn,
            rotated,
            rows * heads,
            scale,
            HEAD_SIZE=size,
            BLOCK_D=len(turn),
            num_warps=4,
        )
        _logits_kernel[(rows, layout.kv_heads, math.ceil(columns / pages))](
            rotated,
            levels(bits, query.device),
            row_begin,
            row_end,
            codes,
            logits,
            columns,
            offset,
            KV_HEADS=layout.kv_heads,
            GROUP=heads // layout.kv_heads,
            HEAD_SIZE=size,
            GROUPS=layout.groups,
            PAGE_TOKENS=layout.page_tokens,
            BITS=bits,
            TILES=tiles,
            LINES=lines,
            RECORD=record,
            BLOCK_D=len(turn),
            BLOCK_G=padded(heads // layout.kv_heads, LEAST_DOT.value),
            BLOCK_L=padded(lines, LEAST_DOT.value),
            BLOCK_T=room,
            PAGES=pages,
            num_warps=8,
            num_stages=1,
        )
