"""Choice of pages by score and mass on the device: top-k and top-p without reading anything back.

The k-th largest score is found digit by digit, by four histograms of scores that stay in registers:
no sort, and equal scores go by number. The semantics are those of ``ScoringKernels.choose``.
"""

from __future__ import annotations

import torch
import triton.language as tl

from vllm_ssdkv.triton_kernels.launch import inline, jit, on_device_of, padded, require

TILE = 8192
"""Pages of a list that a program holds in registers; it goes over longer lists in such tiles."""


@inline
def weigh_line(
    logits_ptr: torch.Tensor,
    seen_m_ptr: torch.Tensor,
    seen_l_ptr: torch.Tensor,
    weights_ptr: torch.Tensor,
    lse_ptr: torch.Tensor,
    line: int,
    log_tokens: float,
    columns: int,
    width: int,
    queries: int,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    SEEN: tl.constexpr,
    SUMS: tl.constexpr,
) -> float:
    """Write the weights of a list's pages, and the log-sum-exps of its query heads; return the mass
    of what its queries have seen before: ``SEEN`` partial states (``l`` is 1 without ``SUMS``)."""
    window = 0.0
    for g in range(GROUP):
        head = line * GROUP + g
        at = logits_ptr + head * width
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
        seen = float("-inf")
        for part in tl.static_range(SEEN):
            part_lse = tl.load(seen_m_ptr + part * queries + head)
            if SUMS:
                part_l = tl.load(seen_l_ptr + part * queries + head)
                any_key = part_lse > float("-inf")
                part_lse += tl.log(tl.where(any_key, part_l, 1.0))
            seen = _add_logs(seen, part_lse)
        if SEEN > 0:
            all_ = _add_logs(all_, seen)
            window += tl.where(seen == float("-inf"), 0.0, tl.exp(seen - all_)) / GROUP
        tl.store(lse_ptr + head, all_)
        all_ = tl.where(all_ == float("-inf"), 0.0, all_)
        for start in range(0, columns, BLOCK):
            column = start + tl.arange(0, BLOCK)
            there = column < columns
            x = tl.load(at + column, mask=there, other=float("-inf"))
            weight = tl.where(x == float("-inf"), 0.0, tl.exp(x + log_tokens - all_)) / GROUP
            to = weights_ptr + line * width + column
            if g > 0:
                weight += tl.load(to, mask=there, other=0.0)
            tl.store(to, weight, mask=there)
    return window


@inline
def _add_logs(one: float, other: float) -> float:
    higher = tl.maximum(one, other)
    shift = tl.where(higher == float("-inf"), 0.0, higher)
    total: float = higher + tl.log(tl.exp(one - shift) + tl.exp(other - shift))
    return total


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
    SEEN: tl.constexpr,
) -> None:
    line = tl.program_id(0).to(tl.int64)
    window = weigh_line(
        logits_ptr,
        window_lse_ptr,
        window_lse_ptr,
        weights_ptr,
        lse_ptr,
        line,
        log_tokens,
        columns,
        columns,
        0,
        GROUP,
        BLOCK,
        SEEN,
        False,
    )
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

    NaN counts as infinity, the ``first`` columns come before all.
    """
    column = start + tl.arange(0, BLOCK)
    there = column < columns
    x = tl.load(score_ptr + column, mask=there, other=0.0)
    mass = tl.load(mass_ptr + column, mask=there, other=0.0)
    x = tl.where(x != x, float("inf"), x) + 0.0  # noqa: PLR0124
    bits = x.to(tl.uint32, bitcast=True)
    key = tl.where((bits >> 31) != 0, bits ^ 0xFFFFFFFF, bits | 0x80000000).to(tl.uint32)
    return tl.where(column < first, 0xFFFFFFFF, key).to(tl.uint32), mass


@inline
def tile_of(
    score_ptr: torch.Tensor,
    mass_ptr: torch.Tensor,
    start: int,
    columns: int,
    first: int,
    held: torch.Tensor,
    held_mass: torch.Tensor,
    BLOCK: tl.constexpr,
    ONE: tl.constexpr,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Keys and masses of a tile, which registers hold if it is the only one, and its columns."""
    column = start + tl.arange(0, BLOCK)
    if ONE:
        key, mass = held, held_mass
    else:
        key, mass = _ranked(score_ptr, mass_ptr, start, columns, first, BLOCK)
    return key, mass, column < columns


@inline
def _enough(
    score_ptr: torch.Tensor,
    mass_ptr: torch.Tensor,
    columns: int,
    first: int,
    covered: float,
    p: float,
    held: torch.Tensor,
    held_mass: torch.Tensor,
    BLOCK: tl.constexpr,
    ONE: tl.constexpr,
) -> torch.Tensor:
    """Return how many of the highest columns cover p, with what is ``covered`` without them."""
    # The largest threshold whose scores cover p, and of the equal ones as many as it takes.
    bound = tl.zeros([], tl.uint32)
    for bit in tl.static_range(31, -1, -1):
        higher = bound | (1 << bit)
        reached = covered
        for start in range(0, columns, BLOCK):
            key, mass, there = tile_of(
                score_ptr, mass_ptr, start, columns, first, held, held_mass, BLOCK, ONE
            )
            reached += tl.sum(tl.where(there & (key >= higher), mass, 0.0), 0)
        bound = tl.where(reached >= p, higher, bound).to(tl.uint32)
    count: torch.Tensor = tl.zeros([], tl.int32)
    reached = covered
    for start in range(0, columns, BLOCK):
        key, mass, there = tile_of(
            score_ptr, mass_ptr, start, columns, first, held, held_mass, BLOCK, ONE
        )
        above = there & (key > bound)
        reached += tl.sum(tl.where(above, mass, 0.0), 0)
        count += tl.sum(above.to(tl.int32), 0)
    for start in range(0, columns, BLOCK):
        key, mass, there = tile_of(
            score_ptr, mass_ptr, start, columns, first, held, held_mass, BLOCK, ONE
        )
        tie = there & (key == bound)
        mass = tl.where(tie, mass, 0.0)
        # Before each of them; not below p says that it is not needed, NaN that it is.
        before = reached + tl.cumsum(mass, 0) - mass
        count += tl.sum((tie & ((before >= p) == 0)).to(tl.int32), 0)
        reached += tl.sum(mass, 0)
    return count


