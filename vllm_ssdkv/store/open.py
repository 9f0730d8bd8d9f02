"""Opening a store and recovering it: directories, manifest, data files, DRAM; apart, the index.

Workers open data files (one per rank and device, locked), the scheduler opens the journal. The
manifest in the state directory makes them agree on identity and size, whoever comes first.
"""

from __future__ import annotations

import hashlib
import logging
import os
import stat
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from pathlib import Path
from uuid import UUID, uuid4

import numpy as np
from msgspec.structs import replace

from vllm_ssdkv.base.errors import (
    ConfigError,
    DamagedError,
    DeadlineError,
    DeviceError,
    FormatError,
    StoreError,
)
from vllm_ssdkv.base.file_access import create_directory, why_refused
from vllm_ssdkv.base.file_lock import require_unlocked
from vllm_ssdkv.base.metrics import Counters
from vllm_ssdkv.base.sizes import format_size
from vllm_ssdkv.config.encryption import EncryptionConfig
from vllm_ssdkv.config.engine import SSDKVConfig
from vllm_ssdkv.store.devices.data_device import OpenDevice, open_device, open_to_read
from vllm_ssdkv.store.devices.data_file import claim, read_superblock
from vllm_ssdkv.store.devices.health import DeviceHealth
from vllm_ssdkv.store.devices.manifest_copies import CopySpreader
from vllm_ssdkv.store.devices.remote_devices import RemoteDevices, RemoteVolume, stub_of
from vllm_ssdkv.store.devices.throughput import ThroughputEstimator
from vllm_ssdkv.store.format.fingerprint import Fingerprint
from vllm_ssdkv.store.format.journal_record import JOURNAL
from vllm_ssdkv.store.format.manifest import NAME, Manifest, locked
from vllm_ssdkv.store.format.segment import Segment
from vllm_ssdkv.store.format.slot_geometry import (
    PAGE_ALIGN,
    SUPERBLOCK_BYTES,
    SlotGeometry,
    round_up,
    with_equal_units,
)
from vllm_ssdkv.store.format.superblock import KEY_ID_BYTES, data_file_path
from vllm_ssdkv.store.index.journal import Journal, journal_bytes
from vllm_ssdkv.store.index.recovery import ProgressLog
from vllm_ssdkv.store.index.slot_index import EPOCH_COUNTER_BITS, SlotIndex
from vllm_ssdkv.store.integrity.page_verification import PageSampler
from vllm_ssdkv.store.integrity.slot_codec import ChecksumCodec, SlotCodec
from vllm_ssdkv.store.integrity.store_key import StoreKey
from vllm_ssdkv.store.io.device_prober import Identity
from vllm_ssdkv.store.io.engines.open import open_engine
from vllm_ssdkv.store.io.slot_io import SlotIO
from vllm_ssdkv.store.location import Location, choose_state, locate
from vllm_ssdkv.store.maintenance.offline_store import StoredStore, is_lost, set_aside
from vllm_ssdkv.store.manifest_keeper import ManifestKeeper
from vllm_ssdkv.store.memory.arena import Arena
from vllm_ssdkv.store.memory.memory_plan import MemoryPlan, SparseMemory
from vllm_ssdkv.store.open_store import OpenStore
from vllm_ssdkv.store.placement.division import STATE_SLACK
from vllm_ssdkv.store.placement.growth import DataFileSpace, StoreGrowth
from vllm_ssdkv.store.placement.placement import Placement, placement_of
from vllm_ssdkv.store.placement.rebalancer import BackgroundSaver, FixedRebalancer, Rebalancer
from vllm_ssdkv.store.placement.reconcile import division_of, growing_by, reconcile
from vllm_ssdkv.store.placement.replica_selector import Replicas
from vllm_ssdkv.store.write.trim import trim_new

logger = logging.getLogger(__name__)

_NOT_TOLD = "00"
"""Digest in the manifest of a worker that has not told, beside others that share its files."""

LOCK_TIMEOUT_S = 10.0
"""A killed predecessor's last writes may hold the lock for as long as its devices need."""


