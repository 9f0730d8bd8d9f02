"""Two engines on one node: hits of what the other computed, kills and stalls of either side."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.engine import Answer, Engine, Tokens
from tests.e2e.models import prompts
from tests.e2e.node_process import NodeProcess, until
from tests.e2e.stock import Stock
from tests.e2e.workload import SHORT

BLOCK = 32
KV_TOKENS = 16384
MORE = prompts((700, 900, 500), seed=31)
OTHERS = prompts((800, 600), seed=32)

Devices = Callable[..., list[dict[str, Any]]]


def full_hits(batch: list[Tokens]) -> list[int]:
    """Tokens that a store which knows every prompt can serve."""
    return [(len(prompt) - 1) // BLOCK * BLOCK for prompt in batch]


def tokens(answers: list[Answer]) -> list[tuple[int, ...]]:
    return [a.tokens for a in answers]


def cached(answers: list[Answer]) -> list[int]:
    return [a.cached for a in answers]


@pytest.fixture(scope="module")
def node(devices: Devices, tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    folder = tmp_path_factory.mktemp("node")
    places = [place["path"] for place in devices(2)]
    made = NodeProcess(f"unix://{folder}/s", places, folder / "node.log")
    yield made
    made.close()


def open_engine(models: dict[str, Path], node: NodeProcess, *, in_process: bool) -> Engine:
    """An engine without HBM's own prefix cache: every hit is the node's."""
    options = {"mode": "reuse", "verify_hits": 0, "load": "always", "nodes": [node.address]}
    return Engine(
        models["llama"],
        ssdkv={**options, "io": {"deadline": 5.0}},
        kv_tokens=KV_TOKENS,
        enable_prefix_caching=False,
        in_process=in_process,
    )


@pytest.fixture(scope="module")
def first(models: dict[str, Path], node: NodeProcess, stock: Stock) -> Iterator[Engine]:
    for batch in (SHORT, MORE, OTHERS):
        stock.answers("llama", batch)  # before an engine takes this process
    with open_engine(models, node, in_process=True) as engine:
        yield engine


@pytest.fixture(scope="module")
def second(models: dict[str, Path], node: NodeProcess, first: Engine) -> Iterator[Engine]:
    with open_engine(models, node, in_process=False) as engine:
        yield engine


def test_an_engine_finds_what_the_other_has_computed(
    first: Engine, second: Engine, stock: Stock
) -> None:
    wanted = tokens(stock.answers("llama", SHORT))
    got = first.answers(SHORT)
    assert tokens(got) == wanted
    assert cached(got) == [0] * len(SHORT)
    first.settle()
    got = second.answers(SHORT)
    assert tokens(got) == wanted
    assert cached(got) == full_hits(SHORT)
    got = first.answers(SHORT)
    assert tokens(got) == wanted
    assert cached(got) == full_hits(SHORT)


def test_nothing_is_held_when_requests_have_ended(
    first: Engine, second: Engine, node: NodeProcess
) -> None:
    first.settle()

    def held() -> int:
        status = node.status()
        assert status is not None
        assert len(status["sessions"]) >= 4
        return sum(session["pins"] + session["claims"] for session in status["sessions"])

    until(lambda: held() == 0, node)


@pytest.mark.parametrize("how", ["kill", "stop"])
def test_engines_survive_the_node_and_find_it_again(
    first: Engine, node: NodeProcess, stock: Stock, how: str
) -> None:
    first.settle()
    node.kill() if how == "kill" else node.stop()
    got = first.answers(MORE)
    assert tokens(got) == tokens(stock.answers("llama", MORE))
    if how == "kill":
        assert cached(got) == [0] * len(MORE)
    node.start()
    _await_hits(first, node, SHORT)
    got = first.answers(MORE)
    assert tokens(got) == tokens(stock.answers("llama", MORE))
    first.settle()
    _await_hits(first, node, MORE)


def _await_hits(engine: Engine, node: NodeProcess, batch: list[Tokens]) -> None:
    """Ask until all of a batch is found."""

    def found() -> bool:
        got = cached(engine.answers(batch, 1))
        engine.settle()
        return got == full_hits(batch)

    until(found, node)


def test_a_node_that_stands_still_costs_a_deadline(
    first: Engine, node: NodeProcess, stock: Stock
) -> None:
    wanted = tokens(stock.answers("llama", OTHERS))
    first.answers(OTHERS)
    first.settle()
    node.freeze()
    begun = time.monotonic()
    assert tokens(first.answers(OTHERS)) == wanted
    assert time.monotonic() - begun < 60
    node.thaw()
    _await_hits(first, node, OTHERS)
    assert tokens(first.answers(OTHERS)) == wanted
