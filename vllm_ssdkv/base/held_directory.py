"""A directory that is known again, for whoever puts files back that were deleted in it."""

from __future__ import annotations

import os
from pathlib import Path


class HeldDirectory:
    """A directory held open: while it is, no other one gets its number. Any thread.

    A drive that is gone leaves its mount point, and a directory that was removed may be made again,
    both empty and both another one. Nothing is to be put back there.
    """

    def __init__(self, path: Path):
        """Raises OSError: it cannot be opened."""
        self._path = path
        self._fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def is_there(self) -> bool:
        """Check whether the path still names it, with anything in it. Blocks on I/O, briefly.

        Raises:
            OSError: the directory cannot be read.
        """
        try:
            if not os.path.samestat(os.fstat(self._fd), os.stat(self._path)):
                return False
            with os.scandir(self._path) as entries:
                return any(not entry.name.endswith(".tmp") for entry in entries)
        except (FileNotFoundError, NotADirectoryError):
            return False

    def close(self) -> None:
        """Let go; idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
