"""Attention of ragged query rows over lists of KV blocks or pages, with resumable partial results.

The online softmax of Milakov and Gimelshein (2018) over tiles, as in FlashAttention (Dao 2022);
the queries of all heads that share a KV head form the M dimension of one matrix product, so that K
and V are loaded once per group. Short rows and listed pages are split over their keys
(FlashDecoding, Dao et al. 2023) and merged by log-sum-exp.
"""

from __future__ import annotations

import math

import torch
import triton.language as tl

from vllm_ssdkv.kernels.operands.block_layout import (
    DTYPES,
    BlockLayout,
    PartialState,
    Rows,
    on_device,
)
from vllm_ssdkv.kernels.operands.page_list import SPLIT_PAGES, PageList
from vllm_ssdkv.triton_kernels.launch import (
    EXPONENT_BITS,
    TL_DTYPES,
    dot_dtype,
    jit,
    on_device_of,
    padded,
    processors,
    require,
    widened,
)
from vllm_ssdkv.triton_kernels.merge import merge

TILE_KEYS = 64
"""Keys per step of a program, for heads of at most 256 bytes; fewer for longer ones."""

TILE_QUERIES = 64
"""Queries times heads of a group per program where rows are long, i.e. in prefill."""

MIN_SPLIT_KEYS = 512
"""A split over keys shorter than this costs more in merging than it gains."""

WORKSPACE_BYTES = 64 * 2**20
"""Most that the accumulators of a split call may take, unless ``splits`` is given."""


