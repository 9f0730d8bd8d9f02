"""Seals of slots that are being streamed or written, kept in memory.

A streamed read brings pages without their slot's header, so what they are checked by must be at
hand: 8 bytes per page (encrypted: 16, and 104 per slot), only for slots of running contexts.
"""

from __future__ import annotations

import threading

import numpy as np
from numpy.typing import NDArray

from vllm_ssdkv.store.integrity.slot_codec import Digests

_NO_ROW = -1


class ChecksumTable:
    """Seals by slot. Thread-safe; never blocks on I/O."""

    def __init__(self, slots: int, pages: int, opening_words: int, mark_words: int):
        """``slots`` in the store, ``pages`` per slot; the words are those of the ``SlotCodec``."""
        self._lock = threading.Lock()
        self._row_of = np.full(slots, _NO_ROW, dtype=np.int32)
        self._opening = np.zeros((64, opening_words), dtype=np.uint64)
        self._marks = np.zeros((64, pages, mark_words), dtype=np.uint64)
        self._free = list(range(63, -1, -1))
        self._held: dict[int, tuple[Digests, int]] = {}
        """Of each slot that is being written, the seals of what is written with it, and its place
        among them."""

    def put(self, slots: NDArray[np.int64], seals: Digests) -> None:
        """Remember the seals of distinct slots [n] until they are forgotten."""
        with self._lock:
            self._put(slots, seals)

    def _put(self, slots: NDArray[np.int64], seals: Digests) -> None:
        new = slots[self._row_of[slots] == _NO_ROW]
        while len(new) > len(self._free):
            grown = len(self._marks)
            self._free.extend(range(2 * grown - 1, grown - 1, -1))
            self._opening = np.concatenate([self._opening, np.zeros_like(self._opening)])
            self._marks = np.concatenate([self._marks, np.zeros_like(self._marks)])
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
    def nbytes(self) -> int:
        """Memory held for slots that are not being written."""
        return int(self._opening.nbytes + self._marks.nbytes + self._row_of.nbytes)
