"""X in the pages of a slot that are made for K and V."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from vllm_ssdkv.offload.xcache.input_layout import InputLayout
from vllm_ssdkv.store.format.slot_geometry import SlotGeometry
from vllm_ssdkv.store.memory.arena import Arena

LAYERS, BLOCK = 3, 32


def layout_of(heads: int, head_size: int, dtype: torch.dtype, hidden: int = 0) -> InputLayout:
    payload = 2 * 16 * head_size * dtype.itemsize
    geometry = SlotGeometry("paged", LAYERS, heads, BLOCK // 16, payload)
    return InputLayout(geometry, BLOCK, hidden or heads * head_size, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "head_size"), [(4, 64), (3, 80), (1, 256), (5, 24)])
def test_what_is_put_is_got(heads: int, head_size: int, dtype: torch.dtype) -> None:
    layout = layout_of(heads, head_size, dtype)
    geometry = layout.geometry
    assert layout.pages == -(-geometry.pages_per_layer // 2)
    arena = Arena(4 * geometry.frame_bytes)
    try:
        everything = arena.view(0, arena.nbytes)
        everything[:] = 0xA5
        generator = torch.Generator().manual_seed(heads)
        blocks = torch.randn(2, LAYERS, BLOCK, layout.hidden, generator=generator).to(dtype)
        places = [2, 0]
        for block, place in zip(blocks, places, strict=True):
            layout.put(block, arena.view(place * geometry.frame_bytes, geometry.frame_bytes))
        frames = np.array(places, dtype=np.uint64) * np.uint64(geometry.frame_bytes)
        for layer in range(LAYERS):
            base = np.uint64(arena.address + geometry.layer_offset(layer)) + frames
            found = layout.get(arena, base)
            assert torch.equal(found, blocks[:, layer].reshape(-1, layout.hidden))
        # Other blocks and headers are as before; nothing of an older block is left in this one.
        assert (arena.view(geometry.frame_bytes, geometry.frame_bytes) == 0xA5).all()
        assert (everything[: geometry.header_bytes] == 0xA5).all()
        kept = everything[geometry.header_bytes : geometry.frame_bytes]
        assert not kept.reshape(LAYERS, -1)[:, layout.pages * geometry.page_bytes :].any()
        del everything, kept
    finally:
        arena.close()


def test_x_that_is_larger_than_k_and_v_is_refused() -> None:
    with pytest.raises(ValueError, match="X of a block has"):
        layout_of(2, 64, torch.float32, hidden=512)
