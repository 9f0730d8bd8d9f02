"""DRAM frames: the write buffer and the read cache of slots, one frame per slot.

A frame holds one whole slot, header included, so that a frame is written to and read from the
devices as it lies. Dirty frames (``HELD``, ``WRITING``) *are* the write buffer; clean frames are
the cache. A dirty frame is never evicted: its data exists nowhere else.

A frame goes back to the free list when three things hold: no slot is bound to it, no I/O may touch
it, nobody reads it. Whoever takes away the last of them frees it, so the order does not matter: a
slot may be forgotten, and get another frame, while the old one is still being written or read.

The tables and what happens to them are native (``csrc/cache``); this class adds addresses.

Frames are evicted in DRAM only: stored blocks are evicted by ``store/index/slot_index.py``, single
pages by ``store/cache/selected_pages.py``.
"""

from __future__ import annotations

import time
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vllm_ssdkv import _io
from vllm_ssdkv.store.memory.arena import Arena

NO_FRAME = -1


def count_distinct(numbers: NDArray[np.integer[Any]]) -> int:
    """Count numbers, [n], each once. Every step does this, and sorting takes a thirtieth of the
    time of ``np.unique``."""
    ordered = np.sort(numbers)
    return int(np.count_nonzero(ordered[1:] != ordered[:-1])) + min(1, len(ordered))


class FrameState(IntEnum):
    """State of a frame's bytes."""

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
    SHUT = 6
    """Its memory belongs to single pages for now (:mod:`vllm_ssdkv.store.cache.dram_balancer`)."""


