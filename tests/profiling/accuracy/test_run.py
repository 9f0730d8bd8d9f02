"""A run over real text: how it is carried over, and what its requests choose."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from vllm_ssdkv.config.engine import SSDKVConfig
from vllm_ssdkv.config.request import RequestOptions
from vllm_ssdkv.profiling.accuracy.run import AccuracyRun
from vllm_ssdkv.profiling.recall.bench import SPARSE


def plan_of(selector: str, place: Path) -> AccuracyRun:
    return AccuracyRun(
        model=str(place),
        stores=(str(place),),
        capacity=64 << 20,
        dram_bytes=64 << 20,
        window=256,
        selector=selector,
        suites=(("text", 8192), ("json", 2048)),
        questions=4,
        budgets=(0.05, 0.02),
        dense=str(place),
        sparse={"mass": 0.8},
        block_tokens=128,
    )


@pytest.mark.parametrize("selector", ["exact", *SPARSE])
def test_it_is_carried_over_and_its_options_are_valid(selector: str, tmp_path: Path) -> None:
    plan = plan_of(selector, tmp_path)
    assert AccuracyRun.from_json(plan.to_json()) == plan
    config = SSDKVConfig.from_extra_config(plan.engine().options())
    assert (config.selector, config.exact_below, config.sparse.mass) == (selector, 0, 0.8)
    for share in plan.budgets:
        for beside in (False, True):
            asked = replace(plan, beside_window=beside).asked(share, 8192)
            assert bool(asked) == (selector != "exact")
            RequestOptions.of(asked, config)


def test_a_budget_is_a_share_of_all_or_comes_on_top_of_the_window(tmp_path: Path) -> None:
    plan = plan_of("bounds", tmp_path)
    assert plan.asked(0.05, 8192) == {"budget": 0.05}
    # 256 tokens and half of a block of 128 are held.
    beside = replace(plan, beside_window=True)
    assert beside.asked(0.05, 8192) == {"budget_tokens": 320 + round(0.05 * (8192 - 320))}
    assert beside.asked(0.05, 300) == {"budget_tokens": 300}
