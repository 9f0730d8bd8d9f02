"""Frames of a step's contexts, and what follows from where their blocks lie.

Between two steps mostly nothing changes: no row begins or ends, none has another block in its
context, and no frame is evicted. What was worked out for one step then serves the next one.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from vllm_ssdkv.store.cache.frames import NO_FRAME, FrameCache, count_distinct

NO_SLOTS: NDArray[np.int64] = np.zeros(0, dtype=np.int64)
"""Slots of a row without a context."""


class ContextFrames:
    """Blocks of some contexts, row after row, with their frames. Nobody may write to the arrays.

    Attributes:
        contexts: Slots of each row's blocks.
        slots: Those of all rows, int64 [B].
        begin, end: Blocks of each row in them, int32 [R].
        frames: Frame of each block, or ``NO_FRAME``, int32 [B].
        address: Its address; 0 where there is none, uint64 [B].
        in_frames: Whether all blocks have one.
    """

    def __init__(
        self,
        contexts: Sequence[NDArray[np.int64]],
        slots: NDArray[np.int64],
        frames: NDArray[np.int32],
        cache: FrameCache,
    ) -> None:
        self.contexts = list(contexts)
        edges = np.zeros(len(contexts) + 1, dtype=np.int32)
        np.cumsum([len(one) for one in contexts], out=edges[1:])
        self.begin, self.end = edges[:-1], edges[1:]
        self.slots = slots
        self.frames = frames
        self.in_frames = not len(frames) or int(frames.min()) != NO_FRAME
        if self.in_frames:
            self.address = cache.address(frames)
        else:
            self.address = np.zeros(len(slots), dtype=np.uint64)
            self.address[self.framed] = cache.address(frames[self.framed])

    @classmethod
    def borrow(
        cls,
        cache: FrameCache,
        contexts: Sequence[NDArray[np.int64]],
        latest: ContextFrames | None,
    ) -> ContextFrames:
        """Borrow the frames of these contexts, whose arrays are the same ones for as long as their
        slots are; ``latest``, if these are its contexts, and all frames are those that it has."""
        known = latest is not None and len(latest.contexts) == len(contexts)
        if latest is not None and known and all(map(operator.is_, latest.contexts, contexts)):
            if not len(latest.slots):
                return latest
            frames = cache.borrow(latest.slots)
            if np.array_equal(frames, latest.frames):
                return latest
            return cls(contexts, latest.slots, frames, cache)
        slots = np.concatenate([NO_SLOTS, *contexts])
        return cls(contexts, slots, cache.borrow(slots), cache)

    def give_back(self, cache: FrameCache) -> None:
        """Give back what :meth:`borrow` has borrowed once."""
        if len(self.frames):
            cache.give_back(self.frames)

    @cached_property
    def framed(self) -> NDArray[np.bool_]:
        """Mask of the blocks that have a frame, bool [B]."""
        framed: NDArray[np.bool_] = self.frames != NO_FRAME
        return framed

    @cached_property
    def shared(self) -> NDArray[np.int32]:
        """Number of each block's slot, from 0, [B]; empty: no two blocks have the same."""
        if count_distinct(self.slots) == len(self.slots):
            return np.zeros(0, dtype=np.int32)
        return np.unique(self.slots, return_inverse=True)[1].astype(np.int32)
