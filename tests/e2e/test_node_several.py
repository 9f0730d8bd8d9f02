"""Engines on three nodes that share the blocks: hits, replicas, and nodes that go and come back."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.e2e.models import prompts
from tests.e2e.stock import Stock
from tests.e2e.test_node import eventually, full_hits, reconnected, tokens
from tests.e2e.workload import SHORT
from tests.kit.engine import Engine, Tokens
from tests.kit.engine_process import KV_TOKENS, LEASE_S, EngineProcess
from tests.kit.node import NodeProcess

NODES = 3
LONG = prompts((3000, 2500), seed=31)


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[NodeProcess]]:
    with ExitStack() as stack:
        made = []
        for number in range(NODES):
            root = tmp_path_factory.mktemp(f"n{number}")
            made.append(stack.enter_context(NodeProcess(root, lease=LEASE_S, store_share=1.0)))
        yield made


def options(nodes: list[NodeProcess], **more: object) -> dict[str, object]:
    """Options of an engine that loads whatever the nodes have, two of them each block."""
    addresses = [node.address for node in nodes]
    return {
        "nodes": addresses,
        "replicas": 2,
        "load": "always",
        "verify_hits": 0,
        **more,
    }


@pytest.fixture(scope="module")
def engine(nodes: list[NodeProcess], models: dict[str, Path], stock: Stock) -> Iterator[Engine]:
    stock.answers("llama", SHORT)
    stock.answers("llama", LONG)
    with Engine(
        models["llama"], ssdkv=options(nodes), kv_tokens=KV_TOKENS, enable_prefix_caching=False
    ) as engine:
        yield engine


def check(engine: Engine, stock: Stock, batch: list[Tokens]) -> list[int]:
    """Have the engine answer, as stock vLLM does; tokens that were found."""
    got = engine.answers(batch)
    engine.settle()
    assert [answer.tokens for answer in got] == tokens(stock, batch)
    return [answer.cached for answer in got]


def ready(node: NodeProcess) -> int:
    """Count blocks that a node can give."""
    return sum(store.ready for store in node.status().stores)


def held(nodes: list[NodeProcess]) -> int:
    """Count pins and claims that engines hold."""
    status = [node.status() for node in nodes]
    pinned = sum(store.pinned for one in status for store in one.stores)
    return pinned + sum(s.pins + s.claims for one in status for s in one.sessions)


def test_two_engines_share_three_nodes(
    engine: Engine,
    nodes: list[NodeProcess],
    models: dict[str, Path],
    root: Path,
    stock: Stock,
) -> None:
    assert check(engine, stock, LONG) == [0] * len(LONG)
    blocks = sum(full // 32 for full in (len(prompt) // 32 * 32 for prompt in LONG))
    # Answers fill no more than a block each.
    assert 2 * blocks <= sum(map(ready, nodes)) <= 2 * (blocks + len(LONG))
    assert all(map(ready, nodes)), "each node has a part"
    with EngineProcess(models["llama"], options(nodes), root / "several.log") as other:
        assert other.answers(LONG) == list(zip(tokens(stock, LONG), full_hits(LONG), strict=True))
    assert eventually(lambda: held(nodes) == 0)


def test_a_node_is_killed_and_comes_back(
    engine: Engine, nodes: list[NodeProcess], stock: Stock
) -> None:
    check(engine, stock, LONG)
    killer = threading.Timer(0.05, nodes[0].kill)
    killer.start()
    assert check(engine, stock, LONG) == full_hits(LONG), "the replicas serve"
    killer.join()
    assert check(engine, stock, LONG) == full_hits(LONG)
    check(engine, stock, SHORT)
    nodes[0].start()
    reconnected(engine)
    # What was stored meanwhile lies elsewhere, and is stored where it belongs when it is used.
    before = ready(nodes[0])
    assert check(engine, stock, SHORT) == full_hits(SHORT)
    assert eventually(lambda: ready(nodes[0]) > before)
    assert eventually(lambda: held(nodes) == 0)
