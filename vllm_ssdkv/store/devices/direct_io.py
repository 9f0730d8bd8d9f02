"""Turn on O_DIRECT where it works, and say so where it does not."""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
from typing import Literal, TypeAlias

from vllm_ssdkv.base.errors import DeviceError

logger = logging.getLogger(__name__)

DirectMode: TypeAlias = Literal["auto", "on", "off"]


def turn_on_direct(fd: int, what: str, direct: DirectMode) -> bool:
    """Check whether ``fd`` now uses O_DIRECT. Reads one page to find out.

    Raises:
        DeviceError: ``direct`` is "on" and it does not work here.
    """
    if direct == "off":
        return False
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT)
        _read_one_page(fd)  # some file systems accept the flag and then refuse the I/O
    except OSError as error:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags)
        if direct == "on":
            raise DeviceError(
                f"{what} does not support O_DIRECT ({error.strerror}); use another file system, "
                'or set direct to "auto"'
            ) from error
        logger.warning(
            "%s does not support O_DIRECT (%s): I/O goes through the page cache, which costs "
            "memory and CPU",
            what,
            error.strerror,
        )
        return False
    return True


def _read_one_page(fd: int) -> None:
    with mmap.mmap(-1, mmap.PAGESIZE) as page:
        os.preadv(fd, [page], 0)
