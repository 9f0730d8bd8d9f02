"""Locks of volumes whose I/O does not end, and what is left where a volume cannot be made."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from uuid import UUID, uuid4

import numpy as np
import pytest

from vllm_ssdkv.base.errors import DeviceError, StoreLockedError
from vllm_ssdkv.base.metrics import Counters
from vllm_ssdkv.config.node import NodeConfig
from vllm_ssdkv.node.server import volumes as module
from vllm_ssdkv.node.server.drive_room import DriveRoom
from vllm_ssdkv.node.server.volumes import VolumeSet, VolumeShelf
from vllm_ssdkv.store.io.engines.protocol import Op
from vllm_ssdkv.store.memory.arena import Arena

MIB = 1 << 20
NAMES = [uuid4().bytes, uuid4().bytes]


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> VolumeShelf:
    """Of two drives; who wants a volume that is locked does not wait."""
    monkeypatch.setattr(module, "_LOCK_S", 0.0)
    devices = [{"path": str(tmp_path / f"ssd{i}"), "capacity": "64MiB"} for i in range(2)]
    options = {
        "listen": [f"unix://{tmp_path}/s"],
        "devices": devices,
        "io": {"engine": "threads", "deadline": 3.0},
    }
    config = NodeConfig.from_options(options)
    return VolumeShelf(config, DriveRoom(config, list, Counters()))


def opened(shelf: VolumeShelf, deadline_s: float = 10.0) -> VolumeSet:
    return shelf.open(NAMES, [MIB, MIB], "a model", deadline_s)


def test_a_drive_that_hangs_costs_the_next_session_that_drive_alone(shelf: VolumeShelf) -> None:
    first = opened(shelf)
    kept = [os.dup(fd) for fd in first.fds]  # as an engine that does not end has them
    first.hang([1])
    first.close()
    second = opened(shelf)
    assert [second.is_dead(drive) for drive in range(2)] == [False, True]
    assert second.nbytes(1) == MIB
    engine = second.open_engine(arena := Arena(2 * MIB))
    batch = engine.submit(
        Op.READ,
        np.array([0], dtype=np.uint16),
        np.array([0], dtype=np.uint64),
        np.array([4096], dtype=np.uint32),
        np.array([0], dtype=np.uint64),
    )
    assert batch.wait(5.0)
    assert batch.results().tolist() == [4096]
    assert engine.close(5.0)
    arena.close()
    with pytest.raises(StoreLockedError):  # another live session has the first volume
        opened(shelf)
    second.close()
    for fd in kept:
        os.close(fd)  # the I/O ends
    third = opened(shelf)
    assert not third.is_dead(1)
    with pytest.raises(StoreLockedError):
        shelf.open([None, NAMES[1]], [0, MIB], "a model", 10.0)
    third.close()


def test_the_node_gives_a_drive_up_before_the_engine_gives_up_the_node(shelf: VolumeShelf) -> None:
    for engine_s, node_s in ((10.0, 3.0), (6.0, 3.0), (3.0, 1.5)):
        found = opened(shelf, engine_s)
        assert found.deadline_s == node_s
        found.close()


def test_a_volume_that_cannot_be_made_leaves_nothing(
    shelf: VolumeShelf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int, data: bytes, offset: int) -> None:
        raise OSError(errno.ENOSPC, "no space left on device")

    def count() -> int:
        return len(os.listdir("/proc/self/fd"))

    before = count()
    with monkeypatch.context() as patch:
        patch.setattr(module, "write_all", full)
        with pytest.raises(DeviceError, match=r"volume\.json cannot be written"):
            opened(shelf)
    assert count() == before
    assert not (tmp_path / "ssd0" / "volumes" / str(UUID(bytes=NAMES[0]))).exists()
    opened(shelf).close()
