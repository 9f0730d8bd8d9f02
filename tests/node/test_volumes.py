"""Volumes of a real node, through the engine that a store uses."""

from __future__ import annotations

import errno
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from uuid import UUID, uuid4

import numpy as np
import pytest
from typer.testing import CliRunner

from tests.kit.waiting import until
from vllm_ssdkv.base.errors import StoreError
from vllm_ssdkv.base.metrics import Counters
from vllm_ssdkv.base.node_address import Address
from vllm_ssdkv.cli.node.node import app
from vllm_ssdkv.config.node import NodeConfig
from vllm_ssdkv.node.client.node_engine import FRAME_BYTES, NodeEngine
from vllm_ssdkv.node.client.session import Peer
from vllm_ssdkv.node.client.volume_link import VolumeLink
from vllm_ssdkv.node.server.daemon import Node
from vllm_ssdkv.store.format.slot_geometry import SUPERBLOCK_BYTES
from vllm_ssdkv.store.io.engines.protocol import Op
from vllm_ssdkv.store.memory.arena import Arena

MIB = 1 << 20
VOLUME = 12 * MIB
DEADLINE_S = 5.0
NAMES = [uuid4().bytes, uuid4().bytes]


class Host:
    """A node in this process, of two drives."""

    def __init__(self, root: Path, **options: object):
        self.address = f"unix://{root}/node.sock"
        self._given: dict[str, object] = {
            "listen": [self.address],
            "devices": [{"path": str(root / f"ssd{i}"), "capacity": "64MiB"} for i in range(2)],
            "dram_gib": "64MiB",
            **options,
        }
        self.node: Node | None = None

    def start(self) -> None:
        self.node = Node(NodeConfig.from_options(self._given))
        self.node.start()

    def stop(self) -> None:
        if self.node is not None:
            self.node.close()
            self.node = None


class Rank:
    """One rank's engine over the volumes of a node."""

    def __init__(self, address: str, names: list[bytes], deadline_s: float = DEADLINE_S):
        self.arena = Arena(16 * MIB)
        peer = Peer(Address.parse(address), None, "volume", "a run")
        self.link = VolumeLink(peer, Counters(), "a model", deadline_s)
        self.drives = self.link.start()
        self.link.open(names, [VOLUME] * len(names), self.arena.view(0, self.arena.nbytes))
        numbers = np.arange(len(names), dtype=np.int64)
        self.engine = NodeEngine(self.arena, 0 * numbers, numbers, lambda _: self.link.wire)

    def move(
        self, op: Op, requests: list[tuple[int, int, int, int]], timeout_s: float = 30.0
    ) -> list[int]:
        """Results of requests: device, offset in the volume, bytes, offset in the arena."""
        device, offset, length, buffer = (
            np.array(column) for column in zip(*requests, strict=True)
        )
        batch = self.engine.submit(
            op,
            device.astype(np.uint16),
            offset.astype(np.uint64) + np.uint64(SUPERBLOCK_BYTES),
            length.astype(np.uint32),
            buffer.astype(np.uint64),
        )
        assert batch.wait(timeout_s)
        return [int(result) for result in batch.results()]

    def close(self) -> None:
        assert self.link.close(5.0)
        assert self.engine.close(5.0)


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    made = Host(tmp_path)
    made.start()
    yield made
    made.stop()


@pytest.fixture
def rank(host: Host) -> Iterator[Rank]:
    made = Rank(host.address, NAMES)
    yield made
    made.close()


def test_what_is_written_is_read(rank: Rank) -> None:
    source = np.random.default_rng(1)
    half = rank.arena.nbytes // 2
    rank.arena.view(0, half)[:] = source.integers(0, 256, half, dtype=np.uint8)
    # More than a window at once, a request longer than a frame, and neighbours in one frame.
    long, page = 3 * FRAME_BYTES + 4096, 4096
    requests = [(0, 0, long, 0), (1, page, 2 * MIB, long)]
    requests += [(0, 5 * MIB + 2 * i * page, page, 6 * MIB + i * page) for i in range(40)]
    assert rank.move(Op.WRITE, requests) == [length for _, _, length, _ in requests]
    back = [(device, at, length, half + place) for device, at, length, place in requests]
    assert rank.move(Op.READ, back) == [length for _, _, length, _ in requests]
    for _, _, length, place in requests:
        same = rank.arena.view(place, length) == rank.arena.view(half + place, length)
        assert same.all()
    counted = rank.engine.statistics()
    assert counted["write_bytes.0"] == long + 40 * page == counted["read_bytes.0"]
    assert counted["read_bytes.1"] == 2 * MIB
    assert counted["read_errors.0"] == 0


