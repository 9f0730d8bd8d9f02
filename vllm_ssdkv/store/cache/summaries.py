"""Summaries of slots, kept in DRAM: what a selector looks at instead of the pages themselves.

In a slot without channel pages the summary is a record of each page: its *bounds*, the smallest and
the largest value of each of K's channels (Quest, Tang et al. 2024), or their mean and variance,
with which there may be the sum of V; or K of each head in a few bits (*codes*). In one with channel
pages it is the *sum of V* over the block's tokens (SparQ, Ribar et al. 2024, step 5), and a table
may keep the slot's K, channel-major, too. Records that only kernels read may lie in memory of the
device that scores.
``docs/format.md`` says where all of them lie in a slot. Here they lie without padding, so that one
address per slot and layer is all that a kernel needs.
"""

from __future__ import annotations

import threading
from typing import Final

import numpy as np
from numpy.typing import NDArray

from vllm_ssdkv import _io
from vllm_ssdkv.store.format.slot_geometry import SlotGeometry
from vllm_ssdkv.store.memory.arena import Arena
from vllm_ssdkv.store.memory.device_memory import DeviceMemory
from vllm_ssdkv.store.memory.summary_rows import (
    SummaryRows,
    channel_bytes,
    channels_offset,
    row_bytes,
    summary_bytes,
)

NO_ROW = -1

