"""The file under the journal: opened, locked, appended to, and replaced without a gap."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

from vllm_ssdkv.store.durable import create_temporary, sync_directory, write_all
from vllm_ssdkv.store.file_lock import lock_file

_READ_BYTES = 1 << 24
_FLAGS = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW


class JournalFile:
    """A locked file with a known end. Not thread-safe: callers serialise.

    Whoever opens the path locks the file that the path names at that moment, also while the owner
    replaces it: the replacement is locked before it gets the name.

    Attributes:
        path: Its path.
        end: Offset at which the next append goes; bytes behind it are left-overs.
    """

    def __init__(self, path: Path, lock_timeout_s: float) -> None:
        """Open or create the file, mode 0600, and lock it.

        Raises:
            StoreLockedError: another process held it for all of ``lock_timeout_s``.
            DeviceError: the file system has no locks.
            OSError: it cannot be opened.
        """
        self.path = path
        self.end = 0
        deadline = time.monotonic() + lock_timeout_s
        while True:
            self._fd = os.open(path, _FLAGS, 0o600)
            try:
                lock_file(self._fd, path, "journal", deadline)
                if self._has_the_name():
                    return
            except BaseException:
                os.close(self._fd)
                raise
            os.close(self._fd)  # replaced between open and lock: lock its successor

    def _has_the_name(self) -> bool:
        try:
            return os.path.samestat(os.fstat(self._fd), os.stat(self.path))
        except FileNotFoundError:
            return False

    def read(self) -> bytearray:
        """The whole content. Raises OSError."""
        data = bytearray()
        while chunk := os.pread(self._fd, _READ_BYTES, len(data)):
            data += chunk
        return data

    def start(self, header: bytes) -> None:
        """Write the header of an empty file and make the file durable. Raises OSError."""
        write_all(self._fd, header, 0)
        os.fsync(self._fd)
        sync_directory(self.path.parent)
        self.end = len(header)

    def set_aside(self, name: str) -> None:
        """Rename the file to ``name``, replacing that, and go on with an empty one. OSError."""
        os.rename(self.path, self.path.with_name(name))
        fresh = os.open(self.path, _FLAGS | os.O_EXCL, 0o600)
        os.close(self._fd)
        self._fd = fresh
        lock_file(fresh, self.path, "journal", time.monotonic())

    def append(self, data: bytes) -> None:
        """Write at :attr:`end`. On OSError the end stays, so that a later append overwrites."""
        write_all(self._fd, data, self.end)
        self.end += len(data)

    def sync(self) -> None:
        """fdatasync. Blocks. Raises OSError."""
        os.fdatasync(self._fd)

    def close(self) -> None:
        """Close, which drops the lock; idempotent. Raises OSError."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


class Replacement:
    """A file about to take the journal file's place. Used by one thread.

    ``write`` may run while the old file is appended to; ``install`` may not.
    """

    def __init__(self, target: JournalFile) -> None:
        """Create the temporary file. Raises OSError."""
        self._target = target
        self._fd, self._path = create_temporary(target.path)

    def write(self, data: bytes) -> None:
        """Write the content so far and sync it. Blocks. Raises OSError."""
        fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        write_all(self._fd, data, 0)
        os.fsync(self._fd)

    def install(self, written: int, tail: bytes) -> int:
        """Add ``tail`` behind the ``written`` bytes and take the old file's name and place.

        Returns:
            The old file's descriptor, for the caller to close where it may block.

        Raises:
            OSError: the old file is still in place and valid.
        """
        write_all(self._fd, tail, written)
        os.rename(self._path, self._target.path)
        old, self._target._fd = self._target._fd, self._fd
        self._fd = -1
        self._target.end = written + len(tail)
        return old

    def discard(self) -> None:
        """Remove the temporary file if it was not installed. Raises OSError."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            self._path.unlink(missing_ok=True)
