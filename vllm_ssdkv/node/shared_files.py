"""Files that a node and its host share, each open on one side at a time (DockerSSD, D-2).

A lock stands on the file's inode, one byte of it for each side. Its reference count is the number
of open descriptions that hold the side's byte, and the kernel keeps it: it is in no file, it is
gone after a power loss, and a process that is killed has given back what it held. After a crash the
count is therefore that of the processes that live, without anybody's doing.

Both sides must see the file through one kernel: processes, containers with the directory mounted,
not clients of a network file system.
"""

from __future__ import annotations

import fcntl
import os
import re
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, TypeAlias

from vllm_ssdkv.base.durable_file import create_temporary, sync_directory, write_all
from vllm_ssdkv.base.errors import SharedFileError
from vllm_ssdkv.base.file_lock import lock_file

Side: TypeAlias = Literal["node", "host"]
SIDES: Final[tuple[Side, Side]] = ("node", "host")

_BYTES: Final[dict[Side, int]] = {"node": 1 << 62, "host": (1 << 62) + 1}
"""Offset of each side's lock: behind all content, where nobody else locks."""
_POLL_S: Final = 0.01
_GATE_S: Final = 30.0
"""Longest wait for those who open or replace a file at this moment."""
_FLOCK: Final = struct.Struct("@hhqqi4x")
"""``struct flock`` of 64-bit Linux: type, whence, start, length, process."""


@dataclass(frozen=True, slots=True)
class References:
    """Open descriptions of one file on each side."""

    node: int
    host: int


class SharedFiles:
    """Files of one directory, as one side sees them.

    Any thread may call anything. A descriptor that is inherited keeps the file open on its side
    until the last process that has it ends.

    Attributes:
        directory: Holds the files, and nothing else that is opened in another way.
        side: Which side this process is on.

    Example:
        >>> files = SharedFiles(Path("/var/lib/ssdkv/a/shared"), "host")
        >>> files.write("node.yaml", b"listen: [...]")
        >>> with files.open("node.yaml") as fd:
        ...     os.read(fd, 100)
        b'listen: [...]'
    """

    def __init__(self, directory: Path, side: Side) -> None:
        self.directory = directory
        self.side = side

    @contextmanager
    def open(self, name: str, *, writable: bool = False, wait_s: float = 0.0) -> Iterator[int]:
        """Descriptor of a file, which the other side cannot open meanwhile. Blocks on I/O.

        Args:
            name: Of a file in the directory.
            writable: For reading and writing, not only for reading.
            wait_s: How long to wait for the other side.

        Raises:
            SharedFileError: it is open on the other side, or the name is none.
            OSError: as ``os.open``.
        """
        fd = self._acquire(name, os.O_RDWR if writable else os.O_RDONLY, time.monotonic() + wait_s)
        try:
            yield fd
        finally:
            os.close(fd)

    def write(self, name: str, data: bytes, *, wait_s: float = 0.0) -> None:
        """Put a file with this content in the place of ``name``, which may be new. Blocks on I/O.

        At any instant, a crash included, the name has the old content or the new one, whole.

        Raises:
            SharedFileError: it is open on either side, or the name is none.
            OSError: nothing was replaced, unless only the directory could not be synced.
        """
        path = self._path(name)
        deadline = time.monotonic() + wait_s
        while True:
            with self._gate():
                holder = _holder(path)
                if holder is None:
                    self._replace(path, data)
                    return
            self._wait(name, holder, deadline)

    def references(self, name: str) -> References:
        """Count the open descriptions of a file on each side. Zero where there is no file.

        Raises:
            SharedFileError: the name is none.
        """
        try:
            status = os.stat(self._path(name), follow_symlinks=False)
        except FileNotFoundError:
            return References(0, 0)
        where = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
        table = Path("/proc/locks").read_text(encoding="ascii")
        starts = re.findall(rf"OFDLCK\s+ADVISORY\s+READ\s+-1\s+{re.escape(where)}\s(\d+)\s", table)
        return References(*(starts.count(str(_BYTES[side])) for side in SIDES))

    def _path(self, name: str) -> Path:
        if not name or "/" in name or name.startswith(".") or name.endswith(".tmp"):
            raise SharedFileError(
                f"{name!r} names no shared file: one name without a directory, that begins with "
                "no dot and does not end with .tmp"
            )
        return self.directory / name

    def _acquire(self, name: str, flags: int, deadline: float) -> int:
        path = self._path(name)
        while True:
            fd = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                with self._gate():
                    # A file that was replaced between the two has another inode.
                    if _is_at(fd, path) and not _is_held(fd, _other(self.side)):
                        _hold(fd, self.side)
                        held, fd = fd, -1
                        return held
            finally:
                if fd >= 0:
                    os.close(fd)
            self._wait(name, _other(self.side), deadline)

    def _replace(self, path: Path, data: bytes) -> None:
        fd, temporary = create_temporary(path)
        try:
            try:
                write_all(fd, data, 0)
                os.fsync(fd)
            finally:
                os.close(fd)
            os.rename(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        sync_directory(path.parent)

    def _wait(self, name: str, holder: Side, deadline: float) -> None:
        if time.monotonic() >= deadline:
            raise SharedFileError(
                f"{self.directory / name} is open on the side of the {holder}: stop what has it "
                "open there first"
            )
        time.sleep(_POLL_S)

    @contextmanager
    def _gate(self) -> Iterator[None]:
        """Only one process at a time looks and locks: two sides cannot both find it free."""
        fd = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            lock_file(fd, self.directory, "shared files", time.monotonic() + _GATE_S)
            yield
        finally:
            os.close(fd)


def _other(side: Side) -> Side:
    return "host" if side == "node" else "node"


def _holder(path: Path) -> Side | None:
    """The side that has a file open; None where no side has, and where there is no file."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    try:
        return next((side for side in SIDES if _is_held(fd, side)), None)
    finally:
        os.close(fd)


def _is_at(fd: int, path: Path) -> bool:
    """Check whether the path still names the file behind the descriptor."""
    try:
        there = os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return os.path.samestat(os.fstat(fd), there)


def _is_held(fd: int, side: Side) -> bool:
    """Check whether any other open description holds the byte of a side."""
    asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, _BYTES[side], 1, 0)
    answer = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, asked)
    return bool(_FLOCK.unpack(answer)[0] != fcntl.F_UNLCK)


def _hold(fd: int, side: Side) -> None:
    wanted = _FLOCK.pack(fcntl.F_RDLCK, os.SEEK_SET, _BYTES[side], 1, 0)
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, wanted)
