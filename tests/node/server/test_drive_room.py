"""Volumes and stores of a node take their room from one capacity of each drive."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import msgspec
import numpy as np
import pytest

from tests.node.server.attacker import SPEC, Attacker
from vllm_ssdkv.base.errors import ConfigError, NodeError, StoreError
from vllm_ssdkv.base.metrics import Counters
from vllm_ssdkv.config.engine import DeviceConfig, SSDKVConfig
from vllm_ssdkv.config.node import NodeConfig
from vllm_ssdkv.node.client.session import Peer
from vllm_ssdkv.node.client.volume_link import VolumeLink
from vllm_ssdkv.node.protocol.messages import RemoveVolume
from vllm_ssdkv.node.server.daemon import Node
from vllm_ssdkv.node.server.drive_room import DriveRoom

MIB = 1 << 20


def config_in(root: Path, **options: object) -> NodeConfig:
    """A node of one drive of 64 MiB; each store has half of it."""
    given = {
        "listen": [f"unix://{root}/s"],
        "devices": [{"path": str(root / "ssd"), "capacity": "64MiB"}],
        "dram_gib": "64MiB",
        **options,
    }
    return NodeConfig.from_options(given)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    made = Node(config_in(tmp_path))
    made.start()
    yield made
    assert made.close()


def make_volume(node: Node, nbytes: int, name: bytes) -> None:
    """Open a volume, and close it again."""
    peer = Peer(node.addresses[0], None, "volume", "a run")
    link = VolumeLink(peer, Counters(), "a model", 5.0)
    link.start()
    try:
        link.open([name], [nbytes], np.zeros(4096, dtype=np.uint8))
    finally:
        assert link.close(5.0)


def use_store(node: Node, name: str) -> None:
    """Have the node open a store."""
    with Attacker(node.addresses[0], "scheduler", spec=msgspec.structs.replace(SPEC, name=name)):
        pass


def test_a_volume_gets_nothing_that_stores_own(node: Node, tmp_path: Path) -> None:
    use_store(node, "first")
    (data,) = (tmp_path / "ssd").rglob("rank0.data")
    stored = data.stat().st_size
    assert 29 * MIB < stored <= 32 * MIB
    with pytest.raises(StoreError, match=r"no room for a volume of 40 MiB.*and stores 30376 KiB"):
        make_volume(node, 40 * MIB, uuid4().bytes)
    make_volume(node, 64 * MIB - stored, name := uuid4().bytes)
    make_volume(node, 64 * MIB - stored, name)
    with pytest.raises(StoreError, match="no room for a volume of 4 KiB"):
        make_volume(node, 4096, uuid4().bytes)


def test_a_store_gets_nothing_that_volumes_own(node: Node) -> None:
    make_volume(node, 33 * MIB, name := uuid4().bytes)
    with pytest.raises(NodeError, match=r"no room for a store of 32 MiB: of 64 MiB volumes have"):
        use_store(node, "first")
    with Attacker(node.addresses[0], "status", spec=None) as asker:
        asker.call(RemoveVolume(name))
    use_store(node, "first")
    make_volume(node, 32 * MIB, name)
    use_store(node, "first")  # what it has stays its own


def test_what_is_there_already_is_used_whatever_the_capacity_is_now(tmp_path: Path) -> None:
    first = Node(config_in(tmp_path))
    first.start()
    use_store(first, "first")
    make_volume(first, 30 * MIB, name := uuid4().bytes)
    assert first.close()
    devices = [{"path": str(tmp_path / "ssd"), "capacity": "48MiB"}]
    second = Node(config_in(tmp_path, devices=devices))
    second.start()
    use_store(second, "first")
    make_volume(second, 30 * MIB, name)
    with pytest.raises(StoreError, match="no room for a volume"):
        make_volume(second, MIB, uuid4().bytes)
    assert second.close()


def test_a_store_that_is_being_opened_has_its_room(tmp_path: Path) -> None:
    room = DriveRoom(config_in(tmp_path))
    store = DeviceConfig(path=str(tmp_path / "ssd" / "store"), capacity=40 * MIB)
    options = SSDKVConfig(mode="reuse", devices=(store,))
    volume = tmp_path / "ssd" / "volumes" / "one"
    with room.promise_store(options), room.lock:
        room.check_volume(0, volume, 24 * MIB)
        with pytest.raises(ConfigError, match="no room"):
            room.check_volume(0, volume, 25 * MIB)
    with room.lock:
        room.check_volume(0, volume, 64 * MIB)
