"""Blocks found by the headers of their slots, for a store whose journal is lost or damaged.

A header names slot, key and epoch, so that all headers together say what the journal said of blocks
that were stored. Not of those that were given up: a slot keeps its header until it is written
again, and its block is found again, which is as good as ever. What must not be found again is left
out: headers from before a segment was striped anew, or from before the cache was reset
(:attr:`Segment.since`).
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vllm_ssdkv.base.errors import DeadlineError
from vllm_ssdkv.store.format.slot_geometry import I64
from vllm_ssdkv.store.format.slot_header_batch import HeaderFormat
from vllm_ssdkv.store.index.slot_index import EPOCH_COUNTER_BITS
from vllm_ssdkv.store.io.engines.protocol import U64, Op
from vllm_ssdkv.store.io.slot_io import ReadFrom, SlotIO
from vllm_ssdkv.store.io.slot_request import SlotRequest
from vllm_ssdkv.store.maintenance.offline_store import DataFile, StoredStore
from vllm_ssdkv.store.maintenance.slot_check import Entry
from vllm_ssdkv.store.maintenance.slot_reader import open_slots
from vllm_ssdkv.store.memory.arena import Arena

U8 = NDArray[np.uint8]

_BATCH_BYTES = 4 << 20
_IN_FLIGHT = 4


@dataclass(frozen=True, slots=True)
class Headers:
    """Content of all slots by the headers of one copy: epochs, int64 [n], 0 where a header is not
    right, and keys, uint8 [n, 32]."""

    epochs: I64
    keys: U8

    def same(self, epochs: I64, keys: U8) -> NDArray[np.bool_]:
        """Mask of slots, [n], that hold these blocks."""
        found: NDArray[np.bool_] = (self.epochs == epochs) & (self.keys == keys).all(axis=1)
        return found


def scan_headers(
    store: StoredStore,
    files: Sequence[Sequence[DataFile | None]],
    absent: NDArray[np.bool_],
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Entry:
    """The blocks of a store by its slots' headers, the oldest first. Blocks on I/O.

    A block counts when every rank has the header of one copy at least. Of a key in several slots
    the newest counts. Pages are not looked at.

    Args:
        store: The store.
        files: By rank the open data file of each device, None for a missing one.
        absent: Devices that are away, bool, [devices].
        progress: Hears how many headers are read, of how many.

    Raises:
        DeadlineError: a device does not answer.
    """
    placement = store.placement
    parts = [segment.all_slots() for segment in store.manifest.segments if segment.slots]
    slots = np.sort(np.concatenate([*parts, np.zeros(0, dtype=np.int64)]))
    copies = placement.most_copies
    out = tuple(np.flatnonzero(absent).tolist())
    total, done = len(slots) * copies * len(files), 0

    def count(headers: int) -> None:
        nonlocal done
        done += headers
        progress(done, total)

    progress(0, total)
    epochs = np.zeros(len(slots), dtype=np.int64)
    keys = np.zeros((len(slots), 0), dtype=np.uint8)
    others = Headers(epochs, keys)  # of the first rank, the older one of the two copies
    for rank, mine in enumerate(files):
        found = _of_rank(store, rank, mine, slots, out, count)
        if rank == 0:
            (epochs, keys), others = _newest_first(found)
            continue
        right = np.zeros(len(slots), dtype=np.bool_)
        second = np.zeros(len(slots), dtype=np.bool_)
        for headers in found:
            right |= headers.same(epochs, keys)
            second |= headers.same(others.epochs, others.keys)
        use = ~right & second & (others.epochs > 0)
        epochs = np.where(right, epochs, np.where(use, others.epochs, 0))
        keys[use] = others.keys[use]
    return _chosen(store, slots, epochs, keys)


def _newest_first(found: Sequence[Headers]) -> tuple[tuple[I64, U8], Headers]:
    """Newer header of each slot, and the other one."""
    first = found[0]
    if len(found) == 1:
        return (first.epochs.copy(), first.keys.copy()), Headers(
            np.zeros_like(first.epochs), first.keys
        )
    second = found[1]
    newer = second.epochs > first.epochs
    epochs = np.where(newer, second.epochs, first.epochs)
    keys = np.where(newer[:, None], second.keys, first.keys)
    rest = np.where(newer, first.epochs, second.epochs)
    return (epochs, keys), Headers(rest, np.where(newer[:, None], first.keys, second.keys))


def _chosen(store: StoredStore, slots: I64, epochs: I64, keys: U8) -> Entry:
    """Chosen entries: no void ones, each key once."""
    since = np.zeros(len(slots), dtype=np.int64)
    fresh = set(store.manifest.fresh)
    for segment in store.manifest.segments:
        begin, end = np.searchsorted(slots, [segment.first, segment.first + segment.slots])
        since[begin:end] = max(segment.since, 1)
        if segment.first in fresh:
            since[begin:end] = np.iinfo(np.int64).max
    which = np.flatnonzero(epochs >= since)
    which = which[np.argsort(epochs[which], kind="stable")]
    names = [row.tobytes() for row in keys[which]]
    last = {name: i for i, name in enumerate(names)}
    kept = np.array(sorted(last.values()), dtype=np.int64)
    return Entry(slots[which[kept]], epochs[which[kept]], [names[i] for i in kept.tolist()])


def _of_rank(
    store: StoredStore,
    rank: int,
    files: Sequence[DataFile | None],
    slots: I64,
    out: tuple[int, ...],
    count: Callable[[int], None],
) -> list[Headers]:
    """The headers of each copy."""
    geometry = store.manifest.geometries[rank]
    per = max(1, _BATCH_BYTES // geometry.header_bytes)
    found: list[Headers] = []
    with open_slots(store, rank, files, _IN_FLIGHT * per * geometry.header_bytes) as (mine, arena):
        for copy in range(store.placement.most_copies):
            reader = _Reader(mine, arena, per, ReadFrom(copy, out))
            epochs = np.zeros(len(slots), dtype=np.int64)
            keys = np.zeros((len(slots), 32), dtype=np.uint8)
            for part, right, of, names in reader.read(slots):
                epochs[part] = np.where(right, of, 0)
                keys[part] = names
                count(len(right))
            found.append(Headers(epochs, keys))
    return found


class _Reader:
    """Reads headers, several batches at a time."""

    def __init__(self, files: SlotIO, arena: Arena, per: int, source: ReadFrom):
        self._files, self._arena, self._per, self._source = files, arena, per, source
        self._format = HeaderFormat(files.geometry, files.fingerprint, files.rank)

    def read(self, slots: I64) -> Iterator[tuple[slice, NDArray[np.bool_], I64, U8]]:
        """Part after part of the slots: which part, which of its headers are right, epochs, keys.

        Raises:
            DeadlineError: a device does not answer.
        """
        reading: collections.deque[tuple[slice, U64, SlotRequest]] = collections.deque()
        size = self._files.geometry.header_bytes
        for number, begin in enumerate(range(0, len(slots), self._per)):
            if len(reading) == _IN_FLIGHT:
                yield self._finish(slots, *reading.popleft())
            part = slice(begin, min(begin + self._per, len(slots)))
            first = number % _IN_FLIGHT * self._per
            places = first + np.arange(part.stop - begin, dtype=np.uint64)
            places *= np.uint64(size)
            batch = self._files.submit(Op.READ, slots[part], 0, size, places, source=self._source)
            reading.append((part, places, batch))
        while reading:
            yield self._finish(slots, *reading.popleft())

    def _finish(
        self, slots: I64, part: slice, places: U64, batch: SlotRequest
    ) -> tuple[slice, NDArray[np.bool_], I64, U8]:
        arrived = batch.wait()
        if batch.held().any():
            raise DeadlineError(
                f"a read did not end within {self._files.deadline_s:g} s on "
                f"{', '.join(self._files.health.paths)}: check the drives"
            )
        size = self._files.geometry.header_bytes
        data = self._arena.view(int(places[0]), len(places) * size).reshape(len(places), size)
        right, epochs, keys = self._format.read(data, slots[part])
        return part, right & arrived, epochs, keys


def suspect_slots(store: StoredStore, entry: Entry) -> NDArray[np.bool_]:
    """Mask of blocks, [n], that may miss a part that they have one copy of: a device was away, or
    lost its file, in the opening in which they were stored."""
    placement = store.placement
    opening = entry.epochs >> EPOCH_COUNTER_BITS
    doubt = np.zeros(len(entry.slots), dtype=np.bool_)
    for device, known in enumerate(store.manifest.devices):
        begin, end = known.gap
        inside = np.flatnonzero((opening >= begin) & (opening < end))
        alone = np.arange(placement.devices) == device
        doubt[inside] |= placement.lost(alone, entry.slots[inside])
    return doubt
