"""Scatter of keys and values into blocks."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_ssdkv.kernels.operands.block_layout import FLOAT8, BlockLayout
from vllm_ssdkv.profiling.dense_oracle import read_block
from vllm_ssdkv.triton_kernels.store_kv import store_kv


@settings(max_examples=30, deadline=None)
@given(
    st.integers(0, 9),
    st.integers(1, 5),
    st.sampled_from([1, 3, 16]),
    st.sampled_from([(4, 4), (6, 2), (3, 1)]),
    st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    st.sampled_from([0, 12]),
    st.integers(0, 2**31),
)
def test_every_token_lands_in_its_place(
    tokens: int,
    heads: int,
    head_size: int,
    sizes: tuple[int, int],
    dtype: torch.dtype,
    padding: int,
    seed: int,
) -> None:
    layout = BlockLayout.unpadded(*sizes, heads, head_size, dtype)
    layout = layout.with_page_stride(layout.page_stride_bytes + padding)
    random = torch.Generator().manual_seed(seed)
    held = layout.block_bytes // dtype.itemsize
    # Blocks may lie apart, as they do when layers share one tensor.
    cache = torch.zeros((4, held + 8), dtype=dtype)[:, :held]
    # As in a fused projection: a token's keys and values lie beside each other.
    fused = torch.randn((tokens, 2, heads, head_size), generator=random).to(dtype)
    slots = torch.randperm(4 * layout.block_tokens, generator=random)[:tokens]
    slots[torch.rand(tokens, generator=random) < 0.2] = -1
    before = cache.clone()
    store_kv(fused[:, 0], fused[:, 1], cache, slots, layout)

    written = torch.zeros((4, layout.block_tokens), dtype=torch.bool)
    blocks = [read_block(layout, block.view(torch.uint8)) for block in cache]
    for token, slot in enumerate(slots.tolist()):
        if slot < 0:
            continue
        block, within = divmod(slot, layout.block_tokens)
        written[block, within] = True
        for part in range(2):
            assert torch.equal(blocks[block][part][within], fused[token, part])
    for block in range(4):
        for part in range(2):
            assert not blocks[block][part][~written[block]].any()
    touched = (cache != before).sum()
    assert touched <= written.sum() * heads * head_size * 2


@pytest.mark.parametrize("dtype", FLOAT8, ids=str)
def test_numbers_of_8_bits_are_the_nearest(dtype: torch.dtype) -> None:
    """What is too large is the largest; each kind has its scale."""
    layout = BlockLayout.unpadded(16, 16, 2, 128, dtype)
    key, value = torch.randn(2, 16, 2, 128).bfloat16()
    key[0, 0, :2] = torch.tensor([1e9, -1e9])
    cache = torch.zeros((1, layout.block_bytes), dtype=dtype)
    store_kv(key, value, cache, torch.arange(16), layout, (0.5, 3.0))
    for stored, new, scale in zip(
        read_block(layout, cache[0].view(torch.uint8)), (key, value), (0.5, 3.0), strict=True
    ):
        largest = torch.finfo(dtype).max
        wanted = (new.float() / scale).clamp(-largest, largest).to(dtype)
        assert torch.equal(stored.float(), wanted.float())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"key": torch.zeros(3, 2, 7)}, "key must be"),
        ({"value": torch.zeros(2, 2, 8)}, "value must be"),
        ({"key": torch.zeros(3, 2, 8).half()}, "key must be"),
        ({"slot_mapping": torch.zeros(3, dtype=torch.int32)}, "slot_mapping must be"),
        ({"cache": torch.zeros(2, 8)}, "cannot hold"),
        ({"cache": torch.zeros(512)}, "contiguous blocks"),
    ],
)
def test_wrong_arguments_are_refused(change: dict[str, object], message: str) -> None:
    layout = BlockLayout.unpadded(4, 4, 2, 8, torch.float32)
    arguments = {
        "key": torch.zeros(3, 2, 8),
        "value": torch.zeros(3, 2, 8),
        "cache": torch.zeros(2, layout.block_bytes // 4),
        "slot_mapping": torch.zeros(3, dtype=torch.int64),
        "layout": layout,
    } | change
    with pytest.raises(ValueError, match=message):
        store_kv(**arguments)
