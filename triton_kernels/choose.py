"""Choice of pages by score and mass on the device: top-k and top-p without reading anything back.

The k-th largest score is found bit by bit: 32 counts over scores that stay in the caches, no sort,
and equal scores go by number. The semantics are those of ``ScoringKernels.choose``.
"""

from __future__ import annotations

import torch
import triton.language as tl

from vllm_ssdkv.triton_kernels.launch import inline, jit, on_device_of, padded, require

TILE = 1024


@jit
def _weigh_kernel(
    logits_ptr: torch.Tensor,
    window_lse_ptr: torch.Tensor,
    weights_ptr: torch.Tensor,
    window_mass_ptr: torch.Tensor,
    lse_ptr: torch.Tensor,
    log_tokens: float,
    columns: int,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    WINDOW: tl.constexpr,
) -> None:
    line = tl.program_id(0).to(tl.int64)
    window = 0.0
    for g in range(GROUP):
        at = logits_ptr + (line * GROUP + g) * columns
        top = float("-inf")
        total = 0.0
        for start in range(0, columns, BLOCK):
            column = start + tl.arange(0, BLOCK)
            x = tl.load(at + column, mask=column < columns, other=float("-inf"))
            higher = tl.maximum(top, tl.max(tl.where(x != x, float("-inf"), x), 0))  # noqa: PLR0124
            shift = tl.where(higher == float("-inf"), 0.0, higher)
            weight = tl.where(x != x, 0.0, tl.exp(x - shift))  # noqa: PLR0124
            total = total * tl.exp(top - shift) + tl.sum(weight, 0)
            top = higher
        all_ = tl.where(total > 0, top + tl.log(tl.where(total > 0, total, 1.0)) + log_tokens, top)
        if WINDOW:
            seen = tl.load(window_lse_ptr + line * GROUP + g)
            higher = tl.maximum(all_, seen)
            shift = tl.where(higher == float("-inf"), 0.0, higher)
            all_ = higher + tl.log(tl.exp(all_ - shift) + tl.exp(seen - shift))
            window += tl.where(seen == float("-inf"), 0.0, tl.exp(seen - all_)) / GROUP
        tl.store(lse_ptr + line * GROUP + g, all_)
        all_ = tl.where(all_ == float("-inf"), 0.0, all_)
        for start in range(0, columns, BLOCK):
            column = start + tl.arange(0, BLOCK)
            there = column < columns
            x = tl.load(at + column, mask=there, other=float("-inf"))
            weight = tl.where(x == float("-inf"), 0.0, tl.exp(x + log_tokens - all_)) / GROUP
            to = weights_ptr + line * columns + column
            if g > 0:
                weight += tl.load(to, mask=there, other=0.0)
            tl.store(to, weight, mask=there)
    tl.store(window_mass_ptr + line, window)