class FrameCache:
    """Frames of one rank. Every method may be called from any thread; only :meth:`wait_for_frames`
    blocks. The time of a call grows with the number of slots or frames it is given and with nothing
    else.

    Eviction takes clean frames that nobody reads and no running context refers to, then those of
    contexts; in each class those unused for longest. A frame is used until its write, its load or
    its last reader ends, and its slot's first or last context begins or ends. While a context
    larger than the cache is streamed in a circle, frames are evicted by writes only, never by
    reads: plain LRU would evict each frame just before its turn.

    All methods raise IndexError for slots or frames that do not exist, and TypeError for arrays of
    another dtype or strided ones.
    """

    def __init__(
        self,
        arena: Arena,
        offset: int,
        frame_bytes: int,
        frames: int,
        slots: int,
        lent: NDArray[np.uint64] | None = None,
    ):
        """Args:
        arena: Memory the frames live in, starting at ``offset`` (bytes, 4 KiB multiple).
        frame_bytes: Size of a frame, equal to the slot size.
        frames: Number of frames there.
        slots: Number of slots of the store (size of the slot to frame table).
        lent: Offsets in the arena of more frames, which begin ``SHUT``: they come after the others.
        """
        self.arena = arena
        self.frame_bytes = frame_bytes
        self.frames = frames
        self.slots = slots
        own = offset + np.arange(frames, dtype=np.uint64) * np.uint64(frame_bytes)
        more = own[:0] if lent is None else lent
        self._offsets = np.concatenate([own, more])
        self._tables = _io.FrameCache(len(self._offsets), slots, len(more))

    # ---- where ----

    def buffer_offset(self, frames: NDArray[np.int32]) -> NDArray[np.uint64]:
        """Byte offsets of frames in the arena, as the I/O engine wants them."""
        offsets: NDArray[np.uint64] = self._offsets[frames]
        return offsets

    def address(self, frames: NDArray[np.int32]) -> NDArray[np.uint64]:
        """Absolute addresses of frames."""
        return np.uint64(self.arena.address) + self.buffer_offset(frames)

    def view(self, frame: int) -> NDArray[np.uint8]:
        """The bytes of one frame, shape [frame_bytes]."""
        return self.arena.view(int(self._offsets[frame]), self.frame_bytes)

    def state(self, frame: int) -> FrameState:
        """State of a frame."""
        return FrameState(self._tables.state(frame))

    def frame_of(self, slot: int) -> int:
        """Frame of a slot in any state, or ``NO_FRAME``."""
        return self._tables.frame_of(slot)

    def count(self, *states: FrameState) -> int:
        """Number of frames in any of the states."""
        return self._tables.count([int(state) for state in states])

    def frames_of(self, slots: NDArray[np.int64]) -> NDArray[np.int32]:
        """Frame of each slot, [n], ``NO_FRAME`` where it has none; nobody keeps it from others."""
        return self._tables.frames_of(slots)

    def slots_of(self, frames: NDArray[np.int32]) -> NDArray[np.int64]:
        """Slot of each frame, [n], -1 where it has none."""
        return self._tables.slots_of(frames)

    def spare(self) -> int:
        """Frames that :meth:`take` can give out without one of a running context."""
        return self._tables.spare()

    @property
    def evictions(self) -> int:
        """Frames evicted since the start."""
        return self._tables.evictions()

    # ---- contexts ----

    def retain(self, slots: NDArray[np.int64]) -> None:
        """A running context refers to these slots."""
        self._tables.retain(slots)

    def release_references(self, slots: NDArray[np.int64]) -> NDArray[np.int64]:
        """A context is gone; returns those of its slots that no other context refers to, in
        ascending order."""
        return self._tables.release(slots)

    def referenced(self, slots: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Mask of the slots that a running context refers to."""
        return self._tables.referenced(slots).view(np.bool_)

    # ---- reading ----

    def borrow(self, slots: NDArray[np.int64]) -> NDArray[np.int32]:
        """Frame of each slot, [n], whose bytes may be read, else ``NO_FRAME``.

        The bytes stay as they are until :meth:`give_back`, even if the slot is forgotten.
        """
        return self._tables.borrow(slots)

    def give_back(self, frames: NDArray[np.int32]) -> None:
        """End the reading of borrowed frames; ``NO_FRAME`` entries are skipped."""
        self._tables.give_back(frames)

    # ---- taking ----

    def take(
        self, slots: NDArray[np.int64], state: FrameState, *, spare_contexts: bool = False
    ) -> NDArray[np.int32]:
        """Give the first of these distinct slots a frame in ``state``, evicting clean ones.

        Args:
            slots: Slots without a frame, [n].
            state: ``HELD``, for the caller to fill, or ``LOADING``, for the caller to read into
                and to :meth:`finish_io`.
            spare_contexts: Evict no frame of a running context.

        Returns:
            Frames of the first k slots, [k]; k < n when there is no room for all.

        Raises:
            ValueError: a slot has a frame, or stands there twice; or another state.
        """
        return self._tables.take(slots, state, spare_contexts)

    def wait_for_frames(
        self, slots: NDArray[np.int64], state: FrameState, deadline: float
    ) -> NDArray[np.int32]:
        """:meth:`take`, waiting until ``deadline`` (``time.monotonic``) for at least one frame."""
        return self._tables.take_within(slots, state, deadline - time.monotonic())

    # ---- lending their memory ----

    def open(self, frames: NDArray[np.int32]) -> None:
        """``SHUT`` frames may be taken from now on.

        Raises:
            ValueError: one of them is not ``SHUT``.
        """
        self._tables.open(frames)

    def shut(self, frames: NDArray[np.int32]) -> NDArray[np.bool_]:
        """Take those of these frames out of use that nobody uses, evicting clean ones; which are
        ``SHUT`` now, [n]."""
        return self._tables.shut(frames).view(np.bool_)

    # ---- writing and loading ----

    def start_writing(self, slots: NDArray[np.int64]) -> NDArray[np.int32]:
        """Frame of each slot, [n], now ``WRITING``; ``NO_FRAME`` where none was ``HELD``."""
        return self._tables.start_writing(slots)

    def finish_io(self, frames: NDArray[np.int32], state: FrameState) -> None:
        """The I/O of these frames has ended. Those that still have a slot get ``state``.

        ``FREE`` takes the frame from its slot. Frames without a slot are freed in any case.

        Raises:
            ValueError: ``state`` is not ``FREE``, ``HELD`` or ``CLEAN``.
        """
        self._tables.settle(frames, state)

    def abandon(self, frames: NDArray[np.int32]) -> None:
        """Take frames whose I/O is overdue from their slots; :meth:`finish_io` them later."""
        self._tables.abandon(frames)

    def forget(self, slots: NDArray[np.int64]) -> None:
        """Drop the slots' data: none of them has a frame afterwards."""
        self._tables.forget(slots)

    def audit(self) -> None:
        """Check that all tables agree; for tests, since it looks at everything.

        Raises:
            RuntimeError: names what does not.
        """
        self._tables.audit()
