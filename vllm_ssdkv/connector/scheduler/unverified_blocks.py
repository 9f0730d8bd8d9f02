"""Blocks that this run stored since it was last shown whose they are: by a verified hit, or by a
digest of the weights."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


class UnverifiedBlocks:
    """Marks on slots. If the next check fails, nobody may find these blocks later.

    A byte per slot. Used by the scheduler's thread.

    Example:
        >>> blocks = UnverifiedBlocks(num_slots=4)
        >>> blocks.add(2)
        >>> blocks.slots().tolist()
        [2]
    """

    def __init__(self, num_slots: int):
        self._marks = np.zeros(num_slots, dtype=np.bool_)

    def add(self, slot: int) -> None:
        """A slot has a block that was computed just now."""
        self._marks[slot] = True

    def rewrite(self, old: int, new: int) -> None:
        """A block gets another slot."""
        self._marks[new] = self._marks[old]

    def clear(self) -> None:
        """The check was good."""
        self._marks[:] = False

    def slots(self) -> NDArray[np.int64]:
        """Marked slots, ascending; what they held may have been evicted since."""
        return np.flatnonzero(self._marks)
