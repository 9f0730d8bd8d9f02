"""Page mode whose slots lie on nodes: the tokens of stock vLLM, whatever becomes of a node."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.e2e.engine import Answer, Engine
from tests.e2e.node_engine import LEASE_S
from tests.e2e.stock import Stock
from tests.e2e.workload import SHORT, SMALL_DRAM, kv_tokens
from tests.node.process import NodeProcess

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
            started.append(stack.enter_context(NodeProcess(place, lease=LEASE_S)))
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
    with engine(models["llama"], nodes[:count], state) as again:
        got = again.answers(SHORT)
        assert tokens(got) == wanted
        assert got[0].cached > 0
