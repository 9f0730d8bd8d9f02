"""Opening a store: directories, manifest, data files, engine, DRAM; and, apart from it, the index.

Workers open data files (one per rank and device, locked), the scheduler opens the journal. The
manifest in the state directory makes them agree on identity and size, whoever comes first.
"""

from __future__ import annotations

import logging
import os
import stat
import time
from dataclasses import dataclass
from pathlib import Path
from uuid import UUID

import numpy as np

from vllm_ssdkv.config import SSDKVConfig
from vllm_ssdkv.errors import ConfigError, DeviceError, FormatError, StoreError
from vllm_ssdkv.metrics import Counters
from vllm_ssdkv.sizes import format_size
from vllm_ssdkv.store.arena import Arena
from vllm_ssdkv.store.data_file import claim
from vllm_ssdkv.store.device import OpenDevice, open_device
from vllm_ssdkv.store.engine.open import open_engine
from vllm_ssdkv.store.files import SlotFiles
from vllm_ssdkv.store.fingerprint import Fingerprint
from vllm_ssdkv.store.health import DeviceHealth
from vllm_ssdkv.store.index import SlotIndex
from vllm_ssdkv.store.journal import Journal, journal_bytes
from vllm_ssdkv.store.layout import PAGE_ALIGN, SlotGeometry, StripeMap, round_up
from vllm_ssdkv.store.manifest import Manifest, locked
from vllm_ssdkv.store.recovery import ProgressLog
from vllm_ssdkv.store.tiers import ArenaPlan
from vllm_ssdkv.store.trim import trim_new
from vllm_ssdkv.store.verify import PageSampler

logger = logging.getLogger(__name__)

LOCK_TIMEOUT_S = 10.0
"""A killed predecessor's last writes may hold the lock for as long as its devices need."""

JOURNAL = "journal"

STATE_SLACK = 128 * 1024
"""Room for store.json, directories and the file system's own rounding."""


