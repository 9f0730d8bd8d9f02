"""Small files that survive a power loss: whole writes, synced directories, atomic replacement."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vllm_ssdkv.base.file_access import create_file


def write_all(fd: int, data: bytes, offset: int) -> None:
    """Write all bytes at an offset. Blocks.

    Raises:
        OSError: the kernel refused a part; any prefix of the data may have been written.
    """
    view = memoryview(data)
    while view:
        written = os.pwrite(fd, view, offset)
        if written == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        view = view[written:]
        offset += written


def read_regular(path: Path) -> bytes:
    """Content of a small file, which may be a link to one. Blocks on I/O, and not on a pipe.

    Raises:
        OSError: it cannot be read, or is no regular file.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    with open(fd, "rb") as file:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file", str(path))
        return file.read()


def sync_directory(path: Path) -> None:
    """Make names created in, renamed into or removed from a directory durable. Blocks.

    Raises:
        OSError: as ``open`` and ``fsync``.
    """
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def create_temporary(path: Path) -> tuple[int, Path]:
    """A new empty file next to ``path``, to be renamed over it, see :func:`create_file`.

    One name per target: what a crash left behind is removed first.

    Returns:
        Its descriptor, open for reading and writing, and its path.

    Raises:
        OSError: as ``unlink`` and ``open``.
    """
    temporary = path.with_name(path.name + ".tmp")
    temporary.unlink(missing_ok=True)
    return create_file(temporary, os.O_RDWR), temporary


def replace_file(path: Path, data: bytes) -> None:
    """Put a file with this content in the place of ``path``, as :func:`replacement`. Blocks."""
    with replacement(path) as fd:
        write_all(fd, data, 0)


@contextmanager
def replacement(path: Path) -> Iterator[int]:
    """Descriptor of a file that takes the place of ``path`` when all went well. Blocks.

    At any instant, a crash included, the path names the old content or the new one, whole.

    Raises:
        OSError: nothing was replaced, unless only the directory could not be synced.
    """
    fd, temporary = create_temporary(path)
    try:
        try:
            yield fd
            os.fsync(fd)
        finally:
            os.close(fd)
        os.rename(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)
