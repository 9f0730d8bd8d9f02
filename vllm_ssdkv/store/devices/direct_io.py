"""Turn on O_DIRECT where it works, and say so where it does not."""

from __future__ import annotations

import errno
import fcntl
import logging
import mmap
import os
import stat
from typing import Final, Literal, TypeAlias

from vllm_ssdkv.base.errors import DeviceError
from vllm_ssdkv.store.format.superblock import BLOCK_BYTES

logger = logging.getLogger(__name__)

DirectMode: TypeAlias = Literal["auto", "on", "off"]


_UNUSED_OFFSET: Final = BLOCK_BYTES
"""Offset of a page behind the first superblock that nothing uses, see ``docs/format.md``."""


def turn_on_direct(fd: int, what: str, direct: DirectMode) -> bool:
    """Check whether ``fd`` now uses O_DIRECT.

    To find out, it reads a page, and writes the same bytes back where ``fd`` may write to a file.

    Raises:
        DeviceError: ``direct`` is "on" and it does not work here.
    """
    if direct == "off":
        return False
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT)
        _try_one_page(fd, write=flags & os.O_ACCMODE != os.O_RDONLY)
    except OSError as error:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags)
        if direct == "on":
            raise DeviceError(
                f"{what} does not support O_DIRECT ({error.strerror}); use another file system, "
                'or set io.direct to "auto"'
            ) from error
        logger.warning(
            "%s does not support O_DIRECT (%s): I/O goes through the page cache, which costs "
            "memory and CPU",
            what,
            error.strerror,
        )
        return False
    return True


def _try_one_page(fd: int, *, write: bool) -> None:
    """Read and write a page: some file systems take the flag and then refuse one or both."""
    status = os.fstat(fd)
    with mmap.mmap(-1, mmap.PAGESIZE) as page:
        os.preadv(fd, [page], _UNUSED_OFFSET)
        if not write or not stat.S_ISREG(status.st_mode):
            return
        try:
            os.pwrite(fd, page, _UNUSED_OFFSET)
            if status.st_size < _UNUSED_OFFSET + mmap.PAGESIZE:
                os.ftruncate(fd, status.st_size)
        except OSError as error:
            # A full or failing drive says nothing of the flag; the first real write reports it.
            if error.errno in {errno.EINVAL, errno.EOPNOTSUPP}:
                raise
