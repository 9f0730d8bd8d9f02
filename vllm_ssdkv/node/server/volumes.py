"""Volumes: the bytes of slots of engines that keep their index themselves (mode ``page``).

A volume belongs to one rank of one engine, and is one file on one drive of the node. It lies in
``volumes/UUID/`` below the directory of the drive, and has its space from the start. What is in it
the engine knows: the node moves bytes, and attends to them where it is told to.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final
from uuid import UUID, uuid4

import msgspec

from vllm_ssdkv.base.durable_file import create_temporary, sync_directory, write_all
from vllm_ssdkv.base.errors import ConfigError, DeviceError, StoreError, StoreLockedError
from vllm_ssdkv.base.file_lock import unlock_file
from vllm_ssdkv.base.host import default_capacity
from vllm_ssdkv.base.sizes import format_size
from vllm_ssdkv.config.engine import MIN_CAPACITY, DeviceConfig
from vllm_ssdkv.config.node import NodeConfig
from vllm_ssdkv.node.protocol.messages import Drive, VolumeStatus, shared_volume
from vllm_ssdkv.node.server.drive_room import DIRECTORY, DriveRoom, data_bytes, directories
from vllm_ssdkv.store.devices.data_device import OpenDevice, make_directory, open_device
from vllm_ssdkv.store.format.slot_geometry import PAGE_ALIGN, round_up
from vllm_ssdkv.store.format.superblock import data_file_path
from vllm_ssdkv.store.io.engines.open import open_engine
from vllm_ssdkv.store.io.engines.protocol import IoEngine
from vllm_ssdkv.store.memory.arena import Arena

logger = logging.getLogger(__name__)

_DRIVE: Final = "drive.uuid"
_ABOUT: Final = "volume.json"

_LOCK_S: Final = 2.0
"""Wait for a volume whose last session is about to end, in seconds; the engine asks again."""


class _About(msgspec.Struct, frozen=True):
    """Content of :data:`_ABOUT`, for people."""

    model: str


@dataclass(frozen=True, slots=True, eq=False)
class VolumeSet:
    """Volumes of one rank of one engine, open and locked: one on each drive of the node.

    Attributes:
        devices: The file on each drive; None where a drive has no volume of this set, or where I/O
            of a session before has not ended.
        sizes: Bytes of each; 0 where a drive has no volume of this set.
        paths: Paths of the drives, for messages.
        config: Options of the node.
        deadline_s: Of I/O: the engine still waits for a while when it is over.
        closed: Called at the end with the drives whose I/O has not ended.
        shared: Whether other sets have the same files: their lock stays until the last one ends.

    Example:
        volumes = shelf.open([name], [1 << 30], "Qwen/Qwen3-8B", deadline_s=10.0)
        engine = volumes.open_engine(Arena(1 << 26))
    """

    devices: tuple[OpenDevice | None, ...]
    sizes: tuple[int, ...]
    paths: tuple[str, ...]
    config: NodeConfig
    deadline_s: float
    closed: Callable[[Collection[int]], None]
    shared: bool = False
    _hanging: set[int] = field(default_factory=set)

    @property
    def fds(self) -> list[int]:
        """Descriptor of each drive's volume; -1 where there is none."""
        return [-1 if device is None else device.fd for device in self.devices]

    def nbytes(self, drive: int) -> int:
        """Bytes of a drive's volume; 0 where there is none."""
        return self.sizes[drive]

    def is_dead(self, drive: int) -> bool:
        """Check whether a drive has a volume of this set that is not to be had."""
        return self.devices[drive] is None and self.sizes[drive] > 0

    def hang(self, drives: Collection[int]) -> None:
        """I/O of these drives does not end: their locks stay. Any thread, before :meth:`close`."""
        self._hanging.update(drives)

    def open_engine(self, arena: Arena) -> IoEngine:
        """An I/O engine over all drives, as the node's options have it; drives without a volume
        fail their requests. It must be closed before the set is.

        Raises:
            EngineUnavailableError: see :func:`~vllm_ssdkv.store.io.engines.open.open_engine`.
        """
        null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fds = [null if fd < 0 else fd for fd in self.fds]
            return open_engine(self.config.io.engine_options(), fds, self.paths, arena)
        finally:
            os.close(null)

    def close(self) -> None:
        """Close the files, and give back their locks, but for those of drives that hang. Engines
        over the others must have ended, or have no I/O of theirs."""
        for drive, device in enumerate(self.devices):
            if device is not None and drive not in self._hanging:
                with contextlib.suppress(OSError):
                    os.utime(device.path)
                if not self.shared:
                    unlock_file(device.fd)  # an engine that does not end has a duplicate
        self.closed(self._hanging)
        for device in self.devices:
            if device is not None:
                device.close()


