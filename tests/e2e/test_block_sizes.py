"""Reuse mode with models of which blocks of some KV cache groups have more tokens than those of
others (Gemma 4): a block of ours is a whole number of blocks of every group."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.models import GEMMA4_WINDOW, prompts
from tests.e2e.stock import Stock
from tests.e2e.workload import reuse_mode
from tests.kit.engine import MAX_TOKENS, Answer, Engine

BLOCK = 64
"""Tokens of a block of ours."""
PROMPTS = prompts((1500, 1025, 640, 300, 97, 64, 33, 20), seed=5)
WINDOW_GROUPS = 2
SIZES = {"gemma4": (32, 64), "gemma4_windows": (64, 32)}
"""Tokens of a block of layers with full attention, and with windows."""
GROWTH = 150
Devices = Callable[..., list[dict[str, Any]]]


def start(model: Path, options: dict[str, object], **settings: object) -> Engine:
    """An engine without HBM's own prefix cache, unless it is asked for: every hit is ours."""
    return Engine(
        model,
        ssdkv=options,
        kv_tokens=16384,
        **{"enable_prefix_caching": False, **settings},
    )


def hits() -> list[int]:
    return [(len(prompt) - 1) // BLOCK * BLOCK for prompt in PROMPTS]


def slots_of(hit: int, name: str) -> int:
    """Slots that bring a hit of so many tokens: all of full attention, the windows' ends."""
    full, window = SIZES[name]
    behind = max(0, hit - GEMMA4_WINDOW + 1) // window
    return hit // full + WINDOW_GROUPS * (hit // window - behind)


def turn(name: str, stock: Stock) -> list[int]:
    """The next turn of a conversation that begins with one of the prompts."""
    (answer,) = stock.answers(name, PROMPTS[2:3])
    return [*PROMPTS[2], *answer.tokens, *PROMPTS[4]]


@dataclass
class Rig:
    """An engine, which tests end and start again on its devices."""

    name: str
    path: Path
    place: list[dict[str, Any]]
    stock: Stock
    engine: Engine

    def restart(self, **settings: object) -> None:
        self.engine.settle()
        self.engine.assert_nothing_held()
        self.engine.close()
        self.engine = start(self.path, reuse_mode(self.place), **settings)

    def check(self, got: list[Answer], cached: list[int]) -> None:
        wanted = self.stock.answers(self.name, PROMPTS)
        assert [a.tokens for a in got] == [a.tokens for a in wanted]
        assert [a.cached for a in got] == cached


@pytest.fixture(scope="module", params=SIZES)
def rig(
    request: pytest.FixtureRequest, models: dict[str, Path], stock: Stock, devices: Devices
) -> Iterator[Rig]:
    name: str = request.param
    stock.answers(name, PROMPTS)
    stock.answers(name, PROMPTS[4:], GROWTH)
    stock.answers(name, [turn(name, stock)])
    place = devices(2)
    rig = Rig(name, models[name], place, stock, start(models[name], reuse_mode(place)))
    yield rig
    rig.engine.close()


def test_prompts_hit(rig: Rig) -> None:
    engine = rig.engine
    groups = engine.scheduler.kv_cache_config.kv_cache_groups
    full, window = SIZES[rig.name]
    sizes = [group.kv_cache_spec.block_size for group in groups]
    assert sorted(sizes) == sorted([full] + WINDOW_GROUPS * [window])
    assert engine.scheduler.block_size == BLOCK
    rig.check(engine.answers(PROMPTS), [0] * len(PROMPTS))
    rig.check(engine.answers(PROMPTS), hits())
    assert engine.ssdkv("hit_tokens") == sum(hits())


def test_a_restart_reads_what_the_next_token_attends_to(rig: Rig) -> None:
    rig.restart()
    engine = rig.engine
    slot = engine.scheduler.connector.scheduler.rebalancer.placement.geometry.slot_bytes
    rig.check(engine.answers(PROMPTS), hits())
    assert engine.ssdkv("hit_tokens", tier="ssd") == sum(hits())
    assert engine.ssdkv("bytes_read") == slot * sum(slots_of(hit, rig.name) for hit in hits())


def test_the_next_turn_hits_beside_hbm(rig: Rig) -> None:
    """Blocks in HBM's own cache are not loaded, in whatever group; then all come from the store."""
    asked = turn(rig.name, rig.stock)
    rig.restart(enable_prefix_caching=True)
    engine = rig.engine
    engine.answers(PROMPTS[2:3])
    (got,) = engine.answers([asked])
    assert got.cached == (len(PROMPTS[2]) + MAX_TOKENS - 1) // BLOCK * BLOCK
    loaded = engine.ssdkv("hit_tokens")
    assert engine.llm.llm_engine.reset_prefix_cache()
    (again,) = engine.answers([asked])
    assert engine.ssdkv("hit_tokens") == loaded + (len(asked) - 1) // BLOCK * BLOCK
    assert got.tokens == again.tokens == rig.stock.answers(rig.name, [asked])[0].tokens


def test_hits_are_verified(rig: Rig) -> None:
    """The stored block is the one that is computed again, in the group that keeps every block."""
    rig.engine.settle()
    rig.engine.close()
    rig.engine = start(rig.path, reuse_mode(rig.place, verify_hits=1))
    got = rig.engine.answers(PROMPTS[:4])
    wanted = rig.stock.answers(rig.name, PROMPTS[:4])
    assert [a.tokens for a in got] == [a.tokens for a in wanted]
    assert [a.cached for a in got] == [hit - BLOCK for hit in hits()[:4]]
    rig.engine.settle()
    assert rig.engine.ssdkv("verified_hits", result="same") == 4


def test_requests_that_are_preempted_go_on_from_the_store(rig: Rig) -> None:
    """The requests do not fit into HBM together."""
    wanted = rig.stock.answers(rig.name, PROMPTS[4:], GROWTH)
    rig.restart(num_gpu_blocks_override=24, max_model_len=256)
    got = rig.engine.answers(PROMPTS[4:], GROWTH)
    assert [a.tokens for a in got] == [a.tokens for a in wanted]
    assert rig.engine.metric("vllm:num_preemptions") > 0
    rig.engine.settle()
    rig.engine.assert_nothing_held()
