"""``ssdkv quota``: room of stores, and what another capacity really comes to."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from tests.store.filled_store import GEOMETRY, FilledStore
from vllm_ssdkv.base.host import Mount
from vllm_ssdkv.base.sizes import MIB
from vllm_ssdkv.cli.main import app
from vllm_ssdkv.cli.store import disk_usage
from vllm_ssdkv.cli.store.disk_usage import FileSystemSpace, store_space
from vllm_ssdkv.cli.store.quota import _advice
from vllm_ssdkv.config.engine import SSDKVConfig
from vllm_ssdkv.store.format.manifest import NAME
from vllm_ssdkv.store.maintenance.offline_store import find_store
from vllm_ssdkv.store.open import StorePlace, open_index

SLOTS = tuple(range(0, 300, 10))


def quota(*arguments: object) -> Result:
    return CliRunner(env={"COLUMNS": "300"}).invoke(app, ["quota", *map(str, arguments)])


def as_json(*arguments: object) -> dict[str, Any]:
    result = quota(*arguments, "--json")
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


@pytest.fixture
def store(tmp_devices: Callable[[int], list[Path]]) -> FilledStore:
    """On two devices of 16 MiB, in one folder; the state is on the first."""
    devices = tmp_devices(2)
    store = FilledStore(tuple(devices), devices[0], SLOTS, ranks=1)
    store.fill()
    return store


def folder(store: FilledStore) -> Path:
    return store.state.parent


def test_every_byte_of_the_stores_is_counted_once(store: FilledStore) -> None:
    found = as_json(folder(store), store.state)
    (entry,) = found["stores"]
    assert entry["state_dir"] == str(store.state)
    assert (entry["stored"], entry["capacity"]) == (len(SLOTS), 32 * MIB)
    on_disk = [
        sum(file.stat().st_blocks * 512 for file in place.iterdir()) for place in store.devices
    ]
    assert [device["on_disk"] for device in entry["devices"]] == on_disk
    assert entry["on_disk"] == sum(on_disk)
    assert entry["forecast"] is None
    (place,) = found["filesystems"]
    assert place["stores"] == sum(on_disk)
    assert place["growth"] == sum(max(0, 16 * MIB - nbytes) for nbytes in on_disk)
    status = os.statvfs(store.state)
    assert place["size"] == status.f_blocks * status.f_frsize
    assert place["others"] > 0, "this test's own files, if nothing else"


def test_the_text_has_every_store_and_file_system(store: FilledStore) -> None:
    result = quota(folder(store))
    assert result.exit_code == 0, result.output
    mount = as_json(folder(store))["filesystems"][0]["mount"]
    for text in (
        str(store.state),
        "some/model",
        f"{len(SLOTS)} of ",
        "16 MiB",
        "Other files",
        mount,
    ):
        assert text in result.stdout
    assert "->" not in result.stdout
    index, _ = open_index(store.place)
    assert ", in use" in quota(folder(store)).stdout
    index.close()


def resized(store: FilledStore, capacity: int) -> StorePlace:
    """The store as it is opened with another capacity."""
    devices = [{"path": str(d), "capacity": capacity, "weight": 1} for d in store.devices]
    config = SSDKVConfig.from_extra_config(
        {**store.place.config.model_dump(mode="json"), "devices": devices}
    )
    return StorePlace(config, [GEOMETRY] * store.ranks, store.place.fingerprint, model="some/model")


@pytest.mark.parametrize(("ranks", "replicas"), [(1, 1), (2, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize("capacity", [16 * MIB, 24 * MIB, 200 * MIB])
def test_a_forecast_is_what_the_next_start_makes(
    tmp_devices: Callable[[int], list[Path]], capacity: int, ranks: int, replicas: int
) -> None:
    devices = tuple(tmp_devices(2))
    store = FilledStore(devices, devices[0], (0, 1, 40), ranks=ranks, replicas=replicas)
    store.fill()
    found = as_json(folder(store), "--capacity", f"{capacity // MIB}MiB")
    (entry,), (place,) = found["stores"], found["filesystems"]
    room = [max(0, capacity - device["on_disk"]) for device in entry["devices"]]
    assert place["growth"] == sum(room)
    assert entry["forecast"]["capacity"] == capacity
    assert {device["capacity"] for device in entry["devices"]} == {16 * MIB}, "as it is now"
    other = resized(store, capacity)
    index, rebalancer = open_index(other)
    try:
        assert other.stored().slots == entry["forecast"]["slots"]
        assert index.gauges()["ready"] == entry["forecast"]["kept"]
    finally:
        assert rebalancer.close()
        assert index.close()


def test_a_smaller_store_says_what_is_given_up(
    tmp_devices: Callable[[int], list[Path]],
) -> None:
    (device,) = tmp_devices(1)
    store = FilledStore((device,), device, SLOTS, ranks=1)
    place = resized(store, 64 * MIB)
    index, rebalancer = open_index(place)  # makes the store, larger than it shall be
    slots = index.allocate(place.stored().slots)
    for slot in slots.tolist():
        assert index.publish(slot, slot.to_bytes(32, "little"))
    index.durable(slots)
    index.unpin(slots)
    assert rebalancer.close()
    assert index.close()
    (entry,) = as_json(device, "--capacity", "16MiB")["stores"]
    assert entry["stored"] == len(slots)
    forecast = entry["forecast"]
    assert 0 < forecast["kept"] < len(slots)
    given_up = len(slots) - forecast["kept"]
    assert f"{given_up:,} given up" in quota(device, "--capacity", "16MiB").stdout
    smaller = resized(store, 16 * MIB)
    index, rebalancer = open_index(smaller)
    try:
        assert index.gauges()["ready"] == forecast["kept"]
    finally:
        assert rebalancer.close()
        assert index.close()


def test_what_does_not_fit_is_said_with_the_way_out(store: FilledStore) -> None:
    result = quota(folder(store), "--capacity", "100000TiB")
    assert result.exit_code == 0, result.output
    assert "are missing for the stores to reach their capacities: make room" in result.stdout
    assert "give devices[].capacity 100000 TiB and restart the engine" in result.stdout
    full = FileSystemSpace("/mnt", size=100, stores=10, others=80, free=10, growth=30)
    assert (full.short, _advice([full], None)[0].split(" are ")[0]) == (20, "/mnt: 20 B")
    assert _advice([dataclasses.replace(full, growth=10)], None) == []


@pytest.mark.parametrize(
    ("size", "reason"),
    [
        ("1MiB", "is less than 16 MiB"),
        ("10", "is less than 16 MiB"),
        ("x", "not a number"),
        ("64Gb", "'Gb' may mean bits"),
    ],
)
def test_a_wrong_size_is_refused(size: str, reason: str) -> None:
    result = quota("--capacity", size)
    assert result.exit_code == 2
    assert reason in result.stderr


def test_no_stores_are_no_error(tmp_path: Path) -> None:
    assert quota(tmp_path).stdout == "no stores\n"
    assert as_json(tmp_path) == {"stores": [], "filesystems": []}


def test_a_broken_store_hides_no_other(store: FilledStore) -> None:
    broken = folder(store) / "broken"
    broken.mkdir()
    (broken / NAME).write_text("{")
    result = quota(folder(store))
    assert result.exit_code == 1
    assert str(store.state) in result.stdout
    assert f"{broken}: {broken / NAME} is damaged" in result.stderr


def test_a_file_system_that_is_mounted_twice_is_one(
    store: FilledStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with bind mounts: each device has another mount, and both the same free space."""
    monkeypatch.setattr(disk_usage, "mount_of", lambda path: Mount(str(path), "ext4", "/dev/sda"))
    found = store_space(find_store([], store.state))
    assert {device.filesystem for device in found.devices} == set(map(str, store.devices))
    (place,) = disk_usage.filesystems([found])
    assert place.stores == found.on_disk


def test_a_device_that_is_away_takes_nothing(store: FilledStore) -> None:
    store.devices[1].rename(store.devices[1].with_name("away"))
    found = store_space(find_store([], store.state))
    away = found.devices[1]
    assert (away.filesystem, away.on_disk) == ("", 0)
    (place,) = disk_usage.filesystems([found])
    assert place.growth == max(0, 16 * MIB - found.devices[0].on_disk)


def test_a_file_that_goes_meanwhile_takes_nothing(
    store: FilledStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine replaces its journal while we look."""
    known = disk_usage.store_space(find_store([], store.state)).devices[0].on_disk
    real = disk_usage.files_named_alike
    gone = store.state / "journal.tmp"
    monkeypatch.setattr(disk_usage, "files_named_alike", lambda place: [*real(place), gone])
    assert disk_usage._occupied([store.state]) == known