def test_many_threads_read_what_they_wrote(rank: Rank) -> None:
    wrong: list[int] = []

    def work(number: int) -> None:
        place = number * MIB
        for turn in range(20):
            rank.arena.view(place, MIB // 2)[:] = 16 * number + turn
            rank.move(Op.WRITE, [(number % 2, place, MIB // 2, place)])
            rank.move(Op.READ, [(number % 2, place, MIB // 2, place + MIB // 2)])
            if (rank.arena.view(place + MIB // 2, MIB // 2) != 16 * number + turn).any():
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong


def test_a_node_that_is_gone_fails_requests_at_once_and_comes_back(host: Host, rank: Rank) -> None:
    told: list[bool] = []
    rank.link.tell_changes(told.append)
    assert told == [True]
    rank.arena.view(0, MIB)[:] = 7
    assert rank.move(Op.WRITE, [(0, 0, MIB, 0)]) == [MIB]
    host.stop()
    until(lambda: rank.link.wire is None)
    began = time.monotonic()
    assert rank.move(Op.READ, [(0, 0, MIB, MIB), (1, 0, 4096, MIB)]) == [-errno.ENOTCONN] * 2
    assert time.monotonic() - began < DEADLINE_S
    host.start()
    until(lambda: rank.link.wire is not None)
    assert rank.move(Op.READ, [(0, 0, MIB, 2 * MIB)]) == [MIB]
    assert (rank.arena.view(2 * MIB, MIB) == 7).all()
    until(lambda: told == [True, False, True])


def test_a_volume_belongs_to_one_session_at_a_time(host: Host, rank: Rank) -> None:
    with pytest.raises(StoreError, match="in use by"):
        Rank(host.address, [NAMES[0], uuid4().bytes])
    assert rank.move(Op.READ, [(0, 0, 4096, 0)]) == [4096]


def test_a_drive_has_its_room_and_no_more(host: Host, rank: Rank) -> None:
    peer = Peer(Address.parse(host.address), None, "volume", "another run")
    link = VolumeLink(peer, Counters(), "a model", 5.0)
    drives = link.start()
    assert [drive.room for drive in drives] == [32 * MIB] * 2
    with pytest.raises(StoreError, match="has no room for a volume of 60 MiB"):
        link.open([uuid4().bytes, None], [60 * MIB, 0], np.zeros(4096, dtype=np.uint8))
    link.close(5.0)


def test_a_lost_volume_is_told(host: Host, rank: Rank, tmp_path: Path) -> None:
    assert not rank.link.missing(NAMES[0])
    assert rank.link.missing(uuid4().bytes)
    directory = tmp_path / "ssd0" / "volumes" / str(UUID(bytes=NAMES[0]))
    host.stop()
    until(lambda: rank.link.wire is None)
    (directory / "rank0.data").unlink()
    host.start()
    time.sleep(1.0)
    assert rank.link.wire is None
    assert not (directory / "rank0.data").exists()


def test_volumes_are_listed_and_removed_by_a_command(
    host: Host, rank: Rank, tmp_path: Path
) -> None:
    def run(*more: str) -> tuple[int, str]:
        result = CliRunner().invoke(app, ["volumes", host.address, *more])
        return result.exit_code, result.output

    name = str(UUID(bytes=NAMES[1]))
    code, listed = run("--json")
    assert code == 0
    found = {volume["name"]: volume for volume in json.loads(listed)["volumes"]}
    assert found.keys() == {str(UUID(bytes=name)) for name in NAMES}
    assert found[name]["open"]
    assert found[name]["nbytes"] == VOLUME
    code, refused = run("--remove", name)
    assert code == 1
    assert "in use" in refused
    rank.close()
    until(lambda: run("--remove", name)[0] == 0)
    assert not (tmp_path / "ssd1" / "volumes" / name).exists()
    assert name not in run()[1]


def test_a_node_that_encrypts_takes_no_volumes(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_bytes(bytes(range(32)))
    key.chmod(0o600)
    host = Host(tmp_path, encryption={"key_file": str(key)})
    host.start()
    peer = Peer(Address.parse(host.address), None, "volume", "a run")
    link = VolumeLink(peer, Counters(), "a model", 5.0)
    try:
        with pytest.raises(StoreError, match="option encryption"):
            link.start()
    finally:
        link.close(5.0)
        host.stop()


def test_requests_outside_a_volume_end_the_session(rank: Rank) -> None:
    assert rank.move(Op.READ, [(0, VOLUME, 4096, 0)]) == [-errno.ENOTCONN]


def test_a_hung_drive_fails_its_own_requests_and_the_session_stays(tmp_path: Path) -> None:
    """With the deadline of the engine that of the node, as both have it unless told otherwise."""
    stall = {"kind": "stall", "device": 1}
    deadline_s = 6.0
    host = Host(tmp_path, io={"deadline": deadline_s, "faults": [stall], "engine": "threads"})
    host.start()
    rank = Rank(host.address, NAMES, deadline_s=deadline_s)
    told: list[bool] = []
    rank.link.tell_changes(told.append)
    try:
        # Two frames are under way at once: the second one costs no other deadline.
        hung = [(1, i * FRAME_BYTES, FRAME_BYTES, (1 + i) * FRAME_BYTES) for i in range(2)]
        results = rank.move(Op.READ, [(0, 0, 4096, 0), *hung])
        assert results == [4096, -errno.EIO, -errno.EIO]
        began = time.monotonic()
        assert rank.move(Op.READ, [(1, 0, 4096, 4096), (0, 0, 4096, 0)]) == [-errno.EIO, 4096]
        assert time.monotonic() - began < deadline_s / 2, "the node waits so long for a drive"
        assert told == [True]
    finally:
        rank.close()
        host.stop()
