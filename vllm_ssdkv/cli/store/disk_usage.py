"""The room that stores take, what else is on their file systems, what other sizes would mean."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from vllm_ssdkv.cli.doctor.check_devices import mount_of
from vllm_ssdkv.store.devices.owner import files_named_alike
from vllm_ssdkv.store.maintenance.catalog import summarize
from vllm_ssdkv.store.maintenance.offline_store import (
    StoredStore,
    is_raw,
    open_journal,
    read_journal,
)
from vllm_ssdkv.store.placement.placement import Placement
from vllm_ssdkv.store.placement.reconcile import division_of


@dataclass(frozen=True, slots=True)
class DeviceSpace:
    """One device of a store. Sizes in bytes.

    Attributes:
        filesystem: Where its file system is mounted; empty for a raw block device, and for a
            directory that is away.
        capacity: What the store may take there.
        on_disk: What the store's files occupy there now, as ``du`` counts it.
    """

    path: str
    filesystem: str
    capacity: int
    on_disk: int


@dataclass(frozen=True, slots=True)
class Forecast:
    """A store with another capacity.

    Attributes:
        capacity: Bytes on each device, all ranks together.
        slots: Blocks that it would have room for.
        kept: Of the stored blocks, those that would stay.
    """

    capacity: int
    slots: int
    kept: int


@dataclass(frozen=True, slots=True)
class StoreSpace:
    """One store.

    Attributes:
        stored: Blocks in the store.
        slots: Blocks that it has room for, and may grow to.
        slots_to_come: Those of ``slots`` that it has yet to grow by.
        capacity: Bytes that it may take on all devices.
        on_disk: Bytes that its files occupy, journal and manifest included.
        forecast: None without ``--capacity``.
    """

    state_dir: str
    model: str
    in_use: bool
    stored: int
    slots: int
    slots_to_come: int
    capacity: int
    on_disk: int
    devices: tuple[DeviceSpace, ...]
    forecast: Forecast | None


@dataclass(frozen=True, slots=True)
class FileSystemSpace:
    """A file system with devices of stores on it. Sizes in bytes.

    Attributes:
        mount: One of the places where it is mounted.
        stores: What these stores occupy.
        others: What everything else occupies.
        free: What an unprivileged user may still write.
        growth: What these stores may still grow by at the most, in their capacities or, where
            there is a forecast, in those of the forecast.
    """

    mount: str
    size: int
    stores: int
    others: int
    free: int
    growth: int

    @property
    def short(self) -> int:
        """Bytes that are missing for the stores to reach their capacities."""
        return max(0, self.growth - self.free)


def store_space(store: StoredStore, capacity: int | None = None) -> StoreSpace:
    """Measure the space of a store. Blocks on I/O; takes no lock.

    Args:
        capacity: Bytes of each device for the forecast; None: without one.

    Raises:
        StoreError: the journal cannot be read.
    """
    summary, manifest = summarize(store), store.manifest
    devices = tuple(
        DeviceSpace(
            path=str(path),
            filesystem=_filesystem(path),
            capacity=entry.capacity,
            on_disk=_occupied([path]),
        )
        for path, entry in zip(store.paths, manifest.devices, strict=True)
    )
    return StoreSpace(
        state_dir=summary.state_dir,
        model=summary.model,
        in_use=summary.in_use,
        stored=summary.stored,
        slots=summary.slots,
        slots_to_come=summary.slots_to_come,
        capacity=sum(device.capacity for device in manifest.devices),
        on_disk=summary.disk_bytes,
        devices=devices,
        forecast=None if capacity is None else _forecast(store, capacity),
    )


def filesystems(stores: Sequence[StoreSpace]) -> list[FileSystemSpace]:
    """The file systems of these stores, each once, however often it is mounted. Blocks on I/O."""
    mounts: dict[int, str] = {}
    places: dict[int, list[Path]] = {}
    growth: dict[int, int] = {}
    for store in stores:
        for device in store.devices:
            if not device.filesystem:
                continue
            number = os.stat(device.path).st_dev
            mounts.setdefault(number, device.filesystem)
            places.setdefault(number, []).append(Path(device.path))
            capacity = store.forecast.capacity if store.forecast else device.capacity
            room = max(0, capacity - device.on_disk)
            growth[number] = growth.get(number, 0) + room
    for store in stores:
        number = os.stat(store.state_dir).st_dev
        if number in places:
            places[number].append(Path(store.state_dir))
    found = []
    for number, paths in places.items():
        status = os.statvfs(paths[0])
        used = (status.f_blocks - status.f_bfree) * status.f_frsize
        ours = _occupied(paths)
        found.append(
            FileSystemSpace(
                mount=mounts[number],
                size=status.f_blocks * status.f_frsize,
                stores=ours,
                others=max(0, used - ours),
                free=status.f_bavail * status.f_frsize,
                growth=growth[number],
            )
        )
    return sorted(found, key=lambda place: place.mount)


def _filesystem(path: Path) -> str:
    if is_raw(path) or not path.exists():
        return ""
    mount = mount_of(path)
    return mount.point if mount else ""


def _occupied(places: Sequence[Path]) -> int:
    nbytes = 0
    for file in {file for place in places for file in files_named_alike(place)}:
        with contextlib.suppress(FileNotFoundError):  # an engine has just replaced it
            nbytes += file.stat().st_blocks * 512
    return nbytes


def _forecast(store: StoredStore, capacity: int) -> Forecast:
    """Forecast of the next start of the engine with these capacities."""
    manifest, geometry = store.manifest, store.manifest.geometry
    found = division_of(manifest, store.state, capacity=capacity)
    fd = open_journal(store, lock=False)
    try:
        slots = read_journal(store, fd).replay.slots
    finally:
        if fd is not None:
            os.close(fd)
    segments = found.arrangement.kept
    kept = Placement(geometry, segments, len(manifest.devices)) if segments else None
    return Forecast(
        capacity=capacity,
        slots=found.slots,
        kept=0 if kept is None else int(kept.holds(slots).sum()),
    )
