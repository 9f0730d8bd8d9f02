"""The engine that moves nothing: every request ends at once and well.

It measures what everything around the I/O costs, and lets code run where there is no storage.
Buffers keep what they held, so data read back is whatever lay there.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

import numpy as np

from vllm_ssdkv import _io
from vllm_ssdkv.store.io.engines.protocol import I32, U16, U32, U64, Op, zero_totals
from vllm_ssdkv.store.memory.arena import Arena


class _Ended:
    """A batch that was over when it began."""

    def __init__(self, results: I32) -> None:
        self._results = results

    def done(self) -> bool:
        return True

    def wait(self, timeout_s: float) -> bool:
        del timeout_s
        return True

    def results(self) -> I32:
        return self._results.copy()


class NoopEngine:
    """See ``IoEngine``; checks requests like the others."""

    name = "noop"

    def __init__(self, fds: Sequence[int], arena: Arena, queue_depth: int) -> None:
        del queue_depth
        self._devices = devices = len(fds)
        self._arena_bytes = arena.nbytes
        self._lock = threading.Lock()
        self._closed = False
        self._totals = zero_totals(devices)

    def submit(self, op: Op, device: U16, offset: U64, length: U32, buffer: U64) -> _Ended:
        """See the protocol."""
        device, length = np.ascontiguousarray(device), np.ascontiguousarray(length)
        offset, buffer = np.ascontiguousarray(offset), np.ascontiguousarray(buffer)
        _io.check_requests(device, offset, length, buffer, self._devices, self._arena_bytes)
        requests = np.bincount(device, minlength=self._devices)
        moved = np.bincount(device, weights=length, minlength=self._devices)
        direction = Op(op).name.lower()
        with self._lock:
            if self._closed:
                raise ValueError("the engine is closed")
            for index in np.flatnonzero(requests):
                self._totals[f"{direction}_submitted.{index}"] += int(requests[index])
                self._totals[f"{direction}_requests.{index}"] += int(requests[index])
                self._totals[f"{direction}_bytes.{index}"] += int(moved[index])
        return _Ended(length.astype(np.int32))

    def statistics(self) -> Mapping[str, int]:
        """See the protocol; the names are those of the threads engine."""
        with self._lock:
            return dict(self._totals)

    def close(self, timeout_s: float) -> bool:
        """See the protocol; there is never anything in flight."""
        del timeout_s
        self._closed = True
        return True
