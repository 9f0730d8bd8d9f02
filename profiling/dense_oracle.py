"""Slow, obvious oracles for attention: what every kernel and every merge is tested against.

Nothing here is meant to be fast. Each function computes one definition, in fp64 unless told
otherwise, on whole tensors.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import torch

from vllm_ssdkv.kernels.operands.block_layout import PLAIN, BlockLayout, Softmax


def _pages(layout: BlockLayout, block: torch.Tensor) -> Iterator[tuple[int, slice, torch.Tensor]]:
    """Yield head, tokens within the block, and K and V ``[2, page_tokens, head_size]`` of pages."""
    for index, (head, group) in enumerate(
        itertools.product(range(layout.kv_heads), range(layout.groups))
    ):
        start = index * layout.page_stride_bytes
        payload = block[start : start + layout.page_payload_bytes].view(layout.dtype)
        tokens = slice(group * layout.page_tokens, (group + 1) * layout.page_tokens)
        yield head, tokens, payload.view(2, layout.page_tokens, layout.head_size)


def write_block(
    layout: BlockLayout, block: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> None:
    """Write K and V ``[block_tokens, kv_heads, head_size]`` into ``block``; padding is kept.

    ``block`` is uint8 ``[block_bytes]``.
    """
    for head, tokens, page in _pages(layout, block):
        page[0] = key[tokens, head]
        page[1] = value[tokens, head]


def read_block(layout: BlockLayout, block: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return K and V ``[block_tokens, kv_heads, head_size]`` of uint8 ``block [block_bytes]``."""
    shape = (layout.block_tokens, layout.kv_heads, layout.head_size)
    key = torch.empty(shape, dtype=layout.dtype)
    value = torch.empty(shape, dtype=layout.dtype)
    for head, tokens, page in _pages(layout, block):
        key[tokens, head] = page[0]
        value[tokens, head] = page[1]
    return key, value


def dense_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scale: float,
    first_position: int,
    key_positions: torch.Tensor | None = None,
    sliding_window: int | None = None,
    softmax: Softmax = PLAIN,
    dtype: torch.dtype = torch.float64,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal grouped-query attention by its definition.

    Args:
        query: ``[T, q_heads, head_size]``; query ``i`` stands at position ``first_position + i``.
        key: ``[S, kv_heads, head_size]``; query head ``h`` reads KV head ``h // (q_heads //
        kv_heads)``. value: same shape as ``key``. scale: multiplies the logits. first_position:
        position of the first query, in tokens. key_positions: int64 ``[S]``, default ``0..S-1``;
        a query sees the keys at its own position and before. sliding_window: of these the newest so
        many positions, its own included; None: all. softmax: how products become logits, and sinks,
        for each query head a logit of a key that every query sees and whose value is zero
        (gpt-oss). dtype: everything is computed and returned in it.

    Returns:
        ``out [T, q_heads, head_size]`` and the log-sum-exp of the scaled logits ``[T, q_heads]``.
        A query that sees no key has zeros and minus infinity.
    """
    group = query.shape[1] // key.shape[1]
    keys = key.to(dtype).repeat_interleave(group, dim=1)
    values = value.to(dtype).repeat_interleave(group, dim=1)
    if key_positions is None:
        key_positions = torch.arange(key.shape[0])
    logits = torch.einsum("thd,shd->ths", query.to(dtype), keys) * scale
    query_positions = first_position + torch.arange(query.shape[0])
    if softmax.soft_cap:
        logits = softmax.soft_cap * torch.tanh(logits / softmax.soft_cap)
    if softmax.slopes is not None:
        distance = (key_positions[None, :] - query_positions[:, None]).to(dtype)
        logits += softmax.slopes.to("cpu", dtype)[None, :, None] * distance[:, None, :]
    visible = key_positions[None, :] <= query_positions[:, None]
    if sliding_window is not None:
        visible &= key_positions[None, :] > query_positions[:, None] - sliding_window
    logits = logits.masked_fill(~visible[:, None, :], float("-inf"))
    lse = torch.logsumexp(logits, dim=-1)
    if softmax.sinks is not None:
        lse = torch.logaddexp(lse, softmax.sinks.to(dtype))
    weights = torch.exp(logits - lse[..., None]).masked_fill(~visible[:, None, :], 0.0)
    # Keys that a query may not see are not multiplied at all, in case they hold what was never
    # written.
    values = values.masked_fill(~visible.any(dim=0)[:, None, None], 0.0)
    return softmax.value_scale * torch.einsum("ths,shd->thd", weights, values), lse


def paged_attention(
    query: torch.Tensor,
    blocks: Sequence[torch.Tensor],
    block_positions: Sequence[int],
    layout: BlockLayout,
    *,
    scale: float,
    first_position: int,
    sliding_window: int | None = None,
    softmax: Softmax = PLAIN,
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`dense_attention` over KV that lies in blocks.

    Args:
        query: ``[T, q_heads, head_size]``.
        blocks: uint8 ``[block_bytes]`` each, in any order.
        block_positions: position of each block's first token.
        layout: how the blocks are laid out.
        scale, first_position, sliding_window, softmax: as in :func:`dense_attention`.
    """
    parts = [read_block(layout, block) for block in blocks]
    empty = torch.empty((0, layout.kv_heads, layout.head_size), dtype=layout.dtype)
    positions = [torch.arange(begin, begin + layout.block_tokens) for begin in block_positions]
    return dense_attention(
        query,
        torch.cat([empty, *(key for key, _ in parts)]),
        torch.cat([empty, *(value for _, value in parts)]),
        scale=scale,
        first_position=first_position,
        key_positions=torch.cat([torch.empty(0, dtype=torch.int64), *positions]),
        sliding_window=sliding_window,
        softmax=softmax,
    )


def merge(outs: torch.Tensor, lses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge ``n`` partial attentions over disjoint sets of keys by their log-sum-exps, in fp32.

    Weights are taken relative to the largest log-sum-exp, so nothing overflows (FlashDecoding, Dao
    et al. 2023). A part that saw no key has minus infinity: it takes no part, whatever it holds.

    Args:
        outs: ``[n, ..., head_size]``, any floating dtype, each normalised over its own keys.
        lses: ``[n, ...]``, natural logarithm.

    Returns:
        ``out [..., head_size]`` and ``lse [...]``, both fp32. Where no part saw a key: zeros and
        minus infinity.

    Raises:
        ValueError: the shapes do not belong together, or ``n`` is 0.
    """
    if lses.shape != outs.shape[:-1] or outs.ndim < 2 or outs.shape[0] == 0:
        raise ValueError(f"cannot merge outs {list(outs.shape)} with lses {list(lses.shape)}")
    lses = lses.float()
    top = lses.amax(dim=0)
    weights = torch.exp(lses - torch.where(torch.isneginf(top), 0.0, top))
    total = weights.sum(dim=0)
    # A part without keys may hold anything, NaN included: 0 * NaN must not get in.
    parts = torch.where(weights[..., None] > 0, outs.float() * weights[..., None], 0.0)
    out = parts.sum(dim=0) / torch.where(total > 0, total, 1.0)[..., None]
    return out, top + torch.log(torch.where(total > 0, total, 1.0))
