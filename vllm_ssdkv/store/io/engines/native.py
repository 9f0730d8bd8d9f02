"""Base of the native engines: batches in, memory that outlives hung requests."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from vllm_ssdkv import _io
from vllm_ssdkv.store.io.engines.abandoned import GRACE_S, abandon
from vllm_ssdkv.store.io.engines.protocol import U16, U32, U64, Batch, Op

_Native: TypeAlias = "_io.ThreadsEngine | _io.UringEngine"


def _release(native: _Native, memory: NDArray[np.uint8], timeout_s: float) -> bool:
    if native.close(timeout_s):
        return True
    abandon(memory)
    return False


class NativeEngine:
    """See :class:`vllm_ssdkv.store.io.engines.protocol.IoEngine`; any thread may call any method.

    The descriptors are duplicated: closing the caller's own does not disturb requests in flight,
    and the lock of a data file lasts until the engine is closed and its last I/O has ended.

    Args:
        native: Engine of the native module.
        memory: All of the arena. It stays mapped as long as a request may touch it, even if the
            arena is closed or forgotten by everybody else.

    Attributes:
        joined: Whether requests of a batch that are neighbours on a device go to it as one, up to
            512 KiB, wherever they are in memory. Each has its own result; the statistics count
            what the device gets. Not for memory that is registered: see ``uring_ring.hpp``.
    """

    joined = False

    def __init__(self, native: _Native, memory: NDArray[np.uint8]) -> None:
        self._native = native
        # For engines that are dropped, or alive when the interpreter ends, without close().
        self._finalizer = weakref.finalize(self, _release, native, memory, GRACE_S)
        self._memory: NDArray[np.uint8] | None = memory

    @property
    def native(self) -> _Native:
        """Engine for other native code, which must not use it after :meth:`close`."""
        return self._native

    def submit(self, op: Op, device: U16, offset: U64, length: U32, buffer: U64) -> Batch:
        """See the protocol."""
        return self._native.submit(
            op,
            np.ascontiguousarray(device),
            np.ascontiguousarray(offset),
            np.ascontiguousarray(length),
            np.ascontiguousarray(buffer),
            self.joined,
        )

    def statistics(self) -> Mapping[str, int]:
        """See the protocol."""
        return self._native.statistics()

    def close(self, timeout_s: float) -> bool:
        """See the protocol. What is still queued at the end of the time ends with ECANCELED."""
        if self._memory is None:
            return self._native.close(timeout_s)
        self._finalizer.detach()
        memory, self._memory = self._memory, None
        return _release(self._native, memory, timeout_s)
