"""TRIM: dropped slots and no others, in idle moments, on block devices only."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.kit.waiting import until
from tests.store.conftest import OPAQUE, PATIENCE_S, MakeStore, StoreRig, array, striped
from vllm_ssdkv.base.metrics import Counters
from vllm_ssdkv.base.sizes import MIB
from vllm_ssdkv.store.devices.data_device import OpenDevice, open_device
from vllm_ssdkv.store.write import trim
from vllm_ssdkv.store.write.flusher import Flusher
from vllm_ssdkv.store.write.trim import BYTES_PER_SECOND, SlotTrimmer, _joined, trim_new

SLOTS = 64
Trimmed = list[tuple[int, int, int]]
Watched = Callable[[], tuple[StoreRig, "Rig"]]


class Rig:
    """A trimmer over made-up block devices that note what they are told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, devices: int = 3):
        monkeypatch.setattr(trim, "is_block_device", lambda fd: fd >= 100)
        self.now = 50.0
        self.trimmed: Trimmed = []
        self.counters = Counters()
        self.placement = striped(OPAQUE, [1.0] * devices, SLOTS)
        self.refuse: set[int] = set()
        opened = [
            OpenDevice(Path(f"/{i}"), 100 + i, 1 << 30, True, True, False) for i in range(devices)
        ]
        self.trimmer = SlotTrimmer(
            opened,
            [f"/{i}" for i in range(devices)],
            self.placement,
            SLOTS,
            self.counters,
            discard=self.discard,
            clock=lambda: self.now,
        )

    def discard(self, fd: int, offset: int, nbytes: int) -> None:
        if fd - 100 in self.refuse:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        self.trimmed.append((fd - 100, offset, nbytes))

    def pieces(self, slots: list[int]) -> set[tuple[int, int]]:
        """Device and offset of every 4 KiB of these slots."""
        extents = self.placement.extents(array(slots), 0, OPAQUE.slot_bytes)
        return {
            (int(d), at)
            for d, o, n in zip(extents.device, extents.offset, extents.length, strict=True)
            for at in range(int(o), int(o) + int(n), 4096)
        }

    def told(self) -> set[tuple[int, int]]:
        return {(d, at) for d, o, n in self.trimmed for at in range(o, o + n, 4096)}


def test_exactly_the_slots_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(monkeypatch)
    assert rig.trimmer.wait_s() is None
    rig.trimmer.add(array([3, 9, 10, 40]))
    rig.trimmer.keep(array([9, 50]))
    assert rig.trimmer.wait_s() == 0
    batch = rig.trimmer.take(busy=[40])
    assert batch.tolist() == [3, 10]
    rig.trimmer.discard(batch)
    assert rig.told() == rig.pieces([3, 10])
    assert rig.trimmer.wait_s() is None
    total = sum(rig.counters.total("bytes_trimmed", device=f"/{i}") for i in range(3))
    assert total == 2 * OPAQUE.slot_bytes


def test_neighbours_are_one_range(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(monkeypatch)
    rig.trimmer.add(np.arange(SLOTS))
    rig.trimmer.discard(rig.trimmer.take([]))
    assert rig.told() == rig.pieces(list(range(SLOTS)))
    assert len(rig.trimmed) == 3, "one per device"


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(1, 3)), max_size=30))
def test_joined_ranges_cover_the_same(steps: list[tuple[int, int]]) -> None:
    begins, at = [], 0
    lengths = [length for _, length in steps]
    for gap, length in steps:
        at += gap - 1
        begins.append(at)
        at += length
    begin, end = _joined(array(begins), array(lengths))
    covered = [x for b, e in zip(begin.tolist(), end.tolist(), strict=True) for x in range(b, e)]
    wanted = [x for b, n in zip(begins, lengths, strict=True) for x in range(b, b + n)]
    assert covered == wanted
    assert (begin[1:] > end[:-1]).all()


