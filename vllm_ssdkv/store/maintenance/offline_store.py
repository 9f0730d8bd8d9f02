"""A store as it lies on disk, for commands that have neither its options nor its model."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from uuid import UUID

from vllm_ssdkv._index import Replay
from vllm_ssdkv.base.durable_file import sync_directory
from vllm_ssdkv.base.errors import DeviceError, FormatError, StoreError
from vllm_ssdkv.base.file_lock import lock_file
from vllm_ssdkv.store.devices.direct_io import turn_on_direct
from vllm_ssdkv.store.devices.discovery import look, matched
from vllm_ssdkv.store.devices.manifest_copies import holds_data
from vllm_ssdkv.store.devices.owner import open_regular
from vllm_ssdkv.store.devices.remote_devices import stub_of
from vllm_ssdkv.store.format.fingerprint import Fingerprint
from vllm_ssdkv.store.format.journal_record import (
    HEADER_BYTES,
    JOURNAL,
    check_header,
    is_whole,
    refuse_another_version,
)
from vllm_ssdkv.store.format.manifest import COPY, Manifest
from vllm_ssdkv.store.format.slot_geometry import PAGE_ALIGN, round_up
from vllm_ssdkv.store.format.superblock import KEY_ID_BYTES, Superblock
from vllm_ssdkv.store.location import (
    COPIES_SINCE,
    any_manifest,
    belongs,
    choose_state,
    locate,
    no_store,
    state_elsewhere,
)
from vllm_ssdkv.store.placement.placement import Placement, placement_of


@dataclass(frozen=True, slots=True)
class StoredStore:
    """Content of the manifest, and the places of the parts.

    Attributes:
        state: The state directory.
        manifest: The manifest, or its copy.
        damage: What is wrong with ``store.json`` and its copies, an entry each.
        paths: Directory or raw block device of each device, in stripe order.
        journal_void: Whether the journal is older than the manifest.
        restored: Why the manifest is not the ``store.json`` of the state directory; empty when it
            is.
        foreign: Devices that nobody named, found where the manifest saw them last, which may be
            those of another copy of the store: the state directory is not where it was.
    """

    state: Path
    manifest: Manifest
    damage: tuple[str, ...]
    paths: tuple[Path, ...]
    journal_void: bool = False
    restored: str = ""
    foreign: tuple[Path, ...] = ()

    @property
    def placement(self) -> Placement:
        """Placement of the slots in the data files of rank 0: the devices of a slot are those of
        any rank.

        Raises:
            FormatError: the manifest contradicts itself.
        """
        return placement_of(self.manifest)

    @property
    def fingerprint(self) -> Fingerprint:
        """Fingerprint of the KV."""
        return Fingerprint(self.manifest.fingerprint)

    @property
    def journal(self) -> Path:
        """The journal's path; it may be missing."""
        return self.state / JOURNAL

    def data_path(self, device: int, rank: int) -> Path:
        """The data file of a rank, or the block device; it may be missing."""
        path = self.paths[device]
        return path if is_raw(path) else path / f"rank{rank}.data"

    def absent(self, device: int) -> bool:
        """Check whether the device is missing: not mounted, or another one is in its place."""
        path = self.paths[device]
        if not self.manifest.devices[device].present and self.paths.count(path) > 1:
            return True
        return not path.exists()

    def refuse_foreign(self, *, write: bool) -> None:
        """Raise StoreError where devices that nobody named may be those of another copy of the
        store. Before version 5 of the manifest nobody can tell: then only who writes is refused."""
        if self.foreign and (write or self.manifest.version >= COPIES_SINCE):
            paths = " ".join(map(str, self.foreign))
            was = self.manifest.state or "another place"
            raise StoreError(
                f"{self.state} is not known to be the state directory of the store on {paths}, "
                f"which was {was}: it may be a copy. If it is not, name the devices, too: {paths}"
            )

    def refuse_remote(self) -> None:
        """Raise StoreError where slots lie on nodes: only the engine reaches them."""
        for path in self.paths:
            about = stub_of(path)
            if about is not None:
                whom = "engines" if about.shared else "the engine"
                raise StoreError(
                    f"{path}: its slots lie on the node {about.node} ({about.drive}), which gives "
                    f"them to {whom} alone. The engine verifies what it reads; with the option "
                    "io.scrub_rate it reads all of it"
                )

    def data_bytes(self, device: int, rank: int) -> int:
        """Size that a data file has: what its slots need."""
        return round_up(placement_of(self.manifest, rank).device_bytes(device), PAGE_ALIGN)

    def superblock(self, device: int, rank: int, identity: UUID, epoch: int) -> Superblock:
        """The superblock that this file has."""
        geometry = self.manifest.geometries[rank]
        return Superblock(
            store=UUID(self.manifest.store),
            device=identity,
            rank=rank,
            unit_bytes=geometry.unit_bytes,
            epoch=epoch,
            geometry=geometry,
            fingerprint=self.fingerprint,
            key_id=bytes.fromhex(self.manifest.key_id) or bytes(KEY_ID_BYTES),
        )


