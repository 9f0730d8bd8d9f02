"""Entries of a model's configuration that count, and those that transformers implies."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from transformers import Blip2Config, Gemma3TextConfig, LlamaConfig, PreTrainedConfig, Qwen3Config

from vllm_ssdkv.connector.identity.kv_settings import entries_that_count

KINDS: tuple[PreTrainedConfig, ...] = (
    LlamaConfig(rms_norm_eps=1e-5, rope_parameters={"rope_type": "linear", "factor": 2.0}),
    Qwen3Config(num_hidden_layers=3, head_dim=64),
    Gemma3TextConfig(num_hidden_layers=5, sliding_window=64),
    Blip2Config(num_query_tokens=16),
)


def entries_of(config: PreTrainedConfig) -> dict[str, Any]:
    """As they are saved."""
    found: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    return found


@pytest.mark.parametrize("config", KINDS, ids=lambda config: config.model_type)
def test_what_is_left_says_the_same(config: PreTrainedConfig) -> None:
    entries, kind = entries_of(config), type(config)
    left = entries_that_count(entries, kind)
    assert len(left) < len(entries)
    assert kind.from_dict(left).to_dict() == kind.from_dict(entries).to_dict()
    assert entries == entries_of(config)


@pytest.mark.parametrize("config", KINDS, ids=lambda config: config.model_type)
def test_defaults_need_not_be_there(config: PreTrainedConfig) -> None:
    """Whichever of them a version has saved, in whatever order."""
    kind, draw = type(config), random.Random(3)
    entries = entries_of(config)
    left = entries_that_count(entries, kind)
    for _ in range(10):
        fewer = {k: v for k, v in entries.items() if k in left or draw.random() < 0.5}
        shuffled = dict(draw.sample(sorted(fewer.items()), len(fewer)))
        assert entries_that_count(shuffled, kind) == left


@pytest.mark.parametrize(
    "changed",
    [
        {"rms_norm_eps": 1e-4},
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}},
        {"attention_bias": True},
        {"made_up": 3},
    ],
)
def test_what_differs_stays(changed: dict[str, object]) -> None:
    entries = entries_of(KINDS[0])
    before = entries_that_count(entries, LlamaConfig)
    assert entries_that_count({**entries, **changed}, LlamaConfig) != before


def test_two_entries_that_imply_each_other() -> None:
    """One of them stays: an old name beside a new one."""
    entries = {"rope_theta": 500.0, "rope_parameters": {"rope_type": "default", "rope_theta": 500}}
    left = entries_that_count(entries, LlamaConfig)
    assert left
    assert LlamaConfig.from_dict(left).rope_parameters["rope_theta"] == 500


def test_a_configuration_that_cannot_be_made_is_taken_as_it_is() -> None:
    entries = {"num_attention_heads": "many"}
    assert entries_that_count(entries, LlamaConfig) == entries
