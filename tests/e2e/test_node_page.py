"""Page mode whose slots lie on nodes: the tokens of stock vLLM, whatever becomes of a node."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.e2e.stock import Stock
from tests.e2e.workload import SHORT, SMALL_DRAM, kv_tokens
from tests.kit.engine import Answer, Engine
from tests.kit.engine_process import LEASE_S
from tests.kit.node import NodeProcess
from vllm_ssdkv.cli.main import app as cli
from vllm_ssdkv.store import own_store

WINDOW = 128
CHUNK = 256
BLOCK = 32


@pytest.fixture(scope="module")
def nodes(root: Path) -> Iterator[Sequence[NodeProcess]]:
    """Four nodes of one drive each."""
    with ExitStack() as stack:
        started = []
        for number in range(4):
            place = root / f"node{number}"
            place.mkdir()
            drive = {"path": str(place / "ssd"), "capacity": "1GiB"}
            node = NodeProcess(place, lease=LEASE_S, devices=[drive], store_share=0.0625)
            started.append(stack.enter_context(node))
        yield started


def options(nodes: Sequence[NodeProcess], state: Path, **more: object) -> dict[str, object]:
    """Options of an engine in page mode, whose contexts do not fit into its DRAM."""
    return {
        "mode": "page",
        "verify_hits": 0,
        "nodes": [node.address for node in nodes],
        "state_dir": str(state),
        "hbm_window_tokens": WINDOW,
        "dram_gib": SMALL_DRAM,
        "io": {"staging": "4MiB"},
        **more,
    }


@contextmanager
def engine(
    model: Path, nodes: Sequence[NodeProcess], state: Path, **more: object
) -> Iterator[Engine]:
    with Engine(
        model,
        ssdkv=options(nodes, state, **more),
        kv_tokens=kv_tokens(WINDOW, CHUNK, BLOCK),
        max_num_batched_tokens=CHUNK,
        enable_prefix_caching=False,
    ) as started:
        yield started


def tokens(answers: Sequence[Answer]) -> list[tuple[int, ...]]:
    return [answer.tokens for answer in answers]


@pytest.mark.parametrize("count", [1, 2, 4])
def test_contexts_on_nodes_give_the_tokens_of_stock(
    count: int, nodes: Sequence[NodeProcess], models: dict[str, Path], stock: Stock, tmp_path: Path
) -> None:
    wanted = tokens(stock.answers("llama", SHORT))
    state = tmp_path / "state"
    with engine(models["llama"], nodes[:count], state) as here:
        assert tokens(here.answers(SHORT)) == wanted
        here.settle()
        assert here.ssdkv("bytes_read") > 0
    checked = CliRunner().invoke(cli, ["fsck", str(state)])
    assert checked.exit_code
    assert "its slots lie on the node" in checked.output
    if count > 1:
        return
    with engine(models["llama"], nodes[:count], state) as again:
        got = again.answers(SHORT)
        assert tokens(got) == wanted
        assert got[0].cached > 0


def test_pages_of_contexts_on_nodes_are_chosen_by_codes(
    nodes: Sequence[NodeProcess], models: dict[str, Path], stock: Stock, tmp_path: Path
) -> None:
    """Summaries come over the wire once; with a budget of everything no token is another."""
    wanted = tokens(stock.answers("llama", SHORT))
    state = tmp_path / "state"
    chooses = {"selector": "codes", "sparse": {"exact_below": 0, "budget": 1.0}}
    for life in range(2):
        with engine(models["llama"], nodes[:2], state, **chooses) as here:
            got = here.answers(SHORT)
            assert tokens(got) == wanted
            assert here.ssdkv("sparse_selections") > 0
            assert here.ssdkv("sparse_rows_exact") == 0
            here.settle()
            if life:
                assert got[0].cached > 0
                assert here.ssdkv("sparse_bytes_fetched", pages="summary", tier="ssd") > 0


def eventually(here: Engine, what: Callable[[], bool], seconds: float = 60.0) -> bool:
    """Check whether something becomes true; reports come with steps, mending with rest."""
    deadline = time.monotonic() + seconds
    while not what():
        if time.monotonic() > deadline:
            return False
        time.sleep(2.0)
        here.answers([[1] * 8], 1)
    return True


def test_the_only_node_dies_and_comes_back_under_requests(
    nodes: Sequence[NodeProcess],
    models: dict[str, Path],
    stock: Stock,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With one copy their contexts are computed again, when the node is back."""
    monkeypatch.setattr(own_store, "RETURN_S", 60.0)
    wanted = tokens(stock.answers("llama", SHORT))
    with engine(models["llama"], nodes[3:], tmp_path / "state") as here:
        again = threading.Timer(2.0, nodes[3].start)

        def strike(step: int) -> None:
            if step == 12:
                nodes[3].kill()
                again.start()

        for number, prompt in enumerate(SHORT):
            here.add(str(number), prompt)
        got = here.run(strike)
        again.join()
        assert [got[str(number)] for number in range(len(SHORT))] == wanted
        here.settle()
        assert here.ssdkv("device_lost") == here.ssdkv("device_returned") == 1
        assert here.ssdkv("recomputed_requests") > 0


def test_a_node_dies_under_requests_comes_back_and_heals(
    nodes: Sequence[NodeProcess], models: dict[str, Path], stock: Stock, tmp_path: Path
) -> None:
    """With two copies nothing is computed again, and what was stored meanwhile is on it later.

    Of three: what is stored while one of two is gone has no second copy until it is stored again.
    """
    wanted = tokens(stock.answers("llama", SHORT))
    three = nodes[:3]
    with engine(models["llama"], three, tmp_path / "state", replicas=2) as here:
        struck: list[int] = []

        def strike(step: int) -> None:
            if step == 12:
                three[1].kill()
                struck.append(step)

        for number, prompt in enumerate(SHORT):
            here.add(str(number), prompt)
        got = here.run(strike)
        assert struck
        assert [got[str(number)] for number in range(len(SHORT))] == wanted
        here.settle()
        assert here.ssdkv("device_lost") == 1
        assert here.ssdkv("slots_dropped", cause="device_lost") == 0
        assert here.ssdkv("recomputed_requests") == 0

        three[1].start()
        assert eventually(here, lambda: here.ssdkv("device_returned") == 1)
        before = -1.0  # what was written in part when the node died is mended, if there was any
        while before != (before := here.ssdkv("mended_copies")):
            time.sleep(3.0)
            here.answers([[1] * 8], 1)

        three[0].kill()
        try:
            answers = here.answers(SHORT)
            assert tokens(answers) == wanted
            assert answers[0].cached > 2900
            assert here.ssdkv("slots_dropped", cause="device_lost") == 0
            assert here.ssdkv("recomputed_requests") == 0
        finally:
            three[0].start()
