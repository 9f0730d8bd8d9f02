"""Kernels from the logits of all tokens to the scores of pages, and to the mass that was chosen.

The semantics are those of ``ScoringKernels.score_tokens`` and ``cover``; tables are
``[R, heads, columns]``, as in :mod:`~vllm_ssdkv.triton_kernels.score`.
"""

from __future__ import annotations

import torch
import triton.language as tl

from vllm_ssdkv.triton_kernels.launch import jit, on_device_of, padded, require

TILE = 1024
"""Tokens of a program."""


@jit
def _sum_kernel(
    logits_ptr: torch.Tensor,
    top_ptr: torch.Tensor,
    sum_ptr: torch.Tensor,
    tokens: int,
    tiles: int,
    TILE_TOKENS: tl.constexpr,
) -> None:
    line = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    token = tile * TILE_TOKENS + tl.arange(0, TILE_TOKENS)
    x = tl.load(logits_ptr + line * tokens + token, mask=token < tokens, other=float("-inf"))
    x = tl.where(x != x, float("-inf"), x)  # noqa: PLR0124
    top = tl.max(x, 0)
    shift = tl.where(top == float("-inf"), 0.0, top)
    tl.store(top_ptr + line * tiles + tile, top)
    tl.store(sum_ptr + line * tiles + tile, tl.sum(tl.exp(x - shift), 0))