def is_raw(path: Path) -> bool:
    """Check whether this is a block device, which holds rank 0 by itself."""
    return path.is_block_device()


def find_store(directories: Sequence[Path], state_dir: Path | None = None) -> StoredStore:
    """The store on these devices. Reads its manifest. Blocks on I/O.

    Args:
        directories: Its devices, in any order while their data files say who they are; or only the
            state directory, when the devices are where they were last; may be empty with
            ``state_dir``.
        state_dir: The state directory; default: see :func:`choose_state`.

    Raises:
        StoreError: there is none, or not so many devices belong to it.
        FormatError: the manifest and all its copies are damaged or of another version.
    """
    state = state_dir or choose_state(directories)
    if state is None or not state.is_dir():
        raise no_store([state_dir] if state_dir else directories)
    elsewhere = None if state_dir else state_elsewhere(state)
    if elsewhere is not None:
        raise StoreError(
            f"{state} is a device of the store whose state directory is {elsewhere}: name that, "
            f"or all devices and --state-dir {elsewhere}"
        )
    known = any_manifest(state)
    was = [] if known is None else [Path(device.path) for device in known.devices]
    others = [d for d in directories if not _same(d, state)]
    location = locate(state, others or was)
    manifest = location.manifest
    if manifest is None:
        raise no_store([state_dir] if state_dir else directories)
    devices = [d for d in directories if not _same(d, state) or _is_device(manifest, d)]
    damage = [location.problem] if location.problem else []
    damage += [f"{place / COPY} is missing or damaged" for place in location.without_copy]
    foreign: tuple[Path, ...] = ()
    if len(devices) not in (len(manifest.devices), len(manifest.present())):
        if others:
            raise StoreError(
                f"the store in {state} has {len(manifest.devices)} device(s) "
                f"({', '.join(d.path for d in manifest.devices)}), {len(devices)} are named: name "
                "all of them, or only the state directory"
            )
        # Where they were last; but paths may have changed places.
        named = {d.resolve() for d in (*directories, state)}
        devices = [Path(device.path) for device in manifest.present()]
        foreign = tuple(
            d
            for d in devices
            if d.resolve() not in named
            and holds_data(d, manifest)
            and not belongs(d, state, manifest)
        )
    paths = _placed(manifest, devices)
    return StoredStore(
        state,
        manifest,
        tuple(damage),
        paths,
        location.journal_void,
        location.problem,
        foreign,
    )


def _same(one: Path, other: Path) -> bool:
    return one == other or one.resolve() == other.resolve()


def _is_device(manifest: Manifest, directory: Path) -> bool:
    """Check whether the state directory is one of the devices, too."""
    if str(directory) in (device.path for device in manifest.devices):
        return True
    return bool(look(str(directory), manifest.tp_size, manifest.store).names)


def _placed(manifest: Manifest, directories: Sequence[Path]) -> tuple[Path, ...]:
    """Paths of the devices: by the names in data files, else by path, else in this order."""
    sights = [look(str(d), manifest.tp_size, manifest.store) for d in directories]
    numbers = matched(manifest.devices, sights)
    unseen = [i for i in range(len(manifest.devices)) if i not in numbers]
    paths = [Path(device.path) for device in manifest.devices]
    for directory, number in zip(directories, numbers, strict=True):
        paths[unseen.pop(0) if number is None else number] = directory
    return tuple(paths)


