"""DRAM frames: the write buffer and the read cache of slots, one frame per slot.

A frame holds one whole slot, header included, so that a frame is written to and read from the
devices as it lies. Dirty frames (``HELD``, ``WRITING``) *are* the write buffer; clean frames are
the cache. A dirty frame is never evicted: its data exists nowhere else.

A frame goes back to the free list when three things hold: no slot is bound to it, no I/O may touch
it, nobody reads it. Whoever takes away the last of them frees it, so the order does not matter: a
slot may be forgotten, and get another frame, while the old one is still being written or read.
"""

from __future__ import annotations

import threading
import time
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from vllm_ssdkv.store.arena import Arena

NO_FRAME = -1
_NO_SLOT = -1


class FrameState(IntEnum):
    """What a frame's bytes are."""

    FREE = 0
    HELD = 1
    """Filled from HBM, not yet handed to the writer."""
    WRITING = 2
    """Being written to the devices."""
    CLEAN = 3
    """Equal to the slot on the devices; may be evicted."""
    LOADING = 4
    """A read into it is in flight; belongs to the loader."""
    LOST = 5
    """Bound to no slot; out of use until the I/O and the readers that still touch it have ended."""


_READABLE = np.zeros(len(FrameState), dtype=np.bool_)
_READABLE[[FrameState.HELD, FrameState.WRITING, FrameState.CLEAN]] = True


