"""Blocks of KV caches whose layout a backend has asked for."""

from __future__ import annotations

from typing import cast

import numpy as np
import pytest
import torch

from vllm_ssdkv.base.errors import UnsupportedError
from vllm_ssdkv.connector.kv_layout import joined_geometry, layer_offsets
from vllm_ssdkv.connector.worker import device_blocks
from vllm_ssdkv.connector.worker.block_copy import (
    LeavingBlocks,
    OpaquePort,
    as_it_lies,
    blocks_as_bytes,
    check_overlay,
    whole_blocks,
)
from vllm_ssdkv.connector.worker.device_blocks import DeviceBlocks
from vllm_ssdkv.store.cache.frames import FrameCache, FrameState
from vllm_ssdkv.store.format.slot_geometry import PAGE_ALIGN, SlotGeometry, round_up
from vllm_ssdkv.store.memory.arena import Arena

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
        LeavingBlocks(np.array([5, 2], dtype=np.int64), taken)
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


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (0, 3, 2, 1)])
@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("at_once", [1, 2, 100])
def test_blocks_of_a_gpu_lie_in_frames_as_those_of_a_cpu(
    order: tuple[int, ...], together: bool, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With tensors of the CPU for the GPU's. ``together``: in one allocation, as vLLM does it."""
    payload = HEADS * TOKENS * SIZE * 4
    geometry = SlotGeometry("opaque", LAYERS, 1, 1, payload)
    arena = Arena(round_up(9 * geometry.frame_bytes, PAGE_ALIGN))
    frames = FrameCache(arena, 0, geometry.frame_bytes, 9, 20)
    source, target = caches(order), [torch.zeros_like(one) for one in caches(order)]
    if together:
        source, target = in_one_allocation(source), in_one_allocation(target)
    ids = np.array([5, 2, 0], dtype=np.int64)
    wanted = frames.take(np.array([1, 2, 3], dtype=np.int64), FrameState.HELD)
    found = frames.take(np.array([4, 5, 6], dtype=np.int64), FrameState.HELD)
    OpaquePort(source, geometry, frames).save(LeavingBlocks(ids, wanted))
    page = geometry.page_bytes
    shape = [layer * page for layer in range(LAYERS)], LAYERS * page
    monkeypatch.setattr(device_blocks, "BUFFER_BYTES", at_once * shape[1])
    begin = geometry.layer_offset(0)
    memory = [torch.from_numpy(frames.view(frame)[begin:]) for frame in found.tolist()]
    lying = [as_it_lies(cache) for cache in source]
    blocks = DeviceBlocks(lying, *shape)
    assert (blocks._all is not None) is together
    blocks.save(torch.from_numpy(ids), memory)
    for one, other in zip(wanted.tolist(), found.tolist(), strict=True):
        for layer in range(LAYERS):
            part = slice(geometry.layer_offset(layer), geometry.layer_offset(layer) + payload)
            np.testing.assert_array_equal(frames.view(one)[part], frames.view(other)[part])
    alone = frames.take(np.array([7, 8, 9], dtype=np.int64), FrameState.HELD)
    for layer in reversed(range(LAYERS)):
        begin = geometry.layer_offset(layer)
        pages = [frames.view(frame)[begin : begin + payload] for frame in alone.tolist()]
        blocks.save_layer(layer, torch.from_numpy(ids), [torch.from_numpy(one) for one in pages])
    begin = geometry.layer_offset(0)
    for one, other in zip(found.tolist(), alone.tolist(), strict=True):
        np.testing.assert_array_equal(frames.view(one)[begin:], frames.view(other)[begin:])
    to = torch.tensor([1, 4, 3])
    DeviceBlocks([as_it_lies(cache) for cache in target], *shape).load(memory, to)
    for old, new in zip(source, target, strict=True):
        assert torch.equal(new[to], old[torch.from_numpy(ids)])
        assert not new[[0, 2, 5]].any()
    arena.close()


def test_layers_of_several_sizes_lie_back_to_back() -> None:
    """Through a CPU's port, whole and layer by layer, and as of a GPU with tensors of the CPU."""
    sizes = [12000, 100, 30000, 4096, 500]
    generator, geometry = torch.Generator().manual_seed(1), joined_geometry(sizes)
    source = [
        torch.randint(256, (BLOCKS, size), generator=generator, dtype=torch.uint8) for size in sizes
    ]
    arena = Arena(round_up(6 * geometry.frame_bytes, PAGE_ALIGN))
    frames = FrameCache(arena, 0, geometry.frame_bytes, 6, 10)
    taken = frames.take(np.arange(6, dtype=np.int64), FrameState.HELD)
    port = OpaquePort(source, geometry, frames, sizes)
    ids = np.array([5, 2], dtype=np.int64)
    port.save(LeavingBlocks(ids, taken[:2]))
    for layer in (3, 0, 4, 1, 2):
        port.save_layer(layer, LeavingBlocks(ids, taken[2:4]))
    begin = geometry.header_bytes
    offsets = [offset - begin for offset in layer_offsets(geometry, sizes)]
    device = DeviceBlocks(source, offsets, geometry.frame_bytes - begin)
    memory = [torch.from_numpy(frames.view(frame)[begin:]) for frame in taken[4:].tolist()]
    device.save(torch.from_numpy(ids), memory)
    for frame, block in zip(taken.tolist(), 3 * ids.tolist(), strict=True):
        wanted = torch.cat([cache[block] for cache in source]).numpy()
        np.testing.assert_array_equal(frames.view(frame)[begin : begin + len(wanted)], wanted)
    for way in ("cpu", "gpu"):
        target = [torch.zeros_like(cache) for cache in source]
        to = np.array([1, 4], dtype=np.int64)
        if way == "cpu":
            OpaquePort(target, geometry, frames, sizes).load(taken[:2], to)
        else:
            blocks = DeviceBlocks(target, offsets, geometry.frame_bytes - begin)
            blocks.load(memory, torch.from_numpy(to))
        for old, new in zip(source, target, strict=True):
            assert torch.equal(new[to], old[ids])
            assert not new[[0, 2, 3, 5]].any()
    arena.close()


def in_one_allocation(layers: list[torch.Tensor]) -> list[torch.Tensor]:
    """The same layers one behind the other, with something between."""
    size = layers[0].numel()
    memory = torch.zeros(LAYERS, size + 64)
    made = []
    for layer, row in zip(layers, memory, strict=True):
        there = row[:size].as_strided(layer.shape, layer.stride(), row.storage_offset())
        made.append(there.copy_(layer))
    return made


@pytest.mark.parametrize("ratio", [1, 2, 4])
def test_blocks_that_a_backend_has_cut_are_stored_whole(ratio: int) -> None:
    """As FlashInfer does with large blocks: its kernels take smaller ones."""
    payload = HEADS * TOKENS * SIZE * 4
    geometry = SlotGeometry("opaque", LAYERS, 1, 1, payload)
    arena = Arena(round_up(2 * geometry.frame_bytes, PAGE_ALIGN))
    frames = FrameCache(arena, 0, geometry.frame_bytes, 2, 10)
    whole = caches((0, 2, 1, 3))
    cut = [one.permute(0, 2, 1, 3).reshape(BLOCKS * ratio, -1, HEADS, SIZE) for one in whole]
    taken = frames.take(np.array([7], dtype=np.int64), FrameState.HELD)
    OpaquePort([whole_blocks(one, BLOCKS) for one in cut], geometry, frames).save(
        LeavingBlocks(np.array([3], dtype=np.int64), taken)
    )
    for layer, cache in enumerate(whole):
        first = geometry.layer_offset(layer)
        held = frames.view(int(taken[0]))[first : first + payload].view(np.float32)
        memory = cache[3].permute(1, 0, 2).contiguous().numpy().ravel()
        np.testing.assert_array_equal(held, memory)
    arena.close()


def test_caches_of_other_numbers_of_blocks_are_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"has 12 blocks, vLLM hands out 5"):
        whole_blocks(torch.zeros(12, 3), 5)
    apart = torch.zeros(12, 2, 8)[:, 0]
    geometry = SlotGeometry("opaque", 1, 1, 1, 2 * 8 * 4)
    arena = Arena(round_up(geometry.frame_bytes, PAGE_ALIGN))
    frames = FrameCache(arena, 0, geometry.frame_bytes, 1, 10)
    with pytest.raises(UnsupportedError, match="not one stretch of memory"):
        OpaquePort([whole_blocks(apart, 6)], geometry, frames)
    with pytest.raises(UnsupportedError, match="a device of type meta"):
        OpaquePort([torch.zeros(6, 8, device="meta")], geometry, frames)
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


