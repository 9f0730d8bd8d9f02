"""The memory between devices and models: one mapping on huge pages, addressed by offset."""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
import threading

import numpy as np
from numpy.typing import NDArray

from vllm_ssdkv import _io
from vllm_ssdkv.base.errors import StoreError

logger = logging.getLogger(__name__)

HUGE_PAGE = 2 << 20

_F_SEAL_FUTURE_WRITE = 0x10
"""Constant of ``linux/fcntl.h``; Python 3.11 does not name it."""

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | _F_SEAL_FUTURE_WRITE

_POPULATED_AT_ONCE = 32 << 20
"""Bytes; :meth:`Arena.close` waits for so many at most."""


class Arena:
    """Anonymous memory that begins at a multiple of 2 MiB and is made of huge pages if possible.

    On 4 KiB pages the kernel spends several times the CPU on each direct I/O. Pages get memory
    when first touched, or by :meth:`populate`. A forked child does not have the arena: direct I/O
    into memory that a fork shares could land in the wrong copy. Core dumps leave it out, because it
    holds prompts.

    Any thread may call any method; two threads must not write the same bytes at once.

    Args:
        nbytes: Usable size in bytes, a positive multiple of 4096.

    Raises:
        ValueError: ``nbytes`` is not a positive multiple of 4096.
        StoreError: the system has not so much address space or memory to promise.
    """

    def __init__(self, nbytes: int) -> None:
        if nbytes <= 0 or nbytes % mmap.PAGESIZE:
            raise ValueError(f"an arena has a positive multiple of 4096 bytes, not {nbytes}")
        try:
            # Private, because shared anonymous memory gets no huge pages by default. One huge
            # page more than asked, to find an aligned start.
            mapping = mmap.mmap(-1, nbytes + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError) as error:
            raise StoreError(
                f"cannot map {nbytes / 2**30:.2f} GiB of memory ({error}); lower the DRAM size "
                "or the memory limit of other programs"
            ) from error
        address = np.frombuffer(mapping, dtype=np.uint8).ctypes.data
        self._adopt(mapping, -address % HUGE_PAGE, nbytes)

    def _adopt(self, mapping: mmap.mmap, start: int, nbytes: int) -> None:
        """Use ``nbytes`` from ``start`` on of a mapping."""
        everything = np.frombuffer(mapping, dtype=np.uint8)
        self._bytes: NDArray[np.uint8] | None = everything[start : start + nbytes]
        self.nbytes = nbytes
        self.address = int(self._bytes.ctypes.data)
        """Absolute address of the first byte."""
        mapping.madvise(mmap.MADV_DONTFORK)
        mapping.madvise(mmap.MADV_DONTDUMP)
        self._mapping: mmap.mmap | None = mapping
        self.huge_pages = _ask_for_huge_pages(mapping, start, nbytes)
        """True if the kernel took the request for huge pages; it may still run out of them."""
        self._populating: threading.Thread | None = None
        self._closing = threading.Event()

    def populate(self) -> None:
        """Begin to give all of the arena its memory, in a thread of its own; once.

        The first use of a page is slow, for hits too: the kernel clears 2 MiB, and a virtual
        machine may have to get them from its host, at a tenth of the speed of an SSD. Linux before
        5.14 cannot do it, and gives memory when first touched.
        """
        if self._populating is None:
            self._populating = threading.Thread(
                target=self._populate, name="ssdkv-memory", daemon=True
            )
            self._populating.start()

    def _populate(self) -> None:
        for at in range(0, self.nbytes, _POPULATED_AT_ONCE):
            if self._closing.is_set():
                return
            nbytes = min(_POPULATED_AT_ONCE, self.nbytes - at)
            if code := _io.populate(self.address + at, nbytes):
                logger.info(
                    "DRAM is not made ready at start (%s): the first hits are slower",
                    os.strerror(code),
                )
                return

    def view(self, offset: int, length: int) -> NDArray[np.uint8]:
        """Bytes [offset, offset + length) without a copy, shape [length].

        Raises:
            ValueError: the range is outside the arena, or the arena is closed.
        """
        if self._bytes is None:
            raise ValueError("the arena is closed")
        if offset < 0 or length < 0 or offset + length > self.nbytes:
            raise ValueError(
                f"bytes {offset} + {length} are outside the arena of {self.nbytes} bytes"
            )
        return self._bytes[offset : offset + length]

    def close(self) -> None:
        """Give the memory back once the last view of it is gone; idempotent.

        Views, and engines with I/O in flight, keep it mapped, so closing early is never a crash.
        """
        self._closing.set()
        mapping, self._mapping, self._bytes = self._mapping, None, None
        if mapping is None:
            return
        if self._populating is not None:
            self._populating.join()
        try:
            mapping.close()
        except BufferError:
            # Somebody holds a view, and with it the mapping, which ends with the last of them.
            logger.debug("an arena of %d bytes is closed while views of it exist", self.nbytes)


class BorrowedArena(Arena):
    """Memory of a device that is mapped into this process, as an arena. It is the device's.

    Example:
        arena = BorrowedArena(backend.peer_memory(1 << 26))
    """

    def __init__(self, memory: NDArray[np.uint8]) -> None:
        """``memory``: contiguous, uint8."""
        self._bytes = memory
        self.nbytes = len(memory)
        self.address = int(memory.ctypes.data)
        self._mapping = None
        self.huge_pages = False
        self._populating = None
        self._closing = threading.Event()


class SharedArena(Arena):
    """Memory that other processes may map by its descriptor, for reading only.

    Huge pages are in use where ``/sys/kernel/mm/transparent_hugepage/shmem_enabled`` is ``advise``
    or more. Everybody who gets :attr:`fd` reads all of the arena.

    Example:
        arena = SharedArena(1 << 30)
        os.pread(arena.fd, 4096, 0)

    Args:
        nbytes: Usable size in bytes, a positive multiple of 4096.

    Raises:
        ValueError: ``nbytes`` is not a positive multiple of 4096.
        StoreError: the system has no such memory, or cannot keep others from writing to it (Linux
            before 5.1).
    """

    def __init__(self, nbytes: int) -> None:
        if nbytes <= 0 or nbytes % mmap.PAGESIZE:
            raise ValueError(f"an arena has a positive multiple of 4096 bytes, not {nbytes}")
        fd = os.memfd_create("ssdkv-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, nbytes)
            mapping = mmap.mmap(fd, nbytes)
            # This mapping goes on to be written to; nobody can make another one of that kind.
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        except (OSError, OverflowError) as error:
            os.close(fd)
            raise StoreError(
                f"cannot share {nbytes / 2**30:.2f} GiB of memory ({error}); lower the DRAM size, "
                "or use Linux 5.1 or newer"
            ) from error
        self.fd = fd
        """Descriptor of the memory; valid until :meth:`close`."""
        self._adopt(mapping, 0, nbytes)

    def close(self) -> None:
        """See :meth:`Arena.close`; processes that have mapped the memory keep it."""
        if self._mapping is not None:
            os.close(self.fd)
        super().close()


def _ask_for_huge_pages(mapping: mmap.mmap, start: int, nbytes: int) -> bool:
    try:
        mapping.madvise(mmap.MADV_HUGEPAGE, start, nbytes)
    except OSError as error:
        logger.warning("no transparent huge pages (%s): each I/O costs more CPU", error)
        return False
    return True
