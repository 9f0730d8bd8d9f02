"""The oracles against torch's own attention, and against numbers worked out by hand."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_ssdkv.kernels.operands.block_layout import BlockLayout
from vllm_ssdkv.profiling.dense_oracle import (
    dense_attention,
    merge,
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


def partials(
    sizes: list[int], seed: int, spread: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Outs and lses of attentions over ``sizes`` keys each, and of the one over all."""
    draw = torch.Generator().manual_seed(seed)
    query = torch.randn((3, 4, 16), generator=draw) * spread
    key = torch.randn((sum(sizes), 2, 16), generator=draw)
    value = torch.randn((sum(sizes), 2, 16), generator=draw)
    first = sum(sizes)  # every query sees every key
    parts = [
        dense_attention(query, k, v, scale=0.25, first_position=first)
        for k, v in zip(key.split(sizes), value.split(sizes), strict=True)
    ]
    out, lse = dense_attention(query, key, value, scale=0.25, first_position=first)
    outs = torch.stack([part[0] for part in parts]).float()
    return outs, torch.stack([part[1] for part in parts]).float(), out, lse


@given(
    sizes=st.lists(st.integers(0, 40), min_size=1, max_size=6),
    seed=st.integers(0, 1000),
    spread=st.sampled_from([0.1, 1.0, 40.0]),
)
@settings(deadline=None, max_examples=50)
def test_merge_is_attention_over_the_union(sizes: list[int], seed: int, spread: float) -> None:
    outs, lses, want_out, want_lse = partials(sizes, seed, spread)
    out, lse = merge(outs, lses)
    assert out.dtype == lse.dtype == torch.float32
    tolerance = 2e-6 * max(1.0, spread)
    torch.testing.assert_close(out.double(), want_out, rtol=0, atol=tolerance * 4)
    torch.testing.assert_close(lse.double(), want_lse, rtol=2e-6, atol=2e-6)


def test_a_part_without_keys_takes_no_part_whatever_it_holds() -> None:
    outs, lses, want_out, _ = partials([9, 7], 0, 1.0)
    outs = torch.cat([outs, torch.full_like(outs[:1], torch.nan)])
    lses = torch.cat([lses, torch.full_like(lses[:1], -torch.inf)])
    order = [2, 0, 1]
    torch.testing.assert_close(merge(outs[order], lses[order])[0].double(), want_out)


def test_no_key_anywhere() -> None:
    outs, lses = torch.full((2, 3, 8), torch.nan), torch.full((2, 3), -torch.inf)
    out, lse = merge(outs, lses)
    assert torch.equal(out, torch.zeros(3, 8))
    assert lse.isneginf().all()


def test_nan_of_a_part_with_keys_shows() -> None:
    outs, lses, _, _ = partials([4, 4], 1, 1.0)
    outs[1, 0] = torch.nan
    merged, _ = merge(outs, lses)
    assert merged[0].isnan().all()
    assert not merged[1:].isnan().any()


def test_huge_log_sum_exps_do_not_overflow() -> None:
    outs = torch.tensor([[1.0], [3.0]])
    lses = torch.tensor([3e4, 3e4])
    out, lse = merge(outs[:, None], lses[:, None])
    assert out.item() == 2.0
    assert lse.item() == pytest.approx(3e4 + 0.6931, rel=1e-6)


def test_half_precision_outs_are_merged_in_fp32() -> None:
    outs, lses, _, _ = partials([5, 6, 7], 2, 1.0)
    half = outs.bfloat16()
    torch.testing.assert_close(merge(half, lses), merge(half.float(), lses), rtol=0, atol=0)


def test_shapes_that_do_not_belong_together_are_refused() -> None:
    with pytest.raises(ValueError, match="cannot merge"):
        merge(torch.zeros(2, 3, 4), torch.zeros(2, 4))
    with pytest.raises(ValueError, match="cannot merge"):
        merge(torch.zeros(0, 3, 4), torch.zeros(0, 3))
