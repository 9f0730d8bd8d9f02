"""Choice of pages on the device against the oracle."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.oracles import sparse_attention as oracle
from vllm_ssdkv.triton_kernels import choose as module
from vllm_ssdkv.triton_kernels.choose import choose, weigh


@given(
    lists=st.lists(
        st.lists(st.sampled_from([-2.0, -0.0, 0.0, 0.25, 1.0, 3.0]), max_size=20),
        min_size=1,
        max_size=3,
    ),
    heads=st.integers(1, 2),
    sinks=st.integers(0, 4),
    least=st.integers(-1, 9),
    most=st.integers(-1, 25),
    p=st.sampled_from([0.125, 0.5, 0.875, 1.0]),
    window=st.sampled_from([0.0, 0.25, 0.5]),
    tile=st.sampled_from([8, 1024]),
)
@settings(max_examples=25, deadline=None)
def test_choice_is_the_oracles(
    lists: list[list[float]],
    heads: int,
    sinks: int,
    least: int,
    most: int,
    p: float,
    window: float,
    tile: int,
) -> None:
    """Masses are powers of two, so that sums are exact in any order; lines take several tiles."""
    rows, width = len(lists), max(len(x) for x in lists) + 3
    score = torch.full((rows, heads, width), torch.nan)
    for row, x in enumerate(lists):
        for head in range(heads):
            score[row, head, : len(x)] = torch.tensor(x if head == 0 else x[::-1])
    mass = torch.full_like(score, 1 / 32)
    mass[..., ::3] = 1 / 16
    low, high = min(least, most), most
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "TILE", tile)
        pages, count, covered = choose(
            score,
            mass,
            torch.full((rows, heads), window),
            torch.tensor([len(x) for x in lists], dtype=torch.int32),
            torch.full((rows,), low, dtype=torch.int32),
            torch.full((rows,), high, dtype=torch.int32),
            max_chosen=max(1, high),
            sinks=sinks,
            p=p,
        )
    for row, x in enumerate(lists):
        for head in range(heads):
            want, share = oracle.choose(
                x if head == 0 else x[::-1],
                mass[row, head, : len(x)].tolist(),
                window,
                sinks=sinks,
                least=max(0, low),
                most=max(0, high),
                p=p,
            )
            assert pages[row, head, : count[row, head]].tolist() == want
            assert float(covered[row, head]) == share


def test_broken_scores_are_chosen_first() -> None:
    score = torch.tensor([[[3.0, torch.nan, 2.0, torch.inf, torch.nan, 1.0]]])
    columns = torch.tensor([6], dtype=torch.int32)
    for number, want in ((1, [1]), (2, [1, 3]), (4, [0, 1, 3, 4])):
        most = torch.tensor([number], dtype=torch.int32)
        pages, count, _ = choose(
            score, torch.zeros_like(score), torch.zeros(1, 1), columns, most, most, max_chosen=5
        )
        assert pages[0, 0, : int(count)].tolist() == want


@given(
    kv_heads=st.integers(1, 2),
    group=st.integers(1, 5),
    pages=st.integers(0, 40),
    spread=st.sampled_from([0.1, 3.0, 40.0]),
    windowed=st.booleans(),
    seed=st.integers(0, 999),
)
@settings(max_examples=12, deadline=None)
def test_weights_are_the_oracles(
    kv_heads: int, group: int, pages: int, spread: float, windowed: bool, seed: int
) -> None:
    draw = torch.Generator().manual_seed(seed)
    logits = torch.full((2, kv_heads * group, pages + 5), -torch.inf)
    logits[:, :, :pages] = torch.randn((2, kv_heads * group, pages), generator=draw) * spread
    lse = torch.randn((2, kv_heads * group), generator=draw) if windowed else None
    weights, window, total = weigh(logits, lse, kv_heads, 16)
    counted = logits.double() + math.log(16)
    if lse is not None:
        counted = torch.cat([counted, lse.double()[:, :, None]], -1)
    torch.testing.assert_close(total.double(), counted.logsumexp(-1), atol=1e-5, rtol=1e-5)
    assert not weights[:, :, pages:].any()
    for row in range(2):
        want, share = oracle.page_weights(
            logits[row, :, :pages], kv_heads, 16, None if lse is None else lse[row]
        )
        torch.testing.assert_close(weights[row, :, :pages].double(), want, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(window[row].double(), share.nan_to_num(0), atol=1e-5, rtol=1e-4)


def test_wrong_shapes_are_refused() -> None:
    score, one = torch.zeros(1, 2, 3), torch.ones(1, dtype=torch.int32)
    with pytest.raises(ValueError, match="window_mass"):
        choose(score, score, torch.zeros(1, 1), one, one, one, max_chosen=1)
    with pytest.raises(ValueError, match="KV heads"):
        weigh(torch.zeros(1, 3, 2), None, 2, 16)
    with pytest.raises(ValueError, match="window_lse"):
        weigh(torch.zeros(1, 4, 2), torch.zeros(1, 3), 2, 16)
