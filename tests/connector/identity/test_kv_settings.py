"""Entries of a model's configuration that count, and those that transformers implies."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import vllm.envs
from transformers import Blip2Config, Gemma3TextConfig, LlamaConfig, PreTrainedConfig, Qwen3Config

from tests.connector.kinds import configuration, make
from vllm_ssdkv.connector.identity.kv_settings import (
    _ENVIRONMENT,
    entries_that_count,
    kv_settings,
)
from vllm_ssdkv.store.format.fingerprint import Fingerprint

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


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("model"), "llama")


class TestSettings:
    """Settings of a start, as vLLM has configured it."""

    @staticmethod
    def settings(model: Path, *, chooses: bool = False, **arguments: object) -> Fingerprint:
        return kv_settings(configuration(model, **arguments), "NHD", chooses=chooses)

    def test_they_are_the_same_each_time(self, model: Path) -> None:
        assert self.settings(model) == self.settings(model)

    @pytest.mark.parametrize("name", _ENVIRONMENT)
    def test_variables_that_quantise_or_order_bytes(
        self, name: str, model: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        plain = self.settings(model)
        assert name in vllm.envs.environment_variables, "vLLM does not know it any more"
        monkeypatch.setenv(name, "")
        assert self.settings(model) == plain
        monkeypatch.setenv(name, "1")
        assert self.settings(model) != plain

    def test_settings_of_platforms_and_of_sparse_engines(self, model: Path) -> None:
        found = [
            self.settings(model),
            self.settings(model, additional_config={"layout": "nz"}),
            self.settings(model, additional_config={"layout": "blocked"}),
            self.settings(model, chooses=True),
        ]
        assert len({settings.digest for settings in found}) == len(found)

    def test_the_other_configuration_file_counts(self, model: Path, tmp_path: Path) -> None:
        """Which of the two vLLM reads depends on its options and on names of other files."""
        both = Path(shutil.copytree(model, tmp_path / "both"))
        found = [self.settings(both)]
        for eps in (1e-5, 0.1):
            (both / "params.json").write_text(json.dumps({"norm_eps": eps}))
            found.append(self.settings(both))
        assert len({settings.digest for settings in found}) == len(found)

    def test_overrides_by_a_function_are_what_it_made(self, model: Path) -> None:
        def overrides(eps: float) -> Callable[[PreTrainedConfig], PreTrainedConfig]:
            def change(config: PreTrainedConfig) -> PreTrainedConfig:
                config.rms_norm_eps = eps
                return config

            return change

        one, same, other = (
            self.settings(model, hf_overrides=overrides(eps)) for eps in (0.5, 0.5, 0.1)
        )
        assert one == same
        assert one != other
