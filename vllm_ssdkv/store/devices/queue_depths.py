"""Queue depth of each device, as far as it was asked through one rank's data files."""

from __future__ import annotations

import threading
from typing import Final

import numpy as np
from numpy.typing import NDArray

from vllm_ssdkv.store.io.engines.protocol import PENDING, U16, U32, Batch

_FEW: Final = 64


class QueueDepths:
    """Batches that have not ended. Thread-safe; never blocks."""

    def __init__(self, devices: int):
        """``devices``: numbers of devices are below this."""
        self._devices = devices
        self._lock = threading.Lock()
        self._batches: list[tuple[Batch, U16, U32]] = []
        self._many = _FEW
        """So many are looked through: those that have ended are dropped."""

    def add(self, batch: Batch, device: U16, length: U32) -> None:
        """A batch with these requests, [n] each, was submitted."""
        with self._lock:
            self._batches.append((batch, device, length))
            if len(self._batches) >= self._many:  # nobody has asked for long
                self._forget_ended()
                self._many = max(_FEW, 2 * len(self._batches))

    def pending(self) -> NDArray[np.int64]:
        """Bytes that each device was asked for and has not moved, [devices]. A device that is out
        of use may owe some for ever."""
        left = np.zeros(self._devices, dtype=np.int64)
        with self._lock:
            self._forget_ended()
            batches = list(self._batches)
        for batch, device, length in batches:
            late = batch.results() == PENDING
            left += np.bincount(device[late], length[late], self._devices).astype(np.int64)
        return left

    def _forget_ended(self) -> None:
        """Lock held."""
        self._batches = [entry for entry in self._batches if not entry[0].done()]