class StorePlace:
    """Place and size of a store, as both roles work them out from the same options."""

    def __init__(
        self,
        config: SSDKVConfig,
        geometries: Sequence[SlotGeometry],
        fingerprint: Fingerprint,
        replica: int | None = None,
        model: str = "",
        run: str = "",
        name: str = "",
        sharers: int = 1,
    ):
        """Args:
        config: The options.
        geometries: Shape of the slots of each rank that writes.
        fingerprint: What the KV belongs to.
        replica: Number of this data-parallel engine, which has directories of its own.
        model: Its name, for people who look at the store.
        run: What all processes of this engine, and no others, have in common: the first of them
            to open the store looks at the devices, the others use what it found. Without it each
            one looks.
        name: Tells default directories of models with KV of one shape apart.
        sharers: Workers with the same KV, of which the first writes and the others read: numbers of
            workers are ``rank * sharers`` and up.

        Blocks while the key of an encrypted store is fetched, which has a deadline.

        Raises:
            ConfigError: the key cannot be had.
            ValueError: a geometry is not that of the option ``encryption``.
        """
        named = fingerprint.digest + name.encode()
        key = hashlib.blake2b(named, digest_size=8).hexdigest() if name else named.hex()[:16]
        below = "" if replica is None else f"dp{replica}"
        self.config = config
        self.geometries, self.ranks = with_equal_units(geometries), len(geometries)
        self.sharers, self.workers = sharers, sharers * len(geometries)
        self.fingerprint = fingerprint
        self.run = run or str(uuid4())
        self.model, self.name = model, name
        self.key = None if config.encryption is None else _key(config.encryption)
        for geometry in geometries:
            if geometry.encrypted != (self.key is not None):
                raise ValueError(f"geometry of encrypted slots: {geometry.encrypted}")
        self.counters = Counters()
        self.paths = tuple(str(Path(p) / below) for p in config.device_paths(key))
        default = config.state_path(key) / below
        chosen = None if config.state_dir else choose_state([Path(p) for p in self.paths], default)
        self.state = chosen or default
        self.copies = CopySpreader(self.counters)
        self._keeper: ManifestKeeper | None = None
        """Knows the manifest once the index is open here."""
        self.model_key = key
        self._replica = replica is not None

    def prepare(self) -> None:
        """Make the directories that nobody named by hand. Those that somebody did must exist, or
        their parents: a device that is not mounted must not become a folder on the system disk.

        Raises:
            ConfigError: the parent of ``state_dir`` does not exist.
            StoreError: a directory cannot be made.
        """
        for path in map(Path, self.paths):
            if not self.config.devices or (
                self._replica and (path.parent.exists() or path.parent.parent.exists())
            ):
                _make_directory(path, parents=True)
        if not self.state.exists() and not self.state.parent.exists():
            raise ConfigError(f"state_dir {self.state}: neither it nor its parent exists")
        _make_directory(self.state, parents=False)

    def part(self, worker: int) -> tuple[int, bool]:
        """Rank whose data files a worker uses, and whether it only reads them."""
        rank, place = divmod(worker, self.sharers)
        return rank, place > 0

    def capacity_for(self, slots: int) -> int:
        """Bytes that so many slots need on all devices and ranks together, roughly."""
        slot = sum(one.units_per_slot * one.unit_bytes for one in self.geometries)
        data = self.ranks * len(self.paths) * SUPERBLOCK_BYTES + slots * slot * self.config.replicas
        return data + 2 * journal_bytes(slots) + STATE_SLACK

    def manifest(self) -> Manifest:
        """The store's manifest, made if there is none, with today's devices. Blocks on I/O.

        Raises:
            FingerprintMismatchError, KeyMismatchError, FormatError, StoreError: it does not fit
                these options.
            StoreLockedError: another engine runs on it.
            ConfigError: the devices have no room for a single slot.
        """
        with locked(self.state):
            location = self._locate()
            found = location.manifest
            if found is None:
                found = Manifest.create(self.fingerprint, self.geometries, self.model, self.key_id)
            found.check(self.fingerprint)
            found.check_key(self.key_id)
            if found.run != self.run:
                # What another engine counts on must not be changed under it.
                files = [self.state / JOURNAL, *found.data_files()]
                require_unlocked(files, time.monotonic() + LOCK_TIMEOUT_S)
                self._take_over(location)
                reconcile(self, found)
                found.run = self.run
                found.model_digests = []
                found.save(self.state)
                self._retire_others(found)
            elif location.problem:
                self._take_over(location)
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

    def codec(self, rank: int, arena: Arena) -> SlotCodec:
        """Codec of the slots of a rank. Blocks on I/O.

        Raises:
            UnsupportedError: they are encrypted, and there is no libcrypto.
            StoreError: there is no store yet (see :meth:`manifest`).
        """
        digest, geometry = self.fingerprint.digest, self.geometries[rank]
        if self.key is None:
            sampler = PageSampler(self.config.io.verify)
            return ChecksumCodec(geometry, digest, rank, arena, sampler)
        from vllm_ssdkv.store.integrity.cipher import CipherCodec

        slots_key = self.key.slots(UUID(self.stored().store), rank)
        return CipherCodec(geometry, digest, rank, arena, slots_key)

    def _locate(self) -> Location:
        """The manifest that counts; nothing is changed yet."""
        try:
            location = locate(self.state, self.paths)
        except FormatError as damage:
            if self.config.recover == "strict":
                raise
            self.counters.add("manifest_restores")
            return Location(self._rebuild(damage))
        if location.damage is not None and self.config.recover == "strict":
            raise location.damage
        return location

    def _take_over(self, location: Location) -> None:
        """Say why another manifest counts than the one that was here; a journal that is older than
        it must not be read. Blocks on I/O.

        Raises:
            StoreError: the journal cannot be set aside.
        """
        if location.problem:
            self.counters.add("manifest_restores")
            logger.warning(
                "ssdkv: %s: restored from its copy on %s", location.problem, location.source
            )
        if location.journal_void:
            set_aside(self.state / JOURNAL)

    def _retire_others(self, manifest: Manifest) -> None:
        """Retire state directories of before, on devices that were away since. Blocks on I/O."""
        for path in map(Path, self.paths):
            if path.resolve() == self.state.resolve():
                continue
            try:
                other = Manifest.read(path / NAME)
                if other is not None and other.store == manifest.store:
                    set_aside(path / JOURNAL)
                    (path / NAME).unlink()
                    logger.info("ssdkv: the state is in %s now, not in %s", self.state, path)
            except (StoreError, OSError) as error:  # the newest manifest counts anyway
                self.copies.failed(str(path), str(error))

    def _rebuild(self, damage: FormatError) -> Manifest:
        """A manifest from superblocks, which is not saved yet."""
        if not isinstance(damage, DamagedError):
            raise damage
        from vllm_ssdkv.store.devices.manifest_from_superblocks import rebuilt

        try:
            found = rebuilt(self.paths, self.fingerprint, self.geometries, self.key_id)
        except StoreError as error:
            raise FormatError(f"{damage}; nor can it be made from superblocks: {error}") from error
        logger.error(
            "ssdkv: %s: made anew, as is its copy, from the superblocks of store %s; what was "
            "stored is computed again",
            damage,
            found.store,
        )
        return found

    def tell_weights(self, worker: int, digest: bytes) -> None:
        """Note what a worker of this engine computes with, for its scheduler. Blocks on I/O.

        Raises:
            StoreError: it cannot be saved.
        """
        with locked(self.state):
            manifest = self.stored()
            told = manifest.model_digests or [""] * self.ranks
            rank, place = divmod(worker, self.sharers)
            of_rank = told[rank].split() or [_NOT_TOLD] * self.sharers
            of_rank[place] = digest.hex()
            told[rank] = " ".join(of_rank)
            manifest.model_digests = told
            manifest.save(self.state)

    def bind(self, settings: Fingerprint) -> list[bytes]:
        """Digest of each worker's weights, as they have told; says what is other than before.

        Blocks on I/O.

        Raises:
            StoreError: one has not told, or the manifest cannot be saved.
        """
        with locked(self.state):
            manifest = self.stored()
            told = " ".join(manifest.model_digests).split()
            if manifest.run != self.run or len(told) < self.workers or _NOT_TOLD in told:
                raise StoreError(
                    f"store {manifest.store}: not every rank of this engine has told what weights "
                    "it holds; does another engine start on these directories, or do workers run "
                    "on another host? They need a store on nodes then"
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
        # The scheduler of a pipeline knows its first stage only; workers have told of all.
        self.geometries = manifest.geometries
        return [bytes.fromhex(digest) for digest in told]

    def suspend(self, reason: str) -> None:
        """Have the store opened as suspended until somebody resumes it; empty: resume it.

        Blocks on I/O.

        Raises:
            StoreError: it cannot be saved.
        """
        with locked(self.state):
            manifest = self.stored()
            manifest.suspended = reason
            self._save(manifest)
        self.copies.spread(manifest)

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
            self._save(manifest)
        self.copies.spread(manifest)

    def _save(self, manifest: Manifest) -> None:
        manifest.save(self.state)
        if self._keeper is not None:
            self._keeper.saved(manifest)

    def keep(self, manifest: Manifest, journal: Journal) -> Callable[[], bool]:
        """Keep the manifest, just saved: from now on only this process changes it.

        Args:
            manifest: As it was saved.
            journal: The open one: it knows the state directory again.

        Returns:
            Puts the manifest and its copies back if somebody deleted or changed them; False when
            the store was closed. It blocks on I/O, and raises StoreError or OSError.
        """
        there, counters = journal.directory_is_there, self.counters
        keeper = self._keeper = ManifestKeeper(self.state, manifest, there, counters)

        def look() -> bool:
            if journal.ending:
                return False
            self.copies.mend(keeper.look())
            return True

        return look

    def on_disk(self, manifest: Manifest) -> StoredStore:
        """The store for what reads it as it lies there."""
        paths = tuple(Path(device.path) for device in manifest.devices)
        return StoredStore(self.state, manifest, (), paths)

    def stored(self) -> Manifest:
        """The manifest as it is on disk now; who changes it holds the lock.

        Raises:
            StoreError: it was removed meanwhile, and cannot be put back.
        """
        if self._keeper is not None:
            return self._keeper.current()
        found = Manifest.load(self.state)
        if found is None:
            raise StoreError(f"{self.state}: store.json was removed while the store was opened")
        return found


def _key(options: EncryptionConfig) -> StoreKey:
    from vllm_ssdkv.store.integrity.key_source import read_key

    return read_key(options)


def _make_directory(path: Path, *, parents: bool) -> None:
    try:
        if parents:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            create_directory(path)
        except FileExistsError:  # it was there, or another rank was faster
            if not path.is_dir():
                raise
    except OSError as error:
        why = why_refused(path, error)
        raise StoreError(f"cannot make the directory {path}: {why}") from error


def open_rank(
    place: StorePlace,
    worker: int,
    counters: Counters,
    contexts: int | None = None,
    *,
    memory: Callable[[int], Arena] = Arena,
    remote: RemoteDevices | None = None,
    hbm_summaries: int = 0,
) -> OpenStore:
    """Open, lock and claim a worker's data files, then start the engine. Blocks on I/O.

    Args:
        place: The store.
        worker: Whose files. The first of several that share files locks and claims them, before
            the others open them to read.
        counters: What devices do is counted here.
        contexts: Slots from which running requests choose at most; None: all.
        memory: Makes the arena, of so many bytes.
        remote: Has the slots, where they are not in the data files.
        hbm_summaries: Bytes of the device that attends which are held for summaries.

    Raises:
        StoreLockedError: another engine uses the directory.
        FingerprintMismatchError: it holds KV of something else.
        KeyMismatchError: it is encrypted with another key.
        UnsupportedError: it is encrypted, and there is no libcrypto.
        DeviceError, FormatError, ConfigError: the text names what and the way out.
    """
    place.prepare()
    manifest = place.manifest()
    rank, reads_only = place.part(worker)
    geometry = place.geometries[rank]
    placement = placement_of(manifest, rank)
    choice = sparse_memory(place.config, manifest.numbers, contexts, hbm_summaries)
    plan = MemoryPlan.of(
        geometry,
        place.config.dram_bytes(place.workers),
        place.config.io.staging,
        most_bytes=place.config.most_dram_bytes(place.workers),
        scrub=(place.config.io.scrub_rate is not None and not reads_only)
        or (remote is not None and place.config.replicas > 1),
        choice=choice if geometry.summary_pages else None,
    )
    present = manifest.present()
    paths = [device.path for device in present]
    _count_missing(set(place.paths) - set(paths), counters)
    with ExitStack() as stack:
        opened = _open_devices(place, manifest, worker, counters, stack, remote)
        arena = memory(plan.nbytes)
        stack.callback(arena.close)
        codec = place.codec(rank, arena)
        engine = open_engine(
            place.config.io.engine_options(),
            [d.fd for d in opened],
            paths,
            arena,
            joined=geometry.summary_pages > 0,  # segments may be cut at heads
            base=None
            if remote is None
            else remote.open_engine(_volumes(opened, paths, placement), arena),
        )
        deadline = place.config.io.deadline
        stack.callback(engine.close, deadline)
        arena.populate()
        absent = range(len(present), len(manifest.devices))
        health = DeviceHealth(paths, deadline, counters, absent=absent)
        speed = ThroughputEstimator(paths, [device.weight for device in present])
        files = SlotIO(
            geometry,
            placement,
            engine,
            health,
            speed,
            counters,
            place.fingerprint.digest,
            rank,
            deadline,
            codec,
            Replicas(health, speed, manifest.numbers, [device.gap for device in present]),
        )
        if remote is not None:
            remote.watch(health)
        capacities = tuple(device.capacity for device in present)
        known = _identities(opened) if remote is None else {}
        whose = place.key_id, worker, reads_only
        found = OpenStore(files, opened, arena, plan, manifest.numbers, capacities, known, *whose)
        stack.pop_all()
    return found


def sparse_memory(
    config: SSDKVConfig, slots: int, contexts: int | None, hbm_summaries: int = 0
) -> SparseMemory:
    """Needs of requests that choose, in memory, from a store with so many slots; see
    :func:`open_rank` for ``contexts`` and ``hbm_summaries``."""
    sparse = config.sparse
    return SparseMemory(
        config.page_tokens,
        slots,
        sparse.page_cache,
        sparse.summaries,
        sparse.page_policy,
        sparse.channel_pages,
        contexts,
        sparse.budget,
        hbm_summaries,
    )


def _open_devices(
    place: StorePlace,
    manifest: Manifest,
    worker: int,
    counters: Counters,
    stack: ExitStack,
    remote: RemoteDevices | None,
) -> tuple[OpenDevice, ...]:
    """A worker's data files, locked and claimed, or open to read; ``stack`` closes those that were
    opened, should a later one fail. Those of remote devices end behind their superblocks."""
    rank, reads_only = place.part(worker)
    if reads_only:
        return _open_to_read(place, manifest, rank, stack)
    placement, present = placement_of(manifest, rank), manifest.present()
    opened: list[OpenDevice] = []
    for index, entry in enumerate(present):
        size = placement.device_bytes(index) if remote is None else SUPERBLOCK_BYTES
        device = open_device(
            entry.path,
            index=index,
            rank=rank,
            nbytes=round_up(size, PAGE_ALIGN),
            direct=place.config.io.direct,
            lock_timeout_s=LOCK_TIMEOUT_S,
        )
        stack.callback(device.close)
        opened.append(device)
        if remote is not None:
            remote.check(device)
        if place.config.trim:
            trim_new(device, entry.path)
        if _claim(place, device, index, rank):
            counters.add("device_lost", 1, device=entry.path)
            entry.missed(0, manifest.opened + 1)
        _cut_to_size(device)
    return tuple(opened)


def _open_to_read(
    place: StorePlace, manifest: Manifest, rank: int, stack: ExitStack
) -> tuple[OpenDevice, ...]:
    """Data files that another worker of the same engine has locked and claimed; ``stack`` closes
    them."""
    opened: list[OpenDevice] = []
    for entry in manifest.present():
        device = open_to_read(entry.path, rank, place.config.io.direct)
        stack.callback(device.close)
        block = read_superblock(device)
        if block is None or str(block.device) != entry.files[rank]:
            raise StoreError(f"{device.path} is not the data file that the first worker has opened")
        opened.append(device)
    return tuple(opened)


def _count_missing(paths: Collection[str], counters: Counters) -> None:
    """Count devices that the store is opened without."""
    for path in paths:
        counters.add("device_lost", 1, device=path)
        counters.set("device_state", 0, device=path)


def _identities(opened: Sequence[OpenDevice]) -> dict[int, Identity]:
    """UUIDs in the superblocks of data files, by device."""
    found = {}
    for number, device in enumerate(opened):
        block = read_superblock(device)
        if block is None:
            raise StoreError(f"{device.path} has lost its superblock while it was opened")
        found[number] = Identity(block.store, block.device)
    return found


def _volumes(
    opened: Sequence[OpenDevice], paths: Sequence[str], placement: Placement
) -> list[RemoteVolume]:
    """Bytes that remote devices have elsewhere."""
    found = []
    for index, identity in _identities(opened).items():
        nbytes = max(PAGE_ALIGN, placement.device_bytes(index) - SUPERBLOCK_BYTES)
        found.append(RemoteVolume(paths[index], identity.device, round_up(nbytes, PAGE_ALIGN)))
    return found


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
            geometry=place.geometries[rank],
            fingerprint=place.fingerprint,
            key_id=place.key_id or bytes(KEY_ID_BYTES),
            renamed=renamed,
            elsewhere=manifest.files_besides(index),
        )
        if not known:  # found again, should we be killed here: its superblock names the store
            entry.files[rank] = found
            manifest.save(place.state)
        return known not in ("", found)


