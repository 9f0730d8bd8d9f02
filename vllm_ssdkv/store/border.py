"""Where frames end and single pages begin in DRAM: it moves with what runs.

Single pages serve requests that choose, frames those that attend to everything: short ones, and
prompts while they are computed. How many of each there are shows only while they run. So part of
the places for single pages is cut into *runs*, each as long as a frame, and each of these serves as
places or as a frame.

A frame whose slot is attended to as a whole saves as many reads in each step as it has pages. As
many places save at most that, and mostly far less. So who needs frames gets the runs that those who
choose do not need; and runs go back whose frames nobody attends to as a whole, when somebody begins
to choose and as soon as pages have to make room for others.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from vllm_ssdkv.store.arena_plan import CHOSEN, ArenaPlan
from vllm_ssdkv.store.cache import NO_FRAME, FrameCache, FrameState
from vllm_ssdkv.store.layout import SlotGeometry
from vllm_ssdkv.store.page_cache import PageCache

_FORGETTING: Final = 16
"""With each step without a larger one, what a step needs is taken for so much of itself less."""

_CANDIDATES: Final = 4
"""Of so many times the runs to be lent the emptiest are."""

_PATIENCE: Final = 16
"""Steps without another look, after one that found nothing to give back."""

_NEWEST: Final = 16
"""Blocks of a context among which are those that are saved: some steps' worth."""

_NO_SLOT: Final = -1
_CHOSEN: Final = 1
_WHOLE: Final = 2


