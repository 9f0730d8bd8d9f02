"""Reuse mode with vLLM's own attention backend: hits across requests, turns and restarts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e.models import prompts
from tests.e2e.stock import Stock
from tests.e2e.workload import SHORT, reuse_mode
from tests.kit.engine import MAX_TOKENS, Answer, Engine, Tokens

BLOCK = 32
NEWS = prompts((200,), seed=10)[0]
KV_TOKENS = 16384

Devices = Callable[..., list[dict[str, str]]]


def full_hits(batch: list[Tokens]) -> list[int]:
    """Tokens that a store which knows every prompt can serve: all blocks before the last token."""
    return [(len(prompt) - 1) // BLOCK * BLOCK for prompt in batch]


def tokens(answers: list[Answer]) -> list[tuple[int, ...]]:
    return [a.tokens for a in answers]


def external_hits(engine: Engine) -> tuple[float, float]:
    """vLLM's own metric of what connectors serve: (queried tokens, hit tokens)."""
    return (
        engine.metric("vllm:external_prefix_cache_queries"),
        engine.metric("vllm:external_prefix_cache_hits"),
    )


@pytest.fixture(scope="module")
def place(devices: Devices) -> list[dict[str, str]]:
    return devices(2)


@pytest.fixture(scope="module")
def next_turn(stock: Stock) -> Tokens:
    answer = stock.answers("llama", SHORT)[1]
    turn = SHORT[1] + list(answer.tokens) + NEWS
    stock.answers("llama", [turn])
    return turn


@pytest.fixture(scope="module")
def engine(
    models: dict[str, Path], next_turn: Tokens, place: list[dict[str, str]]
) -> Iterator[Engine]:
    with Engine(
        models["llama"],
        ssdkv=reuse_mode(place),
        kv_tokens=KV_TOKENS,
        # Without HBM's own prefix cache: every hit is ours.
        enable_prefix_caching=False,
    ) as engine:
        yield engine


def test_the_first_time_nothing_hits(engine: Engine, stock: Stock) -> None:
    got = engine.answers(SHORT)
    assert tokens(got) == tokens(stock.answers("llama", SHORT))
    assert [a.cached for a in got] == [0] * len(SHORT)
    assert external_hits(engine) == (sum(map(len, SHORT)), 0)


def test_another_request_hits(engine: Engine, stock: Stock) -> None:
    queries, hits = external_hits(engine)
    got = engine.answers(SHORT)
    assert tokens(got) == tokens(stock.answers("llama", SHORT))
    assert [a.cached for a in got] == full_hits(SHORT)
    assert external_hits(engine) == (
        queries + sum(map(len, SHORT)),
        hits + sum(full_hits(SHORT)),
    )
    assert engine.ssdkv("hit_tokens") == sum(full_hits(SHORT))


def test_the_next_turn_hits(engine: Engine, stock: Stock, next_turn: Tokens) -> None:
    (got,) = engine.answers([next_turn])
    assert [got.tokens] == tokens(stock.answers("llama", [next_turn]))
    # The answer's blocks are known as well, up to its last token, whose KV was never computed.
    assert got.cached == (len(SHORT[1]) + MAX_TOKENS - 1) // BLOCK * BLOCK


def test_another_salt_does_not_hit(engine: Engine, stock: Stock) -> None:
    wanted = tokens(stock.answers("llama", SHORT[:2]))
    salted = [engine.answers(SHORT[:2], salt="tenant 1") for _ in range(2)]
    assert [tokens(got) for got in salted] == [wanted, wanted]
    assert [a.cached for a in salted[0]] == [0, 0]
    assert [a.cached for a in salted[1]] == full_hits(SHORT[:2])
    (other,) = engine.answers(SHORT[:1], salt="tenant 2")
    assert other.cached == 0


def test_idle_afterwards(engine: Engine) -> None:
    engine.settle()
    assert engine.ssdkv("slots_pinned") == 0
    assert engine.ssdkv("dram_frames_dirty") == 0
    assert engine.ssdkv("stores_skipped") == 0


@pytest.fixture(scope="module")
def restarted(
    engine: Engine, models: dict[str, Path], place: list[dict[str, str]]
) -> Iterator[Engine]:
    engine.settle()
    engine.close()
    with Engine(
        models["llama"], ssdkv=reuse_mode(place), kv_tokens=KV_TOKENS, enable_prefix_caching=False
    ) as another:
        yield another


def test_a_restart_hits(restarted: Engine, stock: Stock, next_turn: Tokens) -> None:
    batch = [*SHORT, next_turn]
    got = restarted.answers(batch)
    assert tokens(got) == tokens(stock.answers("llama", batch))
    assert [a.cached for a in got] == full_hits(batch)
    assert restarted.ssdkv("recovered_slots") > 0
    # SHORT[1] is the head of the turn, and comes from DRAM the second time.
    assert restarted.ssdkv("hit_tokens", tier="ssd") >= sum(full_hits(SHORT))


def test_a_restart_keeps_salts_apart(restarted: Engine) -> None:
    (salted,) = restarted.answers(SHORT[:1], salt="tenant 1")
    (other,) = restarted.answers(SHORT[:1], salt="tenant 3")
    assert (salted.cached, other.cached) == (*full_hits(SHORT[:1]), 0)