def _find_journal(place: StorePlace, manifest: Manifest) -> None:
    """Make a journal that should be there and is not anew, from the headers of the slots.

    Blocks on I/O, for as long as it takes to read these.

    Raises:
        DeviceError: a device does not answer.
        StoreError: the journal cannot be written.
    """
    if not manifest.opened or place.config.recover == "none":
        return
    store = place.on_disk(manifest)
    lost = is_lost(store)
    if not lost or (place.config.recover == "strict" and store.journal.exists()):
        return
    set_aside(store.journal)
    if any(stub_of(Path(device.path)) for device in manifest.devices):
        logger.error(
            "ssdkv: %s: what was stored is computed again, since headers of slots on nodes are not "
            "read for it",
            lost,
        )
        return
    from vllm_ssdkv.store.maintenance.journal_rebuild import rebuild_journal

    place.counters.add("journal_rebuilds")
    begin = time.monotonic()
    try:
        found = rebuild_journal(store, whole=place.config.io.verify != "all")
    except (DeadlineError, DeviceError) as error:
        raise DeviceError(
            f"{lost}, and it cannot be made anew from the slots: {error}; or take a broken drive "
            'out of the option devices, or start empty with recover: "none"'
        ) from error
    logger.warning(
        "ssdkv: %s: made anew from the headers of slots in %.1f s, which name %d stored blocks",
        lost,
        time.monotonic() - begin,
        found,
    )


