"""Expected page checksums of slots that are being streamed, kept in memory.

A streamed read brings pages without their slot's header, so the checksums must be at hand: 8 bytes
per page, only for slots of running contexts.
"""

from __future__ import annotations

import threading

import numpy as np
from numpy.typing import NDArray

_NO_ROW = -1


class ChecksumTable:
    """Rows of page checksums by slot. Thread-safe; never blocks on I/O."""

    def __init__(self, slots: int, pages: int):
        """``slots`` in the store, ``pages`` per slot."""
        self._lock = threading.Lock()
        self._row_of = np.full(slots, _NO_ROW, dtype=np.int32)
        self._rows = np.zeros((64, pages), dtype=np.uint64)
        self._free = list(range(63, -1, -1))

    def put(self, slot: int, checksums: NDArray[np.uint64]) -> None:
        """Remember the checksums [pages] of a slot."""
        with self._lock:
            row = int(self._row_of[slot])
            if row == _NO_ROW:
                if not self._free:
                    grown = len(self._rows)
                    self._free.extend(range(2 * grown - 1, grown - 1, -1))
                    self._rows = np.concatenate([self._rows, np.zeros_like(self._rows)])
                row = self._free.pop()
                self._row_of[slot] = row
            self._rows[row] = checksums

    def get(
        self, slots: NDArray[np.int64], first_page: int, pages: int
    ) -> tuple[NDArray[np.uint64], NDArray[np.bool_]]:
        """Checksums [n, pages] from ``first_page`` on, and which slots are known [n]."""
        with self._lock:
            rows = self._row_of[slots]
            known = rows != _NO_ROW
            return self._rows[rows, first_page : first_page + pages], known

    def known(self, slots: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which slots have a row, [n]."""
        with self._lock:
            result: NDArray[np.bool_] = self._row_of[slots] != _NO_ROW
            return result

    def forget(self, slots: NDArray[np.int64]) -> None:
        """No context refers to these slots any more, or their content changes."""
        with self._lock:
            slots = np.unique(slots)
            rows = self._row_of[slots]
            self._free.extend(rows[rows != _NO_ROW].tolist())
            self._row_of[slots] = _NO_ROW

    @property
    def nbytes(self) -> int:
        """Memory held."""
        return int(self._rows.nbytes + self._row_of.nbytes)
