"""Summaries of blocks that leave HBM: records of pages, channel-major K and sums of V."""

from __future__ import annotations

import math

import torch
import triton.language as tl

from vllm_ssdkv.kernels.operands.block_layout import BlockLayout
from vllm_ssdkv.triton_kernels.launch import TL_DTYPES, jit, on_device_of, padded, require

_CHANNEL_TOKENS = 64
"""Tokens of a channel that are written at a time."""


@jit
def _summarize_kernel(
    source_ptr: torch.Tensor,
    bounds_ptr: torch.Tensor,
    spread_ptr: torch.Tensor,
    channels_ptr: torch.Tensor,
    value_sum_ptr: torch.Tensor,
    GROUPS: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    PAGE_STRIDE: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    SUM_STRIDE: tl.constexpr,
    ALIGN: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BOUNDS: tl.constexpr,
    SPREAD: tl.constexpr,
    LARGEST: tl.constexpr,
    CHANNELS: tl.constexpr,
    VALUE_SUM: tl.constexpr,
    KV: tl.constexpr,
) -> None:
    block = tl.program_id(0)
    head = tl.program_id(1)
    source = tl.load(source_ptr + block).to(tl.pointer_type(KV))
    source = tl.multiple_of(source + head * (GROUPS * PAGE_STRIDE), ALIGN)
    channel = tl.arange(0, BLOCK_D)
    in_head = channel < HEAD_SIZE
    token = tl.arange(0, BLOCK_T)
    there = (token < PAGE_TOKENS)[:, None] & in_head[None, :]
    total = tl.zeros([BLOCK_D], tl.float32)
    for group in range(GROUPS):
        page = source + group * PAGE_STRIDE
        if BOUNDS:
            key = tl.load(page + token[:, None] * HEAD_SIZE + channel[None, :], mask=there, other=0)
            x = key.to(tl.float32)
            # A NaN is kept, so that broken data shows.
            broken = tl.max(((x != x) & there).to(tl.int32), 0) > 0  # noqa: PLR0124
            low = tl.min(tl.where(there, x, float("inf")), 0)
            high = tl.max(tl.where(there, x, float("-inf")), 0)
            to = tl.load(bounds_ptr + block).to(tl.pointer_type(KV))
            to += (head * GROUPS + group) * (2 * HEAD_SIZE) + channel
            tl.store(to, tl.where(broken, float("nan"), low).to(KV), mask=in_head)
            tl.store(to + HEAD_SIZE, tl.where(broken, float("nan"), high).to(KV), mask=in_head)
        if SPREAD:
            # One after the other: the mean has the bits of the native kernels.
            first = tl.load(page + channel, mask=in_head, other=0).to(tl.float32)
            mean = tl.zeros([BLOCK_D], tl.float32)
            for t in range(PAGE_TOKENS):
                one = tl.load(page + t * HEAD_SIZE + channel, mask=in_head, other=0)
                mean += one.to(tl.float32) - first
            mean = first + tl.div_rn(mean, PAGE_TOKENS * 1.0)
            square = tl.zeros([BLOCK_D], tl.float32)
            for t in range(PAGE_TOKENS):
                one = tl.load(page + t * HEAD_SIZE + channel, mask=in_head, other=0)
                apart = one.to(tl.float32) - mean
                square += apart * apart
            square = tl.div_rn(square, PAGE_TOKENS * 1.0)
            broken = mean - mean  # 0, or NaN
            square = tl.where(square > LARGEST, LARGEST, square)
            to = tl.load(spread_ptr + block).to(tl.pointer_type(KV))
            to += (head * GROUPS + group) * (2 * HEAD_SIZE) + channel
            tl.store(to, (mean + broken).to(KV), mask=in_head)
            tl.store(to + HEAD_SIZE, (square + broken).to(KV), mask=in_head)
        if VALUE_SUM:
            # One after the other: the sum has the bits of any other way of adding token by token.
            for t in range(PAGE_TOKENS):
                value = page + (PAGE_TOKENS + t) * HEAD_SIZE + channel
                total += tl.load(value, mask=in_head, other=0).to(tl.float32)
    if CHANNELS:
        # Several pages at a time: a channel is written in long stretches, which may cross a link.
        TOKENS: tl.constexpr = GROUPS * PAGE_TOKENS
        base = tl.load(channels_ptr + block).to(tl.pointer_type(KV)) + head * (HEAD_SIZE * TOKENS)
        for start in range(0, TOKENS, BLOCK_C):
            place = start + tl.arange(0, BLOCK_C)
            at = place // PAGE_TOKENS * PAGE_STRIDE + place % PAGE_TOKENS * HEAD_SIZE
            mask = (place < TOKENS)[:, None] & in_head[None, :]
            key = tl.load(source + at[:, None] + channel[None, :], mask=mask, other=0)
            tl.store(base + channel[None, :] * TOKENS + place[:, None], key, mask=mask)
    if VALUE_SUM:
        to = tl.load(value_sum_ptr + block).to(tl.pointer_type(tl.float32)) + head * SUM_STRIDE
        tl.store(to + channel, total, mask=in_head)
        behind = HEAD_SIZE + tl.arange(0, BLOCK_S)
        tl.store(to + behind, tl.zeros([BLOCK_S], tl.float32), mask=behind < SUM_STRIDE)


