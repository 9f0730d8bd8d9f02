"""Devices that are added, removed, moved, missing or copied between two openings of a store."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.store.conftest import PAGED, PATIENCE_S, array
from tests.store.opening import CAPACITY, Opened, close, fill, found, impatient, place, used
from vllm_ssdkv.base import file_lock
from vllm_ssdkv.base.errors import DeviceError, StoreLockedError
from vllm_ssdkv.base.metrics import Counters
from vllm_ssdkv.store import open as opening
from vllm_ssdkv.store.format.journal_record import HEADER_BYTES
from vllm_ssdkv.store.format.manifest import Manifest
from vllm_ssdkv.store.index import journal
from vllm_ssdkv.store.index.journal import Journal
from vllm_ssdkv.store.index.journal_file import JournalFile
from vllm_ssdkv.store.index.slot_index import SlotIndex
from vllm_ssdkv.store.maintenance.offline_store import find_store
from vllm_ssdkv.store.open import JOURNAL, open_index, open_rank
from vllm_ssdkv.store.placement.placement import Placement

pytestmark = pytest.mark.usefixtures("small_segments")


def widths(index: SlotIndex, rebalancer: Any) -> set[frozenset[int]]:  # noqa: ANN401
    """Sets of devices that slots are striped over."""
    return {frozenset(s.lanes) for s in rebalancer.placement.segments if s.slots}


def filled(
    devices: list[Path], opened: Opened, share: float = 1
) -> tuple[dict[int, bytes], Placement]:
    """A new store of which so much is filled, closed again: its slots with their keys, and where
    they are."""
    close(opened(place(devices)))
    index, rebalancer = open_index(place(devices))
    keys = fill(index, int(share * index.num_slots))
    index.close()
    return keys, rebalancer.placement


def test_the_order_of_devices_and_their_paths_do_not_matter(
    tmp_devices: Callable[[int], list[Path]], opened: Opened, caplog: pytest.LogCaptureFixture
) -> None:
    devices = tmp_devices(3)
    keys, before = filled(devices, opened)
    where = {s: before.extents(array([s]), 0, PAGED.slot_bytes) for s in (0, 1, 2)}
    moved = devices[2].with_name("elsewhere")
    devices[2].rename(moved)
    turned = [moved, devices[1], devices[0]]
    with caplog.at_level(logging.INFO):
        counters = Counters()
        close(opened(place(turned), counters=counters))
        index, rebalancer = open_index(place(turned))
    assert f"device {devices[2]} is at {moved} now" in caplog.text
    assert all(counters.total("device_lost", device=str(d)) == 0 for d in turned)
    assert found(index, keys) == set(keys)
    for slot, old in where.items():
        new = rebalancer.placement.extents(array([slot]), 0, PAGED.slot_bytes)
        assert (2 - new.device).tolist() == old.device.tolist()
        assert new.offset.tolist() == old.offset.tolist()
    assert not rebalancer._stale
    index.close()


def test_a_copy_of_the_manifest_says_where_the_state_is(
    tmp_devices: Callable[[int], list[Path]], opened: Opened
) -> None:
    """In another order of the devices the first one would get a state of its own."""
    devices = tmp_devices(2)
    keys, _ = filled(devices, opened, 0.5)
    (devices[0] / "store.json").unlink()
    turned = place(devices[::-1])
    assert turned.state == find_store(devices[::-1]).state == devices[0]
    close(opened(turned))
    assert turned.counters.total("manifest_restores") == 1
    index, _ = open_index(turned)
    assert found(index, keys) == set(keys)
    index.close()


def test_two_devices_that_change_places(
    tmp_devices: Callable[[int], list[Path]], opened: Opened
) -> None:
    """By path alone each would be taken for the other."""
    devices = tmp_devices(3)
    keys, _ = filled(devices, opened, 0.5)
    spare = devices[1].with_name("spare")
    devices[1].rename(spare)
    devices[2].rename(devices[1])
    spare.rename(devices[2])
    close(opened(place(devices)))
    index, rebalancer = open_index(place(devices))
    assert found(index, keys) == set(keys)
    assert not rebalancer._stale
    index.close()


def test_a_removed_device_hides_what_touched_it_and_comes_back_with_it(
    tmp_devices: Callable[[int], list[Path]], opened: Opened, caplog: pytest.LogCaptureFixture
) -> None:
    devices = tmp_devices(3)
    keys, placement = filled(devices, opened, 0.5)
    total = placement.slots
    touched = {s for s in keys if placement.touches(2, array([s]))[0]}
    assert 0 < len(touched) < len(keys)

    store = opened(place(devices[:2]))
    assert [d.path.parent for d in store.devices] == devices[:2]
    index, rebalancer = open_index(place(devices[:2]))
    assert f"device {devices[2]} is not among the devices any more" in caplog.text
    assert found(index, keys) == set(keys) - touched
    assert frozenset({0, 1}) in widths(index, rebalancer)  # what held nothing
    assert 0.6 * total < rebalancer.placement.slots < total
    new = fill(index, 5)
    index.close()
    close(store)

    caplog.clear()
    with caplog.at_level(logging.INFO):
        close(opened(place(devices)))
        index, rebalancer = open_index(place(devices))
    assert f"device {devices[2]} is back" in caplog.text
    assert found(index, new) == set(new)
    assert found(index, keys) == set(keys)
    gauges = index.gauges()
    assert gauges["free"] + gauges["ready"] > 0.8 * total
    index.close()


def test_an_added_device_adds_its_room_and_loses_nothing(
    tmp_devices: Callable[[int], list[Path]], opened: Opened, caplog: pytest.LogCaptureFixture
) -> None:
    devices = tmp_devices(3)
    keys, before = filled(devices[:2], opened, 0.5)
    with caplog.at_level(logging.INFO):
        close(opened(place(devices)))
        index, rebalancer = open_index(place(devices))
    assert f"device {devices[2]} is added" in caplog.text
    assert found(index, keys) == set(keys)
    assert {frozenset({0, 1}), frozenset({0, 1, 2})} <= widths(index, rebalancer)
    gauges = index.gauges()
    assert gauges["ready"] + gauges["free"] == rebalancer.placement.slots > before.slots
    assert max(used(devices)) <= CAPACITY
    # Slots handed out now use all three; those of the old kind come last.
    slots = index.allocate(5)
    new = [rebalancer.placement.touches(d, slots) for d in range(3)]
    assert new[2].any()
    index.close()
    # Opened once more, nothing changes.
    segments = rebalancer.placement.segments
    close(opened(place(devices)))
    index, rebalancer = open_index(place(devices))
    assert rebalancer.placement.segments == segments
    assert found(index, keys) == set(keys)
    index.close()


def test_a_device_that_is_gone_does_not_keep_the_store_from_starting(
    tmp_devices: Callable[[int], list[Path]], opened: Opened, caplog: pytest.LogCaptureFixture
) -> None:
    (root,) = tmp_devices(1)
    devices = [root / "a", root / "b", root / "mnt" / "c"]
    for device in devices:
        device.mkdir(parents=True)
    keys, placement = filled(devices, opened, 0.5)
    (root / "mnt").rename(root / "pulled")
    counters = Counters()
    store = opened(place(devices), counters=counters)
    assert len(store.devices) == 2
    assert counters.total("device_lost", device=str(devices[2])) == 1
    assert f"device {devices[2]} does not exist" in caplog.text
    index, _ = open_index(place(devices))
    assert found(index, keys) == {s for s in keys if not placement.touches(2, array([s]))[0]}
    index.close()
    close(store)
    (root / "pulled").rename(root / "mnt")
    assert len(opened(place(devices)).devices) == 3


def test_the_processes_of_one_engine_see_the_same_devices(
    tmp_devices: Callable[[int], list[Path]], opened: Opened
) -> None:
    """A drive that appears after the first of them looked is used after the next start."""
    (root,) = tmp_devices(1)
    devices = [root / "a", root / "mnt" / "b"]
    for device in devices:
        device.mkdir(parents=True)
    close(opened(place(devices, run="one")))
    (root / "mnt").rename(root / "away")
    first = opened(place(devices, tp_size=1, run="two"))
    (root / "away").rename(root / "mnt")
    index, rebalancer = open_index(place(devices, run="two"))
    assert len(first.devices) == 1
    assert frozenset({0}) in widths(index, rebalancer)
    every = np.arange(index.num_slots, dtype=np.int64)
    assert index.gauges()["lost"] >= rebalancer.placement.touches(1, every).sum() > 0
    index.close()
    close(first)
    assert len(opened(place(devices, run="three")).devices) == 2


def test_who_comes_second_changes_nothing(
    tmp_devices: Callable[[int], list[Path]], opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even the manifest: the engine that runs, in another process, counts on it."""
    monkeypatch.setattr(file_lock.os, "getpid", lambda: 1)
    devices = tmp_devices(2)
    first = opened(place(devices))
    manifest = (devices[0] / "store.json").read_bytes()
    larger = [{"path": d, "capacity": 2 * CAPACITY, "weight": 1} for d in devices]
    for other in (place(devices[::-1]), place(devices, devices=larger), place(devices[:1])):
        with impatient(), pytest.raises(StoreLockedError, match="in use"):
            other.manifest()
        assert (devices[0] / "store.json").read_bytes() == manifest
    close(first)
    place(devices[::-1]).manifest()


