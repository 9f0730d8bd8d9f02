"""Copies between the pages of vLLM's cache and the padded pages of slots, many blocks a launch."""

from __future__ import annotations

import math

import torch
import triton.language as tl

from vllm_ssdkv.triton_kernels.launch import jit, on_device_of, require

_TILE_WORDS = 1024
_WORDS = {8: tl.int64, 4: tl.int32, 2: tl.int16}


@jit
def _copy_kernel(
    source_ptr: torch.Tensor,
    target_ptr: torch.Tensor,
    source_stride: int,
    target_stride: int,
    payload: int,
    filled: int,
    WORD: tl.constexpr,
    ALIGN: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    block = tl.program_id(0)
    page = tl.program_id(1)
    source = tl.load(source_ptr + block).to(tl.pointer_type(WORD))
    target = tl.load(target_ptr + block).to(tl.pointer_type(WORD))
    source = tl.multiple_of(source + page * source_stride, ALIGN)
    target = tl.multiple_of(target + page * target_stride, ALIGN)
    for start in range(0, filled, TILE):
        word = start + tl.arange(0, TILE)
        words = tl.load(source + word, mask=word < payload, other=0)
        tl.store(target + word, words, mask=word < filled)


def copy_pages(
    source: torch.Tensor,
    target: torch.Tensor,
    *,
    aligned: int,
    pages: int,
    payload_bytes: int,
    source_stride_bytes: int,
    target_stride_bytes: int,
    zero_padding: bool,
) -> None:
    """Copy ``pages`` pages of each of n runs from ``source[i]`` to ``target[i]``, in one launch.

    ``source`` and ``target`` int64 ``[n]``, on one device, are absolute addresses in its memory, or
    in pinned host memory that it can reach, multiples of ``aligned``; a run is one layer's part of
    one block. Page p of a run lies ``p * stride`` bytes behind its start; ``payload_bytes`` of it
    are copied and, with ``zero_padding``, the rest of the target's stride is zeroed, so that no
    stale memory reaches a disk. Addresses and sizes must be even; the wider they are aligned (up to
    16 bytes), the wider the accesses. Runs must not overlap, and the caller keeps the memory alive
    until the current stream has passed. Raises ``ValueError`` on bad sizes.
    """
    require(
        source.dtype == target.dtype == torch.int64
        and source.ndim == 1
        and source.shape == target.shape
        and source.device == target.device
        and source.is_contiguous()
        and target.is_contiguous(),
        f"source {source.shape} and target {target.shape} addresses must be int64 [n] on one "
        "device",
    )
    require(
        0 < payload_bytes <= min(source_stride_bytes, target_stride_bytes),
        f"payload {payload_bytes} must fit the strides {source_stride_bytes} and "
        f"{target_stride_bytes}",
    )
    require(0 < pages < 65536, f"pages per block must be 1 to 65535, got {pages}")
    if not len(source):
        return
    align = math.gcd(16, aligned, payload_bytes, source_stride_bytes, target_stride_bytes)
    word = min(8, align)
    require(word >= 2, "addresses and sizes of a page copy must be even")
    filled = target_stride_bytes if zero_padding else payload_bytes
    with on_device_of(source):
        _copy_kernel[(len(source), pages)](
            source,
            target,
            source_stride_bytes // word,
            target_stride_bytes // word,
            payload_bytes // word,
            filled // word,
            WORD=_WORDS[word],
            ALIGN=align,
            TILE=_TILE_WORDS,
            num_warps=4,
        )
