"""Stores with two copies of each block, and devices that go away, come back or are new."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.store.conftest import PAGED, Slots, array
from tests.store.opening import MODEL, Opened, close, fill, found, place
from vllm_ssdkv.base.errors import ConfigError
from vllm_ssdkv.store.open import StorePlace, open_index
from vllm_ssdkv.store.placement.placement import Placement, placement_of

pytestmark = pytest.mark.usefixtures("small_segments")

Devices = Callable[[int], list[Path]]


def twice(devices: list[Path], **options: Any) -> StorePlace:  # noqa: ANN401 - any option
    return place(devices, MODEL, **{"replicas": 2, **options})


def gaps(where: StorePlace) -> list[tuple[int, int]]:
    return [device.gap for device in where.stored().devices]


def copies(placement: Placement) -> set[int]:
    return {segment.copies for segment in placement.segments if segment.slots}


@pytest.mark.parametrize("devices", [0, 1])
def test_two_copies_need_two_devices(devices: int, tmp_path: Path) -> None:
    paths = [tmp_path / str(number) for number in range(devices)]
    with pytest.raises(ConfigError, match=r"replicas: 2 copies need 2 devices.*name another drive"):
        twice(paths)


def test_capacity_is_half(tmp_devices: Devices, opened: Opened) -> None:
    devices = tmp_devices(4)
    first, second = devices[:2], devices[2:]
    close(opened(place(first)))
    close(opened(twice(second)))
    one = place(first).manifest()
    two = twice(second).manifest()
    # Room that one device has more than the other, which holds the journal, is not used.
    assert 0.45 * one.slots <= two.slots <= one.slots // 2
    assert copies(placement_of(two)) == {2}
    for old, new in zip(one.present(), two.present(), strict=True):
        assert old.capacity == new.capacity
    needed = [where.capacity_for(1000) for where in (place(first), twice(second))]
    assert needed[1] - needed[0] == 1000 * PAGED.units_per_slot * PAGED.unit_bytes


def places(where: StorePlace, slots: Slots) -> list[tuple[str, int]]:
    """Device and offset of each unit of both copies."""
    manifest = where.stored()
    copies = placement_of(manifest).copies(slots, 0, PAGED.slot_bytes)
    return [
        (manifest.devices[device].path, offset)
        for extents in copies
        if extents is not None
        for device, offset in zip(extents.device.tolist(), extents.offset.tolist(), strict=True)
    ]


@pytest.mark.parametrize("away", [0, 1, 2])
def test_a_device_that_went_away_and_came_back(
    tmp_devices: Devices, opened: Opened, tmp_path: Path, away: int
) -> None:
    devices = tmp_devices(3)
    state = {"state_dir": tmp_path}
    whole = twice(devices, **state)
    close(opened(whole))
    index, _ = open_index(whole)
    keys = fill(index, index.num_slots // 2)
    slots = array(sorted(keys))
    where = places(whole, slots)
    index.close()

    left = twice([path for number, path in enumerate(devices) if number != away], **state)
    store = opened(left)
    out = store.files.health.out_of_use(np.arange(3, dtype=np.uint16))
    assert out.tolist() == [False, False, True]
    index, _ = open_index(left)
    assert found(index, keys) == set(keys)
    assert places(left, slots) == where
    new = fill(index, 8)
    index.close()
    close(store)
    assert gaps(left) == [(0, 0), (0, 0), (2, 3)]

    whole = twice(devices, **state)
    store = opened(whole)
    index, _ = open_index(whole)
    assert found(index, keys) == set(keys) - set(new)
    assert found(index, new) == set(new)
    kept = array(sorted(set(keys) - set(new)))
    assert set(places(whole, kept)) <= set(where)
    # What was stored meanwhile is not looked for on it.
    slots = array(sorted({**keys, **new}))
    store.files.replicas.stored_in(slots, index.epochs(slots))
    on = np.full(len(slots), away, dtype=np.uint16)
    doubted = slots[store.files.replicas.suspect(slots, on)]
    assert set(doubted.tolist()) == set(new)
    index.close()


def test_a_drive_that_was_replaced_by_an_empty_one(tmp_devices: Devices, opened: Opened) -> None:
    devices = tmp_devices(2)
    close(opened(twice(devices)))
    index, _ = open_index(twice(devices))
    keys = fill(index, 20)
    index.close()
    shutil.rmtree(devices[1])
    store = opened(twice(devices))
    index, _ = open_index(twice(devices))
    assert found(index, keys) == set(keys)
    slots = array(sorted(keys))
    store.files.replicas.stored_in(slots, index.epochs(slots))
    on = np.full(len(slots), 1, dtype=np.uint16)
    assert store.files.replicas.suspect(slots, on).all()
    assert gaps(twice(devices)) == [(0, 0), (0, 2)]
    index.close()


def test_two_drives_that_were_replaced(tmp_devices: Devices, opened: Opened) -> None:
    """What had its copies on both is gone, and only that."""
    devices = tmp_devices(4)
    close(opened(twice(devices)))
    index, rebalancer = open_index(twice(devices))
    keys = fill(index, 40)
    slots = array(sorted(keys))
    empty = np.array([False, True, True, False])
    lost = set(slots[rebalancer.placement.lost(empty, slots)].tolist())
    assert 0 < len(lost) < len(keys)
    index.close()
    for path in devices[1:3]:
        shutil.rmtree(path)
    close(opened(twice(devices)))
    index, _ = open_index(twice(devices))
    assert found(index, keys) == set(keys) - lost
    index.close()


def test_a_device_lost_in_use_is_remembered(tmp_devices: Devices, opened: Opened) -> None:
    """It may be back at the next start, without what was stored after its loss."""
    devices = tmp_devices(3)
    close(opened(twice(devices)))
    index, rebalancer = open_index(twice(devices))
    keys = fill(index, 10)
    rebalancer.reweigh([1.0, 0.0, 1.0])
    assert not rebalancer.placement.lost(rebalancer.out_of_use(), array(sorted(keys))).any()
    assert rebalancer.close()
    assert found(index, keys) == set(keys)
    index.close()
    assert gaps(twice(devices)) == [(0, 0), (1, 2), (0, 0)]


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1)])
def test_another_number_of_copies(
    tmp_devices: Devices, opened: Opened, before: int, after: int
) -> None:
    """What is stored stays; what is empty, or has its turn, gets the new number."""
    devices = tmp_devices(3)
    close(opened(twice(devices, replicas=before)))
    index, rebalancer = open_index(twice(devices, replicas=before))
    keys = fill(index, index.num_slots // 2)
    total = index.num_slots
    index.close()
    close(opened(twice(devices, replicas=after)))
    index, rebalancer = open_index(twice(devices, replicas=after))
    assert found(index, keys) == set(keys)
    assert copies(rebalancer.placement) == {1, 2}
    gauges = index.gauges()
    slots = gauges["ready"] + gauges["free"]
    assert slots == rebalancer.placement.slots
    assert (slots > total) == (after < before)
    # Filled to the last slot, again and again, it turns over.
    for _ in range(2):
        for _ in range(2 * total):
            fill(index, 1)
            rebalancer.step()
            assert rebalancer._saver.wait(30.0)
            rebalancer.step()
    assert copies(rebalancer.placement) == {after}
    index.close()


def test_one_device_is_left_of_two(tmp_devices: Devices, opened: Opened) -> None:
    """New blocks have one copy then; with the device back, two again."""
    (root,) = tmp_devices(1)
    devices = [root / "a", root / "mnt" / "b"]
    for device in devices:
        device.mkdir(parents=True)
    close(opened(twice(devices)))
    index, rebalancer = open_index(twice(devices))
    total = rebalancer.placement.slots
    keys = fill(index, total // 2)
    index.close()
    (root / "mnt").rename(root / "pulled")
    store = opened(twice(devices))
    index, rebalancer = open_index(twice(devices))
    assert found(index, keys) == set(keys)
    assert copies(rebalancer.placement) == {1, 2}
    assert all(set(s.lanes) == {0} for s in rebalancer.placement.segments if s.copies == 1)
    index.close()
    close(store)
    (root / "pulled").rename(root / "mnt")
    close(opened(twice(devices)))
    index, rebalancer = open_index(twice(devices))
    assert found(index, keys) == set(keys)
    assert copies(rebalancer.placement) == {2}
    assert rebalancer.placement.slots == total
    index.close()
