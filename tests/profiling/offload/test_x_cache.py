"""The X-cache's model of a step, and the projection that is measured for it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_ssdkv.profiling.offload.published import x_gain, x_share
from vllm_ssdkv.profiling.offload.rig import Sizes
from vllm_ssdkv.profiling.offload.x_cache import (
    GRID,
    XStep,
    flop_per_token,
    measure_projection,
)

RATES = st.floats(1e6, 1e12)


def test_without_a_limit_of_the_accelerator_the_share_is_that_of_the_closed_form() -> None:
    step = XStep(kv_bytes=1e9, x_bytes=5e8, flop=1.0, drives=3e9, link=1e9, projection=1e15)
    assert step.best() == x_share(3, 1) == 0.5
    assert step.seconds(0) / step.seconds(0.5) == pytest.approx(x_gain(3, 1))


@pytest.mark.parametrize("times", [2.0, 2.5, 4.0])
def test_x_is_not_stored_where_it_is_no_smaller(times: float) -> None:
    """Mixtral, Qwen2.5-32B, Llama-3.1-70B."""
    step = XStep(
        kv_bytes=1e9, x_bytes=times * 1e9, flop=1.0, drives=1e9, link=1e12, projection=1e15
    )
    assert step.best() == 0


@given(drives=RATES, link=RATES, projection=st.floats(1e9, 1e15), x=st.floats(0.5, 4))
def test_no_share_is_better_than_the_best(
    drives: float, link: float, projection: float, x: float
) -> None:
    step = XStep(1e9, x * 1e9, 1e12, drives, link, projection)
    assert step.seconds(step.best()) == min(
        step.seconds(i / GRID) for i in range(GRID + 1) if x < 1 or i == 0
    )
    slower = XStep(1e9, x * 1e9, 1e12, drives, link, projection / 10)
    assert slower.best() <= step.best()


def test_flop_of_heads_with_kv_of_their_own() -> None:
    sizes = Sizes(layers=2, kv_heads=4, queries_per_kv=1, head_size=8)
    assert flop_per_token(sizes) == 4 * sizes.hidden**2
    one, two = measure_projection(sizes, 32, [1, 2])
    assert one["flop"] == 32 * 2 * 4 * 32**2
    assert two["flop"] == 2 * one["flop"]
    assert one["project_s"] > 0
