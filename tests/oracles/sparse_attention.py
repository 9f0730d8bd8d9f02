"""Slow, obvious oracles of sparse attention: of each selector, of its kernels, and of SparQ itself.

All treat one row: a query ``[q_heads, head_size]`` of the newest of S tokens, whose K and V are
``[S, kv_heads, head_size]``. Everything is computed in ``dtype`` (fp64 unless told otherwise).
Sets are boolean: ``[kv_heads, S]`` of tokens, ``[kv_heads, pages]`` of pages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

F64 = torch.float64


def attend_chosen(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    chosen: torch.Tensor,
    scale: float,
    dtype: torch.dtype = F64,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over the chosen tokens of each KV head.

    Returns ``out [q_heads, head_size]`` and the log-sum-exp of the scaled logits ``[q_heads]``;
    zeros and minus infinity where nothing is chosen.
    """
    out = torch.zeros(query.shape, dtype=dtype)
    lse = torch.full(query.shape[:1], -torch.inf, dtype=dtype)
    group = query.shape[0] // key.shape[1]
    for head in range(query.shape[0]):
        tokens = chosen[head // group].nonzero().flatten()
        if len(tokens) == 0:
            continue
        keys = key[tokens, head // group].to(dtype)
        logits = (keys * query[head].to(dtype)).sum(1) * scale
        lse[head] = torch.logsumexp(logits, 0)
        weights = torch.exp(logits - lse[head])
        out[head] = (weights[:, None] * value[tokens, head // group].to(dtype)).sum(0)
    return out, lse


def page_bounds(key: torch.Tensor, page_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Minimum and maximum of each channel over each page of ``key``: ``[pages, kv_heads, d]``."""
    pages = key.view(-1, page_tokens, *key.shape[1:])
    return pages.amin(1), pages.amax(1)


def bound_logits(
    query: torch.Tensor, low: torch.Tensor, high: torch.Tensor, scale: float
) -> torch.Tensor:
    """Upper bounds of the scaled logits of each page, ``[q_heads, pages]`` (Quest).

    ``scale`` must not be negative. Summed channel by channel: in the same order, no sum of products
    ``q * k`` over a key within the bounds is larger, rounding included. Kernels may give NaN where
    a bound is infinite.
    """
    group = query.shape[0] // low.shape[1]
    bounds = torch.zeros((query.shape[0], low.shape[0]), dtype=F64)
    for head in range(query.shape[0]):
        for d in range(query.shape[1]):
            q = query[head, d].double()
            ends = q * low[:, head // group, d].double(), q * high[:, head // group, d].double()
            bounds[head] += torch.maximum(*ends)
    return bounds * scale


def page_spread(key: torch.Tensor, page_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and variance of each channel over each page of ``key``: ``[pages, kv_heads, d]``.

    In the key's dtype, at most its largest finite number; NaN where a number is not finite.
    """
    pages = key.view(-1, page_tokens, *key.shape[1:]).double()
    broken = torch.where(pages.isfinite().all(1), 0.0, torch.nan)
    mean = pages.mean(1)
    variance = (pages - mean[:, None]).square().mean(1).clamp(max=torch.finfo(key.dtype).max)
    return (mean + broken).to(key.dtype), (variance + broken).to(key.dtype)


def spread_logits(
    query: torch.Tensor, mean: torch.Tensor, variance: torch.Tensor, scale: float
) -> torch.Tensor:
    """Second cumulant of the scaled logits of each page, ``[q_heads, pages]``."""
    group = query.shape[0] // mean.shape[1]
    q = query.double() * scale
    first = torch.einsum("hd,phd->hp", q, mean.double().repeat_interleave(group, 1))
    second = torch.einsum("hd,phd->hp", q * q, variance.double().repeat_interleave(group, 1))
    return first + second / 2


def page_weights(
    logits: torch.Tensor, kv_heads: int, page_tokens: int, window_lse: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean softmax weight of each page over a KV head's query heads, and that of the window.

    ``logits [q_heads, pages]`` stand for each of a page's tokens; ``window_lse [q_heads]`` or None.
    Returns ``[kv_heads, pages]`` and ``[kv_heads]``.
    """
    masses = logits.double() + torch.tensor(float(page_tokens)).double().log()
    window = torch.full_like(masses[:, :1], -torch.inf)
    if window_lse is not None:
        window = window_lse.double()[:, None]
    weights = torch.softmax(torch.cat([masses, window], 1), 1).view(
        kv_heads, -1, masses.shape[1] + 1
    )
    mean = weights.mean(1)
    return mean[:, :-1], mean[:, -1]


def choose(
    score: list[float],
    mass: list[float],
    window_mass: float,
    *,
    sinks: int,
    least: int,
    most: int,
    p: float,
) -> tuple[list[int], float]:
    """Columns of one list as ``ScoringKernels.choose`` takes them, and the mass they cover."""
    order = sorted(range(len(score)), key=lambda c: (c >= sinks, c if c < sinks else -score[c], c))
    taken: list[int] = []
    covered = window_mass
    for column in order[:most]:
        if len(taken) >= max(least, min(sinks, most)) and p < 1 and covered >= p:
            break
        taken.append(column)
        covered += mass[column]
    return sorted(taken), 1.0 if len(taken) == len(score) else min(covered, 1.0)


def kept_choices(
    queries: Sequence[torch.Tensor],
    position: Sequence[int],
    pages: Sequence[int],
    left: Sequence[int],
    chosen: Callable[[int], list[set[int]]],
    *,
    page_tokens: int,
    steps: int,
    similarity: float,
) -> list[tuple[list[set[int]], bool]]:
    """What a row attends to, token by token, where a choice is kept for ``steps`` tokens.

    Args:
        queries: Of the tokens, ``[q_heads, head_size]`` each.
        position: Of the tokens.
        pages: Of the context at each token.
        left: Context tokens that the budget allows at each token.
        chosen: Pages of each KV head that the query of a token would choose, by its number here.
        page_tokens: Tokens of a page.
        steps, similarity: See ``selection.kept``.

    Returns:
        Pages of each KV head at each token, and whether its own query chose them.
    """
    made: list[tuple[list[set[int]], bool]] = []
    by = 0
    for now, query in enumerate(queries):
        since = set(range(pages[by], pages[now]))
        heads = [head | since for head in chosen(by)]
        keep = by < now and position[by] < position[now] < position[by] + steps
        keep = keep and pages[now] >= pages[now - 1]
        keep = keep and all(len(head) * page_tokens <= left[now] for head in heads)
        group = len(query) // len(heads)
        for head in range(len(heads)):
            angles = []
            for g in range(head * group, (head + 1) * group):
                one, other = query[g].double(), queries[by][g].double()
                angles.append(float((one @ other) / (one.norm() * other.norm())))
            keep = keep and sum(angles) / group >= similarity
        if not keep:
            by, heads = now, chosen(now)
        made.append((heads, not keep))
    return made


def mean_value(value: torch.Tensor, dtype: torch.dtype = F64) -> torch.Tensor:
    """Mean V ``[kv_heads, head_size]``, updated token by token as SparQ appends them."""
    mean = torch.zeros(value.shape[1:], dtype=dtype)
    for seen, v in enumerate(value.to(dtype), 1):
        mean += (v - mean) / seen
    return mean


def sparq_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    r: int,
    k: int,
    local: int,
    dtype: torch.dtype = F64,
) -> tuple[torch.Tensor, torch.Tensor]:
    """SparQ as published (Ribar et al., ICML 2024, Algorithm 1 and appendix), for grouped queries.

    The last token is the current one, which is free; of the tokens before it k are chosen, the
    newest ``local`` of them in any case (so k is at least ``local``). Whole tensors, no pages.

    Returns ``out [q_heads, head_size]`` and the chosen tokens ``[kv_heads, S]``, the current one
    among them.
    """
    tokens, kv_heads, size = key.shape
    q = query.to(dtype).view(kv_heads, -1, size)
    keys, values = key.to(dtype).transpose(0, 1), value.to(dtype).transpose(0, 1)
    # Step 1: one set of channels per KV head.
    channels = _top(q.abs().sum(1), r)
    q_part = q.gather(2, channels[:, None].expand(-1, q.shape[1], -1))
    k_part = keys.gather(2, channels[:, None].expand(-1, tokens, -1))
    # Step 2: approximate logits.
    temperature = torch.sqrt(size * q_part.abs().sum(2) / q.abs().sum(2))
    logits = _products(q_part, k_part) / temperature[..., None]
    # Step 3: tokens by the sum over the group; local ones and the current one forced in.
    total = logits[:, 0].clone()
    for g in range(1, logits.shape[1]):
        total += logits[:, g]
    total[:, tokens - 1 - local :] = torch.inf
    index = _top(total, min(k + 1, tokens))
    chosen = torch.zeros((kv_heads, tokens), dtype=torch.bool).scatter(1, index, True)
    # Step 4, from the logits before the override of step 3.
    softmax = torch.softmax(logits, 2)
    alpha = _sums(softmax.gather(2, index[:, None].expand(-1, q.shape[1], -1)))
    # Step 5.
    rows = index[..., None].expand(-1, -1, size)
    exact = _products(q, keys.gather(1, rows)) / size**0.5
    out = _products(torch.softmax(exact, 2), values.gather(1, rows).transpose(1, 2))
    mean = mean_value(value, dtype)[:, None]
    mixed = alpha[..., None] * out + (1 - alpha[..., None]) * mean
    return mixed.reshape(query.shape), chosen


@dataclass(slots=True)
class PageCounts:
    """Pages that a step fetches from flash, and what its filter keeps of them."""

    channel_pages: int = 0
    token_pages: int = 0
    tokens: int = 0


def sparf_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    r: int,
    k: int,
    local: int,
    page_tokens: int,
    channel_shape: tuple[int, int],
    dtype: torch.dtype = F64,
) -> tuple[torch.Tensor, torch.Tensor, PageCounts]:
    """SparF (InstInfer, Algorithm 1 with its misprints corrected): SparQ that reads by pages.

    K lies twice: in pages of ``page_tokens`` tokens, and in pages of ``channel_shape`` (channels,
    tokens). What is needed is fetched by whole pages, which are then filtered; everything else of
    the copies is NaN here. Returns SparQ's values and what was fetched.
    """
    tokens, kv_heads, size = key.shape
    group = query.shape[0] // kv_heads
    out = torch.empty(query.shape, dtype=dtype)
    every = torch.zeros((kv_heads, tokens), dtype=torch.bool)
    counts = PageCounts()
    for head in range(kv_heads):
        q = query[head * group : (head + 1) * group].to(dtype)
        magnitude = q.abs().sum(0)
        channels = sorted(range(size), key=lambda d: (-float(magnitude[d]), d))[:r]
        wide, long = channel_shape
        k_channels = torch.full((size, tokens), torch.nan, dtype=dtype)
        for page in sorted({d // wide for d in channels}):
            for start in range(0, tokens, long):
                part = slice(page * wide, (page + 1) * wide), slice(start, start + long)
                k_channels[part] = key[:, head].T[part].to(dtype)
                counts.channel_pages += 1
        # The filter: channels that came along are dropped.
        kept = sorted(channels)
        logits = _products(q[:, kept][None], k_channels[kept].T[None])[0]
        logits /= torch.sqrt(size * q[:, kept].abs().sum(1) / q.abs().sum(1))[:, None]
        total = logits[0].clone()
        for g in range(1, group):
            total += logits[g]
        free = [*range(tokens - 1 - local, tokens)]
        rest = sorted(range(tokens - 1 - local), key=lambda t: (-float(total[t]), t))
        index = sorted([*free, *rest[: k - local]])
        k_pages = torch.full((tokens, size), torch.nan, dtype=dtype)
        v_pages = torch.full((tokens, size), torch.nan, dtype=dtype)
        for page in sorted({t // page_tokens for t in index}):
            part_of = slice(page * page_tokens, (page + 1) * page_tokens)
            k_pages[part_of] = key[part_of, head].to(dtype)
            v_pages[part_of] = value[part_of, head].to(dtype)
            counts.token_pages += 1
        counts.tokens += len(index)
        every[head, index] = True
        alpha = _sums(torch.softmax(logits, 1)[:, index])
        exact = _products(q[None], k_pages[index][None])[0] / size**0.5
        attended = _products(torch.softmax(exact, 1)[None], v_pages[index].T[None])[0]
        mean = mean_value(value, dtype)[head]
        out[head * group : (head + 1) * group] = (
            alpha[:, None] * attended + (1 - alpha[:, None]) * mean
        )
    return out, every, counts


def _top(values: torch.Tensor, count: int) -> torch.Tensor:
    """Indices of the ``count`` largest of the last dimension, ascending; equal ones by index."""
    order = torch.sort(values, dim=-1, descending=True, stable=True).indices[..., :count]
    return order.sort(-1).values


def _sums(values: torch.Tensor) -> torch.Tensor:
    """Sums over the last dimension, one after the other."""
    total = torch.zeros(values.shape[:-1], dtype=values.dtype)
    for i in range(values.shape[-1]):
        total += values[..., i]
    return total


def _products(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """``q [n, g, d]`` times ``k [n, t, d]`` as ``[n, g, t]``, summed channel by channel.

    A matrix product may sum in an order that depends on the shapes, which equality to the bit
    forbids.
    """
    total = torch.zeros((*q.shape[:2], k.shape[1]), dtype=q.dtype)
    for d in range(q.shape[2]):
        total += q[:, :, d, None] * k[:, None, :, d]
    return total