def summarize(
    source: torch.Tensor,
    layout: BlockLayout,
    *,
    bounds: torch.Tensor | None = None,
    spread: torch.Tensor | None = None,
    channels: torch.Tensor | None = None,
    value_sum: torch.Tensor | None = None,
    sum_stride: int | None = None,
) -> None:
    """Summaries of n complete blocks of one layer: ``PageKernels.summarize``.

    All are absolute addresses, int64 ``[n]`` on one device, of memory that it reaches. Blocks start
    at multiples of 16 bytes, or of what divides a page's stride and a key if that is less. Sums of
    V of KV heads lie ``sum_stride`` floats apart, with zeros between them; None: back to back.
    Queued on the current stream; raises ``ValueError`` on wrong shapes, dtypes or devices.
    """
    for name, address in (
        ("source", source),
        ("bounds", bounds),
        ("spread", spread),
        ("channels", channels),
        ("value_sum", value_sum),
    ):
        require(
            address is None
            or (
                address.dtype == torch.int64
                and tuple(address.shape) == (len(source),)
                and address.is_contiguous()
                and address.device == source.device
            ),
            f"{name} must be contiguous int64 [{len(source)}] on {source.device}",
        )
    if not len(source):
        return
    with on_device_of(source):
        _summarize_kernel[(len(source), layout.kv_heads)](
            source,
            source if bounds is None else bounds,
            source if spread is None else spread,
            source if channels is None else channels,
            source if value_sum is None else value_sum,
            GROUPS=layout.groups,
            PAGE_TOKENS=layout.page_tokens,
            PAGE_STRIDE=layout.page_stride,
            HEAD_SIZE=layout.head_size,
            SUM_STRIDE=sum_stride or layout.head_size,
            ALIGN=math.gcd(16, layout.page_stride_bytes, layout.head_size * layout.dtype.itemsize),
            BLOCK_T=padded(layout.page_tokens),
            BLOCK_C=padded(min(_CHANNEL_TOKENS, layout.block_tokens)),
            BLOCK_D=padded(layout.head_size),
            BLOCK_S=padded(max(1, (sum_stride or 0) - layout.head_size)),
            BOUNDS=bounds is not None,
            SPREAD=spread is not None,
            LARGEST=torch.finfo(layout.dtype).max,
            CHANNELS=channels is not None,
            VALUE_SUM=value_sum is not None,
            KV=TL_DTYPES[layout.dtype],
            num_warps=4,
        )
