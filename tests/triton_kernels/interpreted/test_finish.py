"""The kernel that ends an online softmax."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_ssdkv.kernels.operands.block_layout import PartialState, Softmax
from vllm_ssdkv.triton_kernels.finish import finish


def random_state(tokens: int, heads: int, size: int, seed: int) -> PartialState:
    """A state of which a third of the queries have seen nothing."""
    random = torch.Generator().manual_seed(seed)
    m = torch.randn((tokens, heads), generator=random) * 10
    total = torch.rand((tokens, heads), generator=random) + 0.1
    acc = torch.randn((tokens, heads, size), generator=random)
    blind = torch.rand((tokens, heads), generator=random) < 1 / 3
    return PartialState(
        m.masked_fill(blind, -torch.inf),
        total.masked_fill(blind, 0.0),
        acc.masked_fill(blind[..., None], 0.0),
    )


@settings(max_examples=25, deadline=None)
@given(
    st.integers(0, 6),
    st.integers(1, 5),
    st.sampled_from([1, 3, 16, 40]),
    st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    st.booleans(),
    st.sampled_from([1.0, 0.3]),
    st.integers(0, 2**31),
)
def test_equals_the_quotient(
    tokens: int, heads: int, size: int, dtype: torch.dtype, with_lse: bool, scale: float, seed: int
) -> None:
    state = replace(random_state(tokens, heads, size, seed), softmax=Softmax(value_scale=scale))
    # A slice of a wider output: what lies beside it must stay.
    wide = torch.full((tokens, heads + 2, size), torch.nan, dtype=dtype)
    out = wide[:, 1:-1]
    lse = torch.full((tokens, heads), torch.nan) if with_lse else None
    finish(state, out, lse)
    seen = state.l > 0
    divisor = torch.where(seen, state.l, 1.0)
    torch.testing.assert_close(out, (state.acc / divisor[..., None] * scale).to(dtype))
    assert wide[:, 0].isnan().all()
    assert wide[:, -1].isnan().all()
    if lse is not None:
        torch.testing.assert_close(lse, torch.where(seen, state.m + divisor.log(), -torch.inf))


@pytest.mark.parametrize(
    ("out", "lse", "message"),
    [
        (torch.zeros(2, 3, 5), None, "out must be"),
        (torch.zeros(1, 3, 4), None, "out must be"),
        (torch.zeros(2, 3, 4, dtype=torch.float64), None, "out must be"),
        (torch.zeros(2, 3, 8)[..., ::2], None, "out must be"),
        (torch.zeros(2, 3, 4), torch.zeros(2, 4), "lse must be"),
        (torch.zeros(2, 3, 4), torch.zeros(2, 3).half(), "lse must be"),
    ],
)
def test_wrong_arguments_are_refused(
    out: torch.Tensor, lse: torch.Tensor | None, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        finish(random_state(2, 3, 4, seed=1), out, lse)
