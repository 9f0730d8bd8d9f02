"""Memory that a node and an engine on one machine share: sealed memfds.

A mapping of a file that shrinks kills the process that touches it, so a file that does not refuse
to shrink is not mapped.
"""

from __future__ import annotations

import fcntl
import mmap
import os

from vllm_ssdkv.base.errors import NodeError, ProtocolError

_F_ADD_SEALS = 1033
_F_GET_SEALS = 1034
_F_SEAL_SHRINK = 2
_F_SEAL_GROW = 4
"""Constant of ``linux/fcntl.h``; Python 3.11 does not name all of them."""


def make_shared(name: str, nbytes: int) -> int:
    """Make memory that can be shared, of a length that never changes.

    Memory is taken when first touched.

    Args:
        name: For ``/proc/PID/maps``.

    Returns:
        File descriptor; the caller closes it.

    Raises:
        NodeError: the system has no memory for it.
    """
    descriptor = -1
    try:
        descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(descriptor, nbytes)
        fcntl.fcntl(descriptor, _F_ADD_SEALS, _F_SEAL_SHRINK | _F_SEAL_GROW)
    except OSError as error:
        if descriptor >= 0:
            os.close(descriptor)
        raise NodeError(f"cannot make {nbytes} bytes of shared memory ({error})") from error
    return descriptor


def map_shared(descriptor: int, nbytes: int, *, writable: bool) -> mmap.mmap:
    """Map memory of the other side, after a check that it cannot shrink.

    The descriptor may be closed afterwards. A forked child does not have the mapping.

    Raises:
        ProtocolError: the descriptor is no such memory, or has another length.
        NodeError: it cannot be mapped.
    """
    try:
        seals = fcntl.fcntl(descriptor, _F_GET_SEALS)
        length = os.fstat(descriptor).st_size
    except OSError as error:
        raise ProtocolError("memory", f"a descriptor is no shared memory ({error})") from error
    if not seals & _F_SEAL_SHRINK or length != nbytes:
        raise ProtocolError(
            "memory",
            f"shared memory of {length} bytes with seals {seals:#x} came where {nbytes} bytes "
            "that cannot shrink were announced",
        )
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    try:
        mapping = mmap.mmap(descriptor, nbytes, mmap.MAP_SHARED, protection)
    except (OSError, ValueError, OverflowError) as error:
        raise NodeError(f"cannot map {nbytes} bytes of shared memory ({error})") from error
    mapping.madvise(mmap.MADV_DONTFORK)
    mapping.madvise(mmap.MADV_DONTDUMP)
    return mapping
