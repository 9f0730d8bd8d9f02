"""Merging kernel against the merge of finished results in torch."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_ssdkv.kernels.operands.block_layout import PartialState
from vllm_ssdkv.profiling.dense_oracle import merge as merge_finished
from vllm_ssdkv.triton_kernels.merge import merge

CPU = torch.device("cpu")


def parts(
    count: int, tokens: int, heads: int, size: int, seed: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """States ``m, l, acc`` of disjoint keys; a third saw none and holds NaN."""
    random = torch.Generator().manual_seed(seed)
    m = torch.randn((count, tokens, heads), generator=random) * 5
    total = torch.rand((count, tokens, heads), generator=random) + 0.5
    acc = torch.randn((count, tokens, heads, size), generator=random)
    blind = torch.rand((count, tokens, heads), generator=random) < 1 / 3
    m[blind] = -torch.inf
    total[blind] = torch.nan
    acc[blind] = torch.nan
    return m, total, acc


@settings(max_examples=25, deadline=None)
@given(
    st.integers(1, 40),
    st.integers(1, 3),
    st.integers(1, 3),
    st.sampled_from([1, 5, 16, 40]),
    st.integers(0, 2**31),
    st.integers(0, 3),
)
def test_states(count: int, tokens: int, heads: int, size: int, seed: int, rounds: int) -> None:
    """Folding in one call, or in ``rounds`` more, equals merging the finished parts."""
    m, total, acc = parts(count, tokens, heads, size, seed)
    state = PartialState.empty(tokens, heads, size, CPU)
    for chunk in torch.arange(count).tensor_split(rounds + 1):
        merge(state, m[chunk], total[chunk], acc[chunk])
    out, lse = merge_finished(acc / total[..., None], m + total.log().where(m > -torch.inf, m))
    seen = lse > -torch.inf
    assert torch.equal(state.l > 0, seen)
    torch.testing.assert_close((state.acc / state.l[..., None])[seen], out[seen])
    torch.testing.assert_close((state.m + state.l.log())[seen], lse[seen])
    assert not state.acc.isnan().any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("count", [1, 3, 20])
def test_finished_results(dtype: torch.dtype, count: int) -> None:
    lse, _, outs = parts(count, 2, 3, 16, seed=count)
    outs = outs.to(dtype)
    state = PartialState.empty(2, 3, 16, CPU)
    merge(state, lse, None, outs)
    out, merged = merge_finished(outs, lse)
    seen = merged > -torch.inf
    assert torch.equal(state.l > 0, seen)
    torch.testing.assert_close((state.acc / state.l[..., None])[seen], out[seen])
    torch.testing.assert_close((state.m + state.l.log())[seen], merged[seen])


@pytest.mark.parametrize(
    ("m", "total", "acc"),
    [
        (torch.zeros(2, 2, 2), torch.zeros(2, 2, 3), torch.zeros(2, 2, 3, 4)),
        (torch.zeros(2, 2, 3), torch.zeros(3, 2, 3), torch.zeros(2, 2, 3, 4)),
        (torch.zeros(2, 2, 3), torch.zeros(2, 2, 3), torch.zeros(2, 2, 3, 5)),
        (torch.zeros(2, 2, 3), torch.zeros(2, 2, 3), torch.zeros(2, 2, 3, 4).half()),
        (torch.zeros(2, 2, 3).double(), torch.zeros(2, 2, 3), torch.zeros(2, 2, 3, 4)),
    ],
)
def test_wrong_arguments_are_refused(
    m: torch.Tensor, total: torch.Tensor, acc: torch.Tensor
) -> None:
    with pytest.raises(ValueError, match="part_"):
        merge(PartialState.empty(2, 3, 4, CPU), m, total, acc)