_FEW: Final = 16
"""Rows that are looked for one by one, as each block of a decoding request is: partitioning takes
as long as some hundred minima where most rows are empty."""


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
        *,
        channels: bool,
        records_on_device: bool = False,
    ):
        """``rows`` of :func:`row_bytes` each, in the arena from ``offset`` (bytes, a multiple of
        64) on; ``slots`` of the store. ``channels``: rows have the slots' channel pages, too.
        ``records_on_device``: nothing lies in the arena, all in what :meth:`keep_on_device` is
        given. The host must need nothing of it: :func:`only_kernels_read`."""
        self._geometry = geometry
        self.holds_channels = channels and geometry.channel_pages > 0
        """True if channel-major K is kept."""
        self._device: DeviceMemory | None = None
        self._records_on_device = records_on_device
        self._heads = geometry.heads
        self._record = geometry.payload_bytes // page_tokens
        self._row_bytes = row_bytes(geometry, page_tokens, channels=channels)
        self.layer_bytes = summary_bytes(geometry, page_tokens) // geometry.layers
        """Bytes from a layer's records in a row to those of the next layer."""
        self._channels = channels_offset(geometry, page_tokens)
        """Where channel-major K begins in a row."""
        self._channel_bytes = channel_bytes(geometry)
        self._base = arena.address + offset
        held = 0 if records_on_device else rows
        self._memory = arena.view(offset, held * self._row_bytes).reshape(held, self._row_bytes)
        # Of each page that is copied to a row: its number, its place in the row, and its bytes.
        number, place, size = [], [], []
        payload = geometry.payload_bytes
        parts = []
        if not records_on_device:
            size_in_all = summary_bytes(geometry, page_tokens)
            parts.append((geometry.kv_pages, geometry.summary_pages, 0, size_in_all))
        if self.holds_channels:
            parts += [
                (
                    geometry.first_channel_page(layer),
                    geometry.channel_pages,
                    self._channels + layer * self._channel_bytes,
                    self._channel_bytes,
                )
                for layer in range(geometry.layers)
            ]
        for first, count, begin, nbytes in parts:
            number += [first + i for i in range(count)]
            place += [begin + i * payload for i in range(count)]
            size += [min(payload, nbytes - i * payload) for i in range(count)]
        self.pages = np.array(number, dtype=np.int64)
        """Numbers of the pages of a slot that a row is made of, those last that lie in memory of a
        device."""
        self._place = np.array(place, dtype=np.uint64)
        self._size = np.array(size, dtype=np.uint64)
        self._lock = threading.Lock()
        self.rows = rows
        self._row_of = np.full(slots, NO_ROW, dtype=np.int32)
        self._reserved = np.full(slots, NO_ROW, dtype=np.int32)
        """Rows that are being written, pinned, by the slot that they are for."""
        self._slot_of = np.full(rows, -1, dtype=np.int64)
        self._pins = np.zeros(rows, dtype=np.int32)
        self._closed = np.zeros(rows, dtype=np.bool_)
        self.open_rows = rows
        """Rows that are not closed."""
        self._used = np.zeros(rows, dtype=np.int64)
        """When each row was used last, in calls; 0: it holds nothing."""
        self._clock = 0

    @property
    def device_places(self) -> int:
        """Pages of all rows that :meth:`keep_on_device` needs memory for."""
        return self.rows * self._geometry.summary_pages if self._records_on_device else 0

    def keep_on_device(self, memory: DeviceMemory) -> None:
        """The records lie in this memory of :attr:`device_places`, for the table's whole life; it
        must be empty. Copies have ended when ``memory.copy`` returns.

        Raises:
            ValueError: rows have all that slots have, or places are too few.
        """
        places = self.device_places
        if not 0 < places <= memory.places:
            raise ValueError(f"{memory.places} places for summaries, where {places} are needed")
        self.pages = np.arange(self._geometry.kv_pages, self._geometry.pages, dtype=np.int64)
        self._device = memory

    def reserve(self, slots: NDArray[np.int64]) -> SummaryRows:
        """Rows for the caller to write the summaries of distinct slots [n] to, as far as there is
        room. They are found after :meth:`keep`; :meth:`forget` ends that, too."""
        with self._lock:
            self._clock += 1
            self._release(slots)
            rows = self._oldest(len(slots)).astype(np.int32)
            self._disown(rows)
            self._pins[rows] += 1
            self._reserved[slots[: len(rows)]] = rows
        address = np.zeros(len(slots), dtype=np.uint64)
        of = self._device_address if self._records_on_device else self._address
        address[: len(rows)] = of(rows)
        return SummaryRows(address, self._channels if self.holds_channels else -1)

    def keep(self, slots: NDArray[np.int64]) -> None:
        """The reserved rows of these slots are written."""
        with self._lock:
            slots = slots[self._reserved[slots] != NO_ROW]
            rows = self._reserved[slots]
            self._drop_rows(slots)
            self._release(slots)
            self._row_of[slots], self._slot_of[rows], self._used[rows] = rows, slots, self._clock

    def _release(self, slots: NDArray[np.int64]) -> None:
        """Give back what is reserved for these slots. Lock held."""
        rows = self._reserved[slots]
        rows = rows[rows != NO_ROW]
        self._pins[rows] -= 1
        self._used[rows] = 0
        self._reserved[slots] = NO_ROW

    def _disown(self, rows: NDArray[np.int32] | NDArray[np.intp]) -> None:
        """Forget what these rows hold. Lock held."""
        before = self._slot_of[rows]
        self._row_of[before[before >= 0]] = NO_ROW
        self._slot_of[rows] = -1

    def put(self, slots: NDArray[np.int64], pages: NDArray[np.uint64]) -> None:
        """Take in the summaries of distinct slots [n] from the absolute addresses of their
        :attr:`pages`, [n, pages]. Those for which there is no room are left out."""
        with self._lock:
            rows = self._take(slots)
            here = rows != NO_ROW
            self._copy(rows[here], pages[here])

    def put_tails(self, slots: NDArray[np.int64], tails: NDArray[np.uint64]) -> None:
        """:meth:`put` of distinct slots, [n], from the absolute addresses of their tails, [n]."""
        steps = (self.pages - self._geometry.kv_pages) * self._geometry.page_bytes
        self.put(slots, tails[:, None] + steps.astype(np.uint64)[None, :])

    def _take(self, slots: NDArray[np.int64]) -> NDArray[np.int32]:
        """A row for each slot, or ``NO_ROW``. Lock held."""
        rows = self._row_of[slots]
        new = np.flatnonzero(rows == NO_ROW)
        self._used[rows[rows != NO_ROW]] = self._clock = self._clock + 1
        free = self._oldest(len(new))
        new = new[: len(free)]
        self._disown(free)
        self._slot_of[free] = slots[new]
        self._row_of[slots[new]] = free
        self._used[free] = self._clock
        rows[new] = free
        # A slot that was known may have lost its row to one of these.
        rows[self._row_of[slots] != rows] = NO_ROW
        return rows

    def _oldest(self, count: int) -> NDArray[np.intp]:
        """So many rows that may be taken, or fewer, those that were used longest ago. Lock held."""
        free = np.flatnonzero((self._pins == 0) & ~self._closed)
        if count >= len(free):
            return free
        used = self._used[free]
        if count > _FEW:
            return free[np.argpartition(used, count)[:count]]
        places = np.empty(count, dtype=np.intp)
        for i in range(count):
            places[i] = used.argmin()
            used[places[i]] = self._clock + 1
        return free[places]

    def _copy(self, rows: NDArray[np.int32], pages: NDArray[np.uint64]) -> None:
        own = len(self._place)
        if own:
            target = self._address(rows)[:, None] + self._place[None, :]
            sizes = np.broadcast_to(self._size, target.shape)
            _io.copy(
                np.ascontiguousarray(pages[:, :own].ravel()),
                target.ravel(),
                np.ascontiguousarray(sizes.ravel()),
            )
        if self._device is not None and len(rows):
            count = pages.shape[1] - own
            places = rows[:, None] * np.int32(count) + np.arange(count, dtype=np.int32)[None, :]
            self._device.copy(np.ascontiguousarray(pages[:, own:].ravel()), places.ravel())

    def pin(self, slots: NDArray[np.int64]) -> NDArray[np.int32]:
        """Row of each slot, [n], or ``NO_ROW``; rows stay until :meth:`unpin`."""
        with self._lock:
            self._clock += 1
            return _io.pin_rows(slots, self._row_of, self._pins, self._used, self._clock)

    def unpin(self, rows: NDArray[np.int32]) -> None:
        """End the use of pinned rows; ``NO_ROW`` entries are skipped."""
        with self._lock:
            _io.unpin_rows(rows, self._pins)

    def address(self, rows: NDArray[np.int32], layer: int) -> NDArray[np.uint64]:
        """Absolute address of a layer's records in each row, ``[heads, groups, 2, head_size]``."""
        if self._records_on_device:
            return self._device_address(rows) + np.uint64(layer * self.layer_bytes)
        return self._address(rows) + np.uint64(layer * self.layer_bytes)

    def channels(self, rows: NDArray[np.int32], layer: int) -> NDArray[np.uint64]:
        """Absolute address of a layer's K in each row, ``[heads, head_size, block_tokens]``."""
        return self._address(rows) + np.uint64(self._channels + layer * self._channel_bytes)

    def values(self, rows: NDArray[np.int32], layer: int, head_size: int) -> NDArray[np.float32]:
        """A layer's sum of V over the tokens of each row, a copy, [n, heads, head_size]."""
        begin = layer * self.layer_bytes
        if not self._geometry.channel_pages:  # behind the records of the layer's pages
            begin += self._geometry.pages_per_layer * self._record
        records = self._memory[rows, begin : begin + self._heads * self._record]
        used = records.reshape(len(rows), self._heads, self._record)[..., : 4 * head_size]
        return np.ascontiguousarray(used).view(np.float32)

    def _device_address(self, rows: NDArray[np.int32]) -> NDArray[np.uint64]:
        """Absolute address of each row on the device."""
        if self._device is None:
            raise ValueError("summaries lie on a device, of which there is no memory yet")
        size = self._geometry.summary_pages * self._geometry.payload_bytes
        return np.uint64(self._device.address) + rows.astype(np.uint64) * np.uint64(size)

    def _address(self, rows: NDArray[np.int32]) -> NDArray[np.uint64]:
        return np.uint64(self._base) + rows.astype(np.uint64) * np.uint64(self._row_bytes)

    def forget(self, slots: NDArray[np.int64]) -> None:
        """The content of these slots changes."""
        with self._lock:
            self._release(slots)
            self._drop_rows(slots)

    def _drop_rows(self, slots: NDArray[np.int64]) -> None:
        """Lock held."""
        rows = self._row_of[slots]
        rows = rows[rows != NO_ROW]
        self._slot_of[rows] = -1
        self._used[rows] = 0
        self._row_of[slots] = NO_ROW

    # ---- lending their memory ----

    def held_in(self, firsts: NDArray[np.int32], length: int) -> NDArray[np.int32]:
        """Rows that hold something, of the ``length`` from each of these on, [n]; -1 where one is
        pinned."""
        rows = firsts[:, None] + np.arange(length, dtype=np.int32)[None, :]
        with self._lock:
            held: NDArray[np.int32] = (self._slot_of[rows] >= 0).sum(axis=1, dtype=np.int32)
            held[(self._pins[rows] > 0).any(axis=1)] = -1
        return held

    def close(self, firsts: NDArray[np.int32], length: int) -> NDArray[np.bool_]:
        """Take the ``length`` rows from each of these on out of use, where none of them is pinned;
        where that was so, [n]. What was used last of all there is stays, in other rows."""
        rows = firsts[:, None] + np.arange(length, dtype=np.int32)[None, :]
        with self._lock:
            free: NDArray[np.bool_] = ~(self._pins[rows] > 0).any(axis=1)
            closed = np.unique(rows[free])
            closed = closed[~self._closed[closed]]
            self._closed[closed] = True
            self.open_rows -= len(closed)
            self._move(closed)
            return free

    def _move(self, rows: NDArray[np.int32]) -> None:
        """Move the content of these closed rows to where older ones were, or forget it. Lock
        held."""
        held = rows[self._slot_of[rows] >= 0]
        held = held[np.argsort(-self._used[held], kind="stable")]
        place = self._oldest(len(held))
        place = place[np.argsort(self._used[place], kind="stable")]
        # Each is newer than the next, and each place older than the next one.
        count = int(np.count_nonzero(self._used[held[: len(place)]] > self._used[place]))
        place, kept = place[:count], held[:count]
        before = self._slot_of[place]
        self._row_of[before[before >= 0]] = NO_ROW
        self._row_of[self._slot_of[held[count:]]] = NO_ROW
        self._memory[place] = self._memory[kept]
        self._slot_of[place] = self._slot_of[kept]
        self._row_of[self._slot_of[kept]] = place
        self._used[place] = self._used[kept]
        self._slot_of[rows] = -1
        self._used[rows] = 0

    def open(self, firsts: NDArray[np.int32], length: int) -> None:
        """Closed rows may be used again; they hold nothing."""
        rows = firsts[:, None] + np.arange(length, dtype=np.int32)[None, :]
        with self._lock:
            self._closed[rows] = False
            self.open_rows += rows.size

    # ---- counts ----

    def held(self) -> int:
        """Rows that hold something."""
        with self._lock:
            return int((self._slot_of >= 0).sum())

    def pinned(self) -> int:
        """Rows that somebody has pinned."""
        with self._lock:
            return int((self._pins > 0).sum())
