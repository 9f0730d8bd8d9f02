"""Logits of context pages and tokens that selection goes by: from bounds (Quest), mean and
variance, or some channels.

The semantics are those of ``sparse/scores.py``; tables have a fixed width instead of ragged
rows, so that no size has to be read back: ``[R, heads, columns]`` with minus infinity where a row
has no such column.
"""

from __future__ import annotations

import torch
import triton.language as tl

from vllm_ssdkv.kernels.operands.block_layout import BlockLayout
from vllm_ssdkv.triton_kernels.launch import (
    TL_DTYPES,
    dot_dtype,
    jit,
    on_device_of,
    padded,
    require,
)

TILE_PAGES = 64
"""Pages of a program, for records of heads of at most 256 bytes; fewer for longer ones."""

TILE_TOKENS = 128


@jit
def _pages_kernel(
    q_ptr: torch.Tensor,
    row_begin_ptr: torch.Tensor,
    row_end_ptr: torch.Tensor,
    records_ptr: torch.Tensor,
    logits_ptr: torch.Tensor,
    scale: float,
    columns: int,
    offset: int,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TILE: tl.constexpr,
    SPREAD: tl.constexpr,
    KV: tl.constexpr,
    DOT: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    head = tl.program_id(1)
    page = tl.program_id(2) * TILE + tl.arange(0, TILE)
    begin = tl.load(row_begin_ptr + row)
    there = page < (tl.load(row_end_ptr + row) - begin) * GROUPS
    channel = tl.arange(0, BLOCK_D)
    in_head = channel < HEAD_SIZE
    base = tl.load(records_ptr + begin + page // GROUPS, mask=there, other=0) + offset
    at = base.to(tl.pointer_type(KV)) + (head * GROUPS + page % GROUPS) * (2 * HEAD_SIZE)
    at = at[None, :] + channel[:, None]
    mask = there[None, :] & in_head[:, None]
    first = tl.load(at, mask=mask, other=0.0).to(DOT)
    second = tl.load(at + HEAD_SIZE, mask=mask, other=0.0).to(DOT)
    g = tl.arange(0, BLOCK_G)
    query_head = (row * KV_HEADS + head).to(tl.int64) * GROUP + g
    q = tl.load(
        q_ptr + query_head[:, None] * HEAD_SIZE + channel[None, :],
        mask=(g < GROUP)[:, None] & in_head[None, :],
        other=0.0,
    )
    if SPREAD:
        q = q.to(tl.float32) * scale
        logits = tl.dot(q, first, input_precision="ieee")
        logits += tl.dot(0.5 * q * q, second, input_precision="ieee")
    else:
        # The larger of q * low and q * high: by sign of q one of them, so a sum of two products.
        q = q.to(DOT)
        none = tl.zeros_like(q)
        logits = tl.dot(tl.minimum(q, none), first, input_precision="ieee")
        logits += tl.dot(tl.maximum(q, none), second, input_precision="ieee")
        logits = logits * scale
    logits = tl.where(there[None, :], logits, float("-inf"))
    tl.store(
        logits_ptr + query_head[:, None] * columns + page[None, :],
        logits,
        mask=(g < GROUP)[:, None] & (page < columns)[None, :],
    )


@jit
def _channels_kernel(
    q_ptr: torch.Tensor,
    channel_ptr: torch.Tensor,
    row_begin_ptr: torch.Tensor,
    row_end_ptr: torch.Tensor,
    base_ptr: torch.Tensor,
    window_begin_ptr: torch.Tensor,
    window_tokens_ptr: torch.Tensor,
    window_ptr: torch.Tensor,
    logits_ptr: torch.Tensor,
    count: int,
    columns: int,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    PAGE_STRIDE: tl.constexpr,
    BLOCK_G: tl.constexpr,
    TILE: tl.constexpr,
    PICKED: tl.constexpr,
    KV: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    head = tl.program_id(1)
    token = tl.program_id(2) * TILE + tl.arange(0, TILE)
    begin = tl.load(row_begin_ptr + row)
    context = (tl.load(row_end_ptr + row) - begin) * BLOCK_TOKENS
    in_context = token < context
    recent = token - context
    in_window = (recent >= 0) & (recent < tl.load(window_tokens_ptr + row))
    base = tl.load(base_ptr + begin + token // BLOCK_TOKENS, mask=in_context, other=0)
    window_block = tl.load(window_begin_ptr + row) + recent // BLOCK_TOKENS
    window = tl.load(window_ptr + window_block, mask=in_window, other=0)
    offset = recent % BLOCK_TOKENS
    GROUPS: tl.constexpr = BLOCK_TOKENS // PAGE_TOKENS
    page = head * GROUPS + offset // PAGE_TOKENS
    # Of channel 0; a channel further is BLOCK_TOKENS elements on in one copy, 1 in the other.
    held = count if PICKED else HEAD_SIZE
    at = tl.where(
        in_context,
        head * (held * BLOCK_TOKENS) + token % BLOCK_TOKENS,
        page * PAGE_STRIDE + offset % PAGE_TOKENS * HEAD_SIZE,
    )
    key_at = tl.where(in_context, base, window).to(tl.pointer_type(KV)) + at
    step = tl.where(in_context, BLOCK_TOKENS, 1)
    there = in_context | in_window
    g = tl.arange(0, BLOCK_G)
    list_at = (row * KV_HEADS + head).to(tl.int64)
    query_head = list_at * GROUP + g
    logits = tl.zeros([BLOCK_G, TILE], tl.float32)
    for c in range(count):
        channel = tl.load(channel_ptr + list_at * count + c)
        place = tl.where(in_context, c, channel) if PICKED else channel
        key = tl.load(key_at + place * step, mask=there, other=0.0).to(tl.float32)
        q = tl.load(q_ptr + query_head * count + c, mask=g < GROUP, other=0.0)
        logits += q[:, None] * key[None, :]
    logits = tl.where(there[None, :], logits, float("-inf"))
    tl.store(
        logits_ptr + query_head[:, None] * columns + token[None, :],
        logits,
        mask=(g < GROUP)[:, None] & (token < columns)[None, :],
    )


def page_logits(
    query: torch.Tensor,
    row_begin: torch.Tensor,
    row_end: torch.Tensor,
    records: torch.Tensor,
    logits: torch.Tensor,
    *,
    layout: BlockLayout,
    scale: float,
    spread: bool,
    offset: int = 0,
) -> None:
    """Write logits of each context page to ``logits``, float32 ``[R, Hq, columns]``.

    They are upper bounds, or with ``spread`` they come from mean and variance: see
    ``ScoringKernels.bound_logits`` and ``spread_logits``. ``query [R, Hq, D]`` contiguous; row r
    has the blocks ``row_begin[r] .. row_end[r]`` (int32 ``[R]``) of ``records`` (absolute
    addresses, int64 ``[B]``, to each of which ``offset`` bytes are added: ``[kv_heads, groups, 2,
    head_size]`` of the layout's dtype each, in memory that the device reaches). A row has at most
    ``columns`` pages; behind them it gets minus
    infinity. Queued on the current stream; raises ``ValueError`` on wrong shapes.
    """
    rows, heads = _check(query, layout, row_begin, row_end)
    columns = logits.shape[2]
    require(
        tuple(logits.shape[:2]) == (rows, heads)
        and logits.dtype == torch.float32
        and logits.is_contiguous(),
        f"logits must be contiguous float32 [{rows}, {heads}, columns]",
    )
    if not logits.numel():
        return
    group, width = heads // layout.kv_heads, padded(layout.head_size, 16)
    dot = tl.float32 if spread else dot_dtype(query.dtype, layout.dtype)
    row_bytes = width * (4 if dot == tl.float32 else 2)
    tile = max(16, min(TILE_PAGES, TILE_PAGES * 256 // row_bytes))
    with on_device_of(query):
        _pages_kernel[(rows, layout.kv_heads, -(-columns // tile))](
            query,
            row_begin,
            row_end,
            records,
            logits,
            scale,
            columns,
            offset,
            KV_HEADS=layout.kv_heads,
            GROUP=group,
            HEAD_SIZE=layout.head_size,
            GROUPS=layout.groups,
            BLOCK_G=padded(group, 16),
            BLOCK_D=width,
            TILE=tile,
            SPREAD=spread,
            KV=TL_DTYPES[layout.dtype],
            DOT=dot,
            num_warps=4,
        )


def choose_channels(
    query: torch.Tensor, layout: BlockLayout, channels: int, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """SparQ's channels int32 ``[R, Hkv, r]`` and their scaled queries float32 ``[R, Hq, r]``.

    ``r`` is ``channels``, or the head size if that is less. Runs in torch; nothing is read back.
    """
    rows, heads, size = query.shape
    grouped = query.float().view(rows, layout.kv_heads, -1, size)
    magnitude = grouped.abs()
    order = torch.sort(magnitude.sum(2), dim=2, descending=True, stable=True).indices
    chosen = order[..., : min(channels, size)].sort(2).values
    index = chosen[:, :, None].expand(-1, -1, grouped.shape[2], -1)
    part = magnitude.gather(3, index).sum(3)
    correction = torch.where(part > 0, magnitude.sum(3) / part, 1.0).sqrt()
    reduced = grouped.gather(3, index) * (correction * scale)[..., None]
    return chosen.int(), reduced.reshape(rows, heads, -1).contiguous()


def channel_logits(
    chosen: torch.Tensor,
    reduced: torch.Tensor,
    row_begin: torch.Tensor,
    row_end: torch.Tensor,
    base: torch.Tensor,
    window_begin: torch.Tensor,
    window_tokens: torch.Tensor,
    window: torch.Tensor,
    *,
    layout: BlockLayout,
    picked: bool,
    max_tokens: int,
) -> torch.Tensor:
    """SparQ's approximate logits of each token, the window's last: ``[R, Hq, max_tokens]`` float32.

    From the channels and queries of :func:`choose_channels`. As :func:`page_logits`, with ``base``
    of channel-major K ``[kv_heads, head_size, block_tokens]``, or if it is ``picked`` only the
    chosen channels, ``[kv_heads, r, block_tokens]``; and the window's token-major blocks, laid out
    by ``layout``: row r's begin at ``window_begin[r]`` (int32 ``[R]``) of ``window`` (absolute
    addresses, int64) and hold ``window_tokens[r]`` (int32) tokens.
    """
    rows, heads, count = reduced.shape
    _check_rows(reduced, row_begin, row_end, window_begin, window_tokens)
    require(
        tuple(chosen.shape) == (rows, layout.kv_heads, count)
        and heads % layout.kv_heads == 0
        and chosen.dtype == torch.int32
        and chosen.is_contiguous()
        and reduced.is_contiguous(),
        f"channels {tuple(chosen.shape)} and queries {tuple(reduced.shape)} do not fit {layout}",
    )
    logits = torch.empty((rows, heads, max_tokens), dtype=torch.float32, device=reduced.device)
    if not logits.numel():
        return logits
    group = heads // layout.kv_heads
    with on_device_of(reduced):
        _channels_kernel[(rows, layout.kv_heads, -(-max_tokens // TILE_TOKENS))](
            reduced,
            chosen,
            row_begin,
            row_end,
            base,
            window_begin,
            window_tokens,
            window,
            logits,
            count,
            max_tokens,
            KV_HEADS=layout.kv_heads,
            GROUP=group,
            HEAD_SIZE=layout.head_size,
            BLOCK_TOKENS=layout.block_tokens,
            PAGE_TOKENS=layout.page_tokens,
            PAGE_STRIDE=layout.page_stride,
            BLOCK_G=padded(group),
            TILE=TILE_TOKENS,
            PICKED=picked,
            KV=TL_DTYPES[layout.dtype],
            num_warps=4,
        )
    return logits


def _check(query: torch.Tensor, layout: BlockLayout, *per_row: torch.Tensor) -> tuple[int, int]:
    """Rows and query heads of a query that fits."""
    require(
        query.dim() == 3
        and query.is_contiguous()
        and query.shape[2] == layout.head_size
        and query.shape[1] > 0
        and query.shape[1] % layout.kv_heads == 0,
        f"a query of {tuple(query.shape)} does not fit {layout}",
    )
    _check_rows(query, *per_row)
    return query.shape[0], query.shape[1]


def _check_rows(query: torch.Tensor, *per_row: torch.Tensor) -> None:
    for values in per_row:
        require(
            values.dtype == torch.int32
            and tuple(values.shape) == (query.shape[0],)
            and values.device == query.device,
            f"rows need int32 [{query.shape[0]}] on {query.device}",
        )
