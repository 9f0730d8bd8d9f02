"""Selectors by options, and the rows that choose."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from vllm_ssdkv.base.errors import ConfigError
from vllm_ssdkv.config.engine import SSDKVConfig
from vllm_ssdkv.config.request import RequestOptions
from vllm_ssdkv.connector.kv_layout import KVLayout
from vllm_ssdkv.connector.messages import Row
from vllm_ssdkv.connector.worker.selector_registry import MAX_KNOWN, SelectorGroup, SelectorRegistry
from vllm_ssdkv.sparse.protocol import Budget, Needs, Selection, Selector
from vllm_ssdkv.sparse.selection_reuse import RowSizes
from vllm_ssdkv.sparse.selectors.adaptive import AdaptiveSelector
from vllm_ssdkv.sparse.selectors.bounds import BoundsSelector
from vllm_ssdkv.sparse.selectors.codes import CodesSelector
from vllm_ssdkv.sparse.selectors.sparf import SparfSelector
from vllm_ssdkv.sparse.selectors.spread import SpreadSelector
from vllm_ssdkv.sparse.selectors.swarm import SwarmSelector
from vllm_ssdkv.sparse.selectors.window import WindowSelector
from vllm_ssdkv.store.format.slot_geometry import SlotGeometry

CPU = torch.device("cpu")
LAYOUT = KVLayout(
    ("a", "b"),
    32,
    2,
    64,
    torch.bfloat16,
    SlotGeometry("paged", 2, 2, 2, 4096),
    ranks=1,
    num_blocks=8,
)


CPU = torch.device("cpu")


def config(selector: str, **sparse: object) -> SSDKVConfig:
    options = {"mode": "page", "selector": selector, "hbm_window_tokens": 64, "sparse": sparse}
    return SSDKVConfig.from_extra_config(options)


def choice(selector: str, **sparse: object) -> SelectorGroup | None:
    return SelectorGroup.of(config(selector, **sparse), LAYOUT, CPU)


def made(selector: str, **sparse: object) -> SelectorGroup:
    found = choice(selector, **sparse)
    assert found is not None
    return found


def test_exact_has_no_choice() -> None:
    assert choice("exact") is None


def test_options_reach_the_selector() -> None:
    bounds = made("bounds", budget=0.025, floor=0.01, sink_tokens=40)
    assert isinstance(bounds.selector, BoundsSelector)
    assert (bounds.selector.budget, bounds.selector.sink_tokens) == (Budget(share=0.025), 40)
    assert bounds.exact_below == 5120
    window = made("window", budget_tokens=5000)
    assert isinstance(window.selector, WindowSelector)
    assert (window.selector.budget, window.exact_below) == (Budget(tokens=5000), 5000)
    adaptive = made("adaptive", budget=0.5, floor=0.1, mass=0.7, scorer="bounds").selector
    assert isinstance(adaptive, AdaptiveSelector)
    assert (adaptive.budget, adaptive.floor, adaptive.p) == (
        Budget(share=0.5),
        0.1,
        0.7,
    )
    assert isinstance(adaptive.scorer, BoundsSelector)
    assert not adaptive.needs.channels


def test_options_reach_spread() -> None:
    spread = made("spread", budget=0.25, sink_tokens=40).selector
    assert isinstance(spread, SpreadSelector)
    assert (spread.budget, spread.sink_tokens) == (Budget(share=0.25), 40)
    adaptive = made("adaptive", scorer="spread").selector
    assert isinstance(adaptive, AdaptiveSelector)
    assert isinstance(adaptive.scorer, SpreadSelector)
    assert adaptive.needs == spread.needs
    assert (spread.needs.spread, spread.needs.bounds, spread.needs.channels) == (True, False, 0)


def test_options_reach_sparf() -> None:
    sparf = made("sparf", budget=0.25, sink_tokens=0).selector
    assert isinstance(sparf, SparfSelector)
    assert (sparf.budget, sparf.sink_tokens) == (Budget(share=0.25), 0)
    assert (sparf.channels, sparf.granularity) == (8, "page")  # of 64 channels
    sparf = made("sparf", channels=5, granularity="token").selector
    assert isinstance(sparf, SparfSelector)
    assert (sparf.channels, sparf.granularity) == (5, "token")
    adaptive = made("adaptive", scorer="sparf", channels=16).selector
    assert isinstance(adaptive, AdaptiveSelector)
    assert isinstance(adaptive.scorer, SparfSelector)
    assert adaptive.scorer.channels == 16
    assert adaptive.needs.channels


def test_options_reach_codes() -> None:
    codes = made("codes", budget=0.25, sink_tokens=4, code_bits=4).selector
    assert isinstance(codes, CodesSelector)
    assert (codes.budget, codes.sink_tokens, codes.bits) == (Budget(share=0.25), 4, 4)
    adaptive = made("adaptive").selector
    assert isinstance(adaptive, AdaptiveSelector)
    assert isinstance(adaptive.scorer, CodesSelector)
    assert (adaptive.needs.codes, adaptive.needs.channels) == (2, 0)


def test_options_reach_swarm() -> None:
    swarm = made("swarm", budget=0.25, sink_tokens=4, scorer="bounds").selector
    assert isinstance(swarm, SwarmSelector)
    assert (swarm.budget, swarm.sink_tokens, swarm.route) == (Budget(share=0.25), 4, "members")
    assert isinstance(swarm.scorer, BoundsSelector)
    assert (swarm.needs.bounds, swarm.needs.channels, swarm.needs.clusters) == (True, 0, True)
    swarm = made("swarm", scorer="sparf", channels=16, cluster_score="medoid").selector
    assert isinstance(swarm, SwarmSelector)
    assert (swarm.needs.channels, swarm.route) == (16, "medoid")


class ChannelledSelector(WindowSelector):
    """A user's selector that reads channels."""

    version = "1"
    needs = Needs(channels=8)


