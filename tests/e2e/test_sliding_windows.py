"""Reuse mode with models that mix full attention and sliding windows: vLLM keeps their layers in
several KV cache groups, and of a hit the windows need their end only."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.models import GEMMA3_WINDOW, prompts
from tests.e2e.stock import Stock
from tests.e2e.workload import reuse_mode
from tests.faults import set_faults
from tests.kit.engine import MAX_TOKENS, Answer, Engine

BLOCK = 32
KV_TOKENS = 16384
WINDOW_GROUPS = 2
PROMPTS = prompts((3000, 1025, 640, 300, 77, 64, 33, 20), seed=5)
MODEL = "gemma3"

Devices = Callable[..., list[dict[str, Any]]]


def start(model: Path, options: dict[str, object], **settings: object) -> Engine:
    """An engine without HBM's own prefix cache, unless it is asked for: every hit is ours."""
    return Engine(
        model,
        ssdkv=options,
        kv_tokens=KV_TOKENS,
        **{"enable_prefix_caching": False, **settings},
    )


def full_hits(count: int = len(PROMPTS)) -> list[int]:
    return [(len(prompt) - 1) // BLOCK * BLOCK for prompt in PROMPTS[:count]]


def slots_of(hit: int) -> int:
    """Slots that bring a hit of so many tokens."""
    behind = max(0, hit - GEMMA3_WINDOW + 1) // BLOCK
    return hit // BLOCK + WINDOW_GROUPS * (hit // BLOCK - behind)


def check(got: list[Answer], stock: Stock, cached: list[int]) -> None:
    assert [a.tokens for a in got] == [
        a.tokens for a in stock.answers(MODEL, PROMPTS[: len(cached)])
    ]
    assert [a.cached for a in got] == cached


@pytest.fixture(scope="module")
def place(devices: Devices) -> list[dict[str, Any]]:
    return devices(2)


@pytest.fixture(scope="module")
def engine(models: dict[str, Path], stock: Stock, place: list[dict[str, Any]]) -> Iterator[Engine]:
    stock.answers(MODEL, PROMPTS)
    with start(models[MODEL], reuse_mode(place)) as engine:
        yield engine


def test_prompts_hit(engine: Engine, stock: Stock) -> None:
    assert len(engine.scheduler.kv_cache_config.kv_cache_groups) == WINDOW_GROUPS + 1
    check(engine.answers(PROMPTS), stock, [0] * len(PROMPTS))
    check(engine.answers(PROMPTS), stock, full_hits())
    assert engine.ssdkv("hit_tokens") == sum(full_hits())
    engine.settle()
    engine.assert_nothing_held()


def test_a_restart_reads_the_ends_of_windows_only(
    engine: Engine, models: dict[str, Path], stock: Stock, place: list[dict[str, Any]]
) -> None:
    engine.settle()
    engine.close()
    # None of the prompts begins as another one does, so nothing is found in DRAM.
    with start(models[MODEL], reuse_mode(place)) as restarted:
        slot = restarted.scheduler.connector.scheduler.rebalancer.placement.geometry.slot_bytes
        check(restarted.answers(PROMPTS), stock, full_hits())
        assert restarted.ssdkv("hit_tokens", tier="ssd") == sum(full_hits())
        read = restarted.ssdkv("bytes_read")
        assert read == slot * sum(slots_of(hit) for hit in full_hits())
        restarted.settle()
        restarted.assert_nothing_held()


def test_the_next_turn_hits(
    models: dict[str, Path], stock: Stock, place: list[dict[str, Any]]
) -> None:
    """Beside HBM's own cache: what is there is not loaded, in whatever group."""
    (answer,) = stock.answers(MODEL, PROMPTS[2:3])
    turn = PROMPTS[2] + list(answer.tokens) + PROMPTS[4]
    wanted = stock.answers(MODEL, [turn])
    with start(models[MODEL], reuse_mode(place), enable_prefix_caching=True) as engine:
        engine.answers(PROMPTS[2:3])
        (got,) = engine.answers([turn])
        assert got.tokens == wanted[0].tokens
        assert got.cached == (len(PROMPTS[2]) + MAX_TOKENS - 1) // BLOCK * BLOCK
        loaded = engine.ssdkv("hit_tokens")
        assert engine.llm.llm_engine.reset_prefix_cache()
        assert engine.answers([turn])[0].tokens == wanted[0].tokens
        assert engine.ssdkv("hit_tokens") == loaded + (len(turn) - 1) // BLOCK * BLOCK


def test_windows_that_cannot_be_read(
    models: dict[str, Path], stock: Stock, devices: Devices, tmp_path: Path
) -> None:
    """Some slots are lost on the way; requests are computed, as far as it takes."""
    control = tmp_path / "faults.json"
    io = {"staging": "4MiB", "fault_file": str(control)}
    place = devices(2)
    set_faults(control)
    with start(models[MODEL], reuse_mode(place, dram="16MiB", io=io)) as engine:
        check(engine.answers(PROMPTS), stock, [0] * len(PROMPTS))
        engine.settle()
    with start(models[MODEL], reuse_mode(place, dram="16MiB", io=io)) as engine:
        set_faults(control, {"kind": "corrupt", "op": "read", "probability": 0.1, "count": 20})
        got = engine.answers(PROMPTS)
        assert [a.tokens for a in got] == [a.tokens for a in stock.answers(MODEL, PROMPTS)]
        assert engine.ssdkv("recomputed_requests") > 0
        set_faults(control)
        engine.settle()
        check(engine.answers(PROMPTS), stock, full_hits())
        engine.settle()
        engine.assert_nothing_held()