@jit
def _attend_kernel(
    q_ptr: torch.Tensor,
    m_ptr: torch.Tensor,
    l_ptr: torch.Tensor,
    acc_ptr: torch.Tensor,
    query_begin_ptr: torch.Tensor,
    query_count_ptr: torch.Tensor,
    first_position_ptr: torch.Tensor,
    block_begin_ptr: torch.Tensor,
    block_end_ptr: torch.Tensor,
    cache_ptr: torch.Tensor,
    block_offset_ptr: torch.Tensor,
    block_position_ptr: torch.Tensor,
    token_mask_ptr: torch.Tensor,
    slope_ptr: torch.Tensor,
    scale: float,
    soft_cap: float,
    window: int,
    q_stride: int,
    state_rows: int,
    tiles_per_row: int,
    splits: int,
    first_split: int,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    PAGE_STRIDE: tl.constexpr,
    ALIGN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SPLIT: tl.constexpr,
    SPLIT_PAGES: tl.constexpr,
    SKIP_FUTURE: tl.constexpr,
    SLIDES: tl.constexpr,
    ABSOLUTE: tl.constexpr,
    LIST_PER_HEAD: tl.constexpr,
    MASKED: tl.constexpr,
    CAPPED: tl.constexpr,
    SLOPED: tl.constexpr,
    EXPONENT: tl.constexpr,
    KV: tl.constexpr,
    DOT: tl.constexpr,
) -> None:
    QUERIES: tl.constexpr = BLOCK_M // GROUP
    row = tl.program_id(0) // tiles_per_row
    tile = tl.program_id(0) % tiles_per_row
    head = tl.program_id(1)
    split = tl.program_id(2)
    count = tl.load(query_count_ptr + row)
    if tile * QUERIES >= count:
        return

    lane = tl.arange(0, BLOCK_M)
    query = tile * QUERIES + lane // GROUP
    in_use = (lane < QUERIES * GROUP) & (query < count)
    token = (tl.load(query_begin_ptr + row) + query).to(tl.int64)
    query_head = head * GROUP + lane % GROUP
    first_position = tl.load(first_position_ptr + row)
    query_position = first_position + query
    newest = first_position + tl.minimum((tile + 1) * QUERIES, count) - 1
    behind = first_position + tile * QUERIES - window

    channel = tl.arange(0, BLOCK_D)
    in_head = channel < HEAD_SIZE
    q_offset = token * q_stride + query_head * HEAD_SIZE
    q_mask = in_use[:, None] & in_head[None, :]
    q = tl.load(q_ptr + q_offset[:, None] + channel[None, :], mask=q_mask, other=0.0).to(DOT)

    state = split.to(tl.int64) * state_rows + token * (KV_HEADS * GROUP) + query_head
    acc_at = acc_ptr + state[:, None] * HEAD_SIZE + channel[None, :]
    if SPLIT:
        m = tl.full([BLOCK_M], float("-inf"), tl.float32)
        l = tl.zeros([BLOCK_M], tl.float32)  # noqa: E741
        acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    else:
        m = tl.load(m_ptr + state, mask=in_use, other=float("-inf"))
        l = tl.load(l_ptr + state, mask=in_use, other=0.0)  # noqa: E741
        acc = tl.load(acc_at, mask=q_mask, other=0.0)

    blocks = row * KV_HEADS + head if LIST_PER_HEAD else row
    first_block = tl.load(block_begin_ptr + blocks)
    end_block = tl.load(block_end_ptr + blocks)
    if SKIP_FUTURE:
        # Reading the blocks' positions costs little; it spares a tile of early queries the blocks
        # that hold only later keys, whatever order the blocks are listed in.
        visible_end = first_block
        for start in range(first_block, end_block, 128):
            index = start + tl.arange(0, 128)
            position = tl.load(block_position_ptr + index, mask=index < end_block, other=newest + 1)
            visible_end = tl.maximum(
                visible_end, tl.max(tl.where(position <= newest, index + 1, 0), 0)
            )
        end_block = visible_end
    if SLIDES:
        # The same at the other end: blocks that end before the first query's window.
        visible_begin = end_block
        for start in range(first_block, end_block, 128):
            index = start + tl.arange(0, 128)
            position = tl.load(block_position_ptr + index, mask=index < end_block, other=newest + 1)
            in_reach = (position + BLOCK_TOKENS - 1 > behind) & (index < end_block)
            visible_begin = tl.minimum(
                visible_begin, tl.min(tl.where(in_reach, index, end_block), 0)
            )
        first_block = visible_begin
    keys = (end_block - first_block) * BLOCK_TOKENS
    if LIST_PER_HEAD:
        share = SPLIT_PAGES * BLOCK_TOKENS
    else:
        share = tl.cdiv(tl.cdiv(keys, BLOCK_N), splits) * BLOCK_N
    low = (first_split + split) * share
    high = tl.minimum(low + share, keys)

    GROUPS: tl.constexpr = BLOCK_TOKENS // PAGE_TOKENS
    for start in range(low, high, BLOCK_N):
        key = start + tl.arange(0, BLOCK_N)
        listed = key < high
        block = first_block + key // BLOCK_TOKENS
        in_block = key % BLOCK_TOKENS
        if MASKED:
            mask_at = token_mask_ptr + block.to(tl.int64) * BLOCK_TOKENS + in_block
            listed = listed & (tl.load(mask_at, mask=listed, other=0) != 0)
        position = tl.load(block_position_ptr + block, mask=listed, other=0) + in_block
        # A key that no query of this tile may see need not have been written: its bytes could be
        # a NaN, which a zero weight would not silence.
        readable = listed & (position <= newest)
        if SLIDES:
            readable = readable & (position > behind)
        start_of_block = tl.load(block_offset_ptr + block, mask=listed, other=0)
        if ABSOLUTE:
            block_at = start_of_block.to(tl.pointer_type(KV))
        else:
            block_at = cache_ptr + start_of_block
        page = in_block // PAGE_TOKENS if LIST_PER_HEAD else head * GROUPS + in_block // PAGE_TOKENS
        key_at = block_at + page * PAGE_STRIDE + (in_block % PAGE_TOKENS) * HEAD_SIZE
        key_at = tl.multiple_of(key_at, ALIGN)
        k = tl.load(
            key_at[None, :] + channel[:, None],
            mask=readable[None, :] & in_head[:, None],
            other=0,
        )
        # Asked for with K: the link to the host's memory wants many bytes under way.
        v = tl.load(
            key_at[:, None] + (PAGE_TOKENS * HEAD_SIZE + channel)[None, :],
            mask=readable[:, None] & in_head[None, :],
            other=0,
        )
        if EXPONENT:
            k = widened(k, EXPONENT)
            v = widened(v, EXPONENT)
        k, v = k.to(DOT), v.to(DOT)
        score = tl.dot(q, k, input_precision="ieee") * scale
        if CAPPED:
            score = soft_cap * (2.0 * tl.sigmoid(2.0 * score / soft_cap) - 1.0)
        if SLOPED:
            distance = (position[None, :] - query_position[:, None]).to(tl.float32)
            score += tl.load(slope_ptr + query_head)[:, None] * distance
        visible = readable[None, :] & in_use[:, None]
        visible = visible & (position[None, :] <= query_position[:, None])
        if SLIDES:
            visible = visible & (position[None, :] > query_position[:, None] - window)
        score = tl.where(visible, score, float("-inf"))
        top = tl.maximum(m, tl.max(score, 1))
        shift = tl.where(top == float("-inf"), 0.0, top)
        weight = tl.exp(score - shift[:, None])
        decay = tl.exp(m - shift)
        l = l * decay + tl.sum(weight, 1)  # noqa: E741
        acc = acc * decay[:, None] + tl.dot(weight.to(DOT), v, input_precision="ieee")
        m = top

    # Queries without a visible key keep their sums: in a workspace these stay uninitialised.
    seen = in_use & (m > float("-inf"))
    tl.store(m_ptr + state, m, mask=in_use)
    tl.store(l_ptr + state, l, mask=seen)
    tl.store(acc_at, acc, mask=seen[:, None] & in_head[None, :])