def test_a_guest_whose_summaries_are_not_there_is_refused_with_the_ways_out() -> None:
    name = f"{__name__}:{ChannelledSelector.__name__}"
    wanted = f'{name} needs .*slots hold what "bounds" needs.*else to "sparf".*VLLM_PLUGINS'
    with pytest.raises(ConfigError, match=wanted):
        choice(name, scorer="bounds")


def test_prompts_count_for_those_that_will_choose_by_clusters() -> None:
    asked = RequestOptions(selector="swarm")
    rows = [replace(row(name), of_prompt=True) for name in "ab"]
    rows[1] = replace(rows[1], asked=asked)
    for selector, wanted in (("bounds", {1}), ("swarm", {0, 1})):
        options = config(selector, exact_below=0, scorer="bounds")
        registry = SelectorRegistry(options, LAYOUT, CPU)
        later = registry.later(rows)
        assert later == [0, 1]
        assert registry.clustered(rows, later) == wanted
        assert registry.clustered(rows, later[:1]) == wanted - {1}


def test_only_the_selectors_that_score_channels_ask_for_them() -> None:
    for selector, scorer, wanted in (
        ("exact", "sparf", False),
        ("bounds", "sparf", False),
        ("window", "sparf", False),
        ("adaptive", "bounds", False),
        ("adaptive", "sparf", True),
        ("sparf", "bounds", True),
        ("swarm", "bounds", False),
        ("swarm", "sparf", True),
    ):
        options = {"mode": "page", "selector": selector, "sparse": {"scorer": scorer}}
        assert SSDKVConfig.from_extra_config(options).scores_channels == wanted


def row(name: str, asked: RequestOptions | None = None, position: int = 200) -> Row:
    return Row(name, 1, 1, first_position=position, hbm_start=3, asked=asked)


def selectors(choices: SelectorRegistry | None, *rows: Row) -> dict[int, Selector]:
    assert choices is not None
    return choices.of_rows(rows, [np.arange(row.hbm_start, dtype=np.int64) for row in rows])


