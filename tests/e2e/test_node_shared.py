"""Two engines in page mode that share their contexts on a node: the tokens of stock vLLM, whoever
ends meanwhile."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.e2e.models import prompts
from tests.e2e.stock import Stock
from tests.e2e.test_node_page import BLOCK, CHUNK, WINDOW, options
from tests.e2e.workload import kv_tokens
from tests.kit.engine import Tokens
from tests.kit.engine_process import LEASE_S, EngineProcess
from tests.kit.node import NodeProcess
from vllm_ssdkv.cli.main import app as cli

LONG = prompts((2000, 1800, 1500), seed=61)
ENDS = prompts((40, 50), seed=62)
BATCH = [LONG[0] + ENDS[0], LONG[0] + ENDS[1], LONG[1], LONG[2]]
"""The first two begin alike."""

MOST_TOKENS = 4096
"""Limit of a request; the store has slots for a few of these."""

ANSWER = 400
"""Tokens of an answer that takes a while."""

SHARED = len(LONG[0]) // BLOCK * BLOCK


@pytest.fixture(scope="module")
def wanted(stock: Stock) -> dict[int, tuple[int, ...]]:
    """Answers of stock vLLM, by length of the prompt."""
    return {len(p): a.tokens for p, a in zip(BATCH, stock.answers("llama", BATCH), strict=True)}


@pytest.fixture(scope="module")
def long_answer(stock: Stock) -> tuple[int, ...]:
    """A longer answer of stock vLLM to the second prompt."""
    return stock.answers("llama", BATCH[1:2], ANSWER)[0].tokens


@pytest.fixture(scope="module")
def node(root: Path) -> Iterator[NodeProcess]:
    place = root / "shared"
    place.mkdir()
    drive = {"path": str(place / "ssd"), "capacity": "64MiB"}
    with NodeProcess(
        place, lease=LEASE_S, attend_threads=1, devices=[drive], store_share=0.5
    ) as started:
        yield started


def start(model: Path, node: NodeProcess, root: Path, name: str, **more: object) -> EngineProcess:
    """An engine whose contexts are shared."""
    given = options([node], root / name, share_contexts=True, **more)
    return EngineProcess(
        model,
        given,
        root / f"{name}.log",
        kv_tokens=kv_tokens(WINDOW, CHUNK, BLOCK),
        max_num_batched_tokens=CHUNK,
        max_model_len=MOST_TOKENS,
    )


@pytest.fixture(scope="module")
def engines(
    node: NodeProcess,
    models: dict[str, Path],
    root: Path,
    wanted: dict[int, tuple[int, ...]],
    long_answer: tuple[int, ...],
) -> Iterator[list[EngineProcess]]:
    """One reads contexts, the other one has the node attend to them."""
    made = [
        start(models["llama"], node, root, "reads"),
        start(models["llama"], node, root, "asks", offload={"kind": "node"}),
    ]
    yield made
    for engine in made:
        engine.kill()


def ask(
    engine: EngineProcess, batch: list[Tokens], wanted: dict[int, tuple[int, ...]]
) -> list[int]:
    """Have an engine answer as stock vLLM does; tokens of each prompt that were found."""
    got = engine.answers(batch)
    assert [tuple(tokens) for tokens, _ in got] == [wanted[len(p)] for p in batch]
    return [cached for _, cached in got]


def pinned(node: NodeProcess) -> int:
    """Slots that engines have claimed to write or to read."""
    return sum(store.pinned for store in node.status().stores)


def eventually(what: Callable[[], bool], seconds: float = 60.0) -> bool:
    """Check whether something becomes true."""
    deadline = time.monotonic() + seconds
    while not what():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def test_an_engine_attends_to_contexts_that_another_one_has_stored(
    node: NodeProcess, engines: list[EngineProcess], wanted: dict[int, tuple[int, ...]]
) -> None:
    first, second = engines
    assert ask(first, BATCH[:1], wanted) == [0]
    stored = first.metric("bytes_written")
    assert stored > 0
    before = second.metric("bytes_written")
    assert ask(second, BATCH[1:2], wanted) == [SHARED]
    assert second.metric("offload_tickets") > 0
    assert second.metric("offload_failures") == 0
    assert second.metric("bytes_written") - before < stored / 8, "the shared blocks are stored once"
    assert ask(second, BATCH[2:3], wanted) == [0]
    assert ask(first, BATCH[2:3], wanted)[0] >= len(LONG[1]) // BLOCK * BLOCK - BLOCK


def test_blocks_that_an_engine_reads_are_not_evicted(
    node: NodeProcess,
    engines: list[EngineProcess],
    wanted: dict[int, tuple[int, ...]],
    long_answer: tuple[int, ...],
) -> None:
    first, second = engines
    recomputed = second.metric("recomputed_requests", cause="context")
    second.order(prompts=BATCH[1:2], tokens=ANSWER)
    assert eventually(lambda: pinned(node) >= SHARED // BLOCK)
    store = node.status().stores[0]
    count = store.slots // (len(LONG[0]) // BLOCK) + 1
    first.answers(prompts([len(LONG[0])] * count, seed=63), 1)
    assert not second.answered(), "the reader has read all the while"
    assert [tuple(tokens) for tokens, _ in second.ordered_answers()] == [long_answer]
    assert second.metric("recomputed_requests", cause="context") == recomputed
    assert ask(first, BATCH[2:3], wanted) == [0], "what nobody read is gone"
    assert ask(first, BATCH[:1], wanted) == [SHARED]


def test_a_restart_of_the_node_clears_claims(
    node: NodeProcess, engines: list[EngineProcess], wanted: dict[int, tuple[int, ...]]
) -> None:
    for engine in engines:
        engine.order(prompts=BATCH[:2], tokens=40)
    assert eventually(lambda: pinned(node) > 0)
    assert eventually(lambda: sum(store.ready for store in node.status().stores) > 0)
    node.kill()
    node.start()
    for engine in engines:
        got = engine.ordered_answers()
        assert [tuple(tokens) for tokens, _ in got] == [wanted[len(p)] for p in BATCH[:2]]
    assert eventually(lambda: pinned(node) == 0)
    assert sum(store.ready for store in node.status().stores) > 0


def test_an_engine_that_is_killed_keeps_nothing(
    node: NodeProcess,
    engines: list[EngineProcess],
    models: dict[str, Path],
    root: Path,
    wanted: dict[int, tuple[int, ...]],
) -> None:
    first, second = engines
    first.order(prompts=BATCH[3:], tokens=ANSWER)
    assert eventually(lambda: pinned(node) > 0)
    second.order(prompts=BATCH[3:], tokens=40)
    first.kill()
    got = second.ordered_answers()
    assert [tuple(tokens) for tokens, _ in got] == [wanted[len(p)] for p in BATCH[3:]]
    assert eventually(lambda: pinned(node) == 0)
    state = str(root / "reads")
    checked = CliRunner().invoke(cli, ["fsck", state]).output
    assert "gives them to engines alone" in " ".join(checked.split())
    removed = CliRunner().invoke(cli, ["rm", "--yes", state]).output
    assert f"stays on the node: ssdkv node volumes {node.address}" in " ".join(removed.split())
    engines[0] = start(models["llama"], node, root, "reads")
    assert ask(engines[0], BATCH[3:], wanted)[0] > 0, "its contexts are the node's"


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_kills_at_random_instants(
    node: NodeProcess,
    engines: list[EngineProcess],
    models: dict[str, Path],
    root: Path,
    wanted: dict[int, tuple[int, ...]],
    soak_rounds: int,
) -> None:
    """No wrong token, nobody waits for ever, and nothing is left held; 15 s a kill."""
    source = random.Random(7)
    for engine in engines:  # a node may be killed only when its engines have started
        ask(engine, BATCH[:1], wanted)
    for number in range(max(6, soak_rounds // 3)):
        whom = ("node", "reads", "asks", "stopped")[number % 4]
        work = [source.sample(BATCH, 2) for _ in engines]
        for engine, batch in zip(engines, work, strict=True):
            engine.order(prompts=batch, tokens=40)
        time.sleep(source.uniform(0.0, 2.0))
        dead = ("reads", "asks").index(whom) if whom in ("reads", "asks") else -1
        if whom == "node":
            node.kill()
            node.start()
        elif whom == "stopped":
            engines[0].stop()
            time.sleep(2 * LEASE_S)
            engines[0].go_on()
        else:
            engines[dead].kill()
        for at, (engine, batch) in enumerate(zip(engines, work, strict=True)):
            if at != dead:
                got = [tuple(tokens) for tokens, _ in engine.ordered_answers()]
                assert got == [wanted[len(p)] for p in batch]
        if dead >= 0:
            more = {"offload": {"kind": "node"}} if dead else {}
            engines[dead] = start(models["llama"], node, root, whom, **more)
            ask(engines[dead], work[dead], wanted)
        assert eventually(lambda: pinned(node) == 0)