def _settle_index(manifest: Manifest, index: SlotIndex, counters: Counters) -> Placement:
    """Drop what was on data files that are new, and what the journal says of segments that are new;
    mask what lies on devices that are away; bring the manifest up to date with that. Where the
    slots are."""
    slots = np.arange(manifest.numbers, dtype=np.int64)
    manifest.segments = [
        replace(segment, since=index.opening << EPOCH_COUNTER_BITS)
        if segment.first in manifest.fresh
        else segment
        for segment in manifest.segments
    ]
    placement = placement_of(manifest)
    absent = np.array([not entry.present for entry in manifest.devices], dtype=np.bool_)
    for entry in manifest.devices:
        if not entry.present:
            entry.missed(index.opening, index.opening + 1)
    fresh = np.array([bool(entry.fresh) for entry in manifest.devices], dtype=np.bool_)
    away = placement.lost(absent, slots)
    # Blocks that need a new file and an absent one may be whole when that is back, in one copy of
    # two; who would look for it here?
    gone = placement.lost(fresh, slots) | (placement.lost(absent | fresh, slots) & ~away)
    before = index.counters["dropped"]
    index.drop(slots[gone])
    counters.add("slots_dropped", index.counters["dropped"] - before, cause="replaced")
    for entry in manifest.present():
        entry.fresh = []
    for segment in placement.segments:
        if segment.first in manifest.fresh:
            index.drop(segment.all_slots())
    manifest.fresh = []
    index.quarantine(~placement.holds(slots))
    index.mask(slots[away])
    return placement


