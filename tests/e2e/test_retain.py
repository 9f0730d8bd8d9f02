"""Requests that have their blocks retained, while others write the store full several times."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope

from tests.e2e.models import prompts
from tests.e2e.workload import kv_tokens, page_mode, reuse_mode
from tests.kit.engine import Engine

Devices = Callable[..., list[dict[str, str]]]

BLOCK = 32
SESSION, HINTED, PLAIN = prompts((20 * BLOCK + 5, 5 * BLOCK + 5, 8 * BLOCK + 5), seed=60)
SHARE = 0.25


def hints(seconds: float) -> KvHintsEnvelope:
    directives = [{"start": 0, "end": 64, "priority": 50, "duration": seconds}]
    action = KvHintAction("1", "kv.retain", "1.0", {"directives": directives})
    return KvHintsEnvelope("0.1", "message", [action])


def ask(engine: Engine, seed: int, **given: object) -> None:
    """Other requests, of 60 blocks each."""
    for number, prompt in enumerate(prompts((60 * BLOCK,) * 4, seed=seed)):
        engine.add(f"other {seed} {number}", prompt, 2, **given)  # type: ignore[arg-type]
        engine.run()
    engine.settle()


@pytest.mark.parametrize("mode", ["reuse", "page"])
def test_retained_blocks_outlive_three_times_the_capacity_of_other_traffic(
    models: dict[str, Path], devices: Devices, mode: str
) -> None:
    entries = devices(1, "16MiB")
    options = reuse_mode(entries) if mode == "reuse" else page_mode(entries)
    with Engine(
        models["llama"],
        ssdkv=options,
        kv_tokens=2048 if mode == "reuse" else 2 * kv_tokens(128, 256),
        max_num_batched_tokens=256,
        max_model_len=2048,
    ) as engine:
        engine.add("session", SESSION, 2, {"retain": "1h"})
        engine.run()
        engine.llm.llm_engine.add_request(
            "hinted", {"prompt_token_ids": HINTED}, engine.sampling(2), kv_hints=hints(3600.0)
        )
        engine.run()
        engine.answers([PLAIN], 2)
        engine.settle()
        slots = engine.ssdkv("slots")
        assert engine.ssdkv("slots_retained") == 25 < SHARE * slots
        for seed in range(100, 120):
            ask(engine, seed)
            if engine.ssdkv("slots_evicted") >= 3 * slots:
                break
        assert engine.ssdkv("slots_evicted") >= 3 * slots
        assert engine.ssdkv("slots_retained") == 25
        got = engine.answers([SESSION, HINTED, PLAIN], 2)
        assert [answer.cached for answer in got] == [20 * BLOCK, 5 * BLOCK, 0]
        assert engine.ssdkv("retentions_cut") == 0
        ask(engine, 130, asked={"retain": "5m"})
        assert 0.9 * SHARE * slots < engine.ssdkv("slots_retained") <= SHARE * slots
        assert engine.ssdkv("retentions_cut") > 25
        ask(engine, 131)
        assert [a.cached for a in engine.answers([SESSION, HINTED], 2)] == [0, 0]
        engine.settle()
        engine.assert_nothing_held()
