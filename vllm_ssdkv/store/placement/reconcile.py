"""Bringing a manifest up to date with the devices that are there, at the start of an engine."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from vllm_ssdkv.base.errors import ConfigError, DeviceError
from vllm_ssdkv.base.sizes import format_size
from vllm_ssdkv.config.engine import SSDKVConfig
from vllm_ssdkv.store.devices.discovery import Sight, look, matched, renumbered
from vllm_ssdkv.store.format.manifest import Manifest, ManifestDevice
from vllm_ssdkv.store.format.segment import Segment
from vllm_ssdkv.store.format.slot_geometry import SlotGeometry
from vllm_ssdkv.store.placement.division import Division, Room, divide
from vllm_ssdkv.store.placement.segments import next_segment, segment_slots

logger = logging.getLogger(__name__)

GROWTH_BYTES = 512 << 20
"""Most bytes that a growing store takes at a time, unless a slot is larger."""


class Place(Protocol):
    """Place that a store is to have, as its options say: see ``StorePlace`` of
    ``store/open.py``."""

    config: SSDKVConfig
    geometries: tuple[SlotGeometry, ...]
    paths: tuple[str, ...]
    state: Path
    model_key: str


def reconcile(place: Place, manifest: Manifest) -> None:
    """Bring the manifest's devices and segments up to date. Blocks on I/O.

    Raises:
        ConfigError: the devices have no room for a single slot.
        DeviceError: no device is left, two are copies of each other, or one cannot be measured.
    """
    sights = [look(path, len(place.geometries), manifest.store) for path in place.paths]
    before = manifest.devices
    there = {id(device) for device in manifest.present()}
    numbers = matched(before, sights)
    manifest.devices = _present(place, before, sights, numbers)
    in_use = {device for segment in manifest.segments for device in segment.lanes}
    number: dict[int, int] = {}
    for old, device in enumerate(before):
        device.present = any(device is d for d in manifest.devices)
        if not device.present and old in in_use:
            manifest.devices.append(device)
        for new, other in enumerate(manifest.devices):
            if other is device:
                number[old] = new
    manifest.segments = renumbered(manifest.segments, number)
    added = [i for i, d in enumerate(manifest.present()) if id(d) not in there]
    for device in before:
        # What it misses: this opening if it is away, those before if it is back.
        if not device.present:
            device.missed(manifest.opened + 1, manifest.opened + 2)
    _divide(place, manifest, added)


def _present(
    place: Place,
    known: Sequence[ManifestDevice],
    sights: Sequence[Sight],
    numbers: Sequence[int | None],
) -> list[ManifestDevice]:
    """Devices that are there, in the order of the options; logs what has changed."""
    sizes = {
        sight.path: known[number].capacity
        for sight, number in zip(sights, numbers, strict=True)
        if number is not None and known[number].capacity
    }
    found: list[ManifestDevice] = []
    for i, (sight, number) in enumerate(zip(sights, numbers, strict=True)):
        if sight.missing and number is None:
            raise DeviceError(f"device {i} ({sight.path}) {sight.missing}")
        if number is None:
            device = ManifestDevice(
                path=sight.path, capacity=0, weight=0, files=[""] * len(place.geometries)
            )
            if known:
                logger.info("ssdkv: device %s is added", sight.path)
        else:
            device = known[number]
            if device.path != sight.path:
                logger.info("ssdkv: device %s is at %s now", device.path, sight.path)
        device.path = sight.path
        if sight.missing:
            logger.error(
                "ssdkv: device %s %s; the store runs without it, what lay nowhere else is "
                "computed again",
                sight.path,
                sight.missing,
            )
            continue
        if not device.present:
            logger.info("ssdkv: device %s is back", sight.path)
        found.append(device)
    for old, device in enumerate(known):
        if device.present and old not in numbers:
            logger.warning(
                "ssdkv: device %s is not among the devices any more, what lay nowhere else is "
                "computed again",
                device.path,
            )
    if not found:
        raise DeviceError(f"no device is left of {', '.join(place.paths)}")
    capacities = place.config.device_capacities(place.model_key, sizes)
    by_path = dict(zip(place.paths, capacities, strict=True))
    for device in found:
        device.capacity = by_path[device.path]
    _weigh(place, found)
    return found


def _weigh(place: Place, devices: Sequence[ManifestDevice]) -> None:
    """Give devices the weights of the options, or those that they were measured to have.

    Raises:
        DeviceError: a device cannot be measured.
    """
    given = place.config.device_weights()
    if given is None and len(devices) > 1:
        from vllm_ssdkv.store.devices.probe import read_rates, weights_of

        new = [i for i, device in enumerate(devices) if not device.rate]
        if new:
            io = place.config.io
            paths = [device.path for device in devices]
            rates = read_rates(paths, new, io.engine_options(), io.direct, io.deadline)
            for i, rate in zip(new, rates, strict=True):
                devices[i].rate = rate
        given = tuple(weights_of([device.rate for device in devices]))
        by_path = dict(zip((d.path for d in devices), given, strict=True))
    else:
        by_path = dict(zip(place.paths, given or (1.0,) * len(place.paths), strict=True))
    for device in devices:
        device.weight = by_path[device.path]


def _divide(place: Place, manifest: Manifest, added: Sequence[int]) -> None:
    """Give the present devices' capacity to segments; a store that grows gets the first one.

    Raises:
        ConfigError: there is no room for a single slot.
    """
    manifest.grows = not place.config.devices
    whole = division_of(manifest, place.state, added, place.config.replicas)
    found = whole.arrangement
    made = found.made
    if manifest.grows:
        first = None if found.kept else growing_by(manifest, whole, found.kept)
        made = [] if first is None else [first]
    if not (found.kept or made):
        largest = max(one.slot_bytes for one in place.geometries)
        raise ConfigError(
            f"the devices have no room for a block of {format_size(largest)}: "
            f"capacities are {', '.join(format_size(d.capacity) for d in manifest.present())} for "
            f"{len(place.geometries)} rank(s)"
        )
    manifest.segments, manifest.numbers = [*found.kept, *made], found.numbers
    manifest.fresh += [segment.first for segment in made]


def division_of(
    manifest: Manifest,
    state: Path,
    added: Sequence[int] = (),
    replicas: int | None = None,
    capacity: int | None = None,
) -> Division:
    """Division of the store's devices when it has all the room that it may have.

    Args:
        manifest: Of the store.
        state: The state directory.
        added: Devices that are there again, or for the first time.
        replicas: Copies of each new slot; None: as its segments have.
        capacity: Of every device, all ranks together; None: that of the manifest.
    """
    copies = max((segment.copies for segment in manifest.segments), default=1)
    return divide(
        manifest.geometries,
        manifest.segments,
        manifest.weights(),
        _rooms(manifest, state, capacity),
        added,
        copies if replicas is None else replicas,
    )


def growing_by(manifest: Manifest, whole: Division, segments: Sequence[Segment]) -> Segment | None:
    """The segment that a growing store gets next; None: it is as large as it may be."""
    geometry = manifest.geometry
    slot = sum(one.units_per_slot * one.unit_bytes for one in manifest.geometries)
    slots = min(segment_slots(whole.slots, 1), max(1, GROWTH_BYTES // slot))
    return next_segment(geometry, segments, manifest.weights(), whole.ends, slots)


def _rooms(manifest: Manifest, state: Path, capacity: int | None) -> list[Room]:
    """Room of the store on each device; ``capacity``: on every one."""
    return [
        Room(
            (device.capacity if capacity is None else capacity) if device.present else 0,
            Path(device.path) == state or Path(device.path) in state.parents,
        )
        for device in manifest.devices
    ]
