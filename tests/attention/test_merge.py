"""Merging partial attentions gives attention over all keys."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_ssdkv.attention.merge import MergeState, merge
from vllm_ssdkv.profiling.dense_oracle import dense_attention


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
    state = MergeState(tuple(want_out.shape))
    for part_out, part_lse in zip(outs, lses, strict=True):
        state.add(part_out, part_lse)
    step_out, step_lse = state.result()
    torch.testing.assert_close(step_out, out, rtol=0, atol=4e-6)
    torch.testing.assert_close(step_lse, lse, rtol=2e-6, atol=2e-6)


def test_a_part_without_keys_takes_no_part_whatever_it_holds() -> None:
    outs, lses, want_out, _ = partials([9, 7], 0, 1.0)
    outs = torch.cat([outs, torch.full_like(outs[:1], torch.nan)])
    lses = torch.cat([lses, torch.full_like(lses[:1], -torch.inf)])
    order = [2, 0, 1]
    torch.testing.assert_close(merge(outs[order], lses[order])[0].double(), want_out)
    state = MergeState(tuple(outs.shape[1:]))
    for index in order:
        state.add(outs[index], lses[index])
    torch.testing.assert_close(state.result()[0].double(), want_out)


def test_no_key_anywhere() -> None:
    outs, lses = torch.full((2, 3, 8), torch.nan), torch.full((2, 3), -torch.inf)
    state = MergeState((3, 8))
    for out, lse in (merge(outs, lses), state.result()):
        assert torch.equal(out, torch.zeros(3, 8))
        assert lse.isneginf().all()
    state.add(outs[0], lses[0])
    assert torch.equal(state.result()[0], torch.zeros(3, 8))


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
    with pytest.raises(ValueError, match="expected out"):
        MergeState((3, 4)).add(torch.zeros(3, 5), torch.zeros(3))