def test_states_and_kv_that_share_blocks_are_stored_with_all_their_bytes() -> None:
    """A state need not fill its block, nor KV: of a block, all is stored that any layer has."""
    page = HEADS * TOKENS * SIZE * 4 + 32
    memory = torch.arange(BLOCKS * page, dtype=torch.int64).to(torch.uint8)
    kv = memory.view(torch.float32).as_strided(
        (BLOCKS, HEADS, TOKENS, SIZE), (page // 4, SIZE, HEADS * SIZE, 1)
    )
    state = memory.view(torch.int8).as_strided((BLOCKS, 1, 1, 1000), (page, 1000, 1000, 1))
    seen = [blocks_as_bytes(cache, BLOCKS, page) for cache in (kv, state)]
    for blocks in seen:
        assert torch.equal(blocks, memory.view(BLOCKS, page))
        assert blocks.data_ptr() == memory.data_ptr()
    check_overlay(seen[:1], seen[1:])
    second = memory.view(torch.int8).as_strided(
        (BLOCKS - 1, 1, 1, 1000), (page, 1000, 1000, 1), page
    )
    assert torch.equal(blocks_as_bytes(second, BLOCKS - 1, page)[0], memory[page : 2 * page])
    with pytest.raises(UnsupportedError, match="one stretch of 999 bytes"):
        blocks_as_bytes(state, BLOCKS, 999)
    with pytest.raises(UnsupportedError, match="one stretch"):
        blocks_as_bytes(kv[:, :, ::2], BLOCKS, page)
