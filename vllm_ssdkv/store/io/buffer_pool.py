"""Staging: equal pieces of the arena that data pass through on their way to or from a device."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from vllm_ssdkv.store.io.engines.protocol import U64
from vllm_ssdkv.store.io.slot_request import SlotRequest

_LOOK_S = 0.1
"""Interval at which a wait checks all reads again."""


class BufferPool:
    """Pieces by arena offset. One thread uses it; only :meth:`wait` blocks.

    A piece whose I/O missed its deadline is out of use until that I/O ends. Those of the same
    batch on other devices are not: one hung device costs its share of the pieces.
    """

    def __init__(self, offset: int, piece_bytes: int, pieces: int):
        """``offset`` of the first piece in the arena, and ``piece_bytes``: 4 KiB multiples;
        ``pieces`` is their number."""
        self._free = [offset + i * piece_bytes for i in range(pieces)]
        self.pieces = pieces
        self._lent: list[tuple[list[int], SlotRequest]] = []

    def usable(self) -> int:
        """Pieces that no overdue read holds: free ones, those taken, and those free soon."""
        self._collect()
        return self.pieces - sum(len(pieces) for pieces, batch in self._lent if batch.over(0.0))

    def free(self) -> int:
        """Pieces that can be taken now."""
        self._collect()
        return len(self._free)

    def wait(self, count: int) -> bool:
        """Check whether ``count`` pieces are free, after waiting for reads that are not overdue."""
        while True:
            self._collect()
            if count <= len(self._free):
                return True
            in_time = [batch for _, batch in self._lent if not batch.over(0.0)]
            if not in_time:
                return False
            in_time[0].over(_LOOK_S)

    def take(self, count: int) -> U64 | None:
        """Arena offsets of ``count`` free pieces, or None when there are fewer."""
        if count > len(self._free):
            self._collect()
        if count > len(self._free):
            return None
        taken, self._free = self._free[:count], self._free[count:]
        return np.array(taken, dtype=np.uint64)

    def give(self, pieces: U64) -> None:
        """Return pieces that nobody touches."""
        self._free.extend(pieces.tolist())

    def lend(self, pieces: U64, held: NDArray[np.bool_], batch: SlotRequest) -> None:
        """Return pieces, of which ``batch`` may still touch those that are ``held``."""
        self.give(pieces[~held])
        if held.any():
            self._lent.append((pieces[held].tolist(), batch))

    def _collect(self) -> None:
        for entry in [e for e in self._lent if e[1].ended()]:
            self._lent.remove(entry)
            self._free.extend(entry[0])
