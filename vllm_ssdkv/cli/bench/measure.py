"""Short measurement of a device for ``ssdkv doctor``: a small file, written and read back."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import queue
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from vllm_ssdkv.base.sizes import KIB, MIB

REQUEST_BYTES: Final = 512 * KIB
QUEUE_DEPTH: Final = 8
MAX_BYTES: Final = 64 * MIB


@dataclass(frozen=True, slots=True)
class Rates:
    """Measured rates. Rates in bytes per second; None where there was no permission or room.

    Attributes:
        direct: Whether O_DIRECT was used; if not, reads may have come from memory.
    """

    direct: bool
    nbytes: int
    write: float | None
    read: float | None


@contextlib.contextmanager
def temporary_file(directory: Path) -> Iterator[int]:
    """Descriptor of a new file that has no name any more: it is gone however this process ends.

    Raises:
        OSError: the directory cannot be written.
    """
    fd, name = tempfile.mkstemp(prefix=".ssdkv-doctor-", dir=directory)
    os.unlink(name)
    try:
        yield fd
    finally:
        os.close(fd)


def use_direct(fd: int) -> bool:
    """Switch the descriptor to O_DIRECT; False where the file system refuses it."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT)
        with mmap.mmap(-1, REQUEST_BYTES) as page:
            os.preadv(fd, [page], 0)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        fcntl.fcntl(fd, fcntl.F_SETFL, flags)
        return False
    return True


def _pass_over(
    nbytes: int, transfer: Callable[[mmap.mmap, int], int], finish: Callable[[], None]
) -> float:
    """Seconds to transfer all requests with QUEUE_DEPTH threads, ``finish`` included.

    Raises:
        OSError: the first error of a request; no more requests are started after it.
    """
    offsets: queue.SimpleQueue[int] = queue.SimpleQueue()
    for offset in range(0, nbytes, REQUEST_BYTES):
        offsets.put(offset)
    errors: queue.SimpleQueue[OSError] = queue.SimpleQueue()

    def work() -> None:
        with mmap.mmap(-1, REQUEST_BYTES) as buffer:
            buffer.write(os.urandom(REQUEST_BYTES))
            while errors.empty():
                try:
                    offset = offsets.get_nowait()
                except queue.Empty:
                    return
                try:
                    done = transfer(buffer, offset)
                except OSError as error:
                    errors.put(error)
                    return
                if done != REQUEST_BYTES:
                    errors.put(OSError(errno.EIO, f"{done} of {REQUEST_BYTES} bytes transferred"))

    threads = [threading.Thread(target=work, daemon=True) for _ in range(QUEUE_DEPTH)]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if not errors.empty():
        raise errors.get()
    finish()
    return time.perf_counter() - start


def measure_file(fd: int, nbytes: int) -> Rates:
    """Write and read ``nbytes`` (a multiple of 512 KiB) of an empty file.

    Blocks for as long as the device takes: callers that must not hang run it in a daemon thread.

    Raises:
        OSError: the device refused a request.
    """
    direct = use_direct(fd)
    write_s = _pass_over(
        nbytes, lambda buffer, offset: os.pwritev(fd, [buffer], offset), lambda: os.fsync(fd)
    )
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    return Rates(direct, nbytes, nbytes / write_s, nbytes / _read_seconds(fd, nbytes))


def measure_reads(fd: int, nbytes: int) -> Rates:
    """Read the first ``nbytes`` of a raw device; never writes to it.

    Raises:
        OSError: the device refused a request.
    """
    direct = use_direct(fd)
    return Rates(direct, nbytes, None, nbytes / _read_seconds(fd, nbytes))


def _read_seconds(fd: int, nbytes: int) -> float:
    return _pass_over(nbytes, lambda buffer, offset: os.preadv(fd, [buffer], offset), lambda: None)