def _tile(longest: int, group: int, channels: int, full: bool) -> tuple[int, int]:
    """Rows (queries times ``group``) and keys of a tile; ``full`` if float32 is multiplied.

    Two tiles each of K and V must fit 99 KiB of shared memory, the least a device of today has;
    float32 products run on no tensor core and hold their operands in registers.
    """
    width = 2 if full else 1
    keys = max(16, min(TILE_KEYS, TILE_KEYS * 128 // (channels * width)) // width)
    return max(padded(group, 16), min(padded(longest, 16), TILE_QUERIES // width)), keys


def _splits(rows: Rows, layout: BlockLayout, query: torch.Tensor) -> int:
    """Programs per row over its keys: enough to fill the device twice, none of them too short."""
    programs = max(1, len(rows) * layout.kv_heads)
    wanted = -(-2 * processors(query.device) // programs)
    longest = rows.max_blocks * layout.block_tokens
    room = WORKSPACE_BYTES // (4 * query.numel())
    return max(1, min(wanted, longest // MIN_SPLIT_KEYS, room))


def attend(
    query: torch.Tensor,
    state: PartialState,
    rows: Rows,
    *,
    cache: torch.Tensor | None,
    block_offset: torch.Tensor,
    block_position: torch.Tensor,
    layout: BlockLayout,
    scale: float,
    sliding_window: int | None = None,
    splits: int | None = None,
) -> None:
    """Fold the keys and values of the rows' blocks into ``state``, in place.

    ``query [T, Hq, D]`` (float32, float16 or bfloat16; contiguous but for the token stride);
    ``state`` of ``[T, Hq]``; ``rows`` with tensors on the query's device; ``cache`` the tensor of
    ``layout.dtype`` that holds the blocks, addressed flat from its first element, and
    ``block_offset`` int64 ``[B]`` the element at which each block starts; or ``cache = None`` and
    ``block_offset`` absolute addresses in memory that the device can reach (its own, or pinned host
    memory, which every tile of queries then reads across the bus). A block must start at a multiple
    of 16 bytes, or of what divides a page's stride and a key if that is less. ``block_position``
    int64 ``[B]`` is the position of each block's first token. ``splits`` programs share a row's
    keys (default: chosen by the device's size), which needs a workspace of ``splits`` states. Tiles
    and splits are sized for the longest row: call long and short rows apart where both are many.

    Semantics: see ``AttentionKernels.attend``. Scores and sums are float32; weights are rounded to
    the KV dtype (the query's, if that has 8 bits) for the second product, as in FlashAttention, and
    float32 inputs are multiplied in full precision. Queued on the current stream; does not wait.
    Raises ``ValueError`` on wrong shapes, dtypes or devices.
    """
    _attend(
        query,
        state,
        rows,
        cache=cache,
        block_offset=block_offset,
        block_position=block_position,
        token_mask=None,
        list_per_head=False,
        layout=layout,
        scale=scale,
        sliding_window=sliding_window,
        splits=splits,
    )


def attend_pages(
    query: torch.Tensor,
    state: PartialState,
    pages: PageList,
    *,
    layout: BlockLayout,
    scale: float,
    max_pages: int,
) -> None:
    """Fold listed pages into ``state``, in place: ``PageKernels.attend_pages``.

    All of ``pages`` are tensors on the query's device, the mask uint8 and contiguous; nothing is
    read back. ``max_pages`` bounds the length of a list and sizes the launch. Every
    ``SPLIT_PAGES`` pages of a list are one program and one state of a workspace. Alignment and
    errors: as :func:`attend`.
    """
    rows = Rows(
        on_device(pages.query_token, torch.int32, query.device),
        torch.ones(len(pages.query_token), dtype=torch.int32, device=query.device),
        on_device(pages.query_position, torch.int64, query.device),
        on_device(pages.begin, torch.int32, query.device),
        on_device(pages.end, torch.int32, query.device),
        1,
        max_pages,
    )
    mask = pages.token_mask
    require(
        mask is None
        or (
            isinstance(mask, torch.Tensor)
            and mask.dtype == torch.uint8
            and mask.is_contiguous()
            and mask.device == query.device
            and tuple(mask.shape[1:]) == (layout.page_tokens,)
        ),
        f"a token mask must be contiguous uint8 [P, {layout.page_tokens}] on {query.device}",
    )
    _attend(
        query,
        state,
        rows,
        cache=None,
        block_offset=on_device(pages.address, torch.int64, query.device),
        block_position=on_device(pages.position, torch.int64, query.device),
        token_mask=mask if isinstance(mask, torch.Tensor) else None,
        list_per_head=True,
        layout=pages_of(layout),
        scale=scale,
        sliding_window=None,
        splits=None,
    )


def _attend(
    query: torch.Tensor,
    state: PartialState,
    rows: Rows,
    *,
    cache: torch.Tensor | None,
    block_offset: torch.Tensor,
    block_position: torch.Tensor,
    token_mask: torch.Tensor | None,
    list_per_head: bool,
    layout: BlockLayout,
    scale: float,
    sliding_window: int | None,
    splits: int | None,
) -> None:
    require(sliding_window is None or sliding_window > 0, "sliding_window must be positive")
    tokens, query_heads, head_size = _check(query, cache, layout)
    state.check(tuple(query.shape), query.device)
    for name, values, dtype in (
        ("query_begin", rows.query_begin, torch.int32),
        ("query_count", rows.query_count, torch.int32),
        ("first_position", rows.first_position, torch.int64),
        ("block_begin", rows.block_begin, torch.int32),
        ("block_end", rows.block_end, torch.int32),
        ("block_offset", block_offset, torch.int64),
        ("block_position", block_position, torch.int64),
    ):
        require(
            isinstance(values, torch.Tensor)
            and values.dtype == dtype
            and values.dim() == 1
            and values.is_contiguous()
            and values.device == query.device,
            f"{name} must be a contiguous tensor of {dtype} on {query.device}",
        )
    require(block_offset.shape == block_position.shape, "one offset and one position per block")
    if not (tokens and len(rows) and rows.max_queries and rows.max_blocks):
        return

    at_once = _splits(rows, layout, query) if splits is None else splits
    require(at_once >= 1, f"splits must be at least 1, got {splits}")
    every = at_once
    if list_per_head:
        every = -(-rows.max_blocks // SPLIT_PAGES)
        at_once = max(1, min(every, WORKSPACE_BYTES // (4 * query.numel())))
    split = list_per_head or every > 1
    target = state
    if split:
        shape = (at_once, tokens, query_heads)
        target = PartialState(
            torch.empty(shape, device=query.device),
            torch.empty(shape, device=query.device),
            torch.empty((*shape, head_size), device=query.device),
            state.softmax,
        )
    for first in range(0, every, at_once):
        if split:
            target.m.fill_(-torch.inf)
        attend_parts(
            query,
            target,
            rows,
            cache=cache,
            block_offset=block_offset,
            block_position=block_position,
            token_mask=token_mask,
            layout=layout,
            scale=scale,
            sliding_window=sliding_window,
            split_pages=SPLIT_PAGES if list_per_head else 0,
            splits=at_once if split else 0,
            first=first,
        )
        if split:
            merge(state, target.m, target.l, target.acc, in_order=list_per_head)


def attend_parts(
    query: torch.Tensor,
    target: PartialState,
    rows: Rows,
    *,
    cache: torch.Tensor | None,
    block_offset: torch.Tensor,
    block_position: torch.Tensor,
    layout: BlockLayout,
    scale: float,
    splits: int,
    token_mask: torch.Tensor | None = None,
    sliding_window: int | None = None,
    split_pages: int = 0,
    first: int = 0,
) -> None:
    """Launch attention of rows into partial states; arguments as of :func:`attend`, unchecked.

    Part s of ``target`` (``[splits, T, Hq]`` and so on) gets the state of the s-th part of a row's
    keys, of queries that rows have; without ``splits`` the ``target`` is one state, and resumed.
    With ``split_pages`` there is a list for each KV head, part s has its pages from ``(first + s) *
    split_pages`` on, and a block is a page.
    """
    tokens, query_heads, head_size = query.shape
    softmax = target.softmax
    group = query_heads // layout.kv_heads
    dot, exponent = dot_dtype(query.dtype, layout.dtype), EXPONENT_BITS.get(layout.dtype, 0)
    queries, keys = _tile(rows.max_queries * group, group, padded(head_size, 16), dot == tl.float32)
    tiles = -(-rows.max_queries // (queries // group))
    with on_device_of(query):
        _attend_kernel[(len(rows) * tiles, layout.kv_heads, max(1, splits))](
            query,
            target.m,
            target.l,
            target.acc,
            rows.query_begin,
            rows.query_count,
            rows.first_position,
            rows.block_begin,
            rows.block_end,
            query if cache is None else cache.view(torch.uint8) if exponent else cache,
            block_offset,
            block_position,
            query if token_mask is None else token_mask,
            query if softmax.slopes is None else softmax.slopes,
            scale,
            softmax.soft_cap,
            0 if sliding_window is None else sliding_window,
            query.stride(0),
            tokens * query_heads,
            tiles,
            max(1, splits),
            first,
            KV_HEADS=layout.kv_heads,
            GROUP=group,
            HEAD_SIZE=head_size,
            BLOCK_TOKENS=layout.block_tokens,
            PAGE_TOKENS=layout.page_tokens,
            PAGE_STRIDE=layout.page_stride,
            ALIGN=math.gcd(16, layout.page_stride_bytes, head_size * layout.dtype.itemsize),
            BLOCK_M=queries,
            BLOCK_N=keys,
            BLOCK_D=padded(head_size, 16),
            SPLIT=splits > 0,
            SPLIT_PAGES=split_pages,
            SKIP_FUTURE=tiles > 1,
            SLIDES=sliding_window is not None,
            ABSOLUTE=cache is None,
            LIST_PER_HEAD=split_pages > 0,
            MASKED=token_mask is not None,
            CAPPED=softmax.soft_cap != 0.0,
            SLOPED=softmax.slopes is not None,
            EXPONENT=exponent,
            KV=tl.uint8 if exponent else TL_DTYPES[layout.dtype],
            DOT=dot,
            num_warps=8 if queries * padded(head_size) > 64 * 128 else 4,
            num_stages=3,
        )


def pages_of(layout: BlockLayout) -> BlockLayout:
    """Layout of listed pages, each of which is a block of its own."""
    return BlockLayout.unpadded(
        layout.page_tokens, layout.page_tokens, layout.kv_heads, layout.head_size, layout.dtype
    )


def _check(
    query: torch.Tensor, cache: torch.Tensor | None, layout: BlockLayout
) -> tuple[int, int, int]:
    """Sizes ``T, Hq, D`` of a query that fits the layout."""
    require(query.dim() == 3, f"a query must be [T, Hq, D], got {tuple(query.shape)}")
    tokens, query_heads, head_size = query.shape
    require(query.dtype in DTYPES, f"query dtype {query.dtype} is none of {DTYPES}")
    require(
        head_size == layout.head_size
        and query_heads > 0
        and query_heads % layout.kv_heads == 0
        and query.stride(2) == 1
        and query.stride(1) == head_size,
        f"a query of {tuple(query.shape)} with strides {query.stride()} does not fit {layout}",
    )
    require(
        cache is None or (cache.dtype == layout.dtype and cache.device == query.device),
        f"the cache must be {layout.dtype} on {query.device}",
    )
    return tokens, query_heads, head_size
