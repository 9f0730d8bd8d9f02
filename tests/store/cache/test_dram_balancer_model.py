"""The border under random use: nobody's bytes are ever written by another."""

from __future__ import annotations

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from numpy.typing import NDArray

from tests.store.border_rig import SLOTS, Rig, wanted
from tests.store.conftest import array
from vllm_ssdkv.store.cache.frames import NO_FRAME, FrameState
from vllm_ssdkv.store.cache.selected_pages import NO_PLACE, Pages
from vllm_ssdkv.store.cache.summaries import NO_ROW
from vllm_ssdkv.store.memory.memory_plan import FrameRuns


def covered(runs: FrameRuns, served: list[bool]) -> int:
    """Pieces in runs that serve as frames."""
    found: set[int] = set()
    for first, serves in zip(runs.firsts.tolist(), served, strict=True):
        found |= set(range(first, first + runs.length)) if serves else set()
    return len(found)


class Bytes(RuleBasedStateMachine):
    """Random use of both: what a frame or a place was given, it holds as long as it is used."""

    def __init__(self) -> None:
        super().__init__()
        self.rig = Rig(25, rows=True)
        self.pinned: list[NDArray[np.int32]] = []
        self.loading: list[tuple[int, int]] = []
        self.borrowed: list[tuple[int, int]] = []
        self.fetches: list[tuple[Pages, object]] = []

    def teardown(self) -> None:
        self.rig.arena.close()

    def place(self, place: int) -> NDArray[np.uint8]:
        offset = self.rig.plan.page_offset + place * self.rig.geometry.page_bytes
        return self.rig.arena.view(offset, self.rig.geometry.page_bytes)

    @rule(slots=st.sets(st.integers(0, SLOTS - 1), min_size=1, max_size=30))
    def load(self, slots: set[int]) -> None:
        new = [slot for slot in sorted(slots) if self.rig.frames.frame_of(slot) == NO_FRAME]
        self.rig.balancer.make_room(array(new))
        frames = self.rig.frames.take(array(new), FrameState.LOADING).tolist()
        for frame, slot in zip(frames, new, strict=False):
            self.rig.frames.view(frame)[:] = 100 + slot
            self.loading.append((frame, slot))

    @precondition(lambda self: self.loading)
    @rule(data=st.data())
    def loaded(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(1, len(self.loading)))
        ended, self.loading = self.loading[:count], self.loading[count:]
        for frame, slot in ended:
            assert (self.rig.frames.view(frame) == 100 + slot).all()
        self.rig.frames.finish_io(np.array([f for f, _ in ended], dtype=np.int32), FrameState.CLEAN)

    @rule(slots=st.lists(st.integers(0, SLOTS - 1), max_size=6))
    def borrow(self, slots: list[int]) -> None:
        frames = self.rig.frames.borrow(array(slots)).tolist()
        self.borrowed += [(f, s) for f, s in zip(frames, slots, strict=True) if f != NO_FRAME]

    @precondition(lambda self: self.borrowed)
    @rule()
    def give_back(self) -> None:
        frames = np.array([frame for frame, _ in self.borrowed], dtype=np.int32)
        self.borrowed = []
        self.rig.frames.give_back(frames)

    @rule(data=st.data())
    def ask(self, data: st.DataObject) -> None:
        slots = data.draw(st.lists(st.integers(0, SLOTS - 1), max_size=6))
        pages = wanted([(slot, page) for slot in slots for page in range(self.rig.geometry.pages)])
        asked = self.rig.pages.acquire(pages)
        for key, place in zip(asked.keys.tolist(), asked.places.tolist(), strict=True):
            if place == NO_PLACE:
                continue
            if key not in asked.keys[: asked.held]:
                self.place(place)[:] = key % 251
        self.fetches.append((pages, asked))

    @precondition(lambda self: self.fetches)
    @rule(good=st.booleans())
    def arrive(self, good: bool) -> None:
        pages, asked = self.fetches.pop(0)
        new = slice(asked.held, None)  # type: ignore[attr-defined]
        keys, places = asked.keys[new], asked.places[new]  # type: ignore[attr-defined]
        right = np.full(len(keys), good)
        self.rig.pages.complete(keys, places, right, np.zeros(len(keys), np.uint16))
        address, here = self.rig.pages.find(asked, pages)  # type: ignore[arg-type]
        every = pages.slots * self.rig.geometry.pages + pages.numbers
        for key, at, there in zip(every.tolist(), address.tolist(), here.tolist(), strict=True):
            if there:
                data = self.rig.arena.view(
                    at - self.rig.arena.address, self.rig.geometry.page_bytes
                )
                assert (data == key % 251).all()
        self.rig.pages.release(asked.places)  # type: ignore[attr-defined]

    @rule(slots=st.lists(st.integers(0, SLOTS - 1)), begin=st.booleans())
    def refer(self, slots: list[int], begin: bool) -> None:
        if begin:
            self.rig.frames.retain(array(slots))
        else:
            self.rig.frames.retain(array(slots))
            self.rig.frames.release_references(array(slots))

    @rule(contexts=st.lists(st.sets(st.integers(0, SLOTS - 1)), max_size=3), data=st.data())
    def settle(self, contexts: list[set[int]], data: st.DataObject) -> None:
        rows = data.draw(st.sets(st.sampled_from(range(len(contexts))))) if contexts else set()
        self.rig.balancer.rebalance([array(sorted(context)) for context in contexts], rows)

    @rule(slots=st.sets(st.integers(0, SLOTS - 1), min_size=1))
    def summarize(self, slots: set[int]) -> None:
        self.rig.summarize(sorted(slots))

    @rule(slots=st.lists(st.integers(0, SLOTS - 1), max_size=6))
    def pin(self, slots: list[int]) -> None:
        self.pinned.append(self.rig.summaries.pin(array(slots)))

    @precondition(lambda self: self.pinned)
    @rule()
    def unpin(self) -> None:
        self.rig.summaries.unpin(self.pinned.pop(0))

    @rule(slots=st.sets(st.integers(0, SLOTS - 1), min_size=1))
    def choose(self, slots: set[int]) -> None:
        """Nothing is busy for the border: it does not wait for what is in use."""
        self.rig.balancer.choose([array(sorted(slots))], [0])
        used = len(self.loading) + len(self.borrowed)
        short = min(len(slots), self.rig.summaries.rows) - self.rig.summaries.open_rows
        assert short <= used * self.rig.plan.summary_runs.length

    @rule(slots=st.sets(st.integers(0, SLOTS - 1)))
    def forget(self, slots: set[int]) -> None:
        self.rig.pages.forget(array(sorted(slots)))

    @invariant()
    def everything_is_as_it_was_left(self) -> None:
        self.rig.frames.audit()
        for frame, slot in [*self.loading, *self.borrowed]:
            assert (
                self.rig.frames.view(frame)[:: self.rig.geometry.page_bytes] == 100 + slot
            ).all()
        plan = self.rig.plan
        lent, all_lent = self.rig.balancer.lent, len(plan.lent_offsets)
        assert self.rig.frames.count(FrameState.SHUT) == all_lent - lent
        places = self.rig.pages.places - self.rig.pages.open_places
        rows = self.rig.summaries.rows - self.rig.summaries.open_rows
        shut = FrameState.SHUT
        served = [self.rig.frames.state(plan.frames + i) is not shut for i in range(all_lent)]
        count = len(plan.page_runs.firsts)
        assert places == covered(plan.page_runs, served[:count])
        assert rows == covered(plan.summary_runs, served[count:])
        for pinned in self.pinned:
            for row in pinned[pinned != NO_ROW].tolist():
                assert len(set(self.rig.row_bytes(row).tolist())) == 1
        self.rig.known(range(SLOTS))


TestBytes = Bytes.TestCase
TestBytes.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)
