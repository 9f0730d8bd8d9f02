"""Volumes and stores of a node take their room from one capacity of each drive."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import msgspec
import numpy as np
import pytest

from tests.kit.waiting import until
from tests.node.server.attacker import SPEC, Attacker
from vllm_ssdkv.base.errors import ConfigError, NodeError, StoreError
from vllm_ssdkv.base.metrics import Counters
from vllm_ssdkv.config.engine import DeviceConfig, SSDKVConfig
from vllm_ssdkv.config.node import NodeConfig
from vllm_ssdkv.node.client.session import Peer
from vllm_ssdkv.node.client.volume_link import VolumeLink
from vllm_ssdkv.node.protocol.messages import RemoveVolume, StoreSpec
from vllm_ssdkv.node.server.daemon import Node
from vllm_ssdkv.node.server.drive_room import DriveRoom
from vllm_ssdkv.node.server.store_options import directory_of

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
        wait_for_end(node)


def wait_for_end(node: Node) -> None:
    """Wait until nobody uses what the node has."""
    until(lambda: not node.status().sessions)


def spec_named(name: str, model: str = SPEC.model) -> StoreSpec:
    return msgspec.structs.replace(SPEC, name=name, model=model)


def use_store(node: Node, name: str) -> None:
    """Have the node open a store, and wait until nobody uses it."""
    with Attacker(node.addresses[0], "scheduler", spec=spec_named(name)):
        pass
    wait_for_end(node)


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


def stored_bytes(root: Path) -> int:
    return sum(path.stat().st_size for path in (root / "ssd").rglob("rank0.data"))


def test_the_store_that_was_closed_for_longest_makes_room(
    node: Node, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Capacity holds for all that a node has on a drive, whatever comes and goes."""
    names = [directory_of(spec_named(name)) for name in ("a", "b", "c", "d")]
    mine = tmp_path / "ssd" / "mine"  # a stranger's directory, with files named alike
    for number, name in enumerate(("a", "b", "a", "c", "d")):
        use_store(node, name)
        assert stored_bytes(tmp_path) <= 64 * MIB, f"store {number}"
        if name == "b":
            mine.mkdir()
            (mine / "notes").write_text("keep")
    there = {path.name for path in (tmp_path / "ssd").iterdir()}
    assert there - {"mine"} == {names[2], names[3]}
    assert (mine / "notes").read_text() == "keep"
    assert node.counters.totals()["node_stores_removed"] == 2
    removed = [r.getMessage() for r in caplog.records if "is removed" in r.getMessage()]
    assert [names[1] in removed[0], names[0] in removed[1]] == [True, True]
    assert "of attacked" in removed[0]


def test_stores_of_a_start_before_are_counted(tmp_path: Path) -> None:
    first = Node(config_in(tmp_path))
    first.start()
    for name in ("a", "b"):
        use_store(first, name)
    assert first.close()
    second = Node(config_in(tmp_path))
    second.start()
    use_store(second, "c")
    assert stored_bytes(tmp_path) <= 64 * MIB
    assert not (tmp_path / "ssd" / directory_of(spec_named("a"))).exists()
    assert second.close()


def test_stores_in_use_make_no_room_and_are_named(tmp_path: Path) -> None:
    """Where closed stores are not enough, they stay."""
    first = Node(config_in(tmp_path, store_share=0.25))
    first.start()
    for name in ("a", "b"):
        use_store(first, name)
    make_volume(first, 20 * MIB, uuid4().bytes)
    assert first.close()
    made = Node(config_in(tmp_path, store_share=0.25, shares={"large": 0.75}))
    made.start()
    names = ", ".join(sorted(directory_of(spec_named(name)) for name in ("a", "b")))
    with (
        Attacker(made.addresses[0], "scheduler", spec=spec_named("a")),
        pytest.raises(NodeError, match=rf"no room for a store of 48 MiB.*\({names}\)"),
        Attacker(made.addresses[0], "scheduler", spec=spec_named("c", model="large")),
    ):
        pass
    assert len(list((tmp_path / "ssd").rglob("store.json"))) == 2
    assert made.close()


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
    room = DriveRoom(config_in(tmp_path), list, Counters())
    store = DeviceConfig(path=str(tmp_path / "ssd" / "store"), capacity=40 * MIB)
    options = SSDKVConfig(mode="reuse", devices=(store,))
    volume = tmp_path / "ssd" / "volumes" / "one"
    with room.promise_store(options), room.lock:
        room.check_volume(0, volume, 24 * MIB)
        with pytest.raises(ConfigError, match="no room"):
            room.check_volume(0, volume, 25 * MIB)
    with room.lock:
        room.check_volume(0, volume, 64 * MIB)
