"""Choice of pages by score and mass on the device: top-k and top-p without reading anything back.

The k-th largest score is found bit by bit: 32 counts over scores that stay in the caches, no sort,
and equal scores go by number. The semantics are those of ``ScoringKernels.choose``.
"""

from __future__ import annotations

import torch
import triton.language as tl

from vllm_ssdkv.triton_kernels.launch import jit, on_device_of, padded, require

TILE = 1024


@jit
def _weigh_kernel(
    logits_ptr: torch.Tensor,
    window_lse_ptr: torch.Tensor,
    weights_ptr: torch.Tensor,
    window_mass_ptr: torch.Tensor,
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
    columns = tl.load(columns_ptr + row)
    most = tl.minimum(tl.minimum(tl.load(most_ptr + row), columns), room)
    most = tl.maximum(most, 0)
    first = tl.minimum(sinks, most)
    column = tl.arange(0, BLOCK)
    there = column < columns
    x = tl.load(score_ptr + line * width + column, mask=there, other=0.0)
    mass = tl.load(mass_ptr + line * width + column, mask=there, other=0.0)
    # As unsigned integers in the order of the scores; NaN as infinity, sinks before all.
    x = tl.where(x != x, float("inf"), x) + 0.0  # noqa: PLR0124
    bits = x.to(tl.uint32, bitcast=True)
    key = tl.where((bits >> 31) != 0, ~bits, bits | 0x80000000).to(tl.int64)
    key = tl.where(column < first, 0xFFFFFFFF, key)
    key = tl.where(there, key, -1)
    covered = tl.load(window_mass_ptr + line)
    count = most
    if ADAPTIVE:
        # The largest threshold whose scores cover p, and of the equal ones as many as it takes.
        bound = tl.zeros([], tl.int64)
        step = tl.full([], 1 << 31, tl.int64)
        for _ in range(32):
            enough = covered + tl.sum(tl.where(key >= (bound | step), mass, 0.0), 0) >= p
            bound = tl.where(enough, bound | step, bound)
            step = step >> 1
        above = tl.sum((key > bound).to(tl.int32), 0)
        missing = p - covered - tl.sum(tl.where(key > bound, mass, 0.0), 0)
        equal = tl.sum((key == bound).to(tl.int32), 0)
        share = tl.sum(tl.where(key == bound, mass, 0.0), 0) / tl.maximum(equal, 1)
        needed = tl.where(share > 0, tl.ceil(missing / tl.where(share > 0, share, 1.0)), equal)
        needed = tl.where(missing > 0, needed, 0.0).to(tl.int32)
        count = above + tl.minimum(needed, equal)
        count = tl.maximum(tl.maximum(count, tl.load(least_ptr + row)), first)
        count = tl.minimum(count, most)
    # The count-th largest key.
    bound = tl.zeros([], tl.int64)
    step = tl.full([], 1 << 31, tl.int64)
    for _ in range(32):
        enough = tl.sum((key >= (bound | step)).to(tl.int32), 0) >= count
        bound = tl.where(enough, bound | step, bound)
        step = step >> 1
    above = key > bound
    tie = key == bound
    left = count - tl.sum(above.to(tl.int32), 0)
    taken = above | (tie & (tl.cumsum(tie.to(tl.int32), 0) <= left))
    at = tl.cumsum(taken.to(tl.int32), 0) - 1
    tl.store(pages_ptr + line * room + at, column, mask=taken)
    covered = tl.minimum(covered + tl.sum(tl.where(taken, mass, 0.0), 0), 1.0)
    tl.store(count_ptr + line, count)
    tl.store(covered_ptr + line, tl.where(count == columns, 1.0, covered))


def weigh(
    logits: torch.Tensor, window_lse: torch.Tensor | None, kv_heads: int, page_tokens: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean softmax weights float32 ``[R, Hkv, n]`` of pages, and ``[R, Hkv]`` of the window.

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
    if not rows:
        return weights, window
    with on_device_of(logits):
        _weigh_kernel[(rows * kv_heads,)](
            logits.contiguous(),
            logits if window_lse is None else window_lse.contiguous(),
            weights,
            window,
            float(torch.tensor(float(page_tokens)).log()),
            columns,
            GROUP=heads // kv_heads,
            BLOCK=min(TILE, padded(columns)),
            WINDOW=window_lse is not None,
            num_warps=4,
        )
    return weights, window


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
    ``max_chosen``. Entries after the chosen ones are undefined. A program holds a whole line, so
    ``n`` is at most 2**15: half a million tokens in pages of 16. With ``p`` below 1, equal
    scores must have equal masses. Queued on the current stream; raises ``ValueError``.
    """
    rows, heads, width = score.shape
    require(
        mass.shape == score.shape
        and tuple(window_mass.shape) == (rows, heads)
        and all(tuple(part.shape) == (rows,) for part in (columns, least, most)),
        f"scores {tuple(score.shape)} need masses alike, window_mass [R, Hkv] and counts [R]",
    )
    require(width <= 2**15, f"at most {2**15} columns, got {width}")
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
            BLOCK=padded(width),
            num_warps=max(4, min(32, padded(width) // 512)),
        )
    return pages, count, covered
