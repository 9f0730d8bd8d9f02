"""Give a data file its space before the first write, and take it back if there is not enough."""

from __future__ import annotations

import errno
import logging
import os
from pathlib import Path

from vllm_ssdkv import _io
from vllm_ssdkv.base.errors import DeviceError

logger = logging.getLogger(__name__)


def free_bytes(fd: int) -> int:
    """Bytes that an unprivileged user may still allocate on the file system of ``fd``."""
    status = os.fstatvfs(fd)
    return status.f_bavail * status.f_frsize


def reserve_space(fd: int, path: Path, what: str, nbytes: int, *, created: bool) -> bool:
    """Allocate the first ``nbytes`` of a file; existing bytes stay. Blocks for the time it takes.

    Args:
        fd: Descriptor open for writing.
        path: Its path, for messages; the file is deleted on failure if ``created``.
        what: The device, for messages.
        nbytes: Size wanted, in bytes.
        created: Whether the caller has just made the file.

    Returns:
        True; False if the file system cannot preallocate and the file is sparse instead.

    Raises:
        DeviceError: there is not enough room; the file is as it was before.
    """
    status = os.fstat(fd)
    missing = max(0, nbytes - status.st_blocks * 512)
    free = free_bytes(fd)
    # Ask first: some file systems allocate until the disk is full before they fail.
    code = errno.ENOSPC if missing > free else _io.preallocate(fd, nbytes)
    if code == errno.EOPNOTSUPP:
        try:
            if status.st_size < nbytes:
                os.ftruncate(fd, nbytes)
        except OSError as error:
            code = error.errno or errno.EIO
        else:
            logger.warning("%s: %s cannot be preallocated; it may meet a full disk", what, path)
            return False
    if code == 0:
        return True
    _undo_growth(fd, path, status.st_size, created=created)
    need = f"{path} needs {nbytes / 2**30:.3f} GiB ({missing} bytes more)"
    if code in {errno.ENOSPC, errno.EDQUOT}:
        raise DeviceError(
            f"{what} is too full: {need}, free are {free} bytes; lower the capacity of this "
            "device or make room"
        )
    if code == errno.EFBIG:
        raise DeviceError(
            f"{what}: {need}, more than the file system or the limit on file size (ulimit -f) "
            "allows"
        )
    raise DeviceError(f"{what}: cannot reserve space, {need}: {os.strerror(code)}")


def _undo_growth(fd: int, path: Path, size: int, *, created: bool) -> None:
    try:
        os.ftruncate(fd, size)
        if created:
            path.unlink()
    except OSError as error:
        logger.warning("cannot take back the space of %s: %s", path, error)