@dataclass(slots=True, eq=False)
class _SharedFile:
    """File of a volume that several sets have duplicates of."""

    device: OpenDevice
    users: int = 0
    hangs: bool = False


class VolumeShelf:
    """All volumes of a node. Any thread may call; all methods block on I/O.

    Example:
        shelf = VolumeShelf(config, DriveRoom(config, registry.names, counters))
        shelf.drives("Qwen/Qwen3-8B")
    """

    def __init__(self, config: NodeConfig, room: DriveRoom):
        """``config``: options of the node; ``room``: of its drives."""
        self._config, self._room = config, room
        self.before_removal: Callable[[UUID], None] = lambda _: None
        """Hook that runs before a volume is removed; raises StoreLockedError if it must stay."""
        self._lock = room.lock
        self._sharing = threading.Lock()
        """Held before the other lock, while a volume that sets share is opened or closed."""
        self._hanging: set[UUID] = set()
        """Volumes that were closed while their I/O had not ended; it holds their locks."""
        self._shared: dict[UUID, _SharedFile] = {}
        """Volumes that sets share now."""

    def check(self) -> None:
        """Check that this node takes volumes.

        Raises:
            ConfigError: it does not; the text says why.
        """
        if self._config.encryption is not None:
            raise ConfigError(
                "the node has the option encryption, which is for stores that it keeps itself; "
                "engines in mode page encrypt on their side, or use a node without it"
            )

    def drives(self, model: str) -> list[Drive]:
        """The drives, with the room that an engine of this model may take.

        Raises:
            ConfigError: a drive has less room than a store needs, or the node takes no volumes.
            StoreError: a drive cannot be used.
        """
        self.check()
        share = self._config.share_of(model)
        found = []
        for number, device in enumerate(self._config.devices):
            room = int(share * self._whole(device))
            if room < MIN_CAPACITY:
                raise ConfigError(
                    f"drive {device.path}: a share of {share:g} is {format_size(room)}, less than "
                    f"{format_size(MIN_CAPACITY)}: give the drive more capacity, or the model a "
                    "larger share (store_share, shares)"
                )
            found.append(Drive(self._name(number).bytes, _printable(device.path), room))
        return found

    def _whole(self, device: DeviceConfig) -> int:
        try:
            return device.capacity or default_capacity(Path(device.path))
        except OSError as error:
            raise StoreError(f"drive {device.path}: {error.strerror}") from error

    def _directory(self, number: int) -> Path:
        """Directory of the volumes on a drive, made if need be."""
        device = Path(self._config.devices[number].path)
        make_directory(device, f"drive {number} ({device})")
        make_directory(device / DIRECTORY, f"drive {number} ({device})")
        return device / DIRECTORY

    def _name(self, number: int) -> UUID:
        """Name of a drive, which it gets the first time that somebody asks."""
        with self._lock:
            path = self._directory(number) / _DRIVE
            try:
                return UUID(path.read_text(encoding="ascii").strip())
            except FileNotFoundError:
                name = uuid4()
                write_small(path, str(name).encode())
                return name
            except (OSError, ValueError) as error:
                raise StoreError(
                    f"{path}: the name of the drive cannot be read ({error}); remove the file, "
                    "and engines take the drive for a new one"
                ) from error

    def open(
        self,
        names: Sequence[bytes | None],
        nbytes: Sequence[int],
        model: str,
        deadline_s: float,
        *,
        shared: bool = False,
    ) -> VolumeSet:
        """Open the volumes of a rank, and make those that are not there.

        A volume that I/O of a session before still has is left out: its drive hangs, the others
        are to be had.

        Args:
            names: UUID of the volume on each drive; None: there is none.
            nbytes: Size of each.
            model: Name of the engine's model.
            deadline_s: Of the engine's requests.
            shared: Whether other sets may have them, too.

        Raises:
            ConfigError: the node takes no volumes, or a drive has not the room.
            StoreLockedError: another session has one.
            DeviceError: a drive cannot be used.
        """
        self.check()
        drives = self._config.devices
        if not len(names) == len(nbytes) == len(drives):
            raise ConfigError(f"the node has {len(drives)} drives, not {len(names)}")
        opened: list[OpenDevice | None] = []
        with ExitStack() as stack:
            for number, (name, size) in enumerate(zip(names, nbytes, strict=True)):
                device = None
                if name is not None:
                    of_one = self._open_shared if shared else self._open_unless_hanging
                    device = of_one(number, UUID(bytes=name), size, model)
                if device is not None:
                    stack.callback(device.close)
                    if shared and name is not None:
                        stack.callback(self._leave_shared, UUID(bytes=name), hangs=False)
                opened.append(device)
            held = [
                None if device is None else name for name, device in zip(names, opened, strict=True)
            ]
            found = VolumeSet(
                tuple(opened),
                tuple(
                    0 if name is None else round_up(size, PAGE_ALIGN)
                    for name, size in zip(names, nbytes, strict=True)
                ),
                tuple(device.path for device in drives),
                self._config,
                # The engine hears of a drive that hangs before it gives up the session.
                min(self._config.io.deadline, deadline_s / 2),
                functools.partial(self._closed, held, shared),
                shared,
            )
            stack.pop_all()
        return found

    def _open_shared(self, number: int, name: UUID, nbytes: int, model: str) -> OpenDevice | None:
        """A duplicate of a volume that sets share, with one more user; None: see above."""
        with self._sharing:
            file = self._shared.get(name)
            if file is None:
                device = self._open_unless_hanging(number, name, nbytes, model)
                if device is None:
                    return None
                file = self._shared[name] = _SharedFile(device)
            duplicate = dataclasses.replace(file.device, fd=os.dup(file.device.fd))
            file.users += 1
        return duplicate

    def _leave_shared(self, name: UUID, *, hangs: bool) -> None:
        """A set has no more use of a volume; its I/O may hang."""
        with self._sharing:
            file = self._shared[name]
            file.users -= 1
            file.hangs |= hangs
            if file.users:
                return
            del self._shared[name]
            if file.hangs:
                with self._lock:
                    self._hanging.add(name)
            else:
                unlock_file(file.device.fd)
            file.device.close()

    def shared_directory(self, fingerprint: bytes) -> Path:
        """Directory of the first volume that engines of one fingerprint share.

        Raises:
            ConfigError: there is none, so that no worker of them has opened it.
            StoreError: the drive cannot be used.
        """
        name = shared_volume(self._name(0).bytes, fingerprint, 0)
        directory = self._directory(0) / str(name)
        if not directory.is_dir():
            raise ConfigError(f"there is no volume {name}: workers open theirs first")
        return directory

    def shared_bytes(self, fingerprint: bytes) -> int:
        """Bytes of the volumes that engines of one fingerprint share, those of one rank.

        Raises:
            StoreError: a drive cannot be used.
        """
        return sum(
            data_bytes(
                self._directory(drive) / str(shared_volume(self._name(drive).bytes, fingerprint, 0))
            )
            for drive in range(len(self._config.devices))
        )

    def _closed(
        self, names: Sequence[bytes | None], shared: bool, hanging: Collection[int]
    ) -> None:
        """A set of these volumes is closed, and the I/O of some drives goes on."""
        if shared:
            for drive, name in enumerate(names):
                if name is not None:
                    self._leave_shared(UUID(bytes=name), hangs=drive in hanging)
            return
        with self._lock:
            for drive in hanging:
                if (name := names[drive]) is not None:
                    self._hanging.add(UUID(bytes=name))

    def _open_unless_hanging(
        self, number: int, name: UUID, nbytes: int, model: str
    ) -> OpenDevice | None:
        """Open a volume; None: I/O that does not end holds its lock."""
        try:
            device = self._open_one(number, name, nbytes, model)
        except StoreLockedError:
            with self._lock:
                if name not in self._hanging:
                    raise
            logger.error(  # noqa: TRY400 - a drive that hangs, no defect
                "ssdkv node: drive %s has not ended what a session before asked for: it fails in "
                "this session, too",
                self._config.devices[number].path,
            )
            return None
        with self._lock:
            self._hanging.discard(name)
        return device

    def _open_one(self, number: int, name: UUID, nbytes: int, model: str) -> OpenDevice:
        directory = self._directory(number) / str(name)
        size = round_up(nbytes, PAGE_ALIGN)
        with self._lock:  # so that two who ask at once do not both take the last room
            new = not data_file_path(directory, 0).exists()
            self._room.check_volume(number, directory, size)
            make_directory(directory, f"volume {name}")
            try:
                device = open_device(
                    directory,
                    index=number,
                    rank=0,
                    nbytes=size,
                    direct=self._config.io.direct,
                    lock_timeout_s=0.0 if new else _LOCK_S,
                )
                if new:
                    try:
                        write_small(directory / _ABOUT, msgspec.json.encode(_About(model)))
                    except BaseException:
                        device.close()
                        raise
            except BaseException:
                if new:
                    shutil.rmtree(directory, ignore_errors=True)
                raise
        if new:
            logger.info("ssdkv node: volume %s of %s, %s, is made", name, model, format_size(size))
        return device

    def _directories(self, number: int) -> list[Path]:
        return directories(self._directory(number))

    def volumes(
        self, names: Sequence[bytes] = (), in_use: Sequence[bytes] = ()
    ) -> list[VolumeStatus]:
        """Volumes that there are; ``names``: only those, where there are any; ``in_use``: that
        sessions have open.

        Raises:
            StoreError: a drive cannot be read.
        """
        wanted = {UUID(bytes=name) for name in names}
        found = []
        try:
            for number, device in enumerate(self._config.devices):
                for path in self._directories(number):
                    name = _as_uuid(path.name)
                    there = name is not None and data_file_path(path, 0).exists()
                    if name is None or not there or (wanted and name not in wanted):
                        continue
                    found.append(_status(path, name, device.path, name.bytes in in_use))
        except OSError as error:
            raise StoreError(f"volumes cannot be listed: {error}") from error
        return found

    def remove(self, name: bytes) -> None:
        """Remove a volume.

        Raises:
            StoreError: there is none of this name, or it cannot be removed.
            StoreLockedError: a session has it open, or uses the index in it.
        """
        text = str(UUID(bytes=name))
        self.before_removal(UUID(bytes=name))
        for number in range(len(self._config.devices)):
            directory = self._directory(number) / text
            if not directory.exists():
                continue
            with self._lock:
                device = open_device(
                    directory,
                    index=number,
                    rank=0,
                    nbytes=PAGE_ALIGN,
                    direct="off",
                    lock_timeout_s=0.0,
                )
                try:
                    shutil.rmtree(directory)
                except OSError as error:
                    raise StoreError(f"{directory} cannot be removed: {error}") from error
                finally:
                    device.close()
            logger.info("ssdkv node: volume %s is removed", text)
            return
        raise StoreError(f"there is no volume {text}")


def _status(path: Path, name: UUID, drive: str, is_open: bool) -> VolumeStatus:
    about = _About("")
    with contextlib.suppress(OSError, msgspec.DecodeError):
        about = msgspec.json.decode((path / _ABOUT).read_bytes(), type=_About)
    idle_s = 0.0
    with contextlib.suppress(OSError):
        idle_s = max(0.0, time.time() - data_file_path(path, 0).stat().st_mtime)
    return VolumeStatus(
        name.bytes,
        _printable(drive),
        about.model,
        data_bytes(path),
        is_open,
        0.0 if is_open else idle_s,
    )


def write_small(path: Path, data: bytes) -> None:
    """Make a small file, whole. Blocks on I/O.

    Raises:
        DeviceError: it cannot be written.
    """
    try:
        fd, temporary = create_temporary(path)
        try:
            write_all(fd, data, 0)
            os.fsync(fd)
        finally:
            os.close(fd)
        os.rename(temporary, path)
        sync_directory(path.parent)
    except OSError as error:
        raise DeviceError(f"{path} cannot be written: {error.strerror}") from error


def _as_uuid(text: str) -> UUID | None:
    try:
        return UUID(text)
    except ValueError:
        return None


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else "?" for c in text)
