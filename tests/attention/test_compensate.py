"""SparQ's last step: natively and by torch, and what does not fit."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_ssdkv import _kernels
from vllm_ssdkv.attention.compensate import compensate, mix_on_device
from vllm_ssdkv.kernels.operands.block_layout import PartialState

TOKENS = 6
Mix = Callable[..., None]


def state_of(heads: int, head_size: int) -> PartialState:
    return PartialState(
        torch.randn(TOKENS, heads),
        torch.rand(TOKENS, heads) + 0.5,
        torch.randn(TOKENS, heads, head_size),
    )


def copied(state: PartialState) -> PartialState:
    return PartialState(state.m.clone(), state.l.clone(), state.acc.clone())


@given(
    st.lists(st.integers(0, TOKENS - 1), unique=True),
    st.sampled_from([(1, 1), (2, 1), (4, 2), (6, 2)]),
    st.integers(1, 9),
)
def test_both_ways_give_the_same(rows: list[int], heads: tuple[int, int], head_size: int) -> None:
    state = state_of(heads[0], head_size)
    index = torch.tensor(rows, dtype=torch.int64)
    alpha, mean = torch.rand(len(rows), heads[0]), torch.randn(len(rows), heads[1], head_size)
    native, by_torch = copied(state), copied(state)
    compensate(native, index, alpha, mean)
    mix_on_device(by_torch, index, alpha, mean)
    torch.testing.assert_close(native.acc, by_torch.acc, atol=1e-6, rtol=1e-6)
    assert torch.equal(native.l, state.l)
    assert torch.equal(native.m, state.m)
    others = [token for token in range(TOKENS) if token not in rows]
    assert torch.equal(native.acc[others], state.acc[others])


@pytest.mark.parametrize(
    ("rows", "alpha", "mean"),
    [
        ([0], (1, 3), (1, 2, 8)),
        ([0], (2, 4), (1, 2, 8)),
        ([0, 1], (1, 4), (1, 2, 8)),
        ([0], (1, 4), (1, 3, 8)),
    ],
)
def test_shapes_that_do_not_fit(
    rows: list[int], alpha: tuple[int, ...], mean: tuple[int, ...]
) -> None:
    with pytest.raises(ValueError, match="do not belong together"):
        compensate(state_of(4, 8), torch.tensor(rows), torch.zeros(alpha), torch.zeros(mean))


def test_the_native_call_stays_within_the_state() -> None:
    state = state_of(2, 4)
    alpha, mean = np.zeros((1, 2), np.float32), np.zeros((1, 1, 4), np.float32)
    for token in (-1, TOKENS):
        with pytest.raises(ValueError, match="outside"):
            _kernels.compensate(state.bound, np.array([token]), alpha, mean, None)


@pytest.mark.parametrize("mix", [compensate, mix_on_device])
@pytest.mark.parametrize("logit", [-50.0, 0.0, 3.0, 30.0])
def test_a_sink_is_no_token_that_is_missing(logit: float, mix: Mix) -> None:
    """Of 40 keys 10 are attended to, beside a sink. By their true masses."""
    draw = torch.Generator().manual_seed(1)
    logits = torch.randn(2, 40, generator=draw, dtype=torch.float64) * 2
    values = torch.randn(40, 8, generator=draw, dtype=torch.float64)
    sinks = torch.tensor([logit, logit - 1], dtype=torch.float64)
    weights, sink = logits.exp(), sinks.exp()
    some, everything = weights[:, :10].sum(1), weights.sum(1)
    alpha = (some + sink) / (everything + sink)
    attended = weights[:, :10] @ values[:10] / (some + sink)[:, None]
    wanted = alpha[:, None] * attended + (1 - alpha)[:, None] * values.mean(0)

    top = torch.maximum(logits[:, :10].amax(1), sinks)
    scaled = (logits[:, :10] - top[:, None]).exp()
    state = PartialState(
        top[None].float(),
        (scaled.sum(1) + (sinks - top).exp())[None].float(),
        (scaled @ values[:10])[None].float(),
    )
    share, mean = (some / everything)[None].float(), values.mean(0)[None, None].float()
    mix(state, torch.tensor([0]), share, mean, sinks)
    torch.testing.assert_close(
        (state.acc / state.l[..., None])[0].double(), wanted, atol=1e-5, rtol=1e-5
    )
