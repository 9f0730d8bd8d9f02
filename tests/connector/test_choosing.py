"""Which selector the options mean, and who chooses."""

from __future__ import annotations

import numpy as np
import pytest

from vllm_ssdkv.config import SSDKVConfig
from vllm_ssdkv.connector.choosing import Choice
from vllm_ssdkv.connector.messages import Row
from vllm_ssdkv.selection.adaptive import AdaptiveSelector
from vllm_ssdkv.selection.bounds import BoundsSelector
from vllm_ssdkv.selection.protocol import Budget
from vllm_ssdkv.selection.window import WindowSelector


def choice(selector: str, **sparse: object) -> Choice | None:
    options = {"mode": "page", "selector": selector, "hbm_window_tokens": 64, "sparse": sparse}
    return Choice.of(SSDKVConfig.from_extra_config(options))


def made(selector: str, **sparse: object) -> Choice:
    found = choice(selector, **sparse)
    assert found is not None
    return found


def test_exact_has_no_choice() -> None:
    assert choice("exact") is None


def test_options_reach_the_selector() -> None:
    bounds = made("bounds", budget=0.25, sink_tokens=40, dense_layers=2)
    assert isinstance(bounds.selector, BoundsSelector)
    assert (bounds.selector.budget, bounds.selector.sink_tokens) == (Budget(share=0.25), 40)
    assert (bounds.dense_layers, bounds.exact_below, bounds.page_tokens) == (2, 512, 16)
    window = made("window", budget_tokens=300)
    assert isinstance(window.selector, WindowSelector)
    assert (window.selector.budget, window.exact_below) == (Budget(tokens=300), 300)
    adaptive = made("adaptive", budget=0.5, floor=0.1, mass=0.7).selector
    assert isinstance(adaptive, AdaptiveSelector)
    assert (adaptive.cap, adaptive.floor, adaptive.p) == (Budget(share=0.5), Budget(share=0.1), 0.7)


@pytest.mark.parametrize(("below", "wanted"), [(0, [0, 3]), (100, [3]), (201, [3]), (202, [])])
def test_rows_with_one_query_and_a_long_context_choose(below: int, wanted: list[int]) -> None:
    rows = [
        Row("a", 1, 1, first_position=50, hbm_start=1, tokens=1),
        Row("b", 2, 2, first_position=200, hbm_start=3, tokens=2),
        Row("c", 3, 3, first_position=200, hbm_start=0, tokens=1),
        Row("d", 4, 4, first_position=200, hbm_start=3, tokens=1),
    ]
    contexts = [np.arange(row.hbm_start, dtype=np.int64) for row in rows]
    assert made("bounds", exact_below=below).rows(rows, contexts) == wanted
