"""Share of the contexts that is stored as X: least of the longest of three times."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_ssdkv.offload.xcache.x_rule import GRID, XRates, XShape, best_share, times, why

MHA = XShape(hidden=4096, kv_heads=32, head_size=128, itemsize=2)

rates = st.builds(XRates, *[st.floats(1e6, 1e13) for _ in range(2)], st.floats(1e9, 1e16))
shapes = st.builds(
    XShape, st.integers(1, 16384), st.integers(1, 128), st.sampled_from([64, 128]), st.just(2)
)


@pytest.mark.parametrize(
    ("name", "shape", "ratio"),
    [
        ("Llama-3.1-70B", XShape(8192, 8, 128, 2), 4.0),
        ("Qwen2.5-32B", XShape(5120, 8, 128, 2), 2.5),
        ("Mixtral-8x7B", XShape(4096, 8, 128, 2), 2.0),
    ],
)
def test_grouped_queries_leave_nothing_to_gain(name: str, shape: XShape, ratio: float) -> None:
    assert shape.x_bytes / shape.kv_bytes == ratio
    assert not shape.pays
    assert best_share(shape, XRates(1e9, 1e12, 1e16)) == 0.0


def test_without_grouped_queries_x_is_half_and_takes_four_h_squared() -> None:
    assert MHA.x_bytes * 2 == MHA.kv_bytes
    assert MHA.flop == 4 * MHA.hidden**2


def closed_form(storage: float, link: float) -> float:
    """The paper's: drives and link end together, and the accelerator takes no time."""
    return min(1.0, 2 * link / (storage + link))


def test_closed_form_at_a_ratio_of_three() -> None:
    assert best_share(MHA, XRates(3e9, 1e9, math.inf)) == 0.5


@given(storage=st.floats(1e8, 1e12), link=st.floats(1e8, 1e12))
def test_the_grid_meets_the_closed_form_where_arithmetic_is_free(
    storage: float, link: float
) -> None:
    found = best_share(MHA, XRates(storage, link, math.inf))
    assert abs(found - closed_form(storage, link)) <= 1 / GRID


@given(shape=shapes, rates=rates)
def test_no_share_of_the_grid_ends_sooner(shape: XShape, rates: XRates) -> None:
    found = best_share(shape, rates)
    assert 0 <= found <= 1
    if not shape.pays:
        assert found == 0
        return
    longest = times(shape, rates, found).longest
    assert all(times(shape, rates, i / GRID).longest >= longest for i in range(GRID + 1))


@given(rates=rates, factor=st.floats(1, 100))
def test_a_faster_accelerator_or_link_never_lowers_it(rates: XRates, factor: float) -> None:
    found = best_share(MHA, rates)
    assert best_share(MHA, XRates(rates.storage, rates.link, rates.flops * factor)) >= found
    assert best_share(MHA, XRates(rates.storage, rates.link * factor, rates.flops)) >= found


@given(rates=rates)
def test_it_is_never_slower_than_without(rates: XRates) -> None:
    share = best_share(MHA, rates)
    assert times(MHA, rates, share).longest <= times(MHA, rates, 0.0).longest


def test_the_log_has_the_times() -> None:
    text = why(MHA, XRates(3e9, 1e9, 1e15), 0.5)
    assert "storage 4.1 ms" in text
    assert "the link 4.1 ms" in text
    assert "5.5 ms without X" in text


@pytest.mark.parametrize(
    ("hidden", "kv_heads", "head_size", "blocks"),
    [(4096, 32, 128, 2), (3072, 16, 256, 2), (3840, 8, 256, 1), (1024, 32, 128, 8)],
    ids=["Llama 2 7B", "Gemma 7B", "Gemma 3 12B", "narrow"],
)
def test_as_many_blocks_share_a_slot_as_fit_and_stay_in_the_window(
    hidden: int, kv_heads: int, head_size: int, blocks: int
) -> None:
    shape = XShape(hidden, kv_heads, head_size, 2)
    assert shape.blocks_per_slot(16, 4096) == blocks
    for window in range(1, 200):
        found = shape.blocks_per_slot(16, window)
        # When the last block is full, the first one has a token in the window of the next query.
        assert (found - 1) * 16 < window
        assert found == blocks or found * 16 >= window
