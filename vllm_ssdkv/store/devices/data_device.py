"""Open one SSD: find its file or block device, lock it, give it space, turn on direct I/O."""

from __future__ import annotations

import errno
import logging
import os
import stat
import time
from dataclasses import dataclass
from pathlib import Path

from vllm_ssdkv.base.errors import DeviceError
from vllm_ssdkv.base.file_access import create_directory, create_file, file_mode, why_refused
from vllm_ssdkv.base.file_lock import lock_file
from vllm_ssdkv.store.devices.direct_io import DirectMode, turn_on_direct
from vllm_ssdkv.store.devices.preallocate import free_bytes, reserve_space
from vllm_ssdkv.store.format.superblock import data_file_path

logger = logging.getLogger(__name__)

_ALIGN = 4096

_BLOCK = 512
"""Bytes that ``st_blocks`` counts in (stat(2))."""


@dataclass(frozen=True, slots=True)
class DeviceState:
    """Facts that may change while a device is open.

    Attributes:
        lost: Whether the file was deleted under us: what we write now is gone at the next start.
        stored_bytes: What the file takes on its file system; 0 for a block device.
    """

    lost: bool
    stored_bytes: int


@dataclass(slots=True)
class OpenDevice:
    """A locked, sized data file or block device. Not thread-safe, except for reading fields.

    The lock belongs to the open file: duplicates of ``fd`` share it, and it ends when the last of
    them is closed and the I/O of a killed process has ended.
    """

    path: Path
    """The data file or block device itself."""
    fd: int
    """Descriptor, or -1 after :meth:`close`."""
    nbytes: int
    """Usable bytes, as asked for."""
    direct: bool
    """True if O_DIRECT is in force."""
    preallocated: bool
    """True if every byte has its place, so that no write can meet a full disk."""
    created: bool
    """True if this call made the file."""

    def state(self) -> DeviceState:
        """Facts that the system tells of it now."""
        found = os.fstat(self.fd)
        return DeviceState(found.st_nlink == 0, found.st_blocks * _BLOCK)

    def free_bytes(self) -> int:
        """Bytes that an unprivileged user may still allocate on the same file system."""
        return free_bytes(self.fd)

    def close(self) -> None:
        """Close the descriptor, which drops the lock unless a duplicate exists; idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def open_device(
    path: str | Path,
    *,
    index: int,
    rank: int,
    nbytes: int,
    direct: DirectMode,
    lock_timeout_s: float,
) -> OpenDevice:
    """Open, lock and size device ``index`` for tensor-parallel rank ``rank``.

    A directory gets a file ``rank<r>.data``; a missing directory is created if its parent exists.
    Both are their owner's, or the group's in a directory that a group shares. A block device serves
    rank 0 only, and must not be mounted. Existing bytes are never changed or cut off.

    Args:
        path: Directory or block device.
        index: Position among the devices, for messages.
        rank: Tensor-parallel rank, >= 0.
        nbytes: Bytes needed, a positive multiple of 4096.
        direct: ``on`` fails where O_DIRECT does not work, ``auto`` falls back and logs it.
        lock_timeout_s: How long to wait for another process to let go.

    Raises:
        DeviceError: it cannot be used; the text names the path and the way out.
        StoreLockedError: another process holds it.
        ValueError: ``nbytes`` or ``rank`` is impossible.
    """
    if nbytes <= 0 or nbytes % _ALIGN or rank < 0:
        raise ValueError(f"impossible device size {nbytes} or rank {rank}")
    place = Path(path)
    what = f"device {index} ({place})"
    mode = _mode_of(place, what)
    if mode is None:
        make_directory(place, what)
    elif stat.S_ISREG(mode):
        raise DeviceError(f"{what} is a file; name the directory that shall hold the data")
    elif stat.S_ISBLK(mode):
        if rank != 0:
            raise DeviceError(
                f"{what} is a block device, which serves one rank; for several workers make a file "
                "system on it and name a directory"
            )
        return _open_block_device(place, what, nbytes, direct, lock_timeout_s)
    elif not stat.S_ISDIR(mode):
        raise DeviceError(f"{what} is neither a directory nor a block device")
    return _open_data_file(data_file_path(place, rank), what, nbytes, direct, lock_timeout_s)


def open_to_read(path: str | Path, rank: int, direct: DirectMode) -> OpenDevice:
    """Open what another process has open by :func:`open_device`, without a lock, to read it.

    Raises:
        DeviceError: it cannot be opened.
    """
    place = Path(path)
    raw = place.is_block_device()  # a link to it, as /dev/disk/by-id has them, is followed
    file, follow = (place, 0) if raw else (data_file_path(place, rank), os.O_NOFOLLOW)
    try:
        fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC | follow | os.O_NONBLOCK)
    except OSError as error:
        raise DeviceError(f"cannot open {file} to read: {why_refused(file, error)}") from error
    try:
        on = turn_on_direct(fd, str(file), direct)
        return OpenDevice(file, fd, os.lseek(fd, 0, os.SEEK_END), on, True, False)
    except BaseException:
        os.close(fd)
        raise


def _mode_of(path: Path, what: str) -> int | None:
    try:
        return path.stat().st_mode
    except FileNotFoundError:
        return None
    except OSError as error:
        raise DeviceError(f"{what} cannot be looked at: {why_refused(path, error)}") from error


def make_directory(path: Path, what: str) -> None:
    """Make the directory of a device unless it is there; its parent must be.

    Raises:
        DeviceError: it cannot be made; the text says what to do.
    """
    try:
        create_directory(path)
    except FileExistsError:
        return  # another rank was faster
    except FileNotFoundError as error:
        raise DeviceError(
            f"{what} does not exist, nor does {path.parent}: mount the file system there, or "
            f"create the directory with `mkdir -p {path}`"
        ) from error
    except OSError as error:
        raise DeviceError(f"{what} cannot be created: {why_refused(path, error)}") from error
    logger.info("created directory %s", path)


def _open_data_file(
    path: Path, what: str, nbytes: int, direct: DirectMode, lock_timeout_s: float
) -> OpenDevice:
    deadline = time.monotonic() + lock_timeout_s
    while True:
        fd, created = _open_or_create(path, what)
        try:
            lock_file(fd, path, what, deadline)
            if _is_still(fd, path):
                preallocated = reserve_space(fd, path, what, nbytes, created=created)
                on = turn_on_direct(fd, what, direct)
                return OpenDevice(path, fd, nbytes, on, preallocated, created)
        except BaseException:
            os.close(fd)
            raise
        # Between open and lock the previous owner deleted the file: lock its successor instead.
        os.close(fd)


def _open_or_create(path: Path, what: str) -> tuple[int, bool]:
    try:
        try:
            fd = create_file(path, os.O_RDWR)
        except FileExistsError:
            return _open_existing(path), False
        try:
            _sync_directory(path.parent)
        except BaseException:
            os.close(fd)
            raise
    except OSError as error:
        raise DeviceError(
            f"{what}: cannot open {path} for reading and writing ({why_refused(path, error)}); "
            "check that the file system is mounted writable"
        ) from error
    return fd, True


def _open_existing(path: Path) -> int:
    # O_NONBLOCK only matters should it be a pipe.
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise FileExistsError(errno.EEXIST, "it is not a regular file")
        mode = file_mode(path.parent)
        if status.st_mode & 0o007 and status.st_uid == os.geteuid():
            os.fchmod(fd, mode)  # it holds what users said to the model
            logger.warning("%s was open to other users; its mode is %04o now", path, mode)
        elif status.st_mode & 0o007:
            logger.warning(
                "%s is open to other users, and belongs to uid %d, while this process is uid %d: "
                "its owner can run `chmod o= %s`",
                path,
                status.st_uid,
                os.geteuid(),
                path,
            )
    except OSError:
        os.close(fd)
        raise
    return fd


def _sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _is_still(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), path.stat())
    except FileNotFoundError:
        return False


def _open_block_device(
    path: Path, what: str, nbytes: int, direct: DirectMode, lock_timeout_s: float
) -> OpenDevice:
    try:
        # O_EXCL: fails while the device is mounted or part of a volume.
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_EXCL)
    except OSError as error:
        reason = "it is mounted or otherwise in use" if error.errno == errno.EBUSY else error
        raise DeviceError(f"{what} cannot be opened: {reason}") from error
    try:
        lock_file(fd, path, what, time.monotonic() + lock_timeout_s)
        check_capacity(os.lseek(fd, 0, os.SEEK_END), what, nbytes)
        on = turn_on_direct(fd, what, direct)
    except BaseException:
        os.close(fd)
        raise
    return OpenDevice(path, fd, nbytes, on, preallocated=True, created=False)


def check_capacity(size: int, what: str, nbytes: int) -> None:
    """Raise DeviceError unless a block device of ``size`` bytes holds ``nbytes``."""
    if size < nbytes:
        raise DeviceError(f"{what} is too small: {nbytes} bytes needed, it has {size}")
