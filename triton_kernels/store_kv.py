"""Scatter of new keys and values into the block layout."""

from __future__ import annotations

import torch
import triton.language as tl

from vllm_ssdkv.kernels.operands.block_layout import FLOAT8, BlockLayout, block_stride
from vllm_ssdkv.triton_kernels.launch import jit, on_device_of, padded, require


@jit
def _store_kernel(
    key_ptr: torch.Tensor,
    value_ptr: torch.Tensor,
    cache_ptr: torch.Tensor,
    slot_ptr: torch.Tensor,
    key_stride: int,
    value_stride: int,
    block_stride_elements: int,
    KV_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    PAGE_STRIDE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_ptr + token)
    if slot < 0:
        return
    block = slot // BLOCK_TOKENS
    in_block = slot % BLOCK_TOKENS
    head = tl.arange(0, BLOCK_H)
    channel = tl.arange(0, BLOCK_D)
    mask = (head < KV_HEADS)[:, None] & (channel < HEAD_SIZE)[None, :]
    source = head[:, None] * HEAD_SIZE + channel[None, :]
    key = tl.load(key_ptr + token * key_stride + source, mask=mask, other=0.0)
    value = tl.load(value_ptr + token * value_stride + source, mask=mask, other=0.0)
    page = head * (BLOCK_TOKENS // PAGE_TOKENS) + in_block // PAGE_TOKENS
    at = block * block_stride_elements + page * PAGE_STRIDE + (in_block % PAGE_TOKENS) * HEAD_SIZE
    target = cache_ptr + at[:, None] + channel[None, :]
    tl.store(target, key, mask=mask)
    tl.store(target + PAGE_TOKENS * HEAD_SIZE, value, mask=mask)


def narrowed(values: torch.Tensor, scale: float, dtype: torch.dtype) -> torch.Tensor:
    """Values over a scale in a type of 8 bits, rounded to the nearest as vLLM's CUDA kernels do:
    what is too large becomes the largest number."""
    largest = torch.finfo(dtype).max
    return (values.float() / scale).clamp(-largest, largest).to(dtype)


def store_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    layout: BlockLayout,
    scales: tuple[float, float] = (1.0, 1.0),
) -> None:
    """Write ``key, value [T, Hkv, D]`` to the places in ``cache`` that ``slot_mapping`` names.

    ``cache [num_blocks, ...]`` with contiguous blocks of ``layout``; ``key`` and ``value`` of its
    dtype, or divided by their ``scales`` and rounded to it if it has 8 bits, contiguous but for the
    token stride; ``slot_mapping`` int64 ``[T]``: block times
    ``block_tokens`` plus the token in it, negative to skip. The slots must lie inside the cache and
    differ from each other: the kernel cannot check that without waiting. Queued on the current
    stream; raises ``ValueError`` on wrong shapes, dtypes or devices.
    """
    if layout.dtype in FLOAT8:
        key, value = (
            narrowed(part, scale, layout.dtype)
            for part, scale in zip((key, value), scales, strict=True)
        )
    tokens = key.shape[0] if key.dim() else 0
    shape = (tokens, layout.kv_heads, layout.head_size)
    for name, part in (("key", key), ("value", value)):
        require(
            tuple(part.shape) == shape
            and part.dtype == layout.dtype
            and part.stride(2) == 1
            and part.stride(1) == layout.head_size
            and part.device == cache.device,
            f"{name} must be {shape} of {layout.dtype} on {cache.device} with contiguous heads, "
            f"got {part.dtype} {tuple(part.shape)} on {part.device}",
        )
    require(
        slot_mapping.dtype == torch.int64
        and tuple(slot_mapping.shape) == (tokens,)
        and slot_mapping.is_contiguous()
        and slot_mapping.device == cache.device,
        f"slot_mapping must be contiguous int64 {(tokens,)} on {cache.device}",
    )
    layout.check_cache(cache)
    if not tokens:
        return
    if layout.dtype in FLOAT8:  # moved as they are
        key, value, cache = (part.view(torch.uint8) for part in (key, value, cache))
    with on_device_of(cache):
        _store_kernel[(tokens,)](
            key,
            value,
            cache,
            slot_mapping,
            key.stride(0),
            value.stride(0),
            block_stride(cache),
            KV_HEADS=layout.kv_heads,
            HEAD_SIZE=layout.head_size,
            BLOCK_TOKENS=layout.block_tokens,
            PAGE_TOKENS=layout.page_tokens,
            PAGE_STRIDE=layout.page_stride,
            BLOCK_H=padded(layout.kv_heads),
            BLOCK_D=padded(layout.head_size),
            num_warps=4,
        )