def _growth(
    place: StorePlace,
    manifest: Manifest,
    index: SlotIndex,
    rebalancer: Rebalancer,
    counters: Counters,
) -> StoreGrowth:
    """Growth of a store that is smaller than it may be."""
    whole = division_of(manifest, place.state, replicas=place.config.replicas)
    devices = [Path(device.path) for device in manifest.devices]
    ranks, geometries = range(manifest.tp_size), manifest.geometries
    spaces = [
        DataFileSpace([data_file_path(path, rank) for rank in ranks], manifest.store)
        for path in devices
    ]

    def following(segments: Sequence[Segment]) -> Segment | None:
        found = growing_by(manifest, whole, segments)
        fits = found is not None and found.first + found.numbers <= manifest.numbers
        return found if fits else None

    def reserve(segment: Segment) -> None:
        for extent in segment.extents:
            needed = [SUPERBLOCK_BYTES + extent.end * one.unit_bytes for one in geometries]
            spaces[extent.device].reserve([round_up(nbytes, PAGE_ALIGN) for nbytes in needed])

    return StoreGrowth(rebalancer, following, reserve, whole.slots, index.free_now, counters)


def _open_index(
    place: StorePlace, manifest: Manifest, counters: Counters, stack: ExitStack
) -> tuple[SlotIndex, Rebalancer]:
    """See :func:`open_index`; ``stack`` closes what was opened, should the rest fail."""
    journal = Journal(
        place.state / JOURNAL,
        store=UUID(manifest.store),
        fingerprint=place.fingerprint.digest,
        num_slots=manifest.numbers,
        recover=place.config.recover,
        progress=ProgressLog("ssdkv: recovering the index"),
        lock_timeout_s=LOCK_TIMEOUT_S,
    )
    stack.callback(journal.close)
    index = SlotIndex(manifest.numbers, journal, open_number=manifest.opened + 1)
    with locked(place.state):
        manifest = place.stored()
        placement = _settle_index(manifest, index, counters)
        manifest.model = place.model
        manifest.opened = index.opening
        manifest.last_opened = int(time.time())
        index.flush()  # a power loss must not bring back what the manifest calls gone
        manifest.save(place.state)
        look = place.keep(manifest, journal)
    place.copies.spread(manifest)

    def save(segments: Sequence[Segment]) -> None:
        index.flush(LOCK_TIMEOUT_S / 2)  # likewise, of what these segments held
        place.save_segments(segments, rebalancer.weights)

    saver = BackgroundSaver(save, look, counters)
    stack.callback(saver.close, LOCK_TIMEOUT_S / 2)
    replicas = place.config.replicas
    kind = FixedRebalancer if place.config.share_contexts else Rebalancer
    rebalancer = kind(index, placement, manifest.weights(), saver, counters, replicas)
    rebalancer.step_and_wait(LOCK_TIMEOUT_S)
    if manifest.grows:
        rebalancer.growth = _growth(place, manifest, index, rebalancer, counters)
    return index, rebalancer


def open_index(place: StorePlace, counters: Counters | None = None) -> tuple[SlotIndex, Rebalancer]:
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
    begin = time.monotonic()
    _find_journal(place, manifest)
    with ExitStack() as stack:
        index, rebalancer = _open_index(place, manifest, counters or Counters(), stack)
        stack.pop_all()
    counts = index.counters
    logger.info(
        "ssdkv: %d stored blocks recovered in %.1f s, %d of them out of reach, %d dropped, %d "
        "damaged journal records",
        counts["recovered"] - counts["dropped"],
        time.monotonic() - begin,
        index.gauges()["masked"],
        counts["dropped"] + counts["out_of_range"],
        counts["journal_corrupt_records"],
    )
    return index, rebalancer
