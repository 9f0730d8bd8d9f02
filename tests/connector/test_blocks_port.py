"""Blocks of KV caches whose layout a backend has asked for."""

from __future__ import annotations

from typing import cast

import numpy as np
import pytest
import torch

from vllm_ssdkv.connector.blocks import OpaquePort, check_overlay
from vllm_ssdkv.errors import UnsupportedError
from vllm_ssdkv.store.arena import Arena
from vllm_ssdkv.store.cache import FrameCache, FrameState
from vllm_ssdkv.store.layout import PAGE_ALIGN, SlotGeometry, round_up

LAYERS, BLOCKS, HEADS, TOKENS, SIZE = 2, 6, 3, 16, 8


def caches(order: tuple[int, ...]) -> list[torch.Tensor]:
    """[block, head, token, channel], as vLLM shows them, laid out in this order of dimensions."""
    shape = (BLOCKS, HEADS, TOKENS, SIZE)
    made = []
    for layer in range(LAYERS):
        memory = torch.arange(np.prod(shape), dtype=torch.float32).add(1e6 * layer)
        lying = memory.view([shape[dim] for dim in order])
        made.append(lying.permute(*np.argsort(order).tolist()))
    return made


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (0, 3, 2, 1)])
def test_blocks_are_stored_as_they_lie(order: tuple[int, ...]) -> None:
    """FlashAttention and Triton attention have tokens before heads on GPUs."""
    payload = HEADS * TOKENS * SIZE * 4
    geometry = SlotGeometry("opaque", LAYERS, 1, 1, payload)
    arena = Arena(round_up(4 * geometry.frame_bytes, PAGE_ALIGN))
    frames = FrameCache(arena, 0, geometry.frame_bytes, 4, 10)
    source, target = caches(order), [torch.zeros_like(one) for one in caches(order)]
    taken = frames.take(np.array([7, 3], dtype=np.int64), FrameState.HELD)
    OpaquePort(source, geometry, frames).save(
        np.array([5, 2], dtype=np.int64), taken, np.zeros(0, dtype=np.uint64)
    )
    for layer, cache in enumerate(source):
        first = geometry.layer_offset(layer)
        held = frames.view(int(taken[0]))[first : first + payload].view(np.float32)
        memory = cast(torch.Tensor, cache[5]).permute(*(np.argsort(np.argsort(order)[1:])).tolist())
        np.testing.assert_array_equal(held, memory.contiguous().numpy().ravel())
    OpaquePort(target, geometry, frames).load(taken, np.array([1, 4], dtype=np.int64))
    for old, new in zip(source, target, strict=True):
        assert torch.equal(new[1], old[5])
        assert torch.equal(new[4], old[2])
        assert not new[[0, 2, 3, 5]].any()
    arena.close()


def test_blocks_with_gaps_are_refused() -> None:
    geometry = SlotGeometry("opaque", 1, 1, 1, HEADS * TOKENS * SIZE * 4)
    arena = Arena(round_up(geometry.frame_bytes, PAGE_ALIGN))
    frames = FrameCache(arena, 0, geometry.frame_bytes, 1, 10)
    wide = torch.zeros(BLOCKS, HEADS, TOKENS, 2 * SIZE)[..., :SIZE]
    with pytest.raises(UnsupportedError, match="not one stretch of memory"):
        OpaquePort([wide], geometry, frames)
    arena.close()


def test_groups_must_share_the_memory_of_their_blocks() -> None:
    ours = caches((0, 1, 2, 3))
    check_overlay(ours, ours)
    check_overlay(ours, ours[:1])
    for theirs in (ours[1:], ours[::-1], caches((0, 1, 2, 3)), [ours[0][:, :1]]):
        with pytest.raises(UnsupportedError, match="--disable-hybrid-kv-cache-manager"):
            check_overlay(ours, theirs)
