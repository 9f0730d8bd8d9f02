"""Options without effect are named, with what would give them one, and no others are."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import pytest

from vllm_ssdkv.config import engine
from vllm_ssdkv.config.effects import without_effect
from vllm_ssdkv.config.engine import SSDKVConfig
from vllm_ssdkv.config.schema import walk

OPTIONS = {option.path: option for option in walk(SSDKVConfig)}

ALWAYS = {
    "mode",
    "selector",
    "replicas",
    "state_dir",
    "recover",
    "on_reset",
    "retain_share",
    "dram_gib",
    "verify_hits",
    "admission",
    "nodes",
    "node_keys",
    "tier",
    "io.engine",
    "io.queue_depth",
    "io.deadline",
    "io.direct",
    "io.verify",
    "io.scrub_rate",
    "io.fault_file",
}
"""Options that have an effect whatever the others are, beside those of the groups below."""
GROUPS = ("devices", "encryption", "io.faults", "io.throttle", "batch", "offload")

PAGE = {"mode": "page"}
BOUNDS = {**PAGE, "selector": "bounds"}
SPARF = {**PAGE, "selector": "sparf"}

CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "hbm_window_tokens": ({"hbm_window_tokens": 64}, PAGE),
    "page_tokens": ({"page_tokens": 32}, PAGE),
    "load": ({"load": "auto", "mode": "page"}, {"mode": "reuse"}),
    "trim": ({"trim": True}, {"devices": ["/dev/raw"], "state_dir": "/state"}),
    "devices[].weight": (
        {"devices": [{"path": "/a", "weight": 2}]},
        {"devices": [{"path": "/a", "weight": 2}, "/b"]},
    ),
    "sparse.budget": ({"sparse": {"budget": 0.25}}, BOUNDS),
    "sparse.budget_tokens": ({"sparse": {"budget_tokens": 5000}}, BOUNDS),
    "sparse.mass": ({"sparse": {"mass": 0.5}}, BOUNDS),
    "sparse.floor": ({"sparse": {"floor": 0.1}}, BOUNDS),
    "sparse.exact_below": ({"sparse": {"exact_below": 0}}, BOUNDS),
    "sparse.sink_tokens": ({"sparse": {"sink_tokens": 4}}, BOUNDS),
    "sparse.token_order": ({"sparse": {"token_order": "keys"}}, BOUNDS),
    "sparse.dense_layers": ({"sparse": {"dense_layers": 1}}, BOUNDS),
    "sparse.reuse_steps": ({"sparse": {"reuse_steps": 2}}, BOUNDS),
    "sparse.reuse_similarity": (
        {"sparse": {"reuse_similarity": 0.5}},
        {**BOUNDS, "sparse": {"reuse_similarity": 0.5, "reuse_steps": 2}},
    ),
    "sparse.page_cache": ({"sparse": {"page_cache": "64M"}}, BOUNDS),
    "sparse.hbm_pages": ({"sparse": {"hbm_pages": "64M"}}, BOUNDS),
    "sparse.hbm_summaries": ({"sparse": {"hbm_summaries": "64M"}}, BOUNDS),
    "sparse.page_policy": ({"sparse": {"page_policy": "frequency"}}, BOUNDS),
    "sparse.prefetch": ({"sparse": {"prefetch": False}}, BOUNDS),
    "sparse.summaries": ({"sparse": {"summaries": "64M"}}, BOUNDS),
    "sparse.scorer": ({"sparse": {"scorer": "bounds"}}, {**PAGE, "selector": "adaptive"}),
    "sparse.estimate_rest": (
        {"sparse": {"estimate_rest": True}},
        {**PAGE, "selector": "spread"},
    ),
    "sparse.channels": ({"sparse": {"channels": 4}}, SPARF),
    "sparse.code_bits": ({"sparse": {"code_bits": 4}}, {**PAGE, "selector": "codes"}),
    "sparse.channel_pages": ({"sparse": {"channel_pages": "ssd"}}, SPARF),
    "sparse.granularity": ({"sparse": {"granularity": "token"}}, SPARF),
    "sparse.cluster_threshold": ({"sparse": {"cluster_threshold": 0.4}}, BOUNDS),
    "sparse.cluster_size": ({"sparse": {"cluster_size": 4}}, BOUNDS),
    "sparse.cluster_score": ({"sparse": {"cluster_score": "medoid"}}, BOUNDS),
    "sparse.cluster_affinity": ({"sparse": {"cluster_affinity": "conditional"}}, BOUNDS),
    "share_contexts": (
        {"share_contexts": True},
        {"mode": "page", "nodes": ["unix:///run/a"], "state_dir": "/var/lib/kv"},
    ),
    "io.staging": ({"io": {"staging": "64M"}}, {"encryption": {"key_env": "KEY"}}),
    "io.faults[].seconds": (
        {"io": {"faults": [{"kind": "eio", "seconds": 3}]}},
        {"io": {"faults": [{"kind": "stall", "seconds": 3}]}},
    ),
    "io.faults[].seed": (
        {"io": {"faults": [{"kind": "eio", "seed": 3}]}},
        {"io": {"faults": [{"kind": "eio", "seed": 3, "probability": 0.5}]}},
    ),
}
"""By option: options of which it is the only one without effect, and what gives it one."""


def named(options: Mapping[str, object], **known: bool) -> list[str]:
    return [vain.option for vain in without_effect(SSDKVConfig.from_extra_config(options), **known)]


def test_of_every_option_is_known_when_it_has_an_effect() -> None:
    """A new option fails here until it has a condition and a case, or is in the list above."""
    conditional = {path for path, option in OPTIONS.items() if option.conditions}
    assert conditional == set(CASES)
    assert set(OPTIONS) >= ALWAYS
    rest = set(OPTIONS) - conditional - ALWAYS
    assert [path for path in rest if not path.startswith(GROUPS)] == []


@pytest.mark.parametrize("path", CASES)
def test_an_option_without_effect_is_named_until_it_has_one(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "is_block_device", lambda path: path.startswith("/dev"))
    options, cure = copy.deepcopy(CASES[path])
    assert named(options) == [path.replace("[]", "[0]")]
    assert named(options | cure) == []


def test_each_line_says_what_would_give_an_effect() -> None:
    config = SSDKVConfig.from_extra_config({"sparse": {"budget": 0.25}, "page_tokens": 32})
    assert [str(vain) for vain in without_effect(config)] == [
        'page_tokens has no effect unless mode is "page"',
        'sparse.budget has no effect unless mode is "page" and selector "bounds", "spread", '
        '"codes", "sparf", "adaptive", "swarm" or "window"',
    ]


def test_a_share_beside_a_number_of_tokens() -> None:
    both = {**BOUNDS, "sparse": {"budget": 0.25, "budget_tokens": 5000}}
    (vain,) = without_effect(SSDKVConfig.from_extra_config(both))
    assert str(vain) == "sparse.budget has no effect unless sparse.budget_tokens is left out"


def test_limits_of_a_batch_api_that_is_off() -> None:
    options = {"batch": {"capacity": "1G", "directory": "/b"}}
    assert named(options) == []
    assert named(options, batch_api=False) == ["batch.directory", "batch.capacity"]


@pytest.mark.parametrize("options", [{}, {"mode": "page"}, {"selector": "exact"}, BOUNDS, SPARF])
def test_what_is_not_given_is_not_named(options: dict[str, object]) -> None:
    assert named(options, batch_api=False) == []
