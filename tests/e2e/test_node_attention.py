"""Page mode whose contexts lie on nodes that attend to them: the tokens of stock vLLM."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.e2e.stock import Stock
from tests.e2e.test_node_page import engine, tokens
from tests.e2e.workload import SHORT
from tests.kit.engine_process import LEASE_S
from tests.kit.node import NodeProcess

NODES = {"kind": "node"}


@pytest.fixture(scope="module")
def nodes(root: Path) -> Iterator[Sequence[NodeProcess]]:
    """Four nodes of one drive each."""
    with ExitStack() as stack:
        started = []
        for number in range(4):
            place = root / f"attends{number}"
            place.mkdir()
            drive = {"path": str(place / "ssd"), "capacity": "512MiB"}  # each engine has a volume
            node = NodeProcess(
                place, lease=LEASE_S, attend_threads=1, devices=[drive], store_share=0.19
            )
            started.append(stack.enter_context(node))
        yield started


@pytest.mark.parametrize(("count", "batch"), [(1, 1), (2, None), (4, 1)])
def test_nodes_attend_to_what_they_have(
    count: int,
    batch: int | None,
    nodes: Sequence[NodeProcess],
    models: dict[str, Path],
    stock: Stock,
    tmp_path: Path,
) -> None:
    asked = SHORT[:batch]
    wanted = tokens(stock.answers("llama", SHORT))[:batch]
    with engine(models["llama"], nodes[:count], tmp_path / "state", offload=NODES) as here:
        assert tokens(here.answers(asked)) == wanted
        assert here.ssdkv("offload_tickets") > 0
        assert here.ssdkv("offload_failures") == 0
