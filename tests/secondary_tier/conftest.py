"""Settings of an engine with a tiny model, and nodes."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from vllm.config import VllmConfig

from tests.conftest import disk_directory
from tests.e2e.models import make_llama
from tests.kit.waiting import PATIENCE_S
from tests.secondary_tier.rig import engine_settings
from vllm_ssdkv.config.node import NodeConfig
from vllm_ssdkv.node.client import awaited_chains
from vllm_ssdkv.node.server import chains
from vllm_ssdkv.node.server.daemon import Node


@pytest.fixture(scope="package")
def settings(tmp_path_factory: pytest.TempPathFactory) -> VllmConfig:
    return engine_settings(make_llama(tmp_path_factory.mktemp("model") / "llama", layers=1))


@pytest.fixture
def node_place() -> Iterator[Path]:
    """Directory of a node, on a disk."""
    with tempfile.TemporaryDirectory(prefix="ssdkv-tier-", dir=disk_directory()) as place:
        (Path(place) / "ssd").mkdir()
        yield Path(place)


@pytest.fixture
def start_node(node_place: Path) -> Iterator[Callable[..., Node]]:
    """Starts nodes in this process, the first below ``node_place``, until the test ends."""
    with ExitStack() as stack:

        def start(name: str = ".", **options: Any) -> Node:  # noqa: ANN401 - of a node
            place = node_place / name
            (place / "ssd").mkdir(parents=True, exist_ok=True)
            given = {
                "listen": [f"unix://{place}/node.sock"],
                "devices": [{"path": str(place / "ssd"), "capacity": "16MiB"}],
                "dram_gib": "64MiB",
                "store_share": 1.0,
                **options,
            }
            node = Node(NodeConfig.from_options(given, "options"))
            node.start()
            stack.callback(node.close)
            return node

        yield start


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request waits for what another computes as long as a test may take, whatever the machine
    does meanwhile."""
    monkeypatch.setattr(awaited_chains, "STALL_S", PATIENCE_S)
    monkeypatch.setattr(chains, "CHAIN_S", PATIENCE_S)
