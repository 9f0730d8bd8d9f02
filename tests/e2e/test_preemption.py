"""Requests that vLLM preempts start again from the store and give the same tokens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.models import prompts
from tests.e2e.stock import Stock
from tests.e2e.workload import kv_tokens, page_mode, reuse_mode
from tests.kit.engine import Engine

CHUNK = 256
GROWING = prompts((20, 33, 64, 100, 40, 70, 90, 50), seed=7)
GROWTH = 150
LARGE = prompts((3000, 1500, 700, 100), seed=8)


@pytest.mark.parametrize("mode", ["page", "reuse"])
def test_when_the_kv_cache_runs_full(
    mode: str,
    models: dict[str, Path],
    stock: Stock,
    devices: Callable[..., list[dict[str, str]]],
    by_layers: None,
    batches: list[bool],
) -> None:
    """Eight short prompts are admitted together and grow until their KV does not fit."""
    wanted = stock.answers("llama", GROWING, GROWTH)
    options = page_mode(devices(), window=512) if mode == "page" else reuse_mode(devices())
    with Engine(
        models["llama"],
        ssdkv=options,
        kv_tokens=kv_tokens(512, CHUNK),
        max_num_batched_tokens=CHUNK,
        max_model_len=768,
    ) as engine:
        assert engine.kv_tokens < sum(len(p) + GROWTH for p in GROWING)
        got = engine.answers(GROWING, GROWTH)
        engine.settle()
        assert [a.tokens for a in got] == [a.tokens for a in wanted]
        assert engine.metric("vllm:num_preemptions") > 0
        assert len(batches) > GROWTH or mode == "reuse"
        assert all(batches)
        assert engine.ssdkv("layers_copied", when="beside") > 0
        assert engine.ssdkv("slots_pinned") == 0
        assert engine.ssdkv("dram_frames_dirty") == 0


@pytest.mark.parametrize("when", ["prefill", "decode"])
def test_all_at_once_in_mid_flight(
    when: str,
    models: dict[str, Path],
    stock: Stock,
    devices: Callable[..., list[dict[str, str]]],
    batches: list[bool],
) -> None:
    """As an operator does who resets the prefix cache of a running engine."""
    wanted = dict(zip("abcd", (a.tokens for a in stock.answers("llama", LARGE)), strict=True))
    with Engine(
        models["llama"],
        ssdkv=page_mode(devices(), window=128),
        kv_tokens=4 * kv_tokens(128, CHUNK),
        max_num_batched_tokens=CHUNK,
    ) as engine:
        for name, prompt in zip(wanted, LARGE, strict=True):
            engine.add(name, prompt)
        if when == "prefill":
            for _ in range(5):
                engine.step()
        else:
            while len(engine.step().get("a", ())) < 12:
                pass
        assert engine.llm.llm_engine.reset_prefix_cache(reset_running_requests=True)
        assert engine.run() == wanted
        assert batches
        assert all(batches)
        engine.settle()
        assert engine.metric("vllm:num_preemptions") > 0
        # They went on from what the store had, instead of from nothing.
        assert engine.ssdkv("hit_tokens") > 0
        assert engine.ssdkv("slots_pinned") == 0
        assert engine.ssdkv("dram_frames_dirty") == 0
