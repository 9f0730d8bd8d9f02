"""The portable engine: ``queue_depth`` native threads per device that read and write blocking.

Works on every file system and in every container. Each device has its own queue and threads, so
a slow or hung one delays no other; reads overtake waiting writes, up to 32 in a row.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from vllm_ssdkv import _io
from vllm_ssdkv.errors import EngineUnavailableError
from vllm_ssdkv.store.arena import Arena
from vllm_ssdkv.store.engine.protocol import U16, U32, U64, Batch, Op

logger = logging.getLogger(__name__)

# Memory that a thread hung in a device may still write to. It is never given back.
_abandoned: list[NDArray[np.uint8]] = []

_GRACE_S = 1.0


def _release(native: _io.ThreadsEngine, memory: NDArray[np.uint8], timeout_s: float) -> bool:
    if native.close(timeout_s):
        return True
    logger.error(
        "I/O threads hang in a device; %d bytes of memory are lost to them until the process ends",
        memory.size,
    )
    _abandoned.append(memory)
    return False


class ThreadsEngine:
    """See :class:`vllm_ssdkv.store.engine.protocol.IoEngine`; any thread may call any method.

    The descriptors are duplicated: closing the caller's own does not disturb requests in flight,
    and the lock of a data file lasts until the engine is closed and its last I/O has ended.

    Args:
        fds: Open descriptors, one per device.
        arena: Memory of all requests. It stays mapped as long as a thread may touch it, even if
            it is closed or forgotten by everybody else.
        queue_depth: Requests in flight per device, 1 to 1024.

    Raises:
        EngineUnavailableError: a descriptor is not open, or the system has no threads left.
        ValueError: an argument is out of range.
    """

    name = "threads"

    def __init__(self, fds: Sequence[int], arena: Arena, queue_depth: int) -> None:
        memory = arena.view(0, arena.nbytes)
        try:
            self._native = _io.ThreadsEngine(list(fds), arena.address, arena.nbytes, queue_depth)
        except RuntimeError as error:
            raise EngineUnavailableError(
                f"cannot start {queue_depth} I/O threads for each of {len(fds)} devices: {error}; "
                "lower io.queue_depth or raise the limit on threads (ulimit -u, cgroup pids.max)"
            ) from error
        # For engines that are dropped, or alive when the interpreter ends, without close().
        self._finalizer = weakref.finalize(self, _release, self._native, memory, _GRACE_S)
        self._memory: NDArray[np.uint8] | None = memory

    def submit(self, op: Op, device: U16, offset: U64, length: U32, buffer: U64) -> Batch:
        """See the protocol."""
        return self._native.submit(
            op,
            np.ascontiguousarray(device),
            np.ascontiguousarray(offset),
            np.ascontiguousarray(length),
            np.ascontiguousarray(buffer),
        )

    def statistics(self) -> Mapping[str, int]:
        """See the protocol; ``<read|write>_<submitted|requests|bytes|errors|nanoseconds>.<i>``."""
        return self._native.statistics()

    def close(self, timeout_s: float) -> bool:
        """See the protocol. What is still queued at the end of the time ends with ECANCELED."""
        if self._memory is None:
            return self._native.close(timeout_s)
        self._finalizer.detach()
        memory, self._memory = self._memory, None
        return _release(self._native, memory, timeout_s)
