"""Runs of places or rows that serve as frames while nobody needs them as what they are."""

from __future__ import annotations

from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from vllm_ssdkv.store.cache.frames import FrameCache
from vllm_ssdkv.store.format.slot_geometry import SlotGeometry
from vllm_ssdkv.store.memory.memory_plan import FrameRuns

_CANDIDATES: Final = 4
"""Factor of the sample: the emptiest runs are lent out of a sample this many times larger than
needed."""

_PORTIONS: Final = 64
"""Maximum number of turns in which all runs are lent: contexts grow by a few blocks in each step,
and a search costs about as much for one run as for some."""


class Divisible(Protocol):
    """Memory in pieces, of which runs may be taken out of use."""

    def held_in(self, firsts: NDArray[np.int32], length: int) -> NDArray[np.int32]:
        """Pieces that hold something, of the ``length`` from each of these on, [n]; -1 where one is
        in use."""

    def close(self, firsts: NDArray[np.int32], length: int) -> NDArray[np.bool_]:
        """Take these out of use, where none of a run is in use; where that was so, [n]. Some may be
        out of use already."""

    def open(self, firsts: NDArray[np.int32], length: int) -> None:
        """They may be used again, and hold nothing."""


class FrameLease:
    """One kind of memory, and the frames in it. Of one thread; never blocks."""

    def __init__(
        self,
        geometry: SlotGeometry,
        runs: FrameRuns,
        memory: Divisible,
        frames: FrameCache,
        first_frame: int,
    ):
        """The frames from ``first_frame`` on lie in ``runs``, one in each, all of them shut."""
        self._geometry = geometry
        self._runs = runs
        self._memory = memory
        self._frames = frames
        self._first_frame = first_frame
        self._lent = np.zeros(len(runs.firsts), dtype=np.bool_)
        self._shared = runs.length > runs.step
        """True if neighbouring runs share pieces. Those of single pages do not, and are long."""
        pieces = int(runs.firsts[-1]) + runs.length if self._shared else 0
        self._covered = np.zeros(pieces, dtype=np.int32)
        """In how many runs that serve as frames each piece is, where they are shared."""
        self._portion = len(runs.firsts) // _PORTIONS
        self._next = 0
        self.lent = 0
        """Runs that serve as frames."""

    @property
    def frames(self) -> NDArray[np.int32]:
        """Their frames, [lent]."""
        return (self._first_frame + np.flatnonzero(self._lent)).astype(np.int32)

    def runs_in(self, pieces: int) -> int:
        """Runs that so many pieces are, all told."""
        return -int(-pieces // self._runs.step)

    def most(self, spare: int) -> int:
        """Runs that can be lent with so many pieces to spare; fewer, if they are far apart."""
        return min(self.runs_in(max(0, spare)), len(self._lent) - self.lent)

    def detach(self, count: int, spare: int) -> int:
        """So many runs, where they hold least, serve as frames now, or a few more; fewer, where
        they would take more than ``spare`` pieces out of use. Returns how many."""
        if count <= 0:
            return 0
        count = min(max(count, self._portion), self.most(spare))
        runs = self._within(self._emptiest(count), spare)
        runs = runs[self._memory.close(self._runs.firsts[runs], self._runs.length)]
        frames = (self._first_frame + runs).astype(np.int32)
        for frame in frames.tolist():
            self._clean(self._frames.view(frame))
        if self._shared:
            np.add.at(self._covered, self._pieces(runs), 1)
        self._lent[runs] = True
        self.lent += len(runs)
        self._frames.open(frames)
        return len(runs)

    def _pieces(self, runs: NDArray[np.int64] | NDArray[np.int32]) -> NDArray[np.int32]:
        """Pieces of each run, [n, length]."""
        return self._runs.firsts[runs][:, None] + np.arange(self._runs.length, dtype=np.int32)

    def _within(self, runs: NDArray[np.int64], spare: int) -> NDArray[np.int64]:
        """The first of these runs, as many as take no more pieces out of use."""
        if not self._shared:
            return runs[: spare // self._runs.length]
        pieces = self._pieces(runs)
        _, first = np.unique(pieces, return_index=True)
        new = np.zeros(pieces.size, dtype=np.bool_)
        new[first] = self._covered[pieces.ravel()[first]] == 0
        taken = np.cumsum(new.reshape(pieces.shape).sum(axis=1))
        return runs[: np.searchsorted(taken, spare, side="right")]

    def _emptiest(self, count: int) -> NDArray[np.int64]:
        """So many runs that hold little, or fewer, from where the last search ended on."""
        runs = np.flatnonzero(~self._lent)
        begin = int(np.searchsorted(runs, self._next))
        runs = np.concatenate([runs[begin:], runs[:begin]])[: _CANDIDATES * count]
        self._next = int(runs[-1]) + 1
        held = self._memory.held_in(self._runs.firsts[runs], self._runs.length)
        free = np.flatnonzero(held >= 0)
        return runs[free[np.argsort(held[free], kind="stable")[:count]]]

    def _clean(self, frame: NDArray[np.uint8]) -> None:
        """Zero what is not payload: it is written to devices as it lies there, nobody else's
        bytes."""
        geometry = self._geometry
        frame[: geometry.header_bytes] = 0
        pages = frame[geometry.header_bytes :].reshape(geometry.kv_pages, geometry.page_bytes)
        pages[:, geometry.payload_bytes :] = 0

    def attach(self, frames: NDArray[np.int32]) -> int:
        """Turn these frames, where nobody uses them, back into what they were before; number of
        pieces that may be used again."""
        frames = frames[self._frames.shut(frames)]
        runs = frames - self._first_frame
        self._lent[runs] = False
        self.lent -= len(runs)
        if not self._shared:
            self._memory.open(self._runs.firsts[runs], self._runs.length)
            return len(runs) * self._runs.length
        pieces = self._pieces(runs)
        np.subtract.at(self._covered, pieces, 1)
        pieces = np.unique(pieces)
        pieces = pieces[self._covered[pieces] == 0]
        self._memory.open(pieces, 1)
        return len(pieces)