@dataclass(slots=True)
class DataFile:
    """An open data file or block device, locked unless it was only looked at."""

    device: int
    rank: int
    path: Path
    fd: int
    nbytes: int
    raw: bool

    def close(self) -> None:
        """Close it, which drops the lock; idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def open_data_file(
    store: StoredStore, device: int, rank: int, *, write: bool = False, lock: bool = True
) -> DataFile | None:
    """Open one of a store's data files, with O_DIRECT where that works; None when it is missing.

    Args:
        write: For writing, too.
        lock: Take the lock that a running engine holds.

    Raises:
        StoreLockedError: an engine, or another command, uses the store.
        DeviceError: it cannot be opened, or the device is absent (:meth:`StoredStore.absent`).
    """
    path = store.data_path(device, rank)
    what = f"device {device} ({store.paths[device]})"
    flags = (os.O_RDWR if write else os.O_RDONLY) | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW
    raw = is_raw(store.paths[device])
    if raw:
        flags |= os.O_EXCL if lock else 0  # not while it is mounted
        flags &= ~os.O_NOFOLLOW
    try:
        fd = os.open(path, flags)
    except FileNotFoundError as error:
        if store.absent(device):
            raise DeviceError(
                f"{what} does not exist: mount it, or name the directories where the store is now"
            ) from error
        return None
    except OSError as error:
        raise DeviceError(f"{what}: cannot open {path}: {error.strerror}") from error
    try:
        _check_type(fd, path, what, raw=raw)
        if lock:
            lock_file(fd, path, what)
            turn_on_direct(fd, what, "auto")
        return DataFile(device, rank, path, fd, os.lseek(fd, 0, os.SEEK_END), raw)
    except BaseException:
        os.close(fd)
        raise


def _check_type(fd: int, path: Path, what: str, *, raw: bool) -> None:
    if not raw and not stat.S_ISREG(os.fstat(fd).st_mode):
        raise DeviceError(f"{what}: {path} is not a regular file")


@dataclass(frozen=True, slots=True)
class StoredJournal:
    """Content of the journal.

    Attributes:
        replay: Which slot holds what.
        damage: What is wrong with the file header, or that the file is missing; empty when fine.
        nbytes: Size of the file.
    """

    replay: Replay
    damage: str
    nbytes: int


def open_journal(store: StoredStore, *, lock: bool = True) -> int | None:
    """Descriptor of the journal, locked; None when it is missing. The caller closes it.

    Raises:
        StoreLockedError: an engine, or another command, uses the store.
        StoreError: it cannot be opened.
    """
    try:
        fd = open_regular(store.journal)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StoreError(f"journal {store.journal}: {error.strerror}") from error
    try:
        if lock:
            lock_file(fd, store.journal, "journal")
    except BaseException:
        os.close(fd)
        raise
    return fd


def read_journal(store: StoredStore, fd: int | None) -> StoredJournal:
    """Read the journal. With a damaged header its records count all the same: each is checked
    against the header of its slot before anybody believes it.

    Raises:
        FormatError: it is of another version.
        StoreError: it cannot be read, or is whole, but not this store's.
    """
    replay = Replay(store.manifest.numbers)
    head, nbytes = b"", 0
    try:
        if fd is not None:
            head = os.pread(fd, HEADER_BYTES, 0)
            nbytes = len(head)
            while piece := os.pread(fd, 1 << 24, nbytes):
                replay.feed(piece)
                nbytes += len(piece)
    except OSError as error:
        raise StoreError(f"journal {store.journal}: {error.strerror}") from error
    if not nbytes:  # of a store that no scheduler has opened yet, or lost
        lost = f"{store.journal} is {'missing' if fd is None else 'empty'}"
        return StoredJournal(replay, lost if store.manifest.opened else "", 0)
    refuse_another_version(head, store.journal)
    damage = ""
    try:
        check_header(head, UUID(store.manifest.store), store.fingerprint.digest)
    except FormatError as error:
        if is_whole(head):
            raise StoreError(
                f"{store.journal} is not the journal of this store ({error}): the engine sets it "
                "aside and starts empty; move it away to check the rest"
            ) from error
        damage = f"{store.journal}: {error}"
    return StoredJournal(replay, damage, nbytes)


def is_lost(store: StoredStore) -> str:
    """Reason for the journal of a store to say nothing; empty when it is a journal of this store.

    Blocks on I/O.

    Raises:
        FormatError: it is of another version.
        StoreError: it cannot be read.
    """
    try:
        with os.fdopen(open_regular(store.journal), "rb") as file:
            head = file.read(HEADER_BYTES)
    except FileNotFoundError:
        return f"{store.journal} is missing"
    except OSError as error:
        raise StoreError(f"journal {store.journal}: {error.strerror}") from error
    if not head:
        return f"{store.journal} is empty"
    refuse_another_version(head, store.journal)
    try:
        check_header(head, UUID(store.manifest.store), store.fingerprint.digest)
    except FormatError as error:
        return f"{store.journal} is not the journal of this store ({error})"
    return ""


def set_aside(journal: Path) -> None:
    """Rename a journal to ``NAME.rejected``, if there is one; one is kept. Blocks on I/O.

    Raises:
        StoreError: it cannot be renamed.
    """
    try:
        with contextlib.suppress(FileNotFoundError):
            os.rename(journal, journal.with_name(journal.name + ".rejected"))
            sync_directory(journal.parent)
    except OSError as error:
        raise StoreError(f"journal {journal}: {error.strerror}") from error
