"""The oracles against torch's own attention, and against numbers worked out by hand."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_ssdkv.kernels.operands.block_layout import BlockLayout
from vllm_ssdkv.profiling.dense_oracle import (
    dense_attention,
    paged_attention,
    read_block,
    write_block,
)


@given(
    queries=st.integers(1, 9),
    before=st.integers(0, 20),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 4),
    seed=st.integers(0, 1000),
)
@settings(deadline=None, max_examples=50)
def test_dense_is_what_torch_computes(
    queries: int, before: int, kv_heads: int, group: int, seed: int
) -> None:
    draw = torch.Generator().manual_seed(seed)
    query = torch.randn((queries, kv_heads * group, 16), generator=draw, dtype=torch.float64)
    key = torch.randn((before + queries, kv_heads, 16), generator=draw, dtype=torch.float64)
    value = torch.randn_like(key)
    mask = torch.ones((queries, before + queries), dtype=torch.bool).tril(before)
    want = torch.nn.functional.scaled_dot_product_attention(
        query.transpose(0, 1),
        key.transpose(0, 1).repeat_interleave(group, dim=0),
        value.transpose(0, 1).repeat_interleave(group, dim=0),
        attn_mask=mask,
        scale=0.3,
    )
    out, _ = dense_attention(query, key, value, scale=0.3, first_position=before)
    torch.testing.assert_close(out, want.transpose(0, 1))


def test_log_sum_exp_by_hand() -> None:
    query = torch.tensor([[[2.0]], [[2.0]]])
    key = torch.tensor([[[1.0]], [[3.0]]])
    value = torch.tensor([[[10.0]], [[20.0]]])
    out, lse = dense_attention(query, key, value, scale=0.5, first_position=0)
    assert lse.flatten().tolist() == pytest.approx([1.0, math.log(math.e + math.e**3)])
    weight = math.e**3 / (math.e + math.e**3)
    assert out.flatten().tolist() == pytest.approx([10.0, 10 * (1 - weight) + 20 * weight])


def test_a_query_before_every_key_sees_nothing() -> None:
    query, kv = torch.ones((2, 2, 8)), torch.full((3, 1, 8), torch.nan)
    positions = torch.tensor([7, 8, 9])
    out, lse = dense_attention(query, kv, kv, scale=1.0, first_position=5, key_positions=positions)
    assert torch.equal(out, torch.zeros_like(out))
    assert lse.isneginf().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_block_holds_what_was_written_where_the_layout_says(dtype: torch.dtype) -> None:
    layout = BlockLayout(12, 4, 2, 8, 2 * 4 * 8 * dtype.itemsize + 32, dtype)
    block = torch.full((layout.block_bytes,), 0x5A, dtype=torch.uint8)
    key = torch.arange(12 * 2 * 8).view(12, 2, 8).to(dtype)
    write_block(layout, block, key, -key)
    got_key, got_value = read_block(layout, block)
    assert torch.equal(got_key, key)
    assert torch.equal(got_value, -key)
    # Token 6 of head 1: third page of six from the end, its token 2; V comes 4 rows later.
    at = (1 * 3 + 1) * layout.page_stride_bytes + 2 * 8 * dtype.itemsize
    row = slice(at, at + 8 * dtype.itemsize)
    assert torch.equal(block[row].view(dtype), key[6, 1])
    after = 4 * 8 * dtype.itemsize
    assert torch.equal(block[row.start + after : row.stop + after].view(dtype), -key[6, 1])
    pages = block.view(6, layout.page_stride_bytes)
    assert (pages[:, layout.page_payload_bytes :] == 0x5A).all()


def test_paged_is_dense_over_the_same_tokens_in_any_order() -> None:
    layout = BlockLayout.unpadded(8, 4, 2, 16, torch.float32)
    key, value = torch.randn((2, 32, 2, 16))
    query = torch.randn((5, 4, 16))
    blocks = [torch.zeros(layout.block_bytes, dtype=torch.uint8) for _ in range(4)]
    for index, block in enumerate(blocks):
        tokens = slice(index * 8, index * 8 + 8)
        write_block(layout, block, key[tokens], value[tokens])
    order = [2, 0, 3, 1]
    got = paged_attention(
        query,
        [blocks[index] for index in order],
        [index * 8 for index in order],
        layout,
        scale=0.25,
        first_position=25,
    )
    want = dense_attention(query, key, value, scale=0.25, first_position=25)
    torch.testing.assert_close(got, want)
    out, lse = paged_attention(query, [], [], layout, scale=0.25, first_position=25)
    assert torch.equal(out, torch.zeros_like(out))
    assert lse.isneginf().all()