@inline
def _ranked(
    score_ptr: torch.Tensor,
    mass_ptr: torch.Tensor,
    start: int,
    columns: int,
    first: int,
    BLOCK: tl.constexpr,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Columns ``start ..``: unsigned integers in the order of their scores, and their masses.

    NaN counts as infinity, the ``first`` columns come before all, -1 is no column.
    """
    column = start + tl.arange(0, BLOCK)
    there = column < columns
    x = tl.load(score_ptr + column, mask=there, other=0.0)
    mass = tl.load(mass_ptr + column, mask=there, other=0.0)
    x = tl.where(x != x, float("inf"), x) + 0.0  # noqa: PLR0124
    bits = x.to(tl.uint32, bitcast=True)
    key = tl.where((bits >> 31) != 0, bits ^ 0xFFFFFFFF, bits | 0x80000000).to(tl.int64)
    key = tl.where(column < first, 0xFFFFFFFF, key)
    return tl.where(there, key, -1), mass


@jit
def _choose_kernel(
    score_ptr: torch.Tensor,
    mass_ptr: torch.Tensor,
    window_mass_ptr: torch.Tensor,
    columns_ptr: torch.Tensor,
    least_ptr: torch.Tensor,
    most_ptr: torch.Tensor,
    pages_ptr: torch.Tensor,
    count_ptr: torch.Tensor,
    covered_ptr: torch.Tensor,
    sinks: int,
    p: float,
    width: int,
    room: int,
    KV_HEADS: tl.constexpr,
    ADAPTIVE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    line = tl.program_id(0).to(tl.int64)
    row = line // KV_HEADS
    score_ptr += line * width
    mass_ptr += line * width
    columns = tl.load(columns_ptr + row)
    most = tl.minimum(tl.minimum(tl.load(most_ptr + row), columns), room)
    most = tl.maximum(most, 0)
    first = tl.minimum(sinks, most)
    covered = tl.load(window_mass_ptr + line)
    count = most
    if ADAPTIVE:
        # The largest threshold whose scores cover p, and of the equal ones as many as it takes.
        bound = tl.zeros([], tl.int64)
        step = tl.full([], 1 << 31, tl.int64)
        for _ in range(32):
            reached = covered
            for start in range(0, columns, BLOCK):
                key, mass = _ranked(score_ptr, mass_ptr, start, columns, first, BLOCK)
                reached += tl.sum(tl.where(key >= (bound | step), mass, 0.0), 0)
            bound = tl.where(reached >= p, bound | step, bound)
            step = step >> 1
        count = tl.zeros([], tl.int32)
        reached = covered
        for start in range(0, columns, BLOCK):
            key, mass = _ranked(score_ptr, mass_ptr, start, columns, first, BLOCK)
            reached += tl.sum(tl.where(key > bound, mass, 0.0), 0)
            count += tl.sum((key > bound).to(tl.int32), 0)
        for start in range(0, columns, BLOCK):
            key, mass = _ranked(score_ptr, mass_ptr, start, columns, first, BLOCK)
            mass = tl.where(key == bound, mass, 0.0)
            # Before each of them; not below p says that it is not needed, NaN that it is.
            before = reached + tl.cumsum(mass, 0) - mass
            count += tl.sum(((key == bound) & ((before >= p) == 0)).to(tl.int32), 0)
            reached += tl.sum(mass, 0)
        count = tl.maximum(tl.maximum(count, tl.load(least_ptr + row)), first)
        count = tl.minimum(count, most)
    # The count-th largest key.
    bound = tl.zeros([], tl.int64)
    step = tl.full([], 1 << 31, tl.int64)
    for _ in range(32):
        number = tl.zeros([], tl.int32)
        for start in range(0, columns, BLOCK):
            key, mass = _ranked(score_ptr, mass_ptr, start, columns, first, BLOCK)
            number += tl.sum((key >= (bound | step)).to(tl.int32), 0)
        bound = tl.where(number >= count, bound | step, bound)
        step = step >> 1
    left = count
    for start in range(0, columns, BLOCK):
        key, mass = _ranked(score_ptr, mass_ptr, start, columns, first, BLOCK)
        left -= tl.sum((key > bound).to(tl.int32), 0)
    at = line * room
    for start in range(0, columns, BLOCK):
        key, mass = _ranked(score_ptr, mass_ptr, start, columns, first, BLOCK)
        tie = (key == bound).to(tl.int32)
        taken = (key > bound) | ((tie > 0) & (tl.cumsum(tie, 0) <= left))
        number = tl.cumsum(taken.to(tl.int32), 0)
        tl.store(pages_ptr + at + number - 1, start + tl.arange(0, BLOCK), mask=taken)
        covered += tl.sum(tl.where(taken, mass, 0.0), 0)
        at += tl.sum(taken.to(tl.int32), 0)
        left -= tl.sum(tie, 0)
    tl.store(count_ptr + line, count)
    covered = tl.where(covered > 1.0, 1.0, covered)
    tl.store(covered_ptr + line, tl.where(count == columns, 1.0, covered))


def weigh(
    logits: torch.Tensor, window_lse: torch.Tensor | None, kv_heads: int, page_tokens: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Mean softmax weights float32 ``[R, Hkv, n]`` of pages, ``[R, Hkv]`` of the window, and the
    log-sum-exp over both, ``[R, Hq]``.

    ``logits`` float32 ``[R, Hq, n]``, minus infinity where there is no page; ``window_lse`` float32
    ``[R, Hq]`` or None. See ``ScoringKernels.weigh``. Queued on the current stream.
    """
    rows, heads, columns = logits.shape
    require(heads % kv_heads == 0, f"{heads} query heads do not fit {kv_heads} KV heads")
    require(
        window_lse is None or tuple(window_lse.shape) == (rows, heads),
        f"window_lse must be [{rows}, {heads}]",
    )
    weights = torch.empty((rows, kv_heads, columns), dtype=torch.float32, device=logits.device)
    window = torch.zeros((rows, kv_heads), dtype=torch.float32, device=logits.device)
    lse = torch.empty((rows, heads), dtype=torch.float32, device=logits.device)
    if not rows:
        return weights, window, lse
    with on_device_of(logits):
        _weigh_kernel[(rows * kv_heads,)](
            logits.contiguous(),
            logits if window_lse is None else window_lse.contiguous(),
            weights,
            window,
            lse,
            float(torch.tensor(float(page_tokens)).log()),
            columns,
            GROUP=heads // kv_heads,
            BLOCK=min(TILE, padded(columns)),
            WINDOW=window_lse is not None,
            num_warps=4,
        )
    return weights, window, lse


def choose(
    score: torch.Tensor,
    mass: torch.Tensor,
    window_mass: torch.Tensor,
    columns: torch.Tensor,
    least: torch.Tensor,
    most: torch.Tensor,
    *,
    max_chosen: int,
    sinks: int = 0,
    p: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Pages int32 ``[R, Hkv, max_chosen]``, how many int32 ``[R, Hkv]``, mass float32 ``[R, Hkv]``.

    ``score, mass`` float32 ``[R, Hkv, n]``, of which row r has ``columns[r]``; ``window_mass``
    float32 ``[R, Hkv]``; ``columns, least, most`` int32 ``[R]``; no row takes more than
    ``max_chosen``. Entries after the chosen ones are undefined. Queued on the current stream;
    raises ``ValueError``.
    """
    rows, heads, width = score.shape
    require(
        mass.shape == score.shape
        and tuple(window_mass.shape) == (rows, heads)
        and all(tuple(part.shape) == (rows,) for part in (columns, least, most)),
        f"scores {tuple(score.shape)} need masses alike, window_mass [R, Hkv] and counts [R]",
    )
    pages = torch.empty((rows, heads, max_chosen), dtype=torch.int32, device=score.device)
    count = torch.zeros((rows, heads), dtype=torch.int32, device=score.device)
    covered = torch.empty((rows, heads), dtype=torch.float32, device=score.device)
    if not rows:
        return pages, count, covered
    with on_device_of(score):
        _choose_kernel[(rows * heads,)](
            score.contiguous(),
            mass.contiguous(),
            window_mass.contiguous(),
            columns,
            least,
            most,
            pages,
            count,
            covered,
            sinks,
            p,
            width,
            max_chosen,
            KV_HEADS=heads,
            ADAPTIVE=p < 1,
            BLOCK=min(TILE, padded(width)),
            num_warps=4,
        )
    return pages, count, covered
