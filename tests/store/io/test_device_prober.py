"""Probes of devices that are out of use: what is read, what counts as right, and what hangs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults import set_faults
from tests.kit.waiting import until
from tests.store.conftest import PATIENCE_S
from tests.store.opening import Opened, place
from tests.store.unhurried import open_unhurried_engines
from vllm_ssdkv.base.metrics import Counters
from vllm_ssdkv.store.devices.health import LAST_RETRY_S
from vllm_ssdkv.store.format.superblock import BLOCK_BYTES, COPY_OFFSETS
from vllm_ssdkv.store.io.device_prober import DeviceProber
from vllm_ssdkv.store.memory.memory_plan import PROBES
from vllm_ssdkv.store.open_store import OpenStore


class Rig:
    """Two devices of an open store, and a clock. No thread probes."""

    def __init__(self, store: OpenStore, paths: list[Path], control: Path) -> None:
        self.store, self.paths, self.control = store, paths, control
        self.now = 1000.0
        self.health = store.files.health
        self.health.clock = lambda: self.now
        self.prober = DeviceProber(
            store.files, store.arena, store.plan.probe_offset, store.identities
        )
        self.health.on_trouble.clear()

    def probe(self) -> frozenset[int]:
        """Devices that are still out of use after all had their turn."""
        self.now += LAST_RETRY_S
        self.prober.step()
        return self.health.quarantined

    def damage(self, offset: int) -> None:
        with open(self.paths[1] / "rank0.data", "r+b") as file:
            file.seek(offset + 100)
            byte = file.read(1)[0]
            file.seek(offset + 100)
            file.write(bytes([byte ^ 1]))


@pytest.fixture
def rig(
    tmp_devices: Callable[[int], list[Path]],
    opened: Opened,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Rig:
    open_unhurried_engines(monkeypatch)
    paths, control = tmp_devices(2), tmp_path / "faults.json"
    io = {"staging": "4MiB", "deadline": 0.2, "fault_file": str(control)}
    return Rig(opened(place(paths, io=io), 0, Counters()), paths, control)


def test_a_device_that_can_be_read_comes_back(rig: Rig) -> None:
    for device in (0, 1):
        rig.health.quarantine(device, "of a test")
    assert rig.prober.step() == pytest.approx(1.0), "not at once"
    assert rig.health.quarantined == {0, 1}
    assert rig.probe() == frozenset()
    assert rig.health.drain_returns() == [0, 1]
    assert rig.prober.step() is None


def test_a_device_that_fails_is_tried_for_as_long_as_it_takes(rig: Rig) -> None:
    set_faults(rig.control, {"kind": "eio", "device": 1})
    rig.health.quarantine(1, "of a test")
    for _ in range(10):
        assert rig.probe() == {1}
    assert rig.prober.step() == pytest.approx(LAST_RETRY_S)
    set_faults(rig.control)
    assert rig.probe() == frozenset()


@pytest.mark.parametrize("damaged", [1, 2])
def test_one_copy_of_the_superblock_is_enough(rig: Rig, damaged: int) -> None:
    for offset in COPY_OFFSETS[:damaged]:
        rig.damage(offset)
    rig.health.quarantine(1, "of a test")
    assert rig.probe() == ({1} if damaged == 2 else frozenset())


def test_another_file_is_not_taken_for_the_device(rig: Rig) -> None:
    """Its superblock is whole, and names another data file of the same store."""
    other = (rig.paths[0] / "rank0.data").read_bytes()
    with open(rig.paths[1] / "rank0.data", "r+b") as file:
        for offset in COPY_OFFSETS:
            file.seek(offset)
            file.write(other[offset : offset + BLOCK_BYTES])
    rig.health.quarantine(1, "of a test")
    assert rig.probe() == {1}


def test_a_device_that_hangs_holds_one_probe_and_no_other_device(rig: Rig) -> None:
    set_faults(rig.control, {"kind": "stall", "device": 1})
    for device in (0, 1):
        rig.health.quarantine(device, "of a test")
    assert rig.probe() == {1}
    for _ in range(2 * PROBES):
        rig.health.quarantine(0, "of a test")
        assert rig.probe() == {1}
    assert not rig.prober.close(PATIENCE_S), "memory is not free"
    set_faults(rig.control)
    until(lambda: rig.probe() == frozenset(), "the end of the stall")
    assert rig.prober.close(PATIENCE_S)


def test_a_thread_probes_from_the_first_device_on(rig: Rig) -> None:
    prober = DeviceProber(
        rig.store.files, rig.store.arena, rig.store.plan.probe_offset, rig.store.identities
    )
    rig.health.quarantine(1, "of a test")

    def back() -> bool:
        rig.now += 1.0
        prober._begin()  # it looks at the clock
        return not rig.health.quarantined

    until(back, "the return of the device")
    assert prober.close(PATIENCE_S)