class Border:
    """Lends runs of places to frames. Used by the thread that runs the forward pass; never blocks.

    Time of a call grows with what is lent or given back, and with contexts where anything is lent
    and pages make room for each other: then in some of the steps.
    """

    def __init__(
        self, geometry: SlotGeometry, plan: ArenaPlan, frames: FrameCache, pages: PageCache
    ):
        """``frames`` ends with the frames that ``plan.runs`` may become, all of them shut."""
        self._geometry = geometry
        self._frames = frames
        self._pages = pages
        self._firsts = plan.runs
        self._length = plan.run_places
        self._chosen_places = plan.chosen_places
        self._lent = np.zeros(len(plan.runs), dtype=np.bool_)
        self._asked = self._evictions = 0
        self._needed = 0
        """Places that those who choose need."""
        self._newest: list[NDArray[np.int64]] = []
        """Last slots of each of them, in the last step."""
        self._coming: dict[str, NDArray[np.int64]] = {}
        self._kinds = np.zeros(frames.slots, dtype=np.uint8)
        """Who attends to a slot, while it is asked; nobody between times."""
        self._next = self._wait = 0

    @property
    def lent(self) -> int:
        """Runs that serve as frames."""
        return int(np.count_nonzero(self._lent))

    def expect(self, request_id: str, slots: NDArray[np.int64]) -> None:
        """These slots, [n], will be brought into frames from now on, to be attended to as a whole
        in every step: :meth:`make_room` for them."""
        self._coming[request_id] = slots
        self.make_room(slots[:0])

    def arrived(self, request_id: str) -> None:
        """What was expected for this request, if anything, has come, or will not."""
        self._coming.pop(request_id, None)

    def make_room(self, slots: NDArray[np.int64]) -> None:
        """These slots, [n], want frames: lend what is not needed, as far as they have to be lent.

        Frames of contexts that do not run any more are taken first, unless nobody chooses. Blocks
        that rows add which choose can do without.
        """
        spare = (self._pages.open_places - self._needed) // self._length
        most = min(spare, len(self._lent) - self.lent)
        if most <= 0:
            return
        # Loads go on beside this: counted in this order, too few frames are never lent for them.
        coming = np.unique(np.concatenate([slots[:0], *self._coming.values()]))
        coming = coming[self._frames.frames_of(coming) == NO_FRAME]
        there = self._frames.spare() if self._needed else self._frames.count(FrameState.FREE)
        if len(slots) + len(coming) <= there:
            return
        chosen = np.isin(slots, np.concatenate([slots[:0], *self._newest]))
        missing = len(slots) - int(np.count_nonzero(chosen)) + len(coming) - there
        count = min(most, missing)
        if count <= 0:
            return
        runs = self._emptiest(count)
        runs = runs[self._pages.close(self._firsts[runs], self._length)]
        frames = self._frame_of(runs)
        for frame in frames.tolist():
            self._clean(self._frames.view(frame))
        self._lent[runs] = True
        self._frames.open(frames)

    def _emptiest(self, count: int) -> NDArray[np.int64]:
        """So many runs with few pages, or fewer, from where the last search ended on."""
        runs = np.flatnonzero(~self._lent)
        begin = int(np.searchsorted(runs, self._next))
        runs = np.concatenate([runs[begin:], runs[:begin]])[: _CANDIDATES * count]
        self._next = int(runs[-1]) + 1
        held = self._pages.held_in(self._firsts[runs], self._length)
        free = np.flatnonzero(held >= 0)
        return runs[free[np.argsort(held[free], kind="stable")[:count]]]

    def _clean(self, frame: NDArray[np.uint8]) -> None:
        """What is not payload is written to devices as it lies there: nobody else's bytes."""
        geometry = self._geometry
        frame[: geometry.header_bytes] = 0
        pages = frame[geometry.header_bytes :].reshape(geometry.pages, geometry.page_bytes)
        pages[:, geometry.payload_bytes :] = 0

    def choose(self, contexts: Sequence[NDArray[np.int64]], choosing: Collection[int]) -> None:
        """Some of a step's rows, with these slots, are about to choose: give back what that may
        take, before pages have to make room for each other."""
        wanted = self._chosen_places * sum(len(contexts[row]) for row in choosing)
        self._give_back(int(wanted) - self._pages.open_places, contexts, choosing)

    def settle(self, contexts: Sequence[NDArray[np.int64]], choosing: Collection[int]) -> None:
        """A step has ended, with these slots of its rows, some of which chose: give back what they
        need more than others."""
        asked = self._pages.asked - self._asked
        evicted = self._pages.evictions - self._evictions
        self._asked, self._evictions = self._pages.asked, self._pages.evictions
        forgotten = self._needed - -(-self._needed // _FORGETTING)
        self._needed = max(int(asked * CHOSEN), forgotten)
        self._newest = [contexts[row][-_NEWEST:] for row in choosing]
        self._give_back(evicted, contexts, choosing)
        self._wait = max(0, self._wait - 1)

    def _give_back(
        self, places: int, contexts: Sequence[NDArray[np.int64]], choosing: Collection[int]
    ) -> None:
        """So many places, as far as nobody attends to what they hold as a whole."""
        if places <= 0 or self._wait or not self._lent.any():
            return
        runs = np.flatnonzero(self._lent)
        slots = self._frames.slots_of(self._frame_of(runs))
        order = self._dispensable(slots, contexts, choosing)
        if len(order) == 0:
            self._wait = _PATIENCE
        runs = runs[order[: -(-places // self._length)]]
        runs = runs[self._frames.shut(self._frame_of(runs))]
        self._lent[runs] = False
        self._pages.open(self._firsts[runs], self._length)

    def _dispensable(
        self,
        slots: NDArray[np.int64],
        contexts: Sequence[NDArray[np.int64]],
        choosing: Collection[int],
    ) -> NDArray[np.int64]:
        """Which of these frames' slots nobody attends to as a whole: first those that are of no
        running context."""
        for row, context in enumerate(contexts):
            self._kinds[context] |= _CHOSEN if row in choosing else _WHOLE
        kinds = self._kinds[slots]
        for context in contexts:
            self._kinds[context] = 0
        idle = slots == _NO_SLOT
        idle[~idle] = ~self._frames.referenced(slots[~idle])
        return np.concatenate([np.flatnonzero(idle), np.flatnonzero((kinds == _CHOSEN) & ~idle)])

    def _frame_of(self, runs: NDArray[np.int64]) -> NDArray[np.int32]:
        return (self._frames.frames + runs).astype(np.int32)
