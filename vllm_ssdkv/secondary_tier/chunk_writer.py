"""Copies of chunks from vLLM's pool to the store's frames, in a thread: the scheduler only asks."""

from __future__ import annotations

import collections
import itertools
import queue
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from vllm_ssdkv import _io
from vllm_ssdkv.base.metrics import Counters
from vllm_ssdkv.store.io.thread_errors import ThreadErrors
from vllm_ssdkv.store.tier import FrameMemory, Pairs

_LOOK_S: Final = 0.002
"""Time between two looks for a frame."""

_AT_ONCE: Final = 16
"""Chunks that are copied together, at most: the drives begin to write before all are copied."""


@dataclass(frozen=True, slots=True)
class ChunkWrite:
    """A chunk of vLLM's pool, and the slot that gets it."""

    slot: int
    epoch: int
    key: bytes
    chunk: int


@dataclass(frozen=True, slots=True)
class Pool:
    """Rows of vLLM's pool in memory, one for each chunk."""

    address: int
    row_bytes: int

    def addresses(self, chunks: Sequence[int]) -> NDArray[np.uint64]:
        """Absolute address of each chunk, [n]."""
        return np.array([self.address + self.row_bytes * c for c in chunks], dtype=np.uint64)

    def fill(self, sources: NDArray[np.uint64], blocks: NDArray[np.int64]) -> None:
        """Copy chunks from these addresses, [n], to rows, which loads know as blocks, [n]: row i is
        block i + 1, since block 0 stands for none."""
        _io.copy(sources, self.addresses((blocks - 1).tolist()), self.row_bytes)


class SaveStore(Protocol):
    """As much of a store as :class:`ChunkWriter` needs. Methods mean what those of TieredStore
    do."""

    @property
    def save_frames(self) -> FrameMemory:
        """Frames that :meth:`reserve_frames` gives."""

    def reserve_frames(self, slots: NDArray[np.int64], *, wait: bool) -> NDArray[np.int32]:
        """Frames for the first of these slots, [k], k <= n."""

    def flush(
        self, slots: NDArray[np.int64], epochs: NDArray[np.int64], keys: Sequence[bytes]
    ) -> None:
        """Write these slots in the background."""

    def abandon(self, slots: NDArray[np.int64]) -> None:
        """Give the frames of these slots back."""


class ChunkWriter:
    """Fills frames with chunks and has them written. One thread calls the methods.

    A chunk is copied as soon as there is a frame for it. All that wait fail at an error that
    nothing foresaw, and when frames stand still for as long as an I/O request may take. From then
    on a chunk without a frame fails at once, until there is a frame again.
    """

    def __init__(
        self, store: SaveStore, pool: Pool, offset: int, deadline_s: float, counters: Counters
    ):
        """``offset``: of the chunk in a frame."""
        self._store, self._pool, self._offset = store, pool, offset
        self._deadline_s = deadline_s
        self._errors = ThreadErrors(counters, "writer")
        self._orders: queue.SimpleQueue[Sequence[ChunkWrite] | None] = queue.SimpleQueue()
        self._failed: queue.SimpleQueue[ChunkWrite] = queue.SimpleQueue()
        self._waiting: collections.OrderedDict[int, ChunkWrite] = collections.OrderedDict()
        """Chunks without a frame, by slot. Who orders a slot that waits has claimed it anew, in
        another session with a node: nobody wants what it was to get before."""
        self._moved = time.monotonic()
        self._stuck = False
        """Frames have stood still for the deadline, and still do."""
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="ssdkv-chunks", daemon=True)
        self._thread.start()

    def write(self, chunks: Sequence[ChunkWrite]) -> None:
        """Copy chunks and write them, in the background."""
        self._orders.put(chunks)

    def take_failed(self) -> Pairs:
        """(slot, epoch) pairs of chunks that got no frame since the last call."""
        found: Pairs = []
        while True:
            try:
                write = self._failed.get_nowait()
            except queue.Empty:
                return found
            found.append((write.slot, write.epoch))

    def close(self) -> None:
        """End the thread; chunks without a frame fail."""
        self._stopping = True
        self._orders.put(None)
        self._thread.join()

    def _run(self) -> None:
        while not self._stopping:
            done = False
            with self._errors.swallowed("chunks are not stored"):
                self._take_orders()
                self._settle(self._copy(list(itertools.islice(self._waiting.values(), _AT_ONCE))))
                done = True
            if not done:
                self._give_up()
        self._give_up()

    def _take_orders(self) -> None:
        """Wait for orders, where there are none; take all that are there."""
        timeout = _LOOK_S if self._waiting else None
        try:
            while True:
                idle = not self._waiting
                order = self._orders.get(timeout=timeout)
                if idle:
                    self._moved = time.monotonic()
                for write in order or ():
                    self._waiting.pop(write.slot, None)
                    self._waiting[write.slot] = write
                timeout = 0.0
                if self._stopping:
                    return
                if self._orders.empty():
                    return
        except queue.Empty:
            return

    def _copy(self, taken: Sequence[ChunkWrite]) -> int:
        """Copy the first of these chunks, as many as there are frames; how many."""
        if not taken:
            return 0
        slots = np.array([write.slot for write in taken], dtype=np.int64)
        try:
            frames = self._store.reserve_frames(slots, wait=False)
            taken = taken[: len(frames)]
            if not taken:
                return 0
            source = self._pool.addresses([write.chunk for write in taken])
            target = self._store.save_frames.address(frames) + np.uint64(self._offset)
            _io.copy(source, target, self._pool.row_bytes)
            epochs = np.array([write.epoch for write in taken], dtype=np.int64)
            self._store.flush(slots[: len(taken)], epochs, [write.key for write in taken])
        except Exception:
            self._store.abandon(slots)
            raise
        return len(taken)

    def _settle(self, done: int) -> None:
        """Forget the chunks that are on their way, or all when they have waited for too long."""
        for _ in range(done):
            self._waiting.popitem(last=False)
        now = time.monotonic()
        if done:
            self._moved, self._stuck = now, False
        elif self._waiting and (self._stuck or now - self._moved > self._deadline_s):
            self._stuck = True
            self._give_up()

    def _give_up(self) -> None:
        while self._waiting:
            self._failed.put(self._waiting.popitem(last=False)[1])