@pytest.mark.parametrize(("below", "wanted"), [(0, [0, 3]), (100, [3]), (201, [3]), (202, [])])
def test_rows_with_one_query_and_a_long_context_choose(below: int, wanted: list[int]) -> None:
    rows = [
        Row("a", 1, 1, first_position=50, hbm_start=1, tokens=1),
        Row("b", 2, 2, first_position=200, hbm_start=3, tokens=2),
        Row("c", 3, 3, first_position=200, hbm_start=0, tokens=1),
        Row("d", 4, 4, first_position=200, hbm_start=3, tokens=1),
        Row("e", 5, 5, first_position=300, hbm_start=3, tokens=1, of_prompt=True),
    ]
    choices = SelectorRegistry.of(config("bounds", exact_below=below, dense_layers=2), LAYOUT, CPU)
    assert choices is not None
    assert (choices.dense_layers, choices.page_tokens) == (2, 16)
    assert list(selectors(choices, *rows)) == wanted


def test_requests_choose_for_themselves() -> None:
    quarter, tokens = RequestOptions(budget=0.25), RequestOptions(budget_tokens=150)
    found = selectors(
        SelectorRegistry.of(config("bounds", exact_below=0), LAYOUT, CPU),
        row("a"),
        row("b", quarter),
        row("c", RequestOptions(selector="exact")),
        row("d", RequestOptions(selector="adaptive", budget=0.5)),
        row("e", RequestOptions(budget=0.25)),
        row("f", tokens),
        row("g"),
    )
    assert list(found) == [0, 1, 3, 4, 5, 6]
    assert found[0] is found[6]
    assert found[1] is found[4]
    assert isinstance(found[1], BoundsSelector)
    assert found[1].budget == Budget(share=0.25)
    assert isinstance(found[3], AdaptiveSelector)
    assert found[3].budget == Budget(share=0.5)
    assert isinstance(found[5], BoundsSelector)
    assert found[5].budget == Budget(tokens=150)


def test_a_budget_of_its_own_has_a_length_of_its_own_from_which_on_it_pays() -> None:
    choices = SelectorRegistry.of(config("bounds", budget=0.025, floor=0.01), LAYOUT, CPU)
    asked = RequestOptions(budget=0.03125)
    rows = row("a", position=5118), row("b", asked, position=4094), row("c", asked, position=4095)
    assert list(selectors(choices, *rows)) == [2]
    assert list(selectors(choices, row("a", position=5119))) == [0]


def test_adaptive_scores_by_what_the_store_holds() -> None:
    asked = RequestOptions(selector="adaptive")
    for selector, scorer in (("sparf", SparfSelector), ("window", BoundsSelector)):
        (found,) = selectors(
            SelectorRegistry.of(config(selector, exact_below=0), LAYOUT, CPU), row("a", asked)
        ).values()
        assert isinstance(found, AdaptiveSelector)
        assert isinstance(found.scorer, scorer)


def test_many_different_choices_are_not_kept_for_ever() -> None:
    choices = SelectorRegistry.of(config("bounds", exact_below=0), LAYOUT, CPU)
    assert choices is not None
    for tokens in range(100, 100 + 2 * MAX_KNOWN):
        selectors(choices, row("a", RequestOptions(budget_tokens=tokens)))
    assert len(choices._asked) == MAX_KNOWN


def test_what_a_request_chose_is_kept_if_the_options_say_so() -> None:
    once = SelectorRegistry.of(config("bounds"), LAYOUT, CPU)
    assert once is not None
    assert once.kept is None
    once.drop("a")
    choices = SelectorRegistry.of(
        config("bounds", reuse_steps=4, reuse_similarity=0.5), LAYOUT, CPU
    )
    assert choices is not None
    assert choices.kept is not None
    assert choices.kept.steps == 4
    nothing = Selection(np.zeros(0, np.int32), np.zeros(3, np.int32), np.ones((1, 2), np.float32))
    sizes = RowSizes(np.array([99]), np.array([6]), np.array([0]))
    choices.kept.select(0, ["a"], sizes, torch.ones(1, 4, 64), lambda _: nothing)
    assert len(choices.kept) == 1
    choices.drop("a")
    assert len(choices.kept) == 0