def test_a_file_that_the_manifest_does_not_know_is_no_second_device(
    tmp_devices: Callable[[int], list[Path]], opened: Opened
) -> None:
    """As when a start was killed, or a drive is back in the place of what was made without it."""
    devices = tmp_devices(2)
    keys, placement = filled(devices, opened)
    data = devices[1] / "rank0.data"
    away = data.with_name("away")
    data.rename(away)
    close(opened(place(devices)))  # makes another one
    index, _ = open_index(place(devices))
    assert found(index, keys) < set(keys)
    index.close()
    away.rename(data)  # and here is the first one again
    for _ in range(2):
        close(opened(place(devices)))
        index, _ = open_index(place(devices))
        assert index.num_slots == placement.slots
        index.close()
    manifest = place(devices).stored()
    assert [device.path for device in manifest.devices] == [str(d) for d in devices]
    assert all(device.present for device in manifest.devices)


def test_copies_of_a_drive_are_refused(
    tmp_devices: Callable[[int], list[Path]], opened: Opened
) -> None:
    devices = tmp_devices(2)
    close(opened(place(devices[:1])))
    shutil.copy(devices[0] / "rank0.data", devices[1] / "rank0.data")
    with pytest.raises(DeviceError, match=f"{devices[0]} and {devices[1]} hold copies"):
        open_rank(place(devices), 0, Counters())


