"""Summaries of slots, kept in DRAM: what a selector looks at instead of the pages themselves.

The summary of a page is its *bounds*: the smallest and the largest value of each of K's channels
(Quest, Tang et al. 2024; ``docs/format.md`` says where they lie in a slot). Here they lie without
padding, so that one address per slot and layer is all that a kernel needs.
"""

from __future__ import annotations

import threading

import numpy as np
from numpy.typing import NDArray

from vllm_ssdkv import _io
from vllm_ssdkv.store.arena import Arena
from vllm_ssdkv.store.layout import SlotGeometry, round_up

NO_ROW = -1
_ALIGN = 64


def summary_pages(kv_pages: int, page_tokens: int) -> int:
    """Pages that hold the summaries of so many pages of KV."""
    return -(-kv_pages // page_tokens)


def summary_bytes(geometry: SlotGeometry, page_tokens: int) -> int:
    """Bytes of the summaries of one slot, without padding."""
    return geometry.kv_pages * (geometry.payload_bytes // page_tokens)


def row_bytes(geometry: SlotGeometry, page_tokens: int) -> int:
    """Bytes that one slot takes in a table."""
    return round_up(summary_bytes(geometry, page_tokens), _ALIGN)


class SummaryTable:
    """Summaries by slot, least recently used first out. Thread-safe; never blocks on I/O.

    A row that somebody has pinned stays as it is, even when its slot is forgotten.
    """

    def __init__(
        self,
        arena: Arena,
        offset: int,
        geometry: SlotGeometry,
        page_tokens: int,
        rows: int,
        slots: int,
    ):
        """``rows`` of :func:`row_bytes` each, in the arena from ``offset`` (bytes, a multiple of
        64) on; ``slots`` of the store."""
        self._geometry = geometry
        self._used_bytes = summary_bytes(geometry, page_tokens)
        self._row_bytes = row_bytes(geometry, page_tokens)
        self._layer_bytes = self._used_bytes // geometry.layers
        self._base = arena.address + offset
        self._lock = threading.Lock()
        self.rows = rows
        self._row_of = np.full(slots, NO_ROW, dtype=np.int32)
        self._slot_of = np.full(rows, -1, dtype=np.int64)
        self._pins = np.zeros(rows, dtype=np.int32)
        self._used = np.zeros(rows, dtype=np.int64)
        """When each row was used last, in calls; 0: it holds nothing."""
        self._clock = 0

    def put(self, slots: NDArray[np.int64], pages: NDArray[np.uint64]) -> None:
        """Take in the summaries of distinct slots [n] from their summary pages, whose absolute
        addresses are ``pages`` [n, summary_pages]. Those for which there is no room are left out.
        """
        with self._lock:
            rows = self._take(slots)
            here = rows != NO_ROW
            self._copy(rows[here], pages[here])

    def _take(self, slots: NDArray[np.int64]) -> NDArray[np.int32]:
        """A row for each slot, or ``NO_ROW``. Lock held."""
        rows = self._row_of[slots]
        new = np.flatnonzero(rows == NO_ROW)
        self._used[rows[rows != NO_ROW]] = self._clock = self._clock + 1
        free = np.flatnonzero(self._pins == 0)
        count = min(len(new), len(free))
        if count < len(free):
            free = free[np.argpartition(self._used[free], count)[:count]]
        new = new[:count]
        before = self._slot_of[free]
        self._row_of[before[before >= 0]] = NO_ROW
        self._slot_of[free] = slots[new]
        self._row_of[slots[new]] = free
        self._used[free] = self._clock
        rows[new] = free
        # A slot that was known may have lost its row to one of these.
        rows[self._row_of[slots] != rows] = NO_ROW
        return rows

    def _copy(self, rows: NDArray[np.int32], pages: NDArray[np.uint64]) -> None:
        payload = self._geometry.payload_bytes
        begin = np.arange(pages.shape[1], dtype=np.uint64) * np.uint64(payload)
        size = np.minimum(np.uint64(payload), np.uint64(self._used_bytes) - begin)
        target = self._address(rows)[:, None] + begin[None, :]
        sizes = np.broadcast_to(size, target.shape)
        _io.copy(
            np.ascontiguousarray(pages.ravel()), target.ravel(), np.ascontiguousarray(sizes.ravel())
        )

    def pin(self, slots: NDArray[np.int64]) -> NDArray[np.int32]:
        """Row of each slot, [n], or ``NO_ROW``; rows stay until :meth:`unpin`."""
        with self._lock:
            rows = self._row_of[slots]
            here = rows[rows != NO_ROW]
            np.add.at(self._pins, here, 1)
            self._used[here] = self._clock = self._clock + 1
            return rows

    def unpin(self, rows: NDArray[np.int32]) -> None:
        """End the use of pinned rows; ``NO_ROW`` entries are skipped."""
        with self._lock:
            np.subtract.at(self._pins, rows[rows != NO_ROW], 1)

    def address(self, rows: NDArray[np.int32], layer: int) -> NDArray[np.uint64]:
        """Absolute address of a layer's bounds in each row, ``[heads, groups, 2, head_size]``."""
        return self._address(rows) + np.uint64(layer * self._layer_bytes)

    def _address(self, rows: NDArray[np.int32]) -> NDArray[np.uint64]:
        return np.uint64(self._base) + rows.astype(np.uint64) * np.uint64(self._row_bytes)

    def forget(self, slots: NDArray[np.int64]) -> None:
        """The content of these slots changes."""
        with self._lock:
            rows = self._row_of[slots]
            rows = rows[rows != NO_ROW]
            self._slot_of[rows] = -1
            self._used[rows] = 0
            self._row_of[slots] = NO_ROW

    def held(self) -> int:
        """Rows that hold something."""
        with self._lock:
            return int((self._slot_of >= 0).sum())
