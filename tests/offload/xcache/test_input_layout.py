"""X in the pages of a slot that are made for K and V."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from vllm_ssdkv.offload.xcache.input_layout import InputLayout
from vllm_ssdkv.store.format.slot_geometry import SlotGeometry
from vllm_ssdkv.store.memory.arena import Arena

LAYERS, BLOCK = 3, 32


def layout_of(
    heads: int, head_size: int, dtype: torch.dtype, hidden: int = 0, blocks: int = 1
) -> InputLayout:
    payload = 2 * 16 * head_size * dtype.itemsize
    geometry = SlotGeometry("paged", LAYERS, heads, BLOCK // 16, payload)
    return InputLayout(geometry, BLOCK, hidden or heads * head_size, dtype, blocks)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("heads", "head_size", "hidden", "blocks"),
    [
        *((4, 64, 0, 1), (3, 80, 0, 1), (1, 256, 0, 1), (5, 24, 0, 1)),
        *((4, 64, 0, 2), (3, 80, 0, 2), (1, 256, 0, 2), (5, 24, 0, 2)),
        *((4, 64, 192, 2), (5, 24, 48, 5), (5, 24, 56, 4), (5, 24, 18, 13)),
    ],
)
def test_what_is_put_is_got(
    heads: int, head_size: int, hidden: int, blocks: int, dtype: torch.dtype
) -> None:
    """Slots of one block and of several, whose borders are those of pages or not."""
    layout = layout_of(heads, head_size, dtype, hidden, blocks)
    geometry = layout.geometry
    taken = blocks * BLOCK * layout.hidden * dtype.itemsize
    assert layout.pages == -(-taken // geometry.payload_bytes)
    arena = Arena(4 * geometry.frame_bytes)
    try:
        everything = arena.view(0, arena.nbytes)
        everything[:] = 0xA5
        generator = torch.Generator().manual_seed(heads)
        tokens = blocks * BLOCK
        slots = torch.randn(2, LAYERS, tokens, layout.hidden, generator=generator).to(dtype)
        places = [3, 0]
        for slot, place in zip(slots, places, strict=True):
            layout.put(slot, arena.view(place * geometry.frame_bytes, geometry.frame_bytes))
        wanted = slots.transpose(1, 2).reshape(-1, BLOCK, LAYERS, layout.hidden)
        order = np.random.default_rng(blocks).permutation(2 * blocks)
        frames = np.array(places, dtype=np.uint64)[order // blocks] * np.uint64(
            geometry.frame_bytes
        )
        for layer in range(LAYERS):
            base = np.uint64(arena.address + geometry.layer_offset(layer)) + frames
            found = layout.get(arena, base, order)
            assert torch.equal(found, wanted[order][:, :, layer].reshape(-1, layout.hidden))
        # Other blocks and headers are as before; nothing of an older block is left in this one.
        assert (arena.view(geometry.frame_bytes, geometry.frame_bytes) == 0xA5).all()
        assert (everything[: geometry.header_bytes] == 0xA5).all()
        kept = everything[geometry.header_bytes : geometry.frame_bytes]
        assert not kept.reshape(LAYERS, -1)[:, layout.pages * geometry.page_bytes :].any()
        del everything, kept
    finally:
        arena.close()


def test_x_that_is_larger_than_k_and_v_is_refused() -> None:
    with pytest.raises(ValueError, match=r"X of 1 block\(s\) has"):
        layout_of(2, 64, torch.float32, hidden=512)
    with pytest.raises(ValueError, match=r"X of 3 block\(s\) has"):
        layout_of(2, 64, torch.float32, blocks=3)
