"""Balance of DRAM between frames, selected pages and summaries: it moves with what runs.

Single pages and summaries serve requests that choose, frames those that attend to everything: short
ones, and prompts while they are computed. How many of each there are shows only while they run. So
most places for single pages, and all rows for summaries, are cut into *runs*, each as long as a
frame, and each of these serves as what it is or as a frame.

A frame whose slot is attended to as a whole saves as many reads in each step as it has pages. As
many places save at most that, and mostly far less. So who needs frames gets the runs that those who
choose do not need; and runs of places go back whose frames nobody attends to as a whole, when
somebody begins to choose and as soon as pages have to make room for others.

Summaries are no cache: a request without them cannot choose. So their rows go back before they are
needed, whoever attends to what is in the frames.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from vllm_ssdkv.store.cache.frame_lease import FrameLease
from vllm_ssdkv.store.cache.frames import NO_FRAME, FrameCache, FrameState, count_distinct
from vllm_ssdkv.store.cache.selected_pages import SelectedPageCache
from vllm_ssdkv.store.cache.summaries import SummaryTable
from vllm_ssdkv.store.format.slot_geometry import SlotGeometry
from vllm_ssdkv.store.memory.memory_plan import CHOSEN, MemoryPlan

_FORGETTING: Final = 16
"""Divisor of the decay: each step without a larger need lowers the assumed need by this part of
it."""

_GROWING: Final = 5 / 4
"""Rows that are kept for each that is needed: contexts grow."""

_PATIENCE: Final = 16
"""Steps of the same rows without another look, after one that found nothing to give back."""

_NEWEST: Final = 16
"""Blocks of a context among which are those that are saved: some steps' worth."""

_NO_SLOT: Final = -1
_CHOSEN: Final = 1
_WHOLE: Final = 2

_LOOK_S: Final = 0.001
"""Interval of checks whether a frame in use has become free."""

Contexts = Sequence[NDArray[np.int64]]