class FrameCache:
    """Frames of one rank. Every method may be called from any thread; only :meth:`wait_for_frames`
    blocks.

    Eviction takes clean frames that nobody reads and no running context refers to, then those
    unused for longest. While a context larger than the cache is streamed in a circle, frames are
    evicted by writes only, never by reads: plain LRU would evict each frame just before its turn.
    """

    def __init__(self, arena: Arena, offset: int, frame_bytes: int, frames: int, slots: int):
        """Args:
        arena: Memory the frames live in, starting at ``offset`` (bytes, 4 KiB multiple).
        frame_bytes: Size of a frame, equal to the slot size.
        frames: Number of frames.
        slots: Number of slots of the store (size of the slot to frame table).
        """
        self.arena = arena
        self.offset = offset
        self.frame_bytes = frame_bytes
        self.frames = frames
        self._changed = threading.Condition()
        self._frame_of = np.full(slots, NO_FRAME, dtype=np.int32)
        self._slot_of = np.full(frames, _NO_SLOT, dtype=np.int64)
        self._state = np.zeros(frames, dtype=np.uint8)
        self._in_flight = np.zeros(frames, dtype=np.bool_)
        self._readers = np.zeros(frames, dtype=np.int32)
        self._used = np.zeros(frames, dtype=np.int64)
        self._references = np.zeros(slots, dtype=np.int32)
        self._free = list(range(frames - 1, -1, -1))
        self._clock = 0
        self.evictions = 0

    # ---- where ----

    def buffer_offset(self, frames: NDArray[np.int32]) -> NDArray[np.uint64]:
        """Byte offsets of frames in the arena, as the I/O engine wants them."""
        return self.offset + frames.astype(np.uint64) * np.uint64(self.frame_bytes)

    def address(self, frames: NDArray[np.int32]) -> NDArray[np.uint64]:
        """Absolute addresses of frames."""
        return np.uint64(self.arena.address) + self.buffer_offset(frames)

    def view(self, frame: int) -> NDArray[np.uint8]:
        """The bytes of one frame, shape [frame_bytes]."""
        return self.arena.view(self.offset + frame * self.frame_bytes, self.frame_bytes)

    def state(self, frame: int) -> FrameState:
        """State of a frame."""
        return FrameState(int(self._state[frame]))

    def frame_of(self, slot: int) -> int:
        """Frame of a slot in any state, or ``NO_FRAME``."""
        return int(self._frame_of[slot])

    def count(self, *states: FrameState) -> int:
        """Number of frames in any of the states."""
        with self._changed:  # isin looks twice at what other threads may change in between
            return int(np.isin(self._state, [int(s) for s in states]).sum())

    # ---- contexts ----

    def retain(self, slots: NDArray[np.int64]) -> None:
        """A running context refers to these slots."""
        with self._changed:
            np.add.at(self._references, slots, 1)

    def release_references(self, slots: NDArray[np.int64]) -> NDArray[np.int64]:
        """A context is gone; returns those of its slots that no other context refers to."""
        with self._changed:
            np.subtract.at(self._references, slots, 1)
            return np.unique(slots[self._references[slots] <= 0])

    def referenced(self, slots: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Whether a running context refers to each slot."""
        result: NDArray[np.bool_] = self._references[slots] > 0
        return result

    # ---- reading ----

    def borrow(self, slots: NDArray[np.int64]) -> NDArray[np.int32]:
        """Frame of each slot, [n], whose bytes may be read, else ``NO_FRAME``; marks them used.

        The bytes stay as they are until :meth:`give_back`, even if the slot is forgotten.
        """
        with self._changed:
            frames = self._frame_of[slots]
            present = frames != NO_FRAME
            present[present] = _READABLE[self._state[frames[present]]]
            frames[~present] = NO_FRAME
            self._clock += 1
            self._used[frames[present]] = self._clock
            np.add.at(self._readers, frames[present], 1)
            return frames

    def give_back(self, frames: NDArray[np.int32]) -> None:
        """End the reading of borrowed frames; ``NO_FRAME`` entries are skipped."""
        with self._changed:
            frames = frames[frames != NO_FRAME]
            np.subtract.at(self._readers, frames, 1)
            self._reclaim(frames)

    # ---- taking ----

    def take(
        self, slots: NDArray[np.int64], state: FrameState, *, spare_contexts: bool = False
    ) -> NDArray[np.int32]:
        """Give the first of these distinct slots a frame in ``state``, evicting clean ones.

        Args:
            slots: Slots without a frame, [n].
            state: ``HELD``, for the caller to fill, or ``LOADING``, for the caller to read into
                and to :meth:`settle`.
            spare_contexts: Evict no frame of a running context.

        Returns:
            Frames of the first k slots, [k]; k < n when there is no room for all.

        Raises:
            ValueError: a slot has a frame.
        """
        with self._changed:
            if bool((self._frame_of[slots] != NO_FRAME).any()):
                raise ValueError("a slot that has a frame cannot get another")
            self._evict(len(slots) - len(self._free), spare_contexts)
            count = min(len(slots), len(self._free))
            taken = np.array([self._free.pop() for _ in range(count)], dtype=np.int32)
            self._frame_of[slots[:count]] = taken
            self._slot_of[taken] = slots[:count]
            self._state[taken] = state
            self._in_flight[taken] = state is FrameState.LOADING
            self._clock += 1
            self._used[taken] = self._clock
            return taken

    def wait_for_frames(
        self, slots: NDArray[np.int64], state: FrameState, deadline: float
    ) -> NDArray[np.int32]:
        """:meth:`take`, waiting until ``deadline`` (``time.monotonic``) for at least one frame."""
        with self._changed:
            while True:
                taken = self.take(slots, state)
                remaining = deadline - time.monotonic()
                if len(taken) or len(slots) == 0 or remaining <= 0:
                    return taken
                self._changed.wait(remaining)

    def _evict(self, count: int, spare_contexts: bool) -> None:
        if count <= 0:
            return
        clean = np.flatnonzero((self._state == FrameState.CLEAN) & (self._readers == 0))
        wanted = self._references[self._slot_of[clean]] > 0
        if spare_contexts:
            clean, wanted = clean[~wanted], wanted[~wanted]
        # A few more than asked for, so that a run of writes scans the table once.
        batch = max(count, self.frames // 64)
        if len(clean) > batch:
            order = self._used[clean] + np.where(wanted, np.int64(1) << 62, np.int64(0))
            clean = clean[np.argpartition(order, batch - 1)[:batch]]
        self._unbind(clean)
        self._reclaim(clean)
        self.evictions += len(clean)

    # ---- writing and loading ----

    def start_writing(self, slots: NDArray[np.int64]) -> NDArray[np.int32]:
        """Frame of each slot, [n], now ``WRITING``; ``NO_FRAME`` where none was ``HELD``."""
        with self._changed:
            frames = self._frame_of[slots]
            held = frames != NO_FRAME
            held[held] = self._state[frames[held]] == FrameState.HELD
            frames[~held] = NO_FRAME
            self._state[frames[held]] = FrameState.WRITING
            self._in_flight[frames[held]] = True
            return frames

    def settle(self, frames: NDArray[np.int32], state: FrameState) -> None:
        """The I/O of these frames has ended. Those that still have a slot get ``state``.

        ``FREE`` takes the frame from its slot. Frames without a slot are freed in any case.
        """
        with self._changed:
            self._in_flight[frames] = False
            bound = frames[self._slot_of[frames] != _NO_SLOT]
            if state is FrameState.FREE:
                self._unbind(bound)
            else:
                self._state[bound] = state
            self._reclaim(frames)

    def abandon(self, frames: NDArray[np.int32]) -> None:
        """Take frames whose I/O missed its deadline from their slots; :meth:`settle` them later."""
        with self._changed:
            self._unbind(frames[self._slot_of[frames] != _NO_SLOT])

    def forget(self, slots: NDArray[np.int64]) -> None:
        """Drop the slots' data: none of them has a frame afterwards."""
        with self._changed:
            frames = np.unique(self._frame_of[slots])
            frames = frames[frames != NO_FRAME]
            self._unbind(frames)
            self._reclaim(frames)

    def _unbind(self, frames: NDArray[np.signedinteger]) -> None:
        self._frame_of[self._slot_of[frames]] = NO_FRAME
        self._slot_of[frames] = _NO_SLOT
        self._state[frames] = FrameState.LOST

    def _reclaim(self, frames: NDArray[np.signedinteger]) -> None:
        """Free what nothing holds any more, and wake those who wait for it."""
        frames = np.unique(frames)
        idle = frames[
            (self._state[frames] == FrameState.LOST)
            & ~self._in_flight[frames]
            & (self._readers[frames] == 0)
        ]
        self._state[idle] = FrameState.FREE
        self._free.extend(idle.tolist())
        self._changed.notify_all()
