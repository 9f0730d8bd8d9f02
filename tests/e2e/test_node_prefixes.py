"""Prefixes that several engines of a node ask for at once: each is computed by one of them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.models import prompts
from tests.e2e.stock import Stock
from tests.kit.engine import Tokens
from tests.kit.engine_process import EngineProcess
from tests.kit.node import NodeProcess

BLOCK = 32
PREFIXES = prompts((5000, 4500, 4800), seed=41)
ENDS = prompts((90, 120, 70), seed=42)
SHARED = [PREFIXES[0] + end for end in ENDS]
"""Prompts that begin alike."""

FOUND = len(PREFIXES[0]) // BLOCK * BLOCK


@pytest.fixture(scope="module")
def wanted(stock: Stock) -> dict[int, tuple[int, ...]]:
    """Answers of stock vLLM, by length of the prompt."""
    batch = SHARED + PREFIXES[1:]
    return {len(p): a.tokens for p, a in zip(batch, stock.answers("llama", batch), strict=True)}


@pytest.fixture(scope="module")
def engines(
    node: NodeProcess,
    models: dict[str, Path],
    root: Path,
    wanted: dict[int, tuple[int, ...]],
) -> Iterator[list[EngineProcess]]:
    options = {"nodes": [node.address], "load": "always", "verify_hits": 0}
    made = [EngineProcess(models["llama"], options, root / f"engine{i}.log") for i in range(2)]
    for engine in made:
        assert engine.metric("node_connected") == 1
        engine.await_chains(1e3)  # whatever else this machine does
    yield made
    for engine in made:
        engine.kill()


def computing(node: NodeProcess) -> bool:
    """Check whether an engine has claimed blocks."""
    return any(session.claims for session in node.status().sessions)


def await_claims(node: NodeProcess) -> None:
    deadline = time.monotonic() + 60
    while not computing(node):
        assert time.monotonic() < deadline
        time.sleep(0.01)


Got = list[tuple[list[int], int]]
"""Answers, and tokens of their prompts that were found."""


def is_right(got: Got, batch: list[Tokens], wanted: dict[int, tuple[int, ...]]) -> bool:
    return [tuple(tokens) for tokens, _ in got] == [wanted[len(p)] for p in batch]


def test_a_prefix_that_is_being_computed_is_waited_for(
    node: NodeProcess, engines: list[EngineProcess], wanted: dict[int, tuple[int, ...]]
) -> None:
    first, second = engines
    first.order(prompts=SHARED[:1])
    await_claims(node)
    second.order(prompts=SHARED[1:])
    got = first.result()
    assert is_right(got, SHARED[:1], wanted)
    assert got[0][1] == 0
    got = second.result()
    assert is_right(got, SHARED[1:], wanted)
    assert [cached for _, cached in got] == [FOUND] * 2, "it was computed once"
    assert second.metric("prefix_waits") >= 1
    ready = sum(store.ready for store in node.status().stores)
    blocks = len(SHARED[0]) // BLOCK + sum(len(p) // BLOCK - FOUND // BLOCK for p in SHARED[1:])
    # Those of 40 tokens of answers come on top.
    assert blocks <= ready <= blocks + 2 * len(SHARED)


def test_a_prefix_of_an_engine_that_dies_is_taken_over(
    node: NodeProcess, engines: list[EngineProcess], wanted: dict[int, tuple[int, ...]]
) -> None:
    first, second = engines
    second.order(prompts=[PREFIXES[1]])
    await_claims(node)
    first.order(prompts=[PREFIXES[1]])
    time.sleep(0.3)
    second.process.kill()
    begun = time.monotonic()
    assert is_right(first.result(), [PREFIXES[1]], wanted)
    assert time.monotonic() - begun < 60


def test_two_that_begin_at_once_do_not_wait_for_each_other(
    node: NodeProcess, engines: list[EngineProcess], wanted: dict[int, tuple[int, ...]]
) -> None:
    first, _ = engines
    batch = [PREFIXES[2], PREFIXES[2], PREFIXES[2]]
    first.order(prompts=batch)
    got = first.result()
    assert is_right(got, batch, wanted)
    found = [cached for _, cached in got]
    whole = (len(PREFIXES[2]) - 1) // BLOCK * BLOCK
    assert sorted(found) == [0, whole, whole], "one of them computes it"
