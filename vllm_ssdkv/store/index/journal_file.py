"""The file under the journal: opened, locked, appended to, and replaced without a gap."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

from vllm_ssdkv.base.durable_file import create_temporary, sync_directory, write_all
from vllm_ssdkv.base.file_access import create_file
from vllm_ssdkv.base.file_lock import lock_file
from vllm_ssdkv.base.held_directory import HeldDirectory

_READ_BYTES = 1 << 22


class JournalFile:
    """A locked file with a known end. Not thread-safe: callers serialise.

    Whoever opens the path locks the file that the path names at that moment, also while the owner
    replaces it: the replacement is locked before it gets the name.

    Attributes:
        path: Its path.
        end: Offset at which the next append goes; bytes behind it are left-overs.
        home: Its directory.
    """

    def __init__(self, path: Path, lock_timeout_s: float) -> None:
        """Open the file, or make it as :func:`create_file` does, and lock it.

        Raises:
            StoreLockedError: another process held it for all of ``lock_timeout_s``.
            DeviceError: the file system has no locks.
            OSError: it, or its directory, cannot be opened.
        """
        self.path = path
        self.end = 0
        self._name_synced = True
        self.home = HeldDirectory(path.parent)
        try:
            self._fd = self._open_locked(time.monotonic() + lock_timeout_s)
            self._reach = self.size()
            """Offset behind the last byte that may be ours: left-overs included."""
        except BaseException:
            self.home.close()
            raise

    def _open_locked(self, deadline: float) -> int:
        while True:
            fd = self._open_or_create()
            try:
                lock_file(fd, self.path, "journal", deadline)
                if self._has_the_name(fd):
                    return fd
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)  # replaced between open and lock: lock its successor

    def _open_or_create(self) -> int:
        while True:
            with contextlib.suppress(FileNotFoundError):
                return os.open(self.path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            with contextlib.suppress(FileExistsError):  # another process was faster
                return create_file(self.path, os.O_RDWR)

    def _has_the_name(self, fd: int) -> bool:
        try:
            return os.path.samestat(os.fstat(fd), os.lstat(self.path))
        except FileNotFoundError:
            return False

    def why_lost(self, header: bytes) -> str:
        """Deed of somebody else by which the file is lost; empty: none that shows, or its directory
        is gone as well, or nobody can tell. Does not wait for the device.

        Other threads may append meanwhile, and not replace the file.

        Args:
            header: The first bytes that it has.
        """
        with contextlib.suppress(OSError):
            end = self.end
            size = self.size()
            named = self._has_the_name(self._fd)
            if named and end <= size <= self._reach and self.header(len(header)) == header:
                return ""
            if not self.home.is_there():
                return ""
            if named:
                return "was cut or overwritten"
            return "was replaced" if os.path.lexists(self.path) else "was deleted"
        return ""

    def size(self) -> int:
        """Bytes of the file, left-overs included. Raises OSError."""
        return os.fstat(self._fd).st_size

    def header(self, nbytes: int) -> bytes:
        """The first bytes, fewer if there are not so many. Raises OSError."""
        return os.pread(self._fd, nbytes, 0)

    def pieces(self, begin: int) -> Iterator[bytes]:
        """The content from an offset on, a few MiB at a time. Blocks. Raises OSError."""
        while piece := os.pread(self._fd, _READ_BYTES, begin):
            yield piece
            begin += len(piece)

    def start(self, header: bytes) -> None:
        """Write the header of an empty file and make the file durable. Raises OSError."""
        self._reach = max(self._reach, len(header))
        write_all(self._fd, header, 0)
        os.fsync(self._fd)
        sync_directory(self.path.parent)
        self.end = len(header)

    def set_aside(self, name: str) -> None:
        """Rename the file to ``name``, replacing that, and go on with an empty one. OSError."""
        os.rename(self.path, self.path.with_name(name))
        fresh = create_file(self.path, os.O_RDWR)
        os.close(self._fd)
        self._fd = fresh
        self._reach = 0
        lock_file(fresh, self.path, "journal", time.monotonic())

    def set_path_aside(self, name: str) -> None:
        """Rename whatever the path names to ``name``, replacing that: a start takes no journal for
        lost, and one that is wrong for right. Raises OSError."""
        with contextlib.suppress(FileNotFoundError):
            os.rename(self.path, self.path.with_name(name))

    def append(self, data: bytes) -> None:
        """Write at :attr:`end`. On OSError the end stays, so that a later append overwrites."""
        self._reach = max(self._reach, self.end + len(data))
        write_all(self._fd, data, self.end)
        self.end += len(data)

    def sync(self) -> None:
        """Make content and name survive a power loss. Blocks. Raises OSError."""
        os.fdatasync(self._fd)
        if not self._name_synced:
            sync_directory(self.path.parent)
            self._name_synced = True

    def close(self) -> None:
        """Close, which drops the lock; idempotent. Raises OSError."""
        self.home.close()
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


class Replacement:
    """A file about to take the journal file's place. Used by one thread.

    ``write`` and ``sync`` may run while the old file is appended to; ``install`` may not.
    """

    def __init__(self, target: JournalFile, header: bytes) -> None:
        """Create the temporary file, locked, with a header.

        Raises:
            OSError: it cannot be made, or the old file's directory is gone or another one.
        """
        if not target.home.is_there():
            raise OSError(errno.ESTALE, "its directory was removed, emptied or replaced")
        self._target = target
        self._fd, self._path = create_temporary(target.path)
        self._end = 0
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.write(header)
        except OSError:
            self.discard()
            raise

    def write(self, data: bytes) -> None:
        """Append. Blocks. Raises OSError."""
        write_all(self._fd, data, self._end)
        self._end += len(data)

    def sync(self) -> None:
        """Make what was written so far survive a power loss. Blocks. Raises OSError."""
        os.fsync(self._fd)

    def install(self, tail: bytes) -> int:
        """Append ``tail`` and take the old file's name and place; nothing of it is synced.

        Returns:
            The old file's descriptor, for the caller to close where it may block.

        Raises:
            OSError: the old file is still in place and valid.
        """
        self.write(tail)
        os.rename(self._path, self._target.path)
        old, self._target._fd = self._target._fd, self._fd
        self._fd = -1
        self._target.end = self._target._reach = self._end
        self._target._name_synced = False
        return old

    def discard(self) -> None:
        """Remove the temporary file if it was not installed. Raises OSError."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            self._path.unlink(missing_ok=True)