@jit
def _score_kernel(
    logits_ptr: torch.Tensor,
    lse_ptr: torch.Tensor,
    context_ptr: torch.Tensor,
    score_ptr: torch.Tensor,
    mass_ptr: torch.Tensor,
    window_ptr: torch.Tensor,
    tokens: int,
    columns: int,
    tiles: int,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    TILE_PAGES: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    tile = tl.program_id(2)
    line = (row * KV_HEADS + tl.program_id(1)).to(tl.int64)
    page = tile * TILE_PAGES + tl.arange(0, TILE_PAGES)
    offset = tl.arange(0, BLOCK_T)
    token = page[:, None] * PAGE_TOKENS + offset[None, :]
    there = (offset < PAGE_TOKENS)[None, :] & (token < tokens)
    in_context = there & (token < tl.load(context_ptr + row))
    score = tl.zeros([TILE_PAGES, BLOCK_T], tl.float32)
    mass = tl.zeros([TILE_PAGES, BLOCK_T], tl.float32)
    for g in range(GROUP):
        head = line * GROUP + g
        x = tl.load(logits_ptr + head * tokens + token, mask=there, other=float("-inf"))
        score += x
        mass += tl.exp(x - tl.load(lse_ptr + head)) / GROUP
    held = tl.sum(tl.where(in_context, mass, 0.0), 1)
    by = held
    if PAGE_TOKENS == 1:
        by = tl.sum(tl.where(in_context, score, 0.0), 1)
    by = tl.where(tl.max(in_context.to(tl.int32), 1) > 0, by, float("-inf"))
    tl.store(score_ptr + line * columns + page, by, mask=page < columns)
    tl.store(mass_ptr + line * columns + page, held, mask=page < columns)
    window = tl.sum(tl.sum(tl.where(there & (in_context == 0), mass, 0.0), 1), 0)
    tl.store(window_ptr + line * tiles + tile, window)


@jit
def _cover_kernel(
    logits_ptr: torch.Tensor,
    lse_ptr: torch.Tensor,
    context_ptr: torch.Tensor,
    window_ptr: torch.Tensor,
    pages_ptr: torch.Tensor,
    begin_ptr: torch.Tensor,
    token_mask_ptr: torch.Tensor,
    alpha_ptr: torch.Tensor,
    tokens: int,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    TILE_PAGES: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
    MASKED: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    pages = row * KV_HEADS + tl.program_id(1) // GROUP
    line = row.to(tl.int64) * (KV_HEADS * GROUP) + tl.program_id(1)
    logits_ptr += line * tokens
    lse = tl.load(lse_ptr + line)
    first = tl.load(begin_ptr + pages)
    end = tl.load(begin_ptr + pages + 1)
    offset = tl.arange(0, BLOCK_T)
    alpha = 0.0
    for start in range(first, end, TILE_PAGES):
        index = start + tl.arange(0, TILE_PAGES)
        page = tl.load(pages_ptr + index, mask=index < end, other=0)
        taken = (index < end)[:, None] & (offset < PAGE_TOKENS)[None, :]
        if MASKED:
            mask_at = token_mask_ptr + index.to(tl.int64)[:, None] * PAGE_TOKENS + offset[None, :]
            taken = taken & (tl.load(mask_at, mask=taken, other=0) != 0)
        at = logits_ptr + page[:, None] * PAGE_TOKENS + offset[None, :]
        x = tl.load(at, mask=taken, other=float("-inf"))
        alpha += tl.sum(tl.sum(tl.where(taken, tl.exp(x - lse), 0.0), 1), 0)
    context = tl.load(context_ptr + row)
    window = tl.load(window_ptr + row)
    for start in range(0, window, TILE_TOKENS):
        token = start + tl.arange(0, TILE_TOKENS)
        x = tl.load(logits_ptr + context + token, mask=token < window, other=float("-inf"))
        alpha += tl.sum(tl.where(token < window, tl.exp(x - lse), 0.0), 0)
    tl.store(alpha_ptr + line, tl.where(alpha > 1.0, 1.0, alpha))


def score_tokens(
    logits: torch.Tensor,
    context_tokens: torch.Tensor,
    *,
    kv_heads: int,
    page_tokens: int,
    max_columns: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Scores and masses of pages of ``page_tokens``, the window's mass, and log-sum-exps.

    ``logits`` float32 ``[R, Hq, n]`` as ``channel_logits`` makes them, contiguous;
    ``context_tokens`` int32 ``[R]``, whole pages, at most ``max_columns`` of them. Returns float32
    ``[R, Hkv, max_columns]`` twice (minus infinity and zero after a row's pages),
    ``[R, Hkv]`` and ``[R, Hq]``. Queued on the current stream; raises ``ValueError``.
    """
    rows, heads = _check(logits, kv_heads, context_tokens)
    tokens = logits.shape[2]
    device = logits.device
    score = torch.empty((rows, kv_heads, max_columns), dtype=torch.float32, device=device)
    mass = torch.empty_like(score)
    require(max_columns * page_tokens <= tokens, f"{max_columns} pages are not in {tokens} tokens")
    if not rows:
        empty = torch.zeros((rows, heads), dtype=torch.float32, device=device)
        return score, mass, empty[:, :kv_heads], empty
    tiles = -(-tokens // TILE)
    top = torch.empty((rows, heads, tiles), dtype=torch.float32, device=device)
    total = torch.empty_like(top)
    block = padded(page_tokens)
    pages = max(1, TILE // block)
    page_tiles = -(-tokens // (pages * page_tokens))
    window = torch.empty((rows, kv_heads, page_tiles), dtype=torch.float32, device=device)
    with on_device_of(logits):
        _sum_kernel[(rows * heads, tiles)](
            logits, top, total, tokens, tiles, TILE_TOKENS=TILE, num_warps=4
        )
        best = top.amax(2)
        shift = torch.where(best.isneginf(), 0.0, best)
        lse = best + (total * torch.exp(top - shift[..., None])).sum(2).log()
        _score_kernel[(rows, kv_heads, page_tiles)](
            logits,
            lse,
            context_tokens,
            score,
            mass,
            window,
            tokens,
            max_columns,
            page_tiles,
            KV_HEADS=kv_heads,
            GROUP=heads // kv_heads,
            PAGE_TOKENS=page_tokens,
            BLOCK_T=block,
            TILE_PAGES=pages,
            num_warps=4,
        )
    return score, mass, window.sum(2), lse


def cover(
    logits: torch.Tensor,
    lse: torch.Tensor,
    context_tokens: torch.Tensor,
    window_tokens: torch.Tensor,
    pages: torch.Tensor,
    begin: torch.Tensor,
    token_mask: torch.Tensor | None,
    *,
    page_tokens: int,
) -> torch.Tensor:
    """Softmax mass of chosen tokens and the window, float32 ``[R, Hq]``: SparQ's alpha.

    ``logits`` and ``lse`` of :func:`score_tokens`; ``context_tokens, window_tokens`` int32 ``[R]``;
    ``pages`` int32 ``[P]`` and ``begin`` int32 ``[R * Hkv + 1]`` as in ``Selection``;
    ``token_mask`` uint8 ``[P, page_tokens]`` or None. Queued on the current stream; raises
    ``ValueError``.
    """
    rows = logits.shape[0]
    kv_heads = (len(begin) - 1) // max(1, rows)
    rows, heads = _check(logits, max(1, kv_heads), context_tokens, window_tokens)
    require(
        pages.dtype == begin.dtype == torch.int32
        and len(begin) == rows * kv_heads + 1
        and tuple(lse.shape) == (rows, heads)
        and (token_mask is None or tuple(token_mask.shape) == (len(pages), page_tokens)),
        f"a selection of {len(begin) - 1} lists does not fit logits {tuple(logits.shape)}",
    )
    alpha = torch.empty_like(lse)
    if not rows:
        return alpha
    block = padded(page_tokens)
    with on_device_of(logits):
        _cover_kernel[(rows, heads)](
            logits,
            lse,
            context_tokens,
            window_tokens,
            pages,
            begin,
            pages if token_mask is None else token_mask.contiguous(),
            alpha,
            logits.shape[2],
            KV_HEADS=kv_heads,
            GROUP=heads // kv_heads,
            PAGE_TOKENS=page_tokens,
            BLOCK_T=block,
            TILE_PAGES=max(1, TILE // block),
            TILE_TOKENS=TILE,
            MASKED=token_mask is not None,
            num_warps=4,
        )
    return alpha


def _check(logits: torch.Tensor, kv_heads: int, *per_row: torch.Tensor) -> tuple[int, int]:
    """Rows and query heads of a table of logits."""
    rows, heads, _ = logits.shape
    require(
        logits.is_contiguous() and logits.dtype == torch.float32 and heads % kv_heads == 0,
        f"logits {tuple(logits.shape)} do not fit {kv_heads} KV heads",
    )
    for values in per_row:
        require(
            values.dtype == torch.int32
            and tuple(values.shape) == (rows,)
            and values.device == logits.device,
            f"rows need int32 [{rows}] on {logits.device}",
        )
    return rows, heads