def test_the_rate_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(monkeypatch)
    monkeypatch.setattr(trim, "BATCH_BYTES", 8 * OPAQUE.slot_bytes)
    rig.trimmer.add(np.arange(20))
    batches = []
    while (wait := rig.trimmer.wait_s()) is not None:
        rig.now += wait
        batches.append((rig.now, rig.trimmer.take([]).tolist()))
    assert [len(slots) for _, slots in batches] == [8, 8, 4]
    pause = 8 * OPAQUE.slot_bytes / BYTES_PER_SECOND
    np.testing.assert_allclose(np.diff([when for when, _ in batches]), pause, rtol=1e-3)


def test_a_device_that_refuses_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rig = Rig(monkeypatch)
    rig.refuse = {1}
    for _ in range(2):
        rig.trimmer.add(np.arange(30))
        rig.trimmer.discard(rig.trimmer.take([]))
    assert {device for device, _, _ in rig.trimmed} == {0, 2}
    assert rig.counters.total("trim_errors", device="/1") == 1
    assert len([r for r in caplog.records if "cannot be trimmed" in r.getMessage()]) == 1


def test_files_keep_their_space(tmp_path: Path) -> None:
    file = tmp_path / "data"
    file.write_bytes(bytes(MIB))
    with file.open("r+b") as stream:
        device = OpenDevice(file, stream.fileno(), MIB, False, True, False)
        trimmer = SlotTrimmer([device], ["x"], striped(OPAQUE, [1.0], SLOTS), SLOTS, Counters())
        trimmer.add(np.arange(10))
        assert trimmer.wait_s() is None


# ---- by the writer ----


@pytest.fixture
def watched(make_store: MakeStore, monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    """A store whose writer has a trimmer."""
    writers: list[Flusher] = []

    def make() -> tuple[StoreRig, Rig]:
        rig, trims = make_store(OPAQUE, slots=SLOTS, devices=3), Rig(monkeypatch)
        store = rig.store
        assert store._writer.close(PATIENCE_S)
        store._writer = Flusher(store.files, store.frames, store._seals, trimmer=trims.trimmer)
        writers.append(store._writer)
        return rig, trims

    yield make
    for writer in writers:
        assert writer.close(PATIENCE_S)


def test_dropped_slots_are_trimmed_in_idle_moments(
    watched: Watched,
) -> None:
    rig, trims = watched()
    rig.write({1: 101, 2: 102, 3: 103})
    rig.store.trim(array([1, 2]))
    until(lambda: trims.told() == trims.pieces([1, 2]), "the trim")


def test_a_slot_that_is_written_again_is_not_trimmed(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig, trims = watched()
    monkeypatch.setattr(trim, "BATCH_BYTES", OPAQUE.slot_bytes)
    trims.now = 0.0  # after the first batch the clock stands still
    rig.store.trim(array([1, 2, 3]))
    until(lambda: trims.told() == trims.pieces([1]), "the first trim")
    rig.write({2: 102})
    rig.store.trim(array([9]))

    def others() -> bool:
        trims.now += 1.0
        return len(trims.told()) >= len(trims.pieces([1, 3, 9]))

    until(others, "the others")
    assert trims.told() == trims.pieces([1, 3, 9])
    assert rig.load({2: 102}, [7]).complete


# ---- a real block device ----


@pytest.fixture
def loop(tmp_path: Path) -> Iterator[Path]:
    """A loop device of 4 MiB that holds no store."""
    image = tmp_path / "image"
    image.write_bytes(bytes(MIB) + b"x" * (3 * MIB))
    command = ["losetup", "--find", "--show", str(image)]
    try:
        made = subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=PATIENCE_S
        )
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"loop devices need root: {error}")
    path = made.stdout.strip()
    yield Path(path)
    subprocess.run(["losetup", "--detach", path], check=True, timeout=PATIENCE_S)


def test_a_new_store_on_a_block_device(loop: Path) -> None:
    device = open_device(loop, index=0, rank=0, nbytes=2 * MIB, direct="off", lock_timeout_s=0.0)
    assert os.pread(device.fd, 4096, MIB) == b"x" * 4096
    trim_new(device, str(loop))
    os.posix_fadvise(device.fd, 0, 4 * MIB, os.POSIX_FADV_DONTNEED)
    assert os.pread(device.fd, MIB, MIB) == bytes(MIB)
    assert os.pread(device.fd, 4096, 2 * MIB) == b"x" * 4096, "beyond the store nothing is touched"
    device.close()