class StorePlace:
    """Where a store is and how large, as both roles work it out from the same options."""

    def __init__(
        self,
        config: SSDKVConfig,
        geometry: SlotGeometry,
        fingerprint: Fingerprint,
        tp_size: int,
        replica: int | None = None,
        model: str = "",
    ):
        """``replica``: number of this data-parallel engine, which has directories of its own.
        ``model``: its name, for people who look at the store.

        Raises:
            ConfigError: the devices have no room for a single slot.
        """
        key = fingerprint.digest.hex()[:16]
        below = "" if replica is None else f"dp{replica}"
        self.config = config
        self.geometry = geometry
        self.fingerprint = fingerprint
        self.tp_size = tp_size
        self.model = model
        self.counters = Counters()
        self.paths = tuple(str(Path(p) / below) for p in config.device_paths(key))
        self.state = config.state_path(key) / below
        self.stripes = StripeMap(geometry, config.device_weights())
        self._key = key
        self._nested = not config.devices or replica is not None

    def prepare(self) -> None:
        """Make the directories that nobody named by hand. Those that somebody did must exist, or
        their parents: a device that is not mounted must not become a folder on the system disk.

        Raises:
            ConfigError: the parent of ``state_dir`` does not exist.
            StoreError: a directory cannot be made.
        """
        if self._nested:
            for path in self.paths:
                _make_directory(Path(path), parents=True)
        if not self.state.exists() and not self.state.parent.exists():
            raise ConfigError(f"state_dir {self.state}: neither it nor its parent exists")
        _make_directory(self.state, parents=False)

    def sized(self, known: Manifest | None) -> tuple[tuple[int, ...], int]:
        """Capacity of each device (all ranks) and the number of slots.

        A device without a capacity in the options keeps the one it was created with.

        Raises:
            ConfigError: the devices have no room for a single slot.
        """
        capacities = list(self.config.device_capacities(self._key))
        for i, device in enumerate(self.config.devices or (None,)):
            if known is not None and (device is None or device.capacity is None):
                capacities[i] = known.devices[i].capacity
        per_rank = [c // self.tp_size for c in capacities]
        slots = self.stripes.max_slots(per_rank)
        home = self._state_device()
        if home is not None:
            # The journal and, while it is rewritten, its successor share the device's capacity.
            journal = 2 * journal_bytes(slots) + STATE_SLACK
            per_rank[home] = (capacities[home] - journal) // self.tp_size
            slots = self.stripes.max_slots([max(0, c) for c in per_rank]) if slots else 0
        if slots < 1:
            raise ConfigError(
                f"the devices have no room for a block of "
                f"{format_size(self.geometry.slot_bytes)}: capacities are "
                f"{', '.join(format_size(c) for c in capacities)} for {self.tp_size} rank(s)"
            )
        return tuple(capacities), slots

    def capacity_for(self, slots: int) -> int:
        """Bytes that so many slots need on all devices and ranks together, roughly."""
        data = sum(self.stripes.device_bytes(d, slots) for d in range(self.stripes.devices))
        return data * self.tp_size + 2 * journal_bytes(slots) + STATE_SLACK

    def manifest(self) -> Manifest:
        """The store's manifest, made if there is none. Blocks on I/O.

        Raises:
            FingerprintMismatchError, FormatError, StoreError: it does not fit these options.
        """
        with locked(self.state):
            found = self._load_manifest()
            if found is None:
                capacities, slots = self.sized(None)
                found = Manifest.create(
                    self.fingerprint,
                    self.geometry,
                    self.tp_size,
                    slots,
                    self.paths,
                    capacities,
                    self.config.device_weights(),
                    self.model,
                )
                found.save(self.state)
        found.check(self.fingerprint, self.paths, self.config.device_weights())
        return found

    def _load_manifest(self) -> Manifest | None:
        try:
            return Manifest.load(self.state)
        except FormatError as damage:
            if self.config.recover == "strict":
                raise
            found = Manifest.load_copy(self.state)
            if found is None:
                raise
            logger.warning("ssdkv: %s: restored from its copy", damage)
            found.save(self.state)
            self.counters.add("manifest_restores")
            return found

    def stored(self) -> Manifest:
        """The manifest as it is on disk now; the caller holds the lock.

        Raises:
            StoreError: it was removed meanwhile.
        """
        found = Manifest.load(self.state)
        if found is None:
            raise StoreError(f"{self.state}: store.json was removed while the store was opened")
        return found

    def _state_device(self) -> int | None:
        for i, path in enumerate(self.paths):
            if Path(path) == self.state or Path(path) in self.state.parents:
                return i
        return None


def _make_directory(path: Path, *, parents: bool) -> None:
    try:
        path.mkdir(mode=0o700, parents=parents, exist_ok=True)
    except OSError as error:
        raise StoreError(f"cannot make the directory {path}: {error.strerror}") from error


@dataclass(frozen=True, slots=True)
class OpenStore:
    """One rank's open data files, engine and memory."""

    files: SlotFiles
    devices: tuple[OpenDevice, ...]
    arena: Arena
    plan: ArenaPlan
    num_slots: int
    capacities: tuple[int, ...]

    def describe(self) -> list[str]:
        """Lines of the start-up summary."""
        slot = self.files.geometry.slot_bytes
        lines = [
            f"SSD  {device.path.parent}: up to {format_size(capacity)}"
            f"{'' if device.direct else ', page cache in use (no O_DIRECT)'}"
            f"{'' if device.preallocated else ', not preallocated'}"
            for device, capacity in zip(self.devices, self.capacities, strict=True)
        ]
        return [
            f"DRAM {format_size(self.plan.nbytes)} per rank: {self.plan.frames} blocks, "
            f"{format_size(self.plan.staging_bytes)} staging",
            *lines,
            f"store {self.num_slots} blocks of {format_size(slot)} per rank, engine "
            f"{self.files.engine.name}",
        ]

    def close(self) -> None:
        """Release the data files and their locks. The store's threads must have ended."""
        for device in self.devices:
            device.close()


def open_rank(place: StorePlace, rank: int, counters: Counters) -> OpenStore:
    """Open, lock and claim this rank's data files, then start the engine. Blocks on I/O.

    Raises:
        StoreLockedError: another engine uses the directory.
        FingerprintMismatchError: it holds KV of something else.
        DeviceError, FormatError, ConfigError: the text names what and the way out.
    """
    place.prepare()
    manifest = place.manifest()
    capacities, num_slots = place.sized(manifest)
    geometry = place.geometry
    plan = ArenaPlan(
        geometry,
        place.config.dram_bytes(place.tp_size),
        place.config.io.staging,
        scrub=place.config.io.scrub_rate is not None,
    )
    opened: list[OpenDevice] = []
    try:
        for index, path in enumerate(place.paths):
            device = open_device(
                path,
                index=index,
                rank=rank,
                nbytes=round_up(place.stripes.device_bytes(index, num_slots), PAGE_ALIGN),
                direct=place.config.io.direct,
                lock_timeout_s=LOCK_TIMEOUT_S,
            )
            opened.append(device)
            if place.config.trim:
                trim_new(device, path)
            if _claim(place, device, index, rank):
                counters.add("device_lost", 1, device=path)
            _cut_to_size(device)
        arena = Arena(plan.nbytes)
        engine = open_engine(
            place.config.io.engine_options(), [d.fd for d in opened], list(place.paths), arena
        )
    except BaseException:
        for device in opened:
            device.close()
        raise
    deadline = place.config.io.deadline
    files = SlotFiles(
        geometry,
        place.stripes,
        engine,
        DeviceHealth(place.paths, deadline, counters),
        counters,
        place.fingerprint.digest,
        rank,
        deadline,
        PageSampler(place.config.io.verify),
    )
    return OpenStore(files, tuple(opened), arena, plan, num_slots, capacities)


def _cut_to_size(device: OpenDevice) -> None:
    """Give back what a data file has beyond its size: the capacity was larger before."""
    status = os.fstat(device.fd)
    if not stat.S_ISREG(status.st_mode) or status.st_size <= device.nbytes:
        return
    try:
        os.ftruncate(device.fd, device.nbytes)
    except OSError as error:
        raise DeviceError(f"cannot shorten {device.path}: {error.strerror}") from error
    logger.info("%s is shortened to %s", device.path, format_size(device.nbytes))


def _claim(place: StorePlace, device: OpenDevice, index: int, rank: int) -> bool:
    """Make the data file ours; whether it replaces one that the manifest knows."""
    with locked(place.state):
        manifest = place.stored()
        entry = manifest.devices[index]
        known = entry.files[rank]
        found = claim(
            device,
            store=UUID(manifest.store),
            known=known,
            index=index,
            rank=rank,
            stripes=place.stripes,
            geometry=place.geometry,
            fingerprint=place.fingerprint,
        )
        if found == known:
            return False
        entry.files[rank] = found
        entry.path = place.paths[index]
        if known:
            entry.fresh.append(rank)
        manifest.save(place.state)
        return bool(known)


def open_index(place: StorePlace) -> tuple[SlotIndex, StripeMap]:
    """Open and recover the index of the store whose data files the workers hold. Blocks on I/O.

    Raises:
        StoreLockedError: another engine uses it.
        FormatError: the option recover is ``strict``, and the journal is damaged.
        StoreError: the journal cannot be opened.
    """
    place.prepare()
    capacities, num_slots = place.sized(place.manifest())
    manifest = place.stored()
    begin = time.monotonic()
    journal = Journal(
        place.state / JOURNAL,
        store=UUID(manifest.store),
        fingerprint=place.fingerprint.digest,
        num_slots=num_slots,
        recover=place.config.recover,
        progress=ProgressLog("ssdkv: recovering the index"),
        lock_timeout_s=LOCK_TIMEOUT_S,
    )
    index = SlotIndex(num_slots, journal, open_number=manifest.opened + 1)
    slots = np.arange(num_slots, dtype=np.int64)
    with locked(place.state):
        manifest = place.stored()
        for device, entry in enumerate(manifest.devices):
            entry.capacity = capacities[device]
            if entry.fresh:
                index.drop(slots[place.stripes.touches(device, slots)])
                entry.fresh = []
        manifest.slots = num_slots
        manifest.model = place.model
        manifest.opened += 1
        manifest.last_opened = int(time.time())
        manifest.save(place.state)
    counts = index.counters
    logger.info(
        "ssdkv: %d stored blocks recovered in %.1f s, %d dropped, %d damaged journal records",
        counts["recovered"] - counts["dropped"],
        time.monotonic() - begin,
        counts["dropped"] + counts["out_of_range"],
        counts["journal_corrupt_records"],
    )
    return index, place.stripes