class DramBalancer:
    """Lends runs of places and rows to frames. Used by the thread that runs the forward pass; only
    :meth:`choose` blocks.

    Time of a call grows with what is lent or given back, and with contexts where anything is lent
    and pages make room for each other: then in some of the steps.
    """

    def __init__(
        self,
        geometry: SlotGeometry,
        plan: MemoryPlan,
        frames: FrameCache,
        pages: SelectedPageCache,
        summaries: SummaryTable,
        busy: Callable[[], bool],
        deadline_s: float,
    ):
        """``frames`` ends with the frames that the plan's runs may become, all of them shut.
        ``busy``: whether anything is being written or loaded."""
        self._frames = frames
        self._pages = pages
        self._summaries = summaries
        self._busy = busy
        self._deadline_s = deadline_s
        first = frames.frames
        self._places = FrameLease(geometry, plan.page_runs, pages, frames, first)
        first += len(plan.page_runs.firsts)
        self._rows = FrameLease(geometry, plan.summary_runs, summaries, frames, first)
        self._chosen_places = plan.chosen_places
        self._asked = self._evictions = 0
        self._places_needed = self._rows_needed = 0
        """By those who choose, or will soon."""
        self._newest: list[NDArray[np.int64]] = []
        """Last slots of each of those that chose in the last step."""
        self._prompts: list[NDArray[np.int64]] = []
        """Slots of each of those that will."""
        self._coming: dict[str, NDArray[np.int64]] = {}
        self._kinds = np.zeros(frames.slots, dtype=np.uint8)
        """Who attends to a slot, while it is asked; nobody between times."""
        self._wait = 0
        self._last: tuple[int, tuple[int, ...]] = (0, ())
        """How many rows the last step had, and which of them chose."""

    @property
    def lent(self) -> int:
        """Runs that serve as frames."""
        return self._places.lent + self._rows.lent

    @property
    def spare(self) -> int:
        """Runs that nobody needs as what they are, and that are not lent yet."""
        return sum(self._idle())

    def _idle(self) -> tuple[int, int]:
        """The same, of places and of rows."""
        places, rows = self._spare()
        return self._places.most(places), self._rows.most(rows)

    def _spare(self) -> tuple[int, int]:
        """Places and rows that nobody needs."""
        places = self._pages.open_places - self._places_needed
        return places, self._summaries.open_rows - self._rows_needed

    # ---- who needs frames ----

    def expect(self, request_id: str, slots: NDArray[np.int64]) -> None:
        """These slots, [n], will be brought into frames from now on, to be attended to as a whole
        in every step: :meth:`make_room` for them."""
        self._coming[request_id] = slots
        self.make_room(slots[:0])

    def arrived(self, request_id: str) -> None:
        """End the wait for what was expected for this request, if anything: it has come, or will
        not."""
        self._coming.pop(request_id, None)

    def make_room(self, slots: NDArray[np.int64]) -> None:
        """These slots, [n], want frames: lend what is not needed, as far as they have to be lent,
        and a small part of it more.

        Frames of contexts that do not run any more are taken first, unless nobody chooses. Blocks
        that rows add which choose can do without; and those of prompts that will be chosen from,
        without the rows for summaries, theirs and what a hit would have to read again.
        """
        places, rows = self._idle()
        if places + rows == 0:
            return
        # Loads go on beside this: counted in this order, too few frames are never lent for them.
        coming = slots[:0]
        if self._coming:
            coming = np.unique(np.concatenate(list(self._coming.values())))
            coming = coming[self._frames.frames_of(coming) == NO_FRAME]
        chosen = self._places_needed or self._rows_needed
        there = self._frames.spare() if chosen else self._frames.count(FrameState.FREE)
        if len(slots) + len(coming) <= there:
            return
        missing = len(slots) - _common(slots, self._newest) + len(coming) - there
        spare_places, spare_rows = self._spare()
        missing -= self._places.detach(min(missing, places), spare_places)
        self._rows.detach(min(missing - _common(slots, self._prompts), rows), spare_rows)

    # ---- who chooses ----

    def reserve(self, blocks: int) -> None:
        """A context of so many blocks comes that will be chosen from."""
        self._rows_needed = min(self._summaries.rows, self._rows_needed + blocks)
        self._give_rows(self._rows_needed, (), ())

    def choose(self, contexts: Contexts, choosing: Collection[int]) -> None:
        """Some of a step's rows, with these slots, are about to choose: give back what that may
        take, before pages have to make room for each other.

        Rows are there afterwards, unless frames in them are in use beyond the deadline of I/O.
        """
        every = blocks = sum([len(contexts[row]) for row in choosing])
        if blocks > self._summaries.open_rows:
            blocks = _distinct(contexts, choosing)
            deadline = time.monotonic() + self._deadline_s
            patient = True
            while patient:
                patient = self._busy() and time.monotonic() < deadline
                if not self._give_rows(blocks, contexts, choosing):
                    break
                if patient:
                    time.sleep(_LOOK_S)
        if (rows := (len(contexts), tuple(choosing))) != self._last:
            self._last, self._wait = rows, 0  # what was attended to as a whole may not be any more
        self._give_places(
            int(self._chosen_places * every) - self._pages.open_places, contexts, choosing
        )

    def rebalance(
        self, contexts: Contexts, choosing: Collection[int], later: Collection[int] = ()
    ) -> None:
        """A step has ended, with these slots of its rows, some of which chose, and others will
        ``later``: give back what they need more than others."""
        asked, evicted = self._pages.asked - self._asked, self._pages.evictions - self._evictions
        needed = asked or evicted or self._places_needed or self._rows_needed
        if not (needed or choosing or later):  # as in most steps of requests that do not choose
            self._wait = max(0, self._wait - 1)
            return
        self._asked += asked
        self._evictions += evicted
        self._places_needed = max(int(asked * CHOSEN), _less(self._places_needed))
        will = {*choosing, *later}
        blocks = sum([len(contexts[row]) for row in will])
        if self._rows.lent and blocks * _GROWING > self._summaries.open_rows:
            blocks = _distinct(contexts, will)
        self._rows_needed = max(int(blocks * _GROWING), _less(self._rows_needed))
        self._newest = [contexts[row][-_NEWEST:] for row in choosing]
        self._prompts = [contexts[row] for row in later]
        self._give_rows(self._rows_needed, contexts, choosing)
        self._give_places(evicted, contexts, choosing)
        self._wait = max(0, self._wait - 1)

    def _give_rows(self, rows: int, contexts: Contexts, choosing: Collection[int]) -> bool:
        """As many rows as are missing to so many open ones; whether they still are."""
        missing = min(rows, self._summaries.rows) - self._summaries.open_rows
        if missing <= 0:
            return False
        frames = self._rows.frames
        first, last = self._by_use(self._frames.slots_of(frames), contexts, choosing)
        frames = frames[np.concatenate([first, last])]
        while missing > 0 and len(frames):
            runs = self._rows.runs_in(missing)
            missing -= self._rows.attach(frames[:runs])
            frames = frames[runs:]
        return missing > 0

    def _give_places(self, places: int, contexts: Contexts, choosing: Collection[int]) -> None:
        """So many places, as far as nobody attends to what they hold as a whole."""
        if places <= 0 or self._wait or not self._places.lent:
            return
        frames = self._places.frames
        order, _ = self._by_use(self._frames.slots_of(frames), contexts, choosing)
        if len(order) == 0:
            self._wait = _PATIENCE
        self._places.attach(frames[order[: self._places.runs_in(places)]])

    def _by_use(
        self, slots: NDArray[np.int64], contexts: Contexts, choosing: Collection[int]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Frames by use: those whose slots nobody attends to as a whole, first those that are of no
        running context; and the others."""
        for row, context in enumerate(contexts):
            self._kinds[context] |= _CHOSEN if row in choosing else _WHOLE
        kinds = self._kinds[slots]
        for context in contexts:
            self._kinds[context] = 0
        idle = slots == _NO_SLOT
        idle[~idle] = ~self._frames.referenced(slots[~idle])
        chosen = (kinds == _CHOSEN) & ~idle
        order = np.concatenate([np.flatnonzero(idle), np.flatnonzero(chosen)])
        return order, np.flatnonzero(~idle & ~chosen)


def _common(slots: NDArray[np.int64], others: Contexts) -> int:
    """Slots that are among the others."""
    if not others:  # as in engines where nobody chooses
        return 0
    return int(np.count_nonzero(np.isin(slots, np.concatenate(others))))


def _distinct(contexts: Contexts, rows: Collection[int]) -> int:
    """Blocks of these rows, each once: rows share them."""
    return count_distinct(np.concatenate([contexts[row] for row in rows]))


def _less(needed: int) -> int:
    return needed - -(-needed // _FORGETTING)
