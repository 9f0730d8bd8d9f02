"""Estimate of the slots that workers hold in DRAM, without asking them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable

import numpy as np
from numpy.typing import NDArray


class ResidentSlots:
    """The newest slots that were saved or loaded, as many as the workers have frames.

    A guess: frames are evicted in nearly this order, a few at a time. A wrong one costs time,
    never a result. Memory: about 100 bytes per frame.
    """

    _SHARE = 15 / 16
    """Share of the frames; those beyond are evicted in batches or are being written."""

    def __init__(self) -> None:
        self._slots: OrderedDict[int, None] = OrderedDict()
        self._limit = 0
        self.left: Callable[[int], None] = lambda slot: None
        """Called with each slot that is held no more."""

    def __contains__(self, slot: int) -> bool:
        """Check whether a slot is probably in DRAM."""
        return slot in self._slots

    def set_frames(self, frames: int) -> None:
        """Every worker has at least so many frames."""
        self._limit = int(frames * self._SHARE)
        self.touch(())

    def touch(self, slots: Iterable[int]) -> None:
        """These were saved or loaded now."""
        for slot in slots:
            self._slots[slot] = None
            self._slots.move_to_end(slot)
        while len(self._slots) > self._limit:
            self.left(self._slots.popitem(last=False)[0])

    def which(self, slots: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Mask of the slots, [n], that are probably in DRAM."""
        return np.array([slot in self._slots for slot in slots.tolist()], dtype=np.bool_)
