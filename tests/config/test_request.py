"""Options of requests, and the answers to those that a request may not choose."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope

from vllm_ssdkv.base.errors import ConfigError
from vllm_ssdkv.base.metrics import Counters
from vllm_ssdkv.config.engine import SSDKVConfig
from vllm_ssdkv.config.offload import OffloadConfig
from vllm_ssdkv.config.request import RequestOptions, servable
from vllm_ssdkv.config.sparse import SparseConfig
from vllm_ssdkv.connector.scheduler.request_overrides import EXACT, RequestOverrides


def config(selector: str = "bounds", **sparse: object) -> SSDKVConfig:
    options = {"mode": "page", "selector": selector, "hbm_window_tokens": 64, "sparse": sparse}
    return SSDKVConfig.from_extra_config(options)


CONFIG = config()


def test_what_a_request_chooses_goes_before_the_options() -> None:
    asked = RequestOptions.of({"budget": 0.5}, CONFIG)
    applied = asked.applied(config(budget_tokens=200))
    assert (applied.selector, applied.sparse.budget) == ("bounds", 0.5)
    assert applied.sparse.budget_tokens is None
    applied = RequestOptions.of({"selector": "window", "budget_tokens": 100}, CONFIG).applied(
        CONFIG
    )
    assert (applied.selector, applied.sparse.budget_tokens) == ("window", 100)
    applied = RequestOptions.of({}, CONFIG).applied(CONFIG)
    assert (applied.selector, applied.sparse.budget) == (CONFIG.selector, CONFIG.sparse.budget)


@pytest.mark.parametrize(
    ("selector", "sparse", "wanted"),
    [
        ("exact", {}, {"exact"}),
        ("bounds", {}, {"exact", "bounds", "adaptive", "swarm", "window"}),
        ("window", {}, {"exact", "bounds", "adaptive", "swarm", "window"}),
        ("spread", {}, {"exact", "spread", "adaptive", "swarm", "window"}),
        ("adaptive", {"scorer": "spread"}, {"exact", "spread", "adaptive", "swarm", "window"}),
        ("codes", {}, {"exact", "codes", "adaptive", "swarm", "window"}),
        ("sparf", {}, {"exact", "sparf", "adaptive", "swarm", "window"}),
        ("adaptive", {"scorer": "sparf"}, {"exact", "sparf", "adaptive", "swarm", "window"}),
    ],
)
def test_selectors_that_a_store_can_serve(
    selector: str, sparse: dict[str, object], wanted: set[str]
) -> None:
    options = config(selector, **sparse)
    assert set(servable(options)) == wanted
    for name in ("exact", "bounds", "spread", "codes", "sparf", "adaptive", "swarm", "window"):
        if name in wanted:
            applied = RequestOptions.of({"selector": name}, options).applied(options)
            assert applied.selector == name
            assert name in {"exact", "window"} or applied.scorer == options.scorer
        else:
            with pytest.raises(ConfigError, match=f'"{name}" is not what .* possible here: exact'):
                RequestOptions.of({"selector": name}, options)


def test_a_request_has_its_own_budget_for_a_selector_of_ones_own() -> None:
    """It cannot name the class, and need not."""
    options = config("bounds").model_copy(update={"selector": "guests.passages:PassageSelector"})
    asked = RequestOptions.of({"budget": 0.5}, options)
    applied = asked.applied(options)
    assert (applied.selector, applied.sparse.budget) == (options.selector, 0.5)
    with pytest.raises(ConfigError, match="named in the engine's configuration only"):
        RequestOptions.of({"selector": options.selector}, options)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"budgte": 0.5}, "budgte: unknown option; did you mean budget?"),
        ({"selector": "quest"}, 'selector: got "quest"; allowed: "exact" or "bounds"'),
        ({"selector": 7}, "selector: got 7"),
        ({"budget": 0}, "budget: got 0; allowed: a number, above 0 and at most 1"),
        ({"budget": 1.5}, "budget: got 1.5"),
        ({"budget": math.nan}, "budget"),
        ({"budget": "0.5"}, 'budget: got "0.5"'),
        ({"budget_tokens": 64}, "not more than hbm_window_tokens"),
        ({"budget": 0.5, "budget_tokens": 500}, "give one of them"),
        ({"selector": "exact", "budget": 0.5}, "give no budget"),
        ({"retain": "1 hour"}, 'retain: got "1 hour"; not a whole number followed by s, m, h or d'),
        ({"retain": "31d"}, 'more than 30d; allowed: a duration such as "90s"'),
        ({"retain": "0s"}, "retain"),
        ({"retain": 60}, "retain: got 60"),
        ("sparf", "object"),
        ([], "object"),
        ({"budget": {1, 2}}, "not a JSON object"),
    ],
)
def test_what_is_wrong_is_said(given: object, text: str) -> None:
    with pytest.raises(ConfigError) as error:
        RequestOptions.of(given, CONFIG)
    assert text in str(error.value)


def request(name: str, params: object, hints: object = None) -> Any:  # noqa: ANN401 - vLLM's
    return SimpleNamespace(request_id=name, kv_transfer_params=params, kv_hints=hints)


def test_a_request_that_cannot_have_what_it_wants_is_exact_and_told_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    counters = Counters()
    asked = RequestOverrides(CONFIG, counters)
    asked.arrived(request("good", {"ssdkv": {"budget": 0.5}}))
    asked.arrived(request("bad", {"ssdkv": {"budget\n": 2}}))
    asked.arrived(request("other", {"do_remote_prefill": False}))
    asked.arrived(request("none", None))
    assert asked.of("good") == RequestOptions(budget=0.5)
    assert asked.of("bad") == EXACT
    assert asked.of("other") is asked.of("none") is None
    assert counters.total("sparse_requests_refused") == 1
    (record,) = caplog.records
    assert "bad gets exact attention" in record.getMessage()
    assert "\n" not in record.getMessage()
    assert asked.ended("good") == {"ssdkv": {"selector": "bounds", "budget": 0.5}}
    told = asked.ended("bad")
    assert told is not None
    assert told["ssdkv"]["selector"] == "exact"
    assert "unknown option" in told["ssdkv"]["error"]
    assert asked.ended("other") is asked.ended("none") is asked.ended("bad") is None
    assert len(asked) == 0


def retaining(*directives: object, kind: str = "kv.retain") -> KvHintsEnvelope:
    action = KvHintAction("1", kind, "1.0", {"directives": list(directives)})
    return KvHintsEnvelope("0.1", "message", [action])


def test_what_a_request_has_retained() -> None:
    asked = RequestOverrides(CONFIG, Counters())
    asked.arrived(request("hour", {"ssdkv": {"retain": "1h", "selector": "window"}}))
    asked.arrived(request("plain", {"ssdkv": {"selector": "window"}}))
    asked.arrived(request("hint", None, retaining({"duration": 2.5}, {"duration": 1})))
    asked.arrived(request("ever", None, retaining({"priority": 100, "duration": None})))
    asked.arrived(request("null", None, retaining({"priority": None, "duration": 60})))
    asked.arrived(request("both", {"ssdkv": {"retain": "1m"}}, retaining({"duration": 90})))
    asked.arrived(request("other", None, retaining({"duration": "?"}, kind="kv.fetch")))
    asked.arrived(request("free", None, retaining({"priority": 0, "duration": 60})))
    asked.arrived(request("least", None, retaining({"priority": -1}, {"priority": -0.5})))
    assert asked.retained_s("null") == 60
    names = ("hour", "plain", "hint", "ever", "both", "other", "free", "least", "none")
    assert [asked.retained_s(name) for name in names] == [3600, 0, 3, 30 * 86400, 90, 0, 0, 0, 0]
    assert asked.of("hour") == asked.of("plain"), "workers tell choices apart, not times"
    assert asked.ended("hour") == {"ssdkv": {"selector": "window", "retain": "3600s"}}
    assert asked.ended("both") == {"ssdkv": {"selector": "bounds", "retain": "90s"}}
    assert asked.ended("hint") is None
    assert asked.retained_s("hint") == 0
    for name in ("plain", "ever", "null", "other", "free", "least"):
        asked.ended(name)
    assert len(asked) == 0


@pytest.mark.parametrize(
    "directive",
    [
        1,
        {"duration": 0},
        {"duration": "1h"},
        {"duration": math.nan},
        {"duration": True},
        {"duration": 1e9},
        {"priority": "high"},
        {"priority": True},
    ],
)
def test_a_hint_that_is_none_is_said(directive: object) -> None:
    counters = Counters()
    asked = RequestOverrides(CONFIG, counters)
    asked.arrived(request("a", None, retaining(directive)))
    assert asked.retained_s("a") == 0
    assert counters.total("sparse_requests_refused") == 1
    told = asked.ended("a")
    assert told is not None
    assert "kv.retain" in told["ssdkv"]["error"]
    assert told["ssdkv"]["selector"] == "bounds", "it chooses as the engine does"


def test_hints_that_are_too_many_are_said() -> None:
    """As many as are looked at retain; one more is refused, and counted."""
    counters = Counters()
    asked = RequestOverrides(CONFIG, counters)
    long, short = {"duration": 9}, {"duration": 5}
    asked.arrived(request("most", None, retaining(*[short] * 63, long)))
    asked.arrived(request("directives", None, retaining(*[short] * 64, long)))
    (action,) = retaining(short).actions
    for name, count in (("all", 64), ("actions", 65)):
        asked.arrived(request(name, None, KvHintsEnvelope("0.1", "message", [action] * count)))
    names = ("most", "directives", "all", "actions")
    assert [asked.retained_s(name) for name in names] == [9, 0, 5, 0]
    assert counters.total("sparse_requests_refused") == 2
    for name in ("directives", "actions"):
        told = asked.ended(name)
        assert told is not None
        assert f"65 {name}" in told["ssdkv"]["error"]
        assert "send fewer" in told["ssdkv"]["error"]


def test_a_request_with_an_error_retains_nothing() -> None:
    asked = RequestOverrides(CONFIG, Counters())
    asked.arrived(request("a", {"ssdkv": {"retain": "1h"}}, retaining(1)))
    assert asked.retained_s("a") == 0
    told = asked.ended("a")
    assert told is not None
    assert told["ssdkv"].keys() == {"selector", "error"}


def test_an_engine_whose_share_is_none_refuses_to_retain() -> None:
    asked = RequestOverrides(CONFIG.model_copy(update={"retain_share": 0.0}), Counters())
    asked.arrived(request("a", {"ssdkv": {"retain": "1h"}}))
    assert asked.retained_s("a") == 0
    told = asked.ended("a")
    assert told is not None
    assert "retains no blocks, by its option retain_share" in told["ssdkv"]["error"]


def test_an_engine_without_a_store_of_its_own_retains_nothing_and_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    counters = Counters()
    asked = RequestOverrides(CONFIG, counters, retains=False)
    asked.arrived(request("a", {"ssdkv": {"retain": "1h"}}))
    asked.arrived(request("b", None, retaining({"duration": 5})))
    assert [asked.retained_s(name) for name in "ab"] == [0, 0]
    assert counters.total("sparse_requests_refused") == 2
    assert len(caplog.records) == 1, "a router sends it with every request"
    for name in "ab":
        told = asked.ended(name)
        assert told is not None
        assert "with a tier of your own, retains no blocks" in told["ssdkv"]["error"]


def test_logits_that_selectors_do_not_know() -> None:
    asked = RequestOverrides(config("window"), Counters(), selects=False)
    asked.arrived(request("fewer", {"ssdkv": {"budget": 0.2}}))
    asked.arrived(request("all", {"ssdkv": {"selector": "exact"}}))
    asked.arrived(request("best", {"ssdkv": {"selector": "bounds"}}))
    assert asked.of("fewer") == RequestOptions(budget=0.2)
    assert asked.of("all") == asked.of("best") == EXACT
    told = asked.ended("best")
    assert told is not None
    assert '"bounds" does not know the logits or the KV of this model' in told["ssdkv"]["error"]
    asked = RequestOverrides(config("bounds"), Counters(), selects=False)
    asked.arrived(request("own", {"ssdkv": {"selector": "bounds"}}))
    assert asked.of("own") == RequestOptions(selector="bounds")


def test_a_graph_chooses_in_one_way() -> None:
    """Graphs choose by its scorer, as far as a mass is covered and up to a number of pages."""
    options = config("adaptive")
    for name in ("exact", "adaptive", options.scorer, "window"):
        assert RequestOptions.of({"selector": name}, options, captured=True).selector == name
    for own, name in (("adaptive", "swarm"), (options.scorer, "adaptive")):
        options = config(own)
        RequestOptions.of({"selector": name}, options)
        with pytest.raises(ConfigError, match=rf'"{name}" is not in the CUDA graphs .*: exact, '):
            RequestOptions.of({"selector": name}, options, captured=True)
    asked = RequestOverrides(config("adaptive"), Counters(), captures=True)
    asked.arrived(request("other", {"ssdkv": {"selector": "swarm"}}))
    assert asked.of("other") == EXACT


def test_who_chooses() -> None:
    """Long enough, and not exact by its own wish or by that of the options."""
    options = config(exact_below=1000)
    asked = RequestOverrides(options, Counters())
    for name, params in (
        ("nothing", None),
        ("exact", {"ssdkv": {"selector": "exact"}}),
        ("wrong", {"ssdkv": {"budget": 2}}),
        ("window", {"ssdkv": {"selector": "window"}}),
    ):
        asked.arrived(request(name, params))
    names = ("nothing", "exact", "wrong", "window")
    assert [asked.chooses(name, 1000) for name in names] == [True, False, False, True]
    assert not any(asked.chooses(name, 999) for name in names)
    never = RequestOverrides(config("exact"), Counters())
    assert not never.chooses("nothing", 1 << 20)


def test_who_chooses_depends_on_the_budget_where_the_options_say_no_length() -> None:
    asked = RequestOverrides(CONFIG, Counters())
    asked.arrived(request("half", {"ssdkv": {"budget": 0.5}}))
    for name, budget in (("own", CONFIG.sparse.budget), ("half", 0.5)):
        least = config(budget=budget).exact_below
        assert asked.chooses(name, least)
        assert not asked.chooses(name, least - 1)


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["ssdkv", "selector", "budget", "budget_tokens"]) | st.text(max_size=8),
            inner,
            max_size=3,
        )
    ),
    max_leaves=8,
)


def nested(depth: int, kind: type, leaf: object = 1) -> object:
    """A value in so many lists or objects."""
    for _ in range(depth):
        leaf = [leaf] if kind is list else {"budget": leaf}
    return leaf


deep = st.builds(nested, st.integers(0, 20_000), st.sampled_from([list, dict]), anything)
wide = st.integers(0, 100_000).map(lambda count: {str(i): i for i in range(count)})
odd = st.sampled_from(
    [
        10**5000,
        -(2**64),
        math.inf,
        math.nan,
        "\ud800",
        "a" * 100_000,
        "\x00",
        b"x",
        {1: 2},
        {b"x": 1},
    ]
)


@given(
    value=anything | deep | wide | odd | st.builds(nested, st.integers(1, 5), st.just(dict), odd)
)
def test_any_value_is_options_or_a_config_error(value: object) -> None:
    try:
        found = RequestOptions.of(value, CONFIG)
    except ConfigError:
        return
    assert found.applied(CONFIG).selector in servable(CONFIG)


@pytest.mark.parametrize("kind", [list, dict])
def test_the_bounds_of_an_object_are_told(kind: type) -> None:
    for depth in (5, 6, 500, 990, 100_000):
        with pytest.raises(ConfigError, match="nested more than 4 deep"):
            RequestOptions.of(nested(depth, kind), CONFIG)
    with pytest.raises(ConfigError, match="got"):
        RequestOptions.of(nested(4, dict), CONFIG)
    with pytest.raises(ConfigError, match="more than 64 values"):
        RequestOptions.of({"budget": [1] * 64}, CONFIG)


@given(params=anything | st.fixed_dictionaries({"ssdkv": anything}))
def test_nothing_that_a_client_sends_is_too_much(params: object) -> None:
    asked = RequestOverrides(CONFIG, Counters())
    asked.arrived(request("a", params))
    found = asked.of("a")
    assert found is None or found.applied(CONFIG).selector in servable(CONFIG)
    json.dumps(asked.ended("a"))
    assert len(asked) == 0


CHANGES_THE_CHOICE: dict[str, object] = {
    "budget": 0.25,
    "budget_tokens": 4000,
    "channels": 3,
    "cluster_affinity": "jaccard",
    "cluster_score": "medoid",
    "cluster_size": 3,
    "cluster_threshold": 0.25,
    "code_bits": 4,
    "dense_layers": 1,
    "estimate_rest": True,
    "floor": 0.0625,
    "granularity": "token",
    "mass": 0.5,
    "reuse_similarity": 0.5,
    "reuse_steps": 3,
    "scorer": "bounds",
    "sink_tokens": 32,
    "token_order": "position",
}
CHANGES_NO_CHOICE: dict[str, object] = {
    "channel_pages": "ssd",
    "exact_below": 5000,
    "hbm_pages": "1MiB",
    "hbm_summaries": "1MiB",
    "page_cache": "1MiB",
    "page_policy": "decay",
    "prefetch": False,
    "summaries": "1MiB",
}


def test_what_a_choice_is_made_by_and_what_not() -> None:
    """Every option is in one of the two lists."""
    plain = config("adaptive").choice
    assert len(plain) == 16
    assert set(SparseConfig.model_fields) == {*CHANGES_THE_CHOICE, *CHANGES_NO_CHOICE}
    for name, value in CHANGES_THE_CHOICE.items():
        assert config("adaptive", **{name: value}).choice != plain, name
    for name, value in CHANGES_NO_CHOICE.items():
        changed = config("adaptive", **{name: value})
        assert getattr(changed.sparse, name) != getattr(CONFIG.sparse, name), name
        assert changed.choice == plain, name
    assert config("exact").choice == b""
    others = [
        config("window"),
        config("swarm"),
        config("sparf"),
        config("sparf").model_copy(update={"offload": OffloadConfig(kind="fpga")}),
        config("sparf").model_copy(update={"hbm_window_tokens": 128}),
        config("sparf").model_copy(update={"page_tokens": 32}),
    ]
    assert len({plain, *(one.choice for one in others)}) == len(others) + 1
    assert config("adaptive", budget_tokens=4000, budget=0.5).choice == (
        config("adaptive", budget_tokens=4000).choice
    )


def test_a_request_that_asks_for_what_the_engine_does_chooses_alike() -> None:
    asked = RequestOverrides(CONFIG, Counters())
    wanted: list[dict[str, object]] = [
        {"selector": "bounds"},
        {"budget": CONFIG.sparse.budget},
        {"selector": "exact"},
        {"budget": 0.5},
    ]
    for number, one in enumerate(wanted):
        asked.arrived(request(str(number), {"ssdkv": one}))
    own = asked.choice("other")
    assert own is not None
    assert asked.choice("0") == asked.choice("1") == own
    assert asked.choice("2") is None
    assert asked.choice("3") not in (None, own)
    asked.ended("2")
    assert asked.choice("2") == own