def test_other_weights_change_new_slots_only(
    tmp_devices: Callable[[int], list[Path]], opened: Opened
) -> None:
    devices = tmp_devices(2)
    keys, _ = filled(devices, opened, 0.5)
    heavy = [
        {"path": d, "capacity": CAPACITY, "weight": w} for d, w in zip(devices, (3, 1), strict=True)
    ]
    close(opened(place(devices, devices=heavy)))
    index, rebalancer = open_index(place(devices, devices=heavy))
    assert found(index, keys) == set(keys)
    shares = {s.lanes.count(1) / len(s.lanes) for s in rebalancer.placement.segments}
    assert {0.25, 0.5} <= shares
    index.close()


# ---- a power loss ----


@pytest.fixture
def unsynced(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of the journal that no sync had made safe yet, each time that a manifest was saved."""
    found: list[int] = []
    synced: dict[int, int] = {}
    sync, save = JournalFile.sync, Manifest.save

    def sync_told(file: JournalFile) -> None:
        status = os.fstat(file._fd)
        sync(file)
        synced[status.st_ino] = status.st_size

    def save_told(manifest: Manifest, state: Path) -> None:
        if (state / JOURNAL).exists():
            status = (state / JOURNAL).stat()
            found.append(status.st_size - synced.get(status.st_ino, HEADER_BYTES))
        save(manifest, state)

    monkeypatch.setattr(JournalFile, "sync", sync_told)
    monkeypatch.setattr(Manifest, "save", save_told)
    # Only who asks has the journal synced.
    monkeypatch.setattr(journal, "SYNC_INTERVAL_S", 1e6)
    monkeypatch.setattr(opening, "Journal", partial(Journal, sync_interval_s=1e6))
    return found


def test_what_a_replaced_device_held_stays_gone(
    tmp_devices: Callable[[int], list[Path]], opened: Opened, unsynced: list[int]
) -> None:
    """The next start does not see that the file is a new one: only the journal knows better."""
    devices = tmp_devices(2)
    keys, placement = filled(devices, opened, 0.5)
    touched = placement.touches(1, array(list(keys)))
    (devices[1] / "rank0.data").unlink()
    close(opened(place(devices)))
    unsynced.clear()
    counters = Counters()
    index, _ = open_index(place(devices), counters)
    assert counters.total("slots_dropped", cause="replaced") == touched.sum() > 0
    assert unsynced
    assert not any(unsynced)
    index.close()


def test_what_is_stored_while_a_device_is_away_replaces_what_it_has(
    tmp_devices: Callable[[int], list[Path]], opened: Opened
) -> None:
    """The newest entry of a key wins, and the place of the older one is free when it is back."""
    devices = tmp_devices(2)
    keys, placement = filled(devices, opened, 0.5)
    key = next(k for s, k in keys.items() if placement.touches(1, array([s]))[0])
    close(opened(place(devices[:1])))
    index, _ = open_index(place(devices[:1]))
    assert index.find(key) is None
    slot = int(index.allocate(1)[0])
    assert index.publish(slot, key)
    index.durable(slot)
    index.close()
    close(opened(place(devices)))
    index, _ = open_index(place(devices))
    assert index.find(key) == slot
    assert index.gauges()["ready"] == len(keys)
    assert index.gauges()["masked"] == 0
    index.close()


def test_a_store_that_only_waits_gives_up_nothing(
    tmp_devices: Callable[[int], list[Path]], opened: Opened
) -> None:
    """Masked blocks make room when blocks are stored, and not before that."""
    devices = tmp_devices(2)
    keys, _ = filled(devices, opened)
    close(opened(place(devices[:1])))
    counters = Counters()
    index, rebalancer = open_index(place(devices[:1]), counters)
    for _ in range(3):
        rebalancer.step_and_wait(PATIENCE_S)
    gauges = index.gauges()
    assert gauges["masked"] > 0
    assert gauges["ready"] + gauges["masked"] == len(keys)
    assert index.claim([b"new".ljust(32)])[0] >= 0
    rebalancer.step(patient=False)
    rebalancer.step_and_wait(PATIENCE_S)
    given = counters.total("slots_dropped", cause="restriped")
    assert given > 0
    rebalancer.close()
    index.close()
    close(opened(place(devices)))
    index, _ = open_index(place(devices))
    assert len(found(index, keys)) == len(keys) - given - 1  # one was evicted
    index.close()


def test_what_is_given_up_for_a_segment_stays_gone(
    tmp_devices: Callable[[int], list[Path]], opened: Opened, unsynced: list[int]
) -> None:
    """By its new lanes the header of a slot may be where it was, and what follows elsewhere."""
    devices = tmp_devices(2)
    close(opened(place(devices)))
    index, rebalancer = open_index(place(devices))
    fill(index, index.num_slots)
    assert index.flush()
    unsynced.clear()
    rebalancer.reweigh([3.0, 1.0])
    rebalancer.step_and_wait(PATIENCE_S)
    assert index.counters["quarantined"] > 0
    assert unsynced
    assert not any(unsynced)
    rebalancer.close()
    index.close()