@inline
def _threshold(
    score_ptr: torch.Tensor,
    mass_ptr: torch.Tensor,
    columns: int,
    first: int,
    count: torch.Tensor,
    held: torch.Tensor,
    held_mass: torch.Tensor,
    BLOCK: tl.constexpr,
    ONE: tl.constexpr,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the ``count``-th largest key, and how many of those that equal it are among them.

    By digits of 8 bits from the highest: a histogram of the next digit of all keys that have the
    ones before."""
    bound = tl.zeros([], tl.uint32)
    left = count
    digit = tl.arange(0, 256)
    for place in tl.static_range(24, -8, -8):
        number = tl.zeros([256], tl.int32)
        for start in range(0, columns, BLOCK):
            key, _, there = tile_of(
                score_ptr, mass_ptr, start, columns, first, held, held_mass, BLOCK, ONE
            )
            there = there & (((key >> place) >> 8) == bound)
            number += tl.histogram(((key >> place) & 255).to(tl.int32), 256, mask=there)
        not_below = tl.sum(number, 0) - tl.cumsum(number, 0) + number
        found = tl.maximum(tl.sum((not_below >= left).to(tl.int32), 0) - 1, 0)
        left -= tl.sum(tl.where(digit > found, number, 0), 0)
        bound = ((bound << 8) | found.to(tl.uint32)).to(tl.uint32)
    return bound, left


@inline
def rank(
    score_ptr: torch.Tensor,
    mass_ptr: torch.Tensor,
    columns: int,
    least: torch.Tensor,
    most: torch.Tensor,
    sinks: int,
    covered: float,
    p: float,
    ADAPTIVE: tl.constexpr,
    BLOCK: tl.constexpr,
    ONE: tl.constexpr,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int, torch.Tensor, torch.Tensor]:
    """Return how many columns of a list are chosen, the key of the last one, how many of its equals
    are among them, how many columns go first, and keys and masses of the first tile."""
    first: int = tl.minimum(sinks, most)
    held, held_mass = _ranked(score_ptr, mass_ptr, 0, columns, first, BLOCK)
    count = most
    if ADAPTIVE:
        count = _enough(
            score_ptr, mass_ptr, columns, first, covered, p, held, held_mass, BLOCK, ONE
        )
        count = tl.minimum(tl.maximum(tl.maximum(count, least), first), most)
    bound, left = _threshold(
        score_ptr, mass_ptr, columns, first, count, held, held_mass, BLOCK, ONE
    )
    return count, bound, left, first, held, held_mass


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
    ONE: tl.constexpr,
) -> None:
    line = tl.program_id(0).to(tl.int64)
    row = line // KV_HEADS
    score_ptr += line * width
    mass_ptr += line * width
    columns = tl.load(columns_ptr + row)
    covered = tl.load(window_mass_ptr + line)
    most = tl.maximum(tl.minimum(tl.minimum(tl.load(most_ptr + row), columns), room), 0)
    least = tl.load(least_ptr + row)
    count, bound, left, first, held, held_mass = rank(
        score_ptr, mass_ptr, columns, least, most, sinks, covered, p, ADAPTIVE, BLOCK, ONE
    )
    at = line * room
    for start in range(0, columns, BLOCK):
        key, mass, there = tile_of(
            score_ptr, mass_ptr, start, columns, first, held, held_mass, BLOCK, ONE
        )
        taken, left = taken_of(key, there, bound, left)
        number = tl.cumsum(taken.to(tl.int32), 0)
        tl.store(pages_ptr + at + number - 1, start + tl.arange(0, BLOCK), mask=taken)
        covered += tl.sum(tl.where(taken, mass, 0.0), 0)
        at += tl.sum(taken.to(tl.int32), 0)
    tl.store(count_ptr + line, count)
    covered = tl.where(covered > 1.0, 1.0, covered)
    tl.store(covered_ptr + line, tl.where(count == columns, 1.0, covered))


@inline
def taken_of(
    key: torch.Tensor, there: torch.Tensor, bound: torch.Tensor, left: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return which columns of a tile are chosen, and how many equals of the last key are left."""
    tie = (there & (key == bound)).to(tl.int32)
    taken = (there & (key > bound)) | ((tie > 0) & (tl.cumsum(tie, 0) <= left))
    return taken, left - tl.sum(tie, 0)


def warps_for(columns: int) -> int:
    """Warps of a program that holds a tile of so many columns."""
    return 16 if columns >= 4096 else 4


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
            SEEN=0 if window_lse is None else 1,
            num_warps=warps_for(columns),
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
            ONE=width <= TILE,
            num_warps=warps_for(width),
        )
    return pages, count, covered
