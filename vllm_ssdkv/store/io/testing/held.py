"""Batches of the faulty twin: parts that start late, made-up results, bytes that change."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from vllm_ssdkv.store.io.engines.protocol import I32, PENDING, U16, U32, U64, Batch, IoEngine, Op
from vllm_ssdkv.store.io.testing.faults import RuleState

Corruption: TypeAlias = tuple[int, int, int]
"""Index of the request, byte of the arena, bits to flip."""


@dataclass(frozen=True, slots=True)
class Requests:
    """Requests of one batch as parallel arrays, shape [n] each."""

    op: Op
    device: U16
    offset: U64
    length: U32
    buffer: U64

    def arrays(self) -> tuple[U16, U64, U32, U64]:
        """Arrays in the order that engines take them."""
        return self.device, self.offset, self.length, self.buffer

    def take(self, which: NDArray[np.int64]) -> Requests:
        """Requests at the given positions."""
        arrays = self.device[which], self.offset[which], self.length[which], self.buffer[which]
        return Requests(self.op, *arrays)


@dataclass(slots=True)
class Hold:
    """Reason that keeps requests from starting. The engine may bring ``until`` forward."""

    state: RuleState
    until: float
    """Time of the monotonic clock; infinite while only taking the rule away helps."""


class Part:
    """Requests of a batch that start together. ``start`` is called once, by any thread."""

    def __init__(self, indices: NDArray[np.int64], requests: Requests, hold: Hold | None) -> None:
        self.indices = indices
        """Their positions in the whole batch."""
        self.hold = hold
        self._requests = requests
        self._results: Batch | I32 | None = None
        self._started = threading.Event()

    def start(self, inner: IoEngine) -> None:
        """Hand the requests to ``inner``; if that is closed by now, they end with ECANCELED."""
        try:
            self._results = inner.submit(self._requests.op, *self._requests.arrays())
        except ValueError:
            self._results = np.full(len(self.indices), -errno.ECANCELED, dtype=np.int32)
        self._started.set()

    def wait(self, timeout_s: float) -> bool:
        """Check whether all have ended, at the latest after ``timeout_s``."""
        deadline = time.monotonic() + timeout_s
        if not self._started.wait(min(max(timeout_s, 0.0), threading.TIMEOUT_MAX)):
            return False
        if isinstance(self._results, np.ndarray) or self._results is None:
            return True
        return self._results.wait(deadline - time.monotonic())

    def results(self) -> I32 | None:
        """As of a batch; None before the start."""
        if self._results is None or isinstance(self._results, np.ndarray):
            return self._results
        return self._results.results()


class FaultyBatch:
    """See :class:`vllm_ssdkv.store.io.engines.protocol.Batch`.

    Bytes are corrupted before anybody is told that their request has ended.
    """

    def __init__(
        self,
        results: I32,
        parts: Sequence[Part],
        corruptions: Sequence[Corruption],
        memory: NDArray[np.uint8],
    ) -> None:
        self._results = results
        self._parts = parts
        self._corruptions = corruptions
        self._memory = memory
        self._lock = threading.Lock()
        self._finished = False

    def done(self) -> bool:
        return self.wait(0.0)

    def wait(self, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        for part in self._parts:
            if not part.wait(deadline - time.monotonic()):
                return False
        self._finish()
        return True

    def results(self) -> I32:
        if self.done():
            return self._results.copy()
        results = self._merged()
        for index, _, _ in self._corruptions:
            results[index] = PENDING
        return results

    def _merged(self) -> I32:
        results = self._results.copy()
        for part in self._parts:
            known = part.results()
            if known is not None:
                results[part.indices] = known
        return results

    def _finish(self) -> None:
        with self._lock:
            if self._finished:
                return
            self._results = self._merged()
            for index, position, bits in self._corruptions:
                if self._results[index] > 0:
                    self._memory[position] ^= np.uint8(bits)
            self._finished = True
