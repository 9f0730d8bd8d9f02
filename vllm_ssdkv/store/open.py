"""Opening a store: directories, manifest, data files, engine, DRAM; and, apart from it, the index.

Workers open data files (one per rank and device, locked), the scheduler opens the journal. The
manifest in the state directory makes them agree on identity and size, whoever comes first.
"""

from __future__ import annotations

import hashlib
import logging
import os
import stat
import time
from collections.abc import Sequence
from pathlib import Path
from uuid import UUID, uuid4

import msgspec
import numpy as np

from vllm_ssdkv.config import SSDKVConfig
from vllm_ssdkv.errors import ConfigError, DamagedError, DeviceError, FormatError, StoreError
from vllm_ssdkv.metrics import Counters
from vllm_ssdkv.sizes import format_size
from vllm_ssdkv.store.arena import Arena
from vllm_ssdkv.store.arena_plan import ArenaPlan, ChoiceMemory
from vllm_ssdkv.store.cipher import CipherSealer
from vllm_ssdkv.store.data_file import claim
from vllm_ssdkv.store.device import OpenDevice, open_device
from vllm_ssdkv.store.engine.open import open_engine
from vllm_ssdkv.store.file_lock import require_unlocked
from vllm_ssdkv.store.files import SlotFiles
from vllm_ssdkv.store.fingerprint import Fingerprint
from vllm_ssdkv.store.health import DeviceHealth
from vllm_ssdkv.store.index import SlotIndex
from vllm_ssdkv.store.inventory import Sight, look, matched, renumbered
from vllm_ssdkv.store.journal import Journal, journal_bytes
from vllm_ssdkv.store.key_source import read_key
from vllm_ssdkv.store.layout import PAGE_ALIGN, SUPERBLOCK_BYTES, SlotGeometry, round_up
from vllm_ssdkv.store.manifest import Manifest, ManifestDevice, has_manifest, locked
from vllm_ssdkv.store.open_store import OpenStore
from vllm_ssdkv.store.placement import Segment
from vllm_ssdkv.store.probe import read_rates, weights_of
from vllm_ssdkv.store.rebuild import rebuilt
from vllm_ssdkv.store.recovery import ProgressLog
from vllm_ssdkv.store.replicas import Replicas
from vllm_ssdkv.store.restripe import BackgroundSaver, Restriper
from vllm_ssdkv.store.sealer import ChecksumSealer, Sealer
from vllm_ssdkv.store.segments import arrange
from vllm_ssdkv.store.speed import DeviceSpeed
from vllm_ssdkv.store.store_key import KEY_ID_BYTES
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
        run: str = "",
        name: str = "",
    ):
        """Args:
        config: The options.
        geometry: Shape of the slots.
        fingerprint: What the KV belongs to.
        tp_size: Number of ranks.
        replica: Number of this data-parallel engine, which has directories of its own.
        model: Its name, for people who look at the store.
        run: What all processes of this engine, and no others, have in common: the first of them
            to open the store looks at the devices, the others use what it found. Without it each
            one looks.
        name: Tells default directories of models with KV of one shape apart.

        Blocks while the key of an encrypted store is fetched, which has a deadline.

        Raises:
            ConfigError: the key cannot be had.
            ValueError: the geometry is not that of the option ``encryption``.
        """
        named = fingerprint.digest + name.encode()
        key = hashlib.blake2b(named, digest_size=8).hexdigest() if name else named.hex()[:16]
        below = "" if replica is None else f"dp{replica}"
        self.config = config
        self.geometry = geometry
        self.fingerprint = fingerprint
        self.tp_size = tp_size
        self.run = run or str(uuid4())
        self.model = model
        self.key = None if config.encryption is None else read_key(config.encryption)
        if geometry.encrypted != (self.key is not None):
            raise ValueError(f"geometry of encrypted slots: {geometry.encrypted}")
        self.counters = Counters()
        self.paths = tuple(str(Path(p) / below) for p in config.device_paths(key))
        self.state = self._find_state(config.state_path(key) / below)
        self._key = key
        self._nested = not config.devices or replica is not None

    def _find_state(self, default: Path) -> Path:
        """Where the state is: the order of devices may change, and with it the default."""
        if self.config.state_dir is not None:
            return default
        return next((Path(p) for p in self.paths if has_manifest(Path(p))), default)

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

    def capacity_for(self, slots: int) -> int:
        """Bytes that so many slots need on all devices and ranks together, roughly."""
        slot = self.geometry.units_per_slot * self.geometry.unit_bytes
        data = len(self.paths) * SUPERBLOCK_BYTES + slots * slot * self.config.replicas
        return data * self.tp_size + 2 * journal_bytes(slots) + STATE_SLACK

    def manifest(self) -> Manifest:
        """The store's manifest, made if there is none, with today's devices. Blocks on I/O.

        Raises:
            FingerprintMismatchError, KeyMismatchError, FormatError, StoreError: it does not fit
                these options.
            StoreLockedError: another engine runs on it.
            ConfigError: the devices have no room for a single slot.
        """
        with locked(self.state):
            found = self._load_manifest()
            if found is None:
                found = Manifest.create(
                    self.fingerprint, self.geometry, self.tp_size, self.model, self.key_id
                )
            found.check(self.fingerprint)
            found.check_key(self.key_id)
            if found.run != self.run:
                # What another engine counts on must not be changed under it.
                files = [self.state / JOURNAL, *found.data_files()]
                require_unlocked(files, time.monotonic() + LOCK_TIMEOUT_S)
                self._arrange(found)
                found.run = self.run
                found.model_digests = msgspec.UNSET
                found.save(self.state)
        return found

    @property
    def key_id(self) -> bytes:
        """Names the key of the store; empty where it is not encrypted."""
        return b"" if self.key is None else self.key.key_id

    def name_key(self) -> bytes:
        """Key under which block hashes are hidden in the store; empty where they are not.

        Blocks on I/O.

        Raises:
            StoreError: there is no store yet (see :meth:`manifest`).
        """
        return b"" if self.key is None else self.key.names(UUID(self.stored().store))

    def sealer(self, rank: int, arena: Arena) -> Sealer:
        """What seals the slots of a rank. Blocks on I/O.

        Raises:
            UnsupportedError: they are encrypted, and there is no libcrypto.
            StoreError: there is no store yet (see :meth:`manifest`).
        """
        digest = self.fingerprint.digest
        if self.key is None:
            sampler = PageSampler(self.config.io.verify)
            return ChecksumSealer(self.geometry, digest, rank, arena, sampler)
        slots_key = self.key.slots(UUID(self.stored().store), rank)
        return CipherSealer(self.geometry, digest, rank, arena, slots_key)

    def _load_manifest(self) -> Manifest | None:
        try:
            return Manifest.load(self.state)
        except FormatError as damage:
            if self.config.recover == "strict":
                raise
            try:
                found = Manifest.load_copy(self.state)
            except DamagedError:
                found = None
            if found is None:
                found = self._rebuild(damage)
            else:
                logger.warning("ssdkv: %s: restored from its copy", damage)
                found.save(self.state)
            self.counters.add("manifest_restores")
            return found

    def _rebuild(self, damage: FormatError) -> Manifest:
        """A manifest from superblocks, which is not saved yet."""
        if not isinstance(damage, DamagedError):
            raise damage
        try:
            found = rebuilt(self.paths, self.fingerprint, self.geometry, self.tp_size, self.key_id)
        except StoreError as error:
            raise FormatError(f"{damage}; nor can it be made from superblocks: {error}") from error
        logger.error(
            "ssdkv: %s: made anew, as is its copy, from the superblocks of store %s; what was "
            "stored is computed again",
            damage,
            found.store,
        )
        return found

    def _arrange(self, manifest: Manifest) -> None:
        """Bring the manifest's devices and segments up to date."""
        sights = [look(path, self.tp_size, manifest.store) for path in self.paths]
        before = manifest.devices
        there = {id(device) for device in manifest.present()}
        numbers = matched(before, sights)
        manifest.devices = self._present(before, sights, numbers)
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
        self._divide(manifest, added)

    def _present(
        self,
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
                    path=sight.path, capacity=0, weight=0, files=[""] * self.tp_size
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
            raise DeviceError(f"no device is left of {', '.join(self.paths)}")
        capacities = self.config.device_capacities(self._key, sizes)
        by_path = dict(zip(self.paths, capacities, strict=True))
        for device in found:
            device.capacity = by_path[device.path]
        self._weigh(found)
        return found

    def _weigh(self, devices: Sequence[ManifestDevice]) -> None:
        """Give devices the weights of the options, or those that they were measured to have.

        Raises:
            DeviceError: a device cannot be measured.
        """
        given = self.config.device_weights()
        if given is None and len(devices) > 1:
            new = [i for i, device in enumerate(devices) if not device.rate]
            if new:
                io = self.config.io
                paths = [device.path for device in devices]
                rates = read_rates(paths, new, io.engine_options(), io.direct, io.deadline)
                for i, rate in zip(new, rates, strict=True):
                    devices[i].rate = rate
            given = tuple(weights_of([device.rate for device in devices]))
            by_path = dict(zip((d.path for d in devices), given, strict=True))
        else:
            by_path = dict(zip(self.paths, given or (1.0,) * len(self.paths), strict=True))
        for device in devices:
            device.weight = by_path[device.path]

    def _divide(self, manifest: Manifest, added: Sequence[int]) -> None:
        """Give the present devices' capacity to segments.

        Raises:
            ConfigError: there is no room for a single slot.
        """
        journal = 0
        for _ in range(2):  # how large the journal may become is known only after the first time
            ends = [
                self._units(device, journal) if device.present else 0 for device in manifest.devices
            ]
            found = arrange(
                self.geometry,
                manifest.segments,
                manifest.weights(),
                ends,
                added,
                self.config.replicas,
            )
            journal = 2 * journal_bytes(found.numbers) + STATE_SLACK
        if not found.segments:
            raise ConfigError(
                f"the devices have no room for a block of "
                f"{format_size(self.geometry.slot_bytes)}: capacities are "
                f"{', '.join(format_size(d.capacity) for d in manifest.present())} for "
                f"{self.tp_size} rank(s)"
            )
        manifest.segments, manifest.numbers = found.segments, found.numbers
        manifest.fresh += [segment.first for segment in found.made]

    def _units(self, device: ManifestDevice, journal: int) -> int:
        """Units that each rank's data file may have on a device."""
        room = device.capacity
        if Path(device.path) == self.state or Path(device.path) in self.state.parents:
            # The journal and, while it is rewritten, its successor share the device's capacity.
            room -= journal
        return max(0, room // self.tp_size - SUPERBLOCK_BYTES) // self.geometry.unit_bytes

    def tell_weights(self, rank: int, digest: bytes) -> None:
        """Note what a rank of this engine computes with, for its scheduler. Blocks on I/O.

        Raises:
            StoreError: it cannot be saved.
        """
        with locked(self.state):
            manifest = self.stored()
            told = manifest.model_digests or [""] * self.tp_size
            told[rank] = digest.hex()
            manifest.model_digests = told
            manifest.save(self.state)

    def bind(self, settings: Fingerprint) -> list[bytes]:
        """Digest of each rank's weights, as the ranks have told; says what is other than before.

        Blocks on I/O.

        Raises:
            StoreError: a rank has not told, or the manifest cannot be saved.
        """
        with locked(self.state):
            manifest = self.stored()
            told = manifest.model_digests or []
            if manifest.run != self.run or not (told and all(told)):
                raise StoreError(
                    f"store {manifest.store}: not every rank of this engine has told what weights "
                    "it holds; does another engine start on these directories?"
                )
            now = Fingerprint({**settings.fields, "weights": " ".join(told)})
            before = Fingerprint(manifest.bound_to or now.fields)
            for difference in before.differences(now):
                logger.warning(
                    "ssdkv: other than in the last run (then != now): %s. What was stored then is "
                    "found only by an engine with the same",
                    difference,
                )
            manifest.bound_to = dict(now.fields)
            manifest.save(self.state)
        return [bytes.fromhex(digest) for digest in told]

    def suspend(self, reason: str) -> None:
        """Have the store opened as suspended until somebody resumes it; empty: resume it.

        Blocks on I/O.

        Raises:
            StoreError: it cannot be saved.
        """
        with locked(self.state):
            manifest = self.stored()
            manifest.suspended = reason or msgspec.UNSET
            manifest.save(self.state)

    def save_segments(self, segments: Sequence[Segment], weights: Sequence[float]) -> None:
        """Replace the segments in the manifest, and note devices that are out of use, whose weight
        is 0. Blocks on I/O.

        Raises:
            StoreError: it cannot be saved.
        """
        with locked(self.state):
            manifest = self.stored()
            manifest.segments = list(segments)
            for device, weight in zip(manifest.devices, weights, strict=True):
                if not weight:
                    device.missed(manifest.opened, manifest.opened + 1)
            manifest.save(self.state)

    def stored(self) -> Manifest:
        """The manifest as it is on disk now; who changes it holds the lock.

        Raises:
            StoreError: it was removed meanwhile.
        """
        found = Manifest.load(self.state)
        if found is None:
            raise StoreError(f"{self.state}: store.json was removed while the store was opened")
        return found


def _make_directory(path: Path, *, parents: bool) -> None:
    try:
        path.mkdir(mode=0o700, parents=parents, exist_ok=True)
    except OSError as error:
        raise StoreError(f"cannot make the directory {path}: {error.strerror}") from error


def open_rank(
    place: StorePlace, rank: int, counters: Counters, contexts: int | None = None
) -> OpenStore:
    """Open, lock and claim this rank's data files, then start the engine. Blocks on I/O.

    Args:
        place: The store.
        rank: Whose files.
        counters: What devices do is counted here.
        contexts: Slots from which running requests choose at most; None: all.

    Raises:
        StoreLockedError: another engine uses the directory.
        FingerprintMismatchError: it holds KV of something else.
        KeyMismatchError: it is encrypted with another key.
        UnsupportedError: it is encrypted, and there is no libcrypto.
        DeviceError, FormatError, ConfigError: the text names what and the way out.
    """
    place.prepare()
    manifest = place.manifest()
    geometry = place.geometry
    placement = manifest.placement()
    choice = None
    if geometry.summary_pages:
        sparse = place.config.sparse
        choice = ChoiceMemory(
            place.config.page_tokens,
            manifest.numbers,
            sparse.page_cache,
            sparse.summaries,
            sparse.page_policy,
            sparse.channel_pages,
            contexts,
            sparse.budget,
        )
    plan = ArenaPlan.of(
        geometry,
        place.config.dram_bytes(place.tp_size),
        place.config.io.staging,
        most_bytes=place.config.most_dram_bytes(place.tp_size),
        scrub=place.config.io.scrub_rate is not None,
        choice=choice,
    )
    present = manifest.present()
    paths = [device.path for device in present]
    for path in set(place.paths) - set(paths):
        counters.add("device_lost", 1, device=path)
        counters.set("device_state", 0, device=path)
    opened: list[OpenDevice] = []
    try:
        for index, path in enumerate(paths):
            device = open_device(
                path,
                index=index,
                rank=rank,
                nbytes=round_up(placement.device_bytes(index), PAGE_ALIGN),
                direct=place.config.io.direct,
                lock_timeout_s=LOCK_TIMEOUT_S,
            )
            opened.append(device)
            if place.config.trim:
                trim_new(device, path)
            if _claim(place, device, index, rank):
                counters.add("device_lost", 1, device=path)
                present[index].missed(0, manifest.opened + 1)
            _cut_to_size(device)
        arena = Arena(plan.nbytes)
        sealer = place.sealer(rank, arena)
        engine = open_engine(place.config.io.engine_options(), [d.fd for d in opened], paths, arena)
        arena.populate()
    except BaseException:
        for device in opened:
            device.close()
        raise
    deadline = place.config.io.deadline
    absent = range(len(present), len(manifest.devices))
    health = DeviceHealth(paths, deadline, counters, absent=absent)
    speed = DeviceSpeed(paths, [device.weight for device in present])
    files = SlotFiles(
        geometry,
        placement,
        engine,
        health,
        speed,
        counters,
        place.fingerprint.digest,
        rank,
        deadline,
        sealer,
        Replicas(health, speed, manifest.numbers, [device.gap for device in present]),
    )
    capacities = tuple(device.capacity for device in present)
    return OpenStore(files, tuple(opened), arena, plan, manifest.numbers, capacities, place.key_id)


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

        def renamed(name: str) -> None:
            entry.files[rank] = name
            entry.fresh = sorted({*entry.fresh, rank})
            entry.missed(0, manifest.opened + 1)
            manifest.save(place.state)

        found = claim(
            device,
            store=UUID(manifest.store),
            known=known,
            rank=rank,
            geometry=place.geometry,
            fingerprint=place.fingerprint,
            key_id=place.key_id or bytes(KEY_ID_BYTES),
            renamed=renamed,
            elsewhere=manifest.files_besides(index),
        )
        if not known:  # found again, should we be killed here: its superblock names the store
            entry.files[rank] = found
            manifest.save(place.state)
        return known not in ("", found)


def open_index(place: StorePlace, counters: Counters | None = None) -> tuple[SlotIndex, Restriper]:
    """Open and recover the index of the store whose data files the workers hold. Blocks on I/O.

    Returns:
        The index, and what keeps the placement of its slots up to date.

    Raises:
        StoreLockedError: another engine uses it.
        FormatError: the journal is of another version, or damaged with the option ``strict``.
        StoreError: the journal cannot be opened.
    """
    place.prepare()
    manifest = place.manifest()
    placement = manifest.placement()
    begin = time.monotonic()
    journal = Journal(
        place.state / JOURNAL,
        store=UUID(manifest.store),
        fingerprint=place.fingerprint.digest,
        num_slots=manifest.numbers,
        recover=place.config.recover,
        progress=ProgressLog("ssdkv: recovering the index"),
        lock_timeout_s=LOCK_TIMEOUT_S,
    )
    index = SlotIndex(manifest.numbers, journal, open_number=manifest.opened + 1)
    slots = np.arange(manifest.numbers, dtype=np.int64)
    with locked(place.state):
        manifest = place.stored()
        absent = np.array([not entry.present for entry in manifest.devices], dtype=np.bool_)
        empty = absent | [bool(entry.fresh) for entry in manifest.devices]
        index.drop(slots[placement.lost(empty, slots)])
        for entry in manifest.present():
            entry.fresh = []
        gone = ~placement.holds(slots) | placement.lost(absent, slots)
        for segment in placement.segments:
            if segment.first in manifest.fresh:
                index.drop(segment.all_slots())
        manifest.fresh = []
        index.quarantine(gone)
        manifest.model = place.model
        manifest.opened += 1
        manifest.last_opened = int(time.time())
        index.flush()  # a power loss must not bring back what the manifest calls gone
        manifest.save(place.state)
    counters = counters or Counters()

    def save(segments: Sequence[Segment]) -> None:
        index.flush(LOCK_TIMEOUT_S / 2)  # likewise, of what these segments held
        place.save_segments(segments, restriper.weights)

    saver = BackgroundSaver(save, counters)
    replicas = place.config.replicas
    restriper = Restriper(index, placement, manifest.weights(), saver, counters, replicas)
    restriper.settle(LOCK_TIMEOUT_S)
    counts = index.counters
    logger.info(
        "ssdkv: %d stored blocks recovered in %.1f s, %d dropped, %d damaged journal records",
        counts["recovered"] - counts["dropped"],
        time.monotonic() - begin,
        counts["dropped"] + counts["out_of_range"],
        counts["journal_corrupt_records"],
    )
    return index, restriper
