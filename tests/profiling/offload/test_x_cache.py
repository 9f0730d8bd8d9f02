"""The X-cache's model of a step, and the projection that is measured for it."""

from __future__ import annotations

import pytest

from vllm_ssdkv.offload.xcache.x_rule import XRates, XShape
from vllm_ssdkv.profiling.offload.rig import Sizes
from vllm_ssdkv.profiling.offload.x_cache import XStep, measure_projection, shape_of

SHAPE = XShape(hidden=512, kv_heads=4, head_size=128, itemsize=2)


def test_without_a_limit_of_the_accelerator_the_share_is_that_of_the_closed_form() -> None:
    step = XStep(SHAPE, XRates(storage=3e9, link=1e9, flops=1e18), tokens=1000)
    # Drives read 1 - alpha / 2 at 3, the link carries alpha / 2 at 1: both end together.
    assert step.best() == 0.5
    assert step.seconds(0) / step.seconds(0.5) == pytest.approx(4 / 3)
    assert step.seconds(0) == pytest.approx(1000 * SHAPE.kv_bytes / 3e9)
    assert step.seconds(0.5) == max(step.parts(0.5))


def test_flop_of_heads_with_kv_of_their_own() -> None:
    sizes = Sizes(layers=2, kv_heads=4, queries_per_kv=1, head_size=8)
    assert shape_of(sizes).flop == 4 * sizes.hidden**2
    one, two = measure_projection(sizes, 32, [1, 2])
    assert one["flop"] == 32 * 2 * 4 * 32**2
    assert two["flop"] == 2 * one["flop"]
    assert one["project_s"] > 0
