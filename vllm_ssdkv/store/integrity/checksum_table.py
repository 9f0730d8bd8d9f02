"""Seals of slots that are being streamed or written, kept in memory.

A streamed read brings pages without their slot's header, so what they are checked by must be at
hand: 8 bytes per page (encrypted: 16, and 104 per slot), only for slots of running contexts.
"""

from __future__ import annotations

import math
import mmap
import threading
from typing import Final

import numpy as np
from numpy.typing import NDArray

from vllm_ssdkv.store.integrity.slot_codec import Digests

_NO_ROW = -1

_MAP_NORESERVE: Final = 0x4000
"""Flag of Linux for memory of which most is never written."""


class ChecksumTable:
    """Seals by slot. Thread-safe; never blocks on I/O.

    Native code reads them where they are (:meth:`arrays`), so they never move.
    """

    def __init__(self, slots: int, pages: int, opening_words: int, mark_words: int):
        """``slots`` in the store, ``pages`` per slot; the words are those of the ``SlotCodec``."""
        self._lock = threading.Lock()
        self._row_of = np.full(slots, _NO_ROW, dtype=np.int32)
        self._opening = _reserved(slots, opening_words)
        self._marks = _reserved(slots, pages, mark_words)
        self._rows = 0
        """Rows that have been used; those behind them take no memory."""
        self._free: list[int] = []
        self._held: dict[int, tuple[Digests, int]] = {}
        """Of each slot that is being written, the seals of what is written with it, and its place
        among them."""

    def put(self, slots: NDArray[np.int64], seals: Digests) -> None:
        """Remember the seals of distinct slots [n] until they are forgotten."""
        with self._lock:
            self._put(slots, seals)

    def _put(self, slots: NDArray[np.int64], seals: Digests) -> None:
        new = slots[self._row_of[slots] == _NO_ROW]
        if (more := len(new) - len(self._free)) > 0:
            self._free.extend(range(self._rows, self._rows + more))
            self._rows += more
        if len(new):
            self._row_of[new] = self._free[-len(new) :]
            del self._free[-len(new) :]
        rows = self._row_of[slots]
        self._opening[rows] = seals.opening
        self._marks[rows] = seals.marks

    def get(
        self, slots: NDArray[np.int64], first_page: int, pages: int
    ) -> tuple[Digests, NDArray[np.bool_]]:
        """Seals of n slots and the pages from ``first_page`` on, and which slots are known [n]."""
        with self._lock:
            rows = self._row_of[slots]
            marks = self._marks[rows, first_page : first_page + pages]
            return Digests(self._opening[rows], marks), rows != _NO_ROW

    def get_pages(
        self, slots: NDArray[np.int64], pages: NDArray[np.int64]
    ) -> tuple[Digests, NDArray[np.bool_]]:
        """Seals of one page of each of n slots (repeats allowed), and which slots are known [n]."""
        with self._lock:
            rows = self._row_of[slots]
            return Digests(self._opening[rows], self._marks[rows, pages][:, None]), rows != _NO_ROW

    def release(self, slots: NDArray[np.int64]) -> None:
        """No context refers to these slots any more. Those that are being written may still be
        adopted: the next context that refers to them finds them in DRAM, but with no header yet."""
        with self._lock:
            self._release(slots)

    def forget(self, slots: NDArray[np.int64]) -> None:
        """The content of these slots changes."""
        with self._lock:
            self._release(slots)
            for slot in slots.tolist():
                self._held.pop(slot, None)

    def _release(self, slots: NDArray[np.int64]) -> None:
        slots = np.unique(slots)
        rows = self._row_of[slots]
        self._free.extend(rows[rows != _NO_ROW].tolist())
        self._row_of[slots] = _NO_ROW

    # ---- slots that are being written ----

    def begin_write(self, slots: NDArray[np.int64], seals: Digests) -> None:
        """These slots are being written with these seals; who needs one may :meth:`adopt` it."""
        with self._lock:
            self._held.update((slot, (seals, i)) for i, slot in enumerate(slots.tolist()))

    def adopt(self, slots: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Mask of slots that are known, [n]; those that are being written are remembered from now
        on."""
        with self._lock:
            unknown = dict.fromkeys(slots[self._row_of[slots] == _NO_ROW].tolist())
            found = [slot for slot in unknown if slot in self._held]
            if found:
                parts = [self._held[slot] for slot in found]
                opening = np.stack([seals.opening[i] for seals, i in parts])
                marks = np.stack([seals.marks[i] for seals, i in parts])
                self._put(np.array(found, dtype=np.int64), Digests(opening, marks))
            result: NDArray[np.bool_] = self._row_of[slots] != _NO_ROW
            return result

    def end_write(self, slots: NDArray[np.int64]) -> None:
        """These slots are written, and their frames say so, or they failed."""
        with self._lock:
            for slot in slots.tolist():
                self._held.pop(slot, None)

    @property
    def arrays(
        self,
    ) -> tuple[NDArray[np.int32], NDArray[np.uint64], NDArray[np.uint64]]:
        """Row of each slot, -1 for none, openings and marks by row. Those of slots that running
        contexts have do not change."""
        return self._row_of, self._opening, self._marks

    @property
    def nbytes(self) -> int:
        """Memory held for slots that are not being written."""
        words = self._opening[: self._rows].size + self._marks[: self._rows].size
        return 8 * words + self._row_of.nbytes


def _reserved(*shape: int) -> NDArray[np.uint64]:
    """Zeros that take memory as they are written."""
    count = math.prod(shape)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    memory = mmap.mmap(-1, max(1, 8 * count), flags=flags)
    return np.frombuffer(memory, dtype=np.uint64, count=count).reshape(shape)
