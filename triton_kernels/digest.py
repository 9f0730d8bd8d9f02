"""Digests of tensors where they lie, equal to those that the native code makes of host memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from vllm_ssdkv.triton_kernels.launch import inline, jit, on_device_of, processors, require

_TILE_WORDS = 2048
_PROGRAMS_PER_PROCESSOR = 8
_WORD = 8

_STEP = tl.constexpr(0x9E3779B97F4A7C15)
_FIRST = tl.constexpr(0xBF58476D1CE4E5B9)
_SECOND = tl.constexpr(0x94D049BB133111EB)


@inline
def _mix(word: torch.Tensor, number: torch.Tensor) -> Any:  # noqa: ANN401 - torch's has no bitcast
    """A word of uint64 bound to its number; see ``csrc/io/slot/digest.hpp``."""
    mixed = (word ^ (number * _STEP)) * _FIRST
    mixed ^= mixed >> 32
    mixed *= _SECOND
    return mixed ^ (mixed >> 29)


@jit
def _digest_kernel(
    data: torch.Tensor, words: int, rest: int, out: torch.Tensor, TILE: tl.constexpr
) -> None:
    """Add what all words, and the ``rest`` bytes behind them, are mixed to."""
    program = tl.program_id(0).to(tl.int64)
    step = tl.num_programs(0).to(tl.int64) * TILE
    total = tl.zeros([TILE], tl.uint64)
    for start in range(program * TILE, words, step):
        place = start + tl.arange(0, TILE)
        inside = place < words
        word = tl.load(data.to(tl.pointer_type(tl.int64)) + place, mask=inside, other=0)
        mixed = _mix(word.to(tl.uint64, bitcast=True), (place + 1).to(tl.uint64))
        total += tl.where(inside, mixed, 0)
    tl.atomic_add(out, tl.sum(total, axis=0).to(tl.int64, bitcast=True))
    if program == 0 and rest > 0:
        whole = tl.zeros([], tl.int64) + words  # which Triton may have made a constant
        place = tl.arange(0, 8)
        behind = data.to(tl.pointer_type(tl.uint8)) + whole * 8 + place
        byte = tl.load(behind, mask=place < rest, other=0).to(tl.uint64)
        word = tl.sum(byte << (place * 8).to(tl.uint64), axis=0)
        mixed = _mix(word, (whole + 1).to(tl.uint64))
        tl.atomic_add(out, mixed.to(tl.int64, bitcast=True))


@jit
def _read_words_kernel(
    addresses: torch.Tensor, out: torch.Tensor, count: int, TILE: tl.constexpr
) -> None:
    place = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = place < count
    address = tl.load(addresses + place, mask=inside, other=0).to(tl.pointer_type(tl.int64))
    tl.store(out + place, tl.load(address, mask=inside, other=0), mask=inside)


def digest(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Digests of the bytes of contiguous tensors of one device, [n], as int64 on that device.

    Queued on the current stream. Raises ``ValueError`` for tensors on several devices, one that is
    not contiguous, or one that does not begin at a multiple of 8.
    """
    device = tensors[0].device
    out = torch.zeros(len(tensors), dtype=torch.int64, device=device)
    with on_device_of(out):
        for i, tensor in enumerate(tensors):
            require(tensor.device == device, "tensors to digest lie on several devices")
            require(tensor.is_contiguous(), "a tensor to digest is not contiguous")
            require(tensor.data_ptr() % _WORD == 0, "a tensor to digest is not aligned to 8 bytes")
            nbytes = tensor.numel() * tensor.itemsize
            if not nbytes:
                continue
            words = nbytes // _WORD
            most = processors(device) * _PROGRAMS_PER_PROCESSOR
            programs = max(1, min(triton.cdiv(words, _TILE_WORDS), most))
            _digest_kernel[(programs,)](
                tensor, words, nbytes % _WORD, out[i:], TILE=_TILE_WORDS, num_warps=8
            )
    return out


def read_words(addresses: torch.Tensor) -> torch.Tensor:
    """The 8 bytes at each absolute address, int64 [n] -> [n], addresses multiples of 8.

    Queued on the current stream.
    """
    out = torch.empty_like(addresses)
    count = addresses.numel()
    if count:
        with on_device_of(addresses):
            _read_words_kernel[(triton.cdiv(count, 256),)](addresses, out, count, TILE=256)
    return out
