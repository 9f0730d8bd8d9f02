"""Two engines on one node: shared hits, and what happens when either of them dies or stalls."""

from __future__ import annotations

import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e.models import make_llama, prompts
from tests.e2e.stock import Stock
from tests.e2e.workload import SHORT
from tests.kit.engine import Engine, Tokens
from tests.kit.engine_process import KV_TOKENS, EngineProcess
from tests.kit.node import NodeProcess
from tests.kit.server import free_port
from vllm_ssdkv.node.protocol.credentials import make_keys

BLOCK = 32
LONG = prompts((3000, 2500, 2800, 2600), seed=21)
NEWS = prompts((700, 900, 1100, 500), seed=22)


def full_hits(batch: list[Tokens]) -> list[int]:
    """Tokens that a store which knows every prompt can serve: all blocks before the last token."""
    return [(len(prompt) - 1) // BLOCK * BLOCK for prompt in batch]


def options(node: NodeProcess, **more: object) -> dict[str, object]:
    """Options of an engine that loads whatever the node has."""
    return {"nodes": [node.address], "load": "always", "verify_hits": 0, **more}


def eventually(what: Callable[[], bool], seconds: float = 60.0) -> bool:
    """Check whether something becomes true."""
    deadline = time.monotonic() + seconds
    while not what():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


@pytest.fixture(scope="module")
def engine(node: NodeProcess, models: dict[str, Path], stock: Stock) -> Iterator[Engine]:
    stock.answers("llama", SHORT)
    stock.answers("llama", LONG)
    stock.answers("llama", NEWS)
    with Engine(
        models["llama"], ssdkv=options(node), kv_tokens=KV_TOKENS, enable_prefix_caching=False
    ) as engine:
        yield engine


@pytest.fixture(scope="module")
def other(
    engine: Engine, node: NodeProcess, models: dict[str, Path], root: Path
) -> Iterator[EngineProcess]:
    with EngineProcess(models["llama"], options(node), root / "other.log") as other:
        other.metric("node_connected")
        yield other


def reconnected(engine: Engine) -> None:
    """Wait until an engine in this process uses the node again. It is told by steps."""

    def connected() -> bool:
        engine.answers([[1] * 8], 1)
        return engine.ssdkv("node_connected") == 1

    assert eventually(connected)


def tokens(stock: Stock, batch: list[Tokens]) -> list[tuple[int, ...]]:
    """Answers of stock vLLM."""
    return [answer.tokens for answer in stock.answers("llama", batch)]


def check(engine: Engine, stock: Stock, batch: list[Tokens]) -> list[int]:
    """Have the engine answer, as stock vLLM does; tokens that were found."""
    got = engine.answers(batch)
    engine.settle()
    assert [answer.tokens for answer in got] == tokens(stock, batch)
    return [answer.cached for answer in got]


def runs(node: NodeProcess) -> set[str]:
    """Engines that the node knows."""
    return {one.run for one in node.status().sessions if one.role != "status"}


def left(node: NodeProcess) -> int:
    """Count pins and claims that sessions of engines hold in the node."""
    status = node.status()
    return sum(s.pins + s.claims for s in status.sessions) + sum(s.pinned for s in status.stores)


def test_the_second_engine_hits_what_the_first_computed(
    engine: Engine, other: EngineProcess, node: NodeProcess, stock: Stock
) -> None:
    assert check(engine, stock, SHORT) == [0] * len(SHORT)
    assert other.answers(SHORT) == list(zip(tokens(stock, SHORT), full_hits(SHORT), strict=True))
    assert other.metric("hit_tokens") == sum(full_hits(SHORT))
    # And the other way round.
    assert other.answers(NEWS[:1]) == [(tokens(stock, NEWS[:1])[0], 0)]
    assert check(engine, stock, NEWS[:1]) == full_hits(NEWS[:1])
    assert eventually(lambda: left(node) == 0)


def test_other_weights_hit_nothing(
    engine: Engine, node: NodeProcess, root: Path, stock: Stock
) -> None:
    check(engine, stock, SHORT)
    another = make_llama(root / "another", seed=5)
    with EngineProcess(another, options(node), root / "another.log") as stranger:
        assert [cached for _, cached in stranger.answers(SHORT)] == [0] * len(SHORT)
        assert [cached for _, cached in stranger.answers(SHORT)] == full_hits(SHORT)
        # A reset keeps what is stored. Until the weights are digested anew, requests compute.
        assert stranger.reset()
        stranger.answers(SHORT)
        assert [cached for _, cached in stranger.answers(SHORT)] == full_hits(SHORT)
        assert stranger.metric("slots_stored") > 0
        with pytest.raises(RuntimeError):  # how full its node is, the node tells
            stranger.metric("slots")
    assert check(engine, stock, SHORT) == full_hits(SHORT)


def test_a_killed_engine_leaves_nothing_held(
    engine: Engine, node: NodeProcess, models: dict[str, Path], root: Path, stock: Stock
) -> None:
    before = runs(node)
    with EngineProcess(models["llama"], options(node), root / "killed.log") as killed:
        killed.metric("node_connected")
        killed.order(prompts=LONG)
        assert eventually(lambda: left(node) > 0)
        killed.process.kill()
        assert check(engine, stock, SHORT) == full_hits(SHORT)
        assert eventually(lambda: runs(node) <= before)
    assert eventually(lambda: left(node) == 0)
    # What it had saved is right, and what it had not is computed.
    check(engine, stock, LONG)
    assert check(engine, stock, LONG) == full_hits(LONG)


def test_a_stopped_engine_harms_nobody(
    engine: Engine, other: EngineProcess, node: NodeProcess, stock: Stock
) -> None:
    before = runs(node)
    other.order(prompts=LONG)
    time.sleep(0.3)
    other.stop()
    try:
        assert check(engine, stock, SHORT) == full_hits(SHORT)
        assert eventually(lambda: len(runs(node)) == 1 and runs(node) < before)
        assert eventually(lambda: left(node) == 0)
    finally:
        other.go_on()
    assert [got for got, _ in other.ordered_answers()] == tokens(stock, LONG)
    assert eventually(lambda: other.metric("node_connected") == 1)
    assert other.answers(SHORT) == list(zip(tokens(stock, SHORT), full_hits(SHORT), strict=True))


def test_engines_survive_the_node_and_it_survives_them(
    engine: Engine, other: EngineProcess, node: NodeProcess, stock: Stock
) -> None:
    check(engine, stock, SHORT)
    assert eventually(lambda: left(node) == 0)
    other.order(prompts=LONG)
    node.kill()
    assert check(engine, stock, SHORT) == [0] * len(SHORT)
    assert [got for got, _ in other.ordered_answers()] == tokens(stock, LONG)
    node.start()
    reconnected(engine)
    assert eventually(lambda: other.metric("node_connected") == 1)
    assert check(engine, stock, SHORT) == full_hits(SHORT)
    assert other.answers(SHORT) == list(zip(tokens(stock, SHORT), full_hits(SHORT), strict=True))


def test_a_node_that_stands_still_costs_a_deadline(
    engine: Engine, node: NodeProcess, stock: Stock
) -> None:
    check(engine, stock, SHORT)
    node.signal(signal.SIGSTOP)
    try:
        began = time.monotonic()
        check(engine, stock, SHORT)
        assert time.monotonic() - began < 60
    finally:
        node.signal(signal.SIGCONT)
    reconnected(engine)
    assert eventually(lambda: check(engine, stock, SHORT) == full_hits(SHORT))


def test_a_node_that_is_told_to_end_writes_everything_first(
    engine: Engine, node: NodeProcess, stock: Stock
) -> None:
    check(engine, stock, NEWS)
    assert node.end() == 0
    assert check(engine, stock, SHORT[:1]) == [0]
    node.start()
    reconnected(engine)
    assert check(engine, stock, NEWS) == full_hits(NEWS)


def test_through_tcp_with_keys(
    models: dict[str, Path], root: Path, stock: Stock, engine: Engine
) -> None:
    engine.close()
    place = Path(tempfile.mkdtemp(dir=root))  # keys are never written over, nor by a second try
    keys = place / "keys"
    make_keys(keys, 2)
    address = f"tcp://127.0.0.1:{free_port()}"
    with NodeProcess(place, keys, listen=[address]) as far:
        asked = options(far, node_keys=str(keys))
        with EngineProcess(models["llama"], asked, root / "first.log") as first:
            assert first.answers(SHORT) == [(got, 0) for got in tokens(stock, SHORT)]
        with EngineProcess(models["llama"], asked, root / "second.log") as second:
            wanted = list(zip(tokens(stock, SHORT), full_hits(SHORT), strict=True))
            assert second.answers(SHORT) == wanted
        assert eventually(lambda: left(far) == 0)
