"""A suspended store: known to later starts, whatever drive is lost, until somebody resumes it."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.kit.child import Child
from tests.store.checked_store import check, make
from tests.store.filled_store import FilledStore
from tests.store.opening import Opened, close, place
from vllm_ssdkv.base.errors import StoreError, StoreLockedError
from vllm_ssdkv.store.format.fingerprint import Fingerprint
from vllm_ssdkv.store.format.manifest import COPY, NAME, Manifest
from vllm_ssdkv.store.maintenance.offline_store import find_store
from vllm_ssdkv.store.maintenance.resume import Resumed, resume
from vllm_ssdkv.store.open import StorePlace, open_index

pytestmark = pytest.mark.usefixtures("small_segments")

REASON = "block 3 of a request differs"
SETTINGS = Fingerprint({"vllm": "0.32", "device": "cpu"})
SLOTS = (0, 1, 2)

Devices = Callable[[int], list[Path]]


def reason_of(store: StorePlace | FilledStore) -> str:
    manifest = Manifest.load(store.state)
    assert manifest is not None
    return manifest.suspended


def filled(devices: list[Path]) -> FilledStore:
    store = FilledStore(tuple(devices), devices[0], SLOTS, replicas=2, options={"state_dir": None})
    store.fill()
    return store


def test_a_suspension_lasts_until_it_is_resumed(tmp_devices: Devices) -> None:
    store = filled(tmp_devices(3))
    assert resume(find_store(list(store.devices))) == Resumed(store.place.stored().store, "")
    store.place.suspend(REASON)
    for _ in range(2):
        index, _ = open_index(store.place)
        assert reason_of(store) == REASON
        assert len(index.order()) == len(SLOTS), "nothing is deleted"
        index.close()
    found = resume(find_store(list(store.devices)))
    assert found.reason == REASON
    assert reason_of(store) == ""


def test_it_is_known_when_the_first_device_is_lost(tmp_devices: Devices) -> None:
    store = filled(tmp_devices(3))
    store.place.suspend(REASON)
    shutil.rmtree(store.devices[0])
    store.devices[0].mkdir()
    index, _ = open_index(store.place)
    index.close()
    assert reason_of(store) == REASON
    assert resume(find_store(list(store.devices))).reason == REASON
    shutil.rmtree(store.devices[0])
    store.devices[0].mkdir()
    index, _ = open_index(store.place)
    index.close()
    assert reason_of(store) == "", "every copy knows that it was resumed"


def test_a_store_in_use_is_not_resumed(tmp_devices: Devices) -> None:
    store = filled(tmp_devices(2))
    index, _ = open_index(store.place)
    store.place.suspend(REASON)
    with pytest.raises(StoreLockedError, match="in use"):
        resume(find_store(list(store.devices)))
    index.close()
    assert resume(find_store(list(store.devices))).reason == REASON


def test_a_copy_of_the_state_directory_resumes_nothing(tmp_path: Path) -> None:
    """Its writes to the devices would count more than what the store itself has."""
    store = make(tmp_path)
    store.place.suspend(REASON)
    backup = tmp_path / "backup"
    shutil.copytree(store.state, backup)
    copies = [device / COPY for device in store.devices]
    before = [copy.read_bytes() for copy in copies]
    with pytest.raises(StoreError, match="may be a copy"):
        resume(find_store([], backup))
    assert [copy.read_bytes() for copy in copies] == before
    assert reason_of(store) == REASON
    hold = ["sh", "-c", "echo held; exec sleep 60"]
    with Child("flock", "--no-fork", store.devices[1] / "rank0.data", *hold) as engine:
        assert engine.hear() == "held"
        with pytest.raises(StoreLockedError, match="in use"):
            resume(find_store(store.devices, backup))
    assert [copy.read_bytes() for copy in copies] == before


def test_a_manifest_that_is_not_the_newest_is_restored_first(tmp_path: Path) -> None:
    """It may say that the store is not suspended, and would be overruled by the next start."""
    store = make(tmp_path)
    older = (store.state / NAME).read_bytes()
    store.place.suspend(REASON)
    for name in (NAME, COPY):
        (store.state / name).write_bytes(older)
    with pytest.raises(StoreError, match=r"ssdkv fsck --repair .*ssd0 .*ssd1 --state-dir .*state`"):
        resume(find_store(store.devices, store.state))
    check(store, mend=True)
    assert resume(find_store(store.devices, store.state)).reason == REASON
    assert store.served() == set(store.slots)


class TestBinding:
    """Keys are bound to what every rank of this engine has told, and to nothing else."""

    def test_all_ranks_are_waited_for(self, tmp_devices: Devices, opened: Opened) -> None:
        devices = tmp_devices(2)
        run = "one engine"
        first, second, scheduler = (place(devices, tp_size=2, run=run) for _ in range(3))
        opened(first, 0)
        opened(second, 1)
        with pytest.raises(StoreError, match="not every rank"):
            scheduler.bind(SETTINGS)
        first.tell_weights(0, b"\x01" * 16)
        with pytest.raises(StoreError, match="not every rank"):
            scheduler.bind(SETTINGS)
        second.tell_weights(1, b"\x02" * 16)
        assert scheduler.bind(SETTINGS) == [b"\x01" * 16, b"\x02" * 16]

    def test_digests_of_an_earlier_engine_do_not_count(
        self, tmp_devices: Devices, opened: Opened
    ) -> None:
        devices = tmp_devices(1)
        before = place(devices, run="before")
        store = opened(before)
        before.tell_weights(0, b"\x01" * 16)
        before.bind(SETTINGS)
        close(store)
        now = place(devices, run="now")
        opened(now)
        with pytest.raises(StoreError, match="not every rank"):
            now.bind(SETTINGS)
        with pytest.raises(StoreError, match="not every rank"):
            before.bind(SETTINGS)

    def test_what_is_other_than_in_the_last_run_is_said(
        self, tmp_devices: Devices, opened: Opened, caplog: pytest.LogCaptureFixture
    ) -> None:
        devices = tmp_devices(1)
        for run, device, weights in (("a", "cpu", 1), ("b", "cuda", 1), ("c", "cuda", 2)):
            caplog.clear()
            now = place(devices, run=run)
            store = opened(now)
            now.tell_weights(0, bytes([weights]) * 16)
            with caplog.at_level(logging.WARNING):
                now.bind(Fingerprint({"vllm": "0.32", "device": device}))
            close(store)
            said = {"a": "", "b": "device: 'cpu' != 'cuda'", "c": f"weights: '{'01' * 16}' != "}
            assert said[run] in caplog.text
            assert ("other than in the last run" in caplog.text) is bool(said[run])
