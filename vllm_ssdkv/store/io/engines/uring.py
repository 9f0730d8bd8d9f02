"""The fast engine: io_uring, one native thread with one ring for up to 8 devices.

Each device has its own queue and limit, so a slow or hung one delays no other; reads overtake
waiting writes, up to 32 in a row. Descriptors, and parts of the arena once they are in use, are
registered with the kernel, which saves their set-up on every request; where it refuses, requests
go without, and the counter ``ring_refused`` moves.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Sequence

from vllm_ssdkv import _io
from vllm_ssdkv.base.errors import EngineUnavailableError
from vllm_ssdkv.base.host import lockable_memory
from vllm_ssdkv.store.io.engines.native import NativeEngine
from vllm_ssdkv.store.memory.arena import Arena

logger = logging.getLogger(__name__)

_CURES = {
    errno.ENOSYS: "it needs Linux 5.13 or later",
    errno.EPERM: "it is forbidden by kernel.io_uring_disabled or a seccomp profile (containers: "
    "allow io_uring_setup, io_uring_enter and io_uring_register)",
    errno.ENOMEM: "raise RLIMIT_MEMLOCK (ulimit -l) or lower io.queue_depth",
    errno.EMFILE: "raise the limit on open files (ulimit -n)",
}


class UringEngine(NativeEngine):
    """See :class:`NativeEngine`.

    Args:
        fds: Open descriptors, one per device.
        arena: Memory of all requests. Its pages are pinned, 64 MiB at a time, as they are used.
        queue_depth: Requests in flight per device, 1 to 1024.

    Raises:
        EngineUnavailableError: no io_uring in this build or on this system, a descriptor is not
            open, or the system has no threads left.
        ValueError: an argument is out of range.
    """

    def __init__(self, fds: Sequence[int], arena: Arena, queue_depth: int) -> None:
        if not _io.has_uring:
            raise EngineUnavailableError(
                "this build has no io_uring; install liburing 2.3 or later (Debian: liburing-dev) "
                "and build again"
            )
        memory = arena.view(0, arena.nbytes)
        try:
            native = _io.UringEngine(list(fds), arena.address, arena.nbytes, queue_depth)
        except OSError as error:
            cure = _CURES.get(error.errno or 0)
            raise EngineUnavailableError(
                f"cannot set up io_uring for {len(fds)} devices: {error.strerror}"
                + (f"; {cure}" if cure else "")
            ) from error
        super().__init__(native, memory)
        self.setups = native.setups()
        """What the kernel let each ring have."""
        self.name = "uring" if _log_setups(self.setups, arena) else "uring(unregistered)"
        """``uring``, or ``uring(unregistered)`` where not all of the arena can be registered."""


def _log_setups(setups: Sequence[_io.UringSetup], arena: Arena) -> bool:
    """Say what the kernel refuses; whether all of the arena can be registered with every ring."""
    logger.info("io_uring: %d rings, task running %s", len(setups), setups[0].task_run)
    for code in {setup.register_files_errno for setup in setups} - {0}:
        logger.warning("io_uring: files not registered (%s)", os.strerror(code))
    codes = {setup.register_buffers_errno for setup in setups} - {0}
    for code in codes:
        logger.warning("io_uring: memory not registered (%s)", os.strerror(code))
    needed, lockable = len(setups) * arena.nbytes, lockable_memory()
    if lockable is None or needed <= lockable:
        return not codes
    logger.warning(
        "io_uring: not all memory will be registered, so requests cost more CPU: RLIMIT_MEMLOCK is "
        "%d bytes, it needs %d (ulimit -l, LimitMEMLOCK=)",
        lockable,
        needed,
    )
    return False
