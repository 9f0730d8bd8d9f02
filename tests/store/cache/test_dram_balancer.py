"""The border between frames and single pages moves to where reads are saved."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from numpy.typing import NDArray

from tests.store.border_rig import DEADLINE_S, DEEP, GEOMETRY, SLOTS, Rig, wanted
from tests.store.chosen_pages import bring, context
from tests.store.conftest import PATIENCE_S, SUMMED, MakeStore, array
from vllm_ssdkv.store.cache import dram_balancer, frame_lease
from vllm_ssdkv.store.cache.frames import NO_FRAME, FrameState
from vllm_ssdkv.store.cache.selected_pages import NO_PLACE, Pages
from vllm_ssdkv.store.cache.summaries import NO_ROW
from vllm_ssdkv.store.memory.memory_plan import KEPT_SHARE, FrameRuns, MemoryPlan, SparseMemory
from vllm_ssdkv.store.memory.summary_rows import row_bytes

NONE: list[NDArray[np.int64]] = []


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.frames.audit()
    rig.arena.close()


def many(rig: Rig, slots: Sequence[int]) -> list[tuple[int, int]]:
    """Pages of these slots, as many as there are places; more than are open."""
    every = [(slot, page) for slot in slots for page in range(GEOMETRY.pages)]
    assert len(every) >= rig.pages.open_places
    return every[: rig.pages.places]


def test_where_nobody_chooses_frames_have_what_pages_do_not_need(rig: Rig) -> None:
    plan = rig.plan
    everything = list(range(SLOTS))
    assert plan.frames + len(plan.page_runs.firsts) < SLOTS
    found = rig.fill(everything)
    assert len(found) == plan.frames + len(plan.page_runs.firsts) == plan.frames + rig.balancer.lent
    left = plan.page_places - len(plan.page_runs.firsts) * plan.page_runs.length
    assert rig.pages.open_places == left >= rig.choice.least_places(GEOMETRY)
    assert KEPT_SHARE * plan.page_places - 1 < left < 16 + plan.page_runs.length
    for slot in found:
        frame = rig.frames.frame_of(slot)
        assert (rig.frames.view(frame) == slot).all()


def test_no_more_is_lent_than_is_asked_for(rig: Rig) -> None:
    rig.fill(range(rig.plan.frames))
    assert rig.balancer.lent == 0
    rig.fill(range(rig.plan.frames, rig.plan.frames + 3))
    assert rig.balancer.lent == 3
    rig.balancer.make_room(array([]))
    assert rig.balancer.lent == 3


def test_large_memory_is_lent_in_portions(monkeypatch: pytest.MonkeyPatch) -> None:
    """To look for one run costs as much as to look for some. What others need stays theirs."""
    monkeypatch.setattr(frame_lease, "_PORTIONS", 4)
    rig = Rig()
    portion = len(rig.plan.page_runs.firsts) // 4
    assert portion > 2
    held = list(range(rig.plan.frames + 1))
    rig.fill(held)
    assert rig.balancer.lent == portion
    more = list(range(rig.plan.frames + 1, rig.plan.frames + portion))
    rig.fill(more)
    assert rig.balancer.lent == portion
    rig.frames.retain(array([*held, *more]))
    every = [(slot, page) for slot in range(SLOTS) for page in range(GEOMETRY.pages)]
    chosen = every[: (rig.pages.open_places - rig.plan.page_runs.length) * 4 // 5]
    rig.choose(chosen)
    rig.balancer.rebalance([array(range(20))], {0})
    left = rig.balancer.spare
    assert 0 < left < portion
    rig.balancer.make_room(array([30]))
    assert portion < rig.balancer.lent <= portion + left
    assert rig.pages.open_places >= len(chosen) * 5 // 4
    rig.frames.audit()
    rig.arena.close()


def test_hits_that_are_queued_together_get_frames_for_all_of_them(rig: Rig) -> None:
    """They are loaded beside this, one after another: none has taken a frame yet."""
    first, second = list(range(rig.plan.frames)), list(range(20, 24))
    rig.balancer.expect("first", array(first))
    assert rig.balancer.lent == 0
    rig.balancer.expect("second", array(second))
    assert rig.balancer.lent == 4
    rig.balancer.expect("shared", array([*second, 30]))
    assert rig.balancer.lent == 5
    rig.frames.finish_io(rig.frames.take(array(first), FrameState.LOADING), FrameState.CLEAN)
    rig.frames.retain(array(first))
    rig.frames.finish_io(rig.frames.take(array(second), FrameState.LOADING), FrameState.CLEAN)
    rig.frames.retain(array(second))
    rig.balancer.make_room(array([]))
    assert rig.balancer.lent == 5
    for request in ("first", "second", "shared", "unknown"):
        rig.balancer.arrived(request)
    rig.balancer.make_room(array(range(31, 37)))
    assert rig.balancer.lent == 10


def test_a_frame_is_lent_empty(rig: Rig) -> None:
    """What lies behind a page's payload goes to the devices with it: nobody else's KV."""
    rig.balancer.make_room(array(range(SLOTS)))
    for frame in range(rig.plan.frames, rig.plan.frames + rig.balancer.lent):
        header, *pages = np.split(rig.frames.view(frame), GEOMETRY.kv_pages + 1)
        assert not header.any()
        assert not any(page[GEOMETRY.payload_bytes :].any() for page in pages)


def test_pages_that_are_chosen_are_not_given_away(rig: Rig) -> None:
    chosen = many(rig, range(20))[: rig.pages.places // 2]
    rig.choose(chosen)
    rig.balancer.rebalance([array(range(20))], {0})
    rig.fill(range(20, SLOTS))
    assert rig.balancer.lent > 0
    assert rig.pages.open_places >= len(chosen) * 5 // 4
    # Of runs the ones with the fewest pages go.
    assert rig.pages.holds(wanted(chosen)).mean() > 0.9


def test_who_chooses_gets_back_what_nobody_attends_to_as_a_whole(rig: Rig) -> None:
    """Frames of requests that ended go first, those of exact ones never."""
    exact, ended, choosing = range(8), range(8, 16), range(16, 20)
    for slots in (exact, ended, choosing):
        rig.fill(slots)
    rig.frames.retain(array(exact))
    rig.frames.retain(array(choosing))
    contexts = [array(exact), array([*choosing, *range(20, 40)])]
    lent = rig.balancer.lent
    assert lent == 20 - rig.plan.frames
    for turn in range(200):
        rig.choose(many(rig, range(20 + turn % 3, 40)))
        rig.balancer.rebalance(contexts, {1})
    # Frames that are always frames are not given up for pages, whoever uses them.
    assert rig.in_frames(exact) == 8
    assert rig.in_frames(ended) + rig.in_frames(choosing) <= rig.plan.frames
    kept = [rig.frames.frame_of(slot) for slot in exact]
    assert rig.balancer.lent == sum(frame >= rig.plan.frames for frame in kept)
    # They share a slot with somebody who chooses: it is still attended to as a whole.
    rig.choose(many(rig, range(15, 35)))
    rig.balancer.rebalance([contexts[0], array(range(40))], {1})
    assert rig.in_frames(exact) == 8


def test_frames_of_ended_requests_go_before_those_of_choosing_ones(rig: Rig) -> None:
    """One by one, as pages make room for others."""
    choosing, ended = list(range(rig.plan.frames + 6)), [30, 31, 32, 33]
    rig.fill(choosing)
    rig.frames.retain(array(choosing))
    rig.fill(ended)
    assert rig.balancer.lent == 10
    contexts = [array([*choosing, *range(20, 30)])]
    pages = iter([(slot, page) for slot in range(20, 40) for page in range(GEOMETRY.pages)])
    rig.choose([next(pages) for _ in range(rig.pages.open_places)])
    rig.balancer.rebalance(contexts, {0})
    assert rig.balancer.lent == 10
    for lent in reversed(range(10)):
        assert rig.pages.held() == rig.pages.open_places
        rig.choose([next(pages)])
        rig.balancer.rebalance(contexts, {0})
        assert rig.balancer.lent == lent
        assert rig.in_frames(ended) == max(0, lent - 6)
        assert rig.in_frames(choosing) == rig.plan.frames + min(lent, 6)
        rig.choose([next(pages) for _ in range(rig.plan.page_runs.length)])
        rig.balancer.rebalance(contexts, {0})
        assert rig.balancer.lent == lent


def test_who_begins_to_choose_finds_its_places(rig: Rig) -> None:
    """Before it reads the first page: an eighth of its context's, and a quarter more."""
    ended = list(range(rig.plan.frames + 10))
    rig.fill(ended)
    assert rig.balancer.lent == 10
    contexts = [np.resize(array(range(24, 40)), blocks) for blocks in (1, 60, 30, 16)]
    kv = GEOMETRY.kv_pages
    for rows in ([0], [0, 1], [0, 1, 2]):
        rig.balancer.choose(contexts, rows)
        wanted = 1.25 * kv / 8 * sum(len(contexts[row]) for row in rows)
        assert rig.pages.open_places >= wanted or rig.balancer.lent == 0
        assert rig.pages.open_places - max(50, wanted) < rig.plan.page_runs.length
        assert rig.pages.evictions == 0
    assert 0 < rig.balancer.lent < 10
    whole = [frame - rig.plan.frames for frame in map(rig.frames.frame_of, ended)]
    left = [slot for slot, run in zip(ended, whole, strict=True) if run >= 0]
    rig.frames.retain(array(left))
    rig.balancer.choose([*contexts, array(left)], [0, 1, 2, 3])
    assert rig.in_frames(left) == len(left)


def test_blocks_of_requests_that_choose_are_lent_nothing(rig: Rig) -> None:
    """Those they add while they are decoded: what was lent for one would go back at once."""
    first = list(range(rig.plan.frames))
    rig.fill(first)
    rig.frames.retain(array(first))
    rig.choose([(0, 0)])
    rig.balancer.rebalance([array([*first, 20, 21])], {0})
    rig.fill([20, 21])  # the newest of its context
    assert rig.balancer.lent == 0
    assert rig.in_frames([20, 21]) == 2
    rig.frames.retain(array([20, 21]))
    rig.fill([22, 23])
    assert rig.balancer.lent == 2


def test_what_is_in_use_is_passed_over(rig: Rig) -> None:
    """A frame that is read or written is not taken back, nor a place that is."""
    rig.fill(range(rig.plan.frames))
    coming = rig.pages.acquire(wanted([(30, 0)]))
    rig.balancer.make_room(array(range(SLOTS)))
    lent = rig.balancer.lent
    # Runs are as many as they can be, without the one that is being read into.
    inside = rig.plan.page_runs.firsts <= coming.places[0]
    inside &= coming.places[0] < rig.plan.page_runs.firsts + rig.plan.page_runs.length
    assert lent == len(rig.plan.page_runs.firsts) - inside.any()
    frames = rig.frames.take(array(range(20, 20 + lent)), FrameState.LOADING)
    assert len(frames) == lent
    rig.pages.release(coming.places)
    rig.choose(many(rig, range(20)))
    rig.choose(many(rig, range(20, 40)))
    rig.balancer.rebalance(NONE, ())
    assert rig.balancer.lent == lent
    rig.frames.finish_io(frames, FrameState.CLEAN)
    rig.choose(many(rig, range(20)))
    rig.balancer.rebalance(NONE, ())
    assert rig.balancer.lent < lent


def test_it_is_not_looked_in_vain_in_each_step(rig: Rig) -> None:
    """Where all that is lent is attended to as a whole, while others choose all the time."""
    whole = list(range(rig.plan.frames + 5))
    rig.fill(whole)
    rig.frames.retain(array(whole))
    contexts = [array(whole), array(range(20, 40))]
    looks = 0
    referenced = rig.frames.referenced

    def look(slots: NDArray[np.int64]) -> NDArray[np.bool_]:
        nonlocal looks
        looks += 1
        return referenced(slots)

    rig.frames.referenced = look  # type: ignore[method-assign]

    def step(rows: list[NDArray[np.int64]], turn: int, choosing: Sequence[int] = (-1,)) -> None:
        """In each the pages of other slots."""
        choosing = [row % len(rows) for row in choosing]
        rig.balancer.choose(rows, choosing)
        first = 20 + turn % 2 * 10
        rig.choose([(slot, page) for slot in range(first, first + 10) for page in range(9)])
        rig.balancer.rebalance(rows, choosing)

    for turn in range(64):
        step(contexts, turn)
        assert rig.balancer.lent == 5
    assert rig.pages.evictions > 1000
    assert 3 <= looks <= 5
    # The other row begins to choose, too, just after a look in vain: it is looked at once.
    before, turn = looks, 64
    while looks == before:
        step(contexts, turn)
        turn += 1
    before = looks
    step(contexts, turn, [0, 1])
    assert looks == before + 1
    assert rig.balancer.lent < 5
    # The others end: what they had goes back soon.
    rig.frames.release_references(array(whole))
    for turn in range(17):
        step(contexts[1:], turn)
    assert rig.balancer.lent == 0


def test_a_cache_whose_size_is_given_is_lent_to_nobody() -> None:
    choice = SparseMemory(16, SLOTS, page_cache=100 * GEOMETRY.page_bytes, summaries=1 << 16)
    plan = MemoryPlan(GEOMETRY, 60 * GEOMETRY.slot_bytes, 0, choice=choice)
    assert len(plan.page_runs.firsts) == 0


@pytest.fixture
def deep() -> Iterator[Rig]:
    rig = Rig(27, rows=True)
    assert len(rig.plan.page_runs.firsts) >= 2
    assert len(rig.plan.summary_runs.firsts) >= 5
    yield rig
    rig.frames.audit()
    rig.arena.close()


def test_rows_for_summaries_serve_as_frames_too(deep: Rig) -> None:
    plan = deep.plan
    found = deep.fill(range(SLOTS))
    assert len(found) == plan.frames + len(plan.lent_offsets)
    assert deep.pages.open_places < plan.page_places
    assert deep.summaries.open_rows < plan.summary_runs.length
    for slot in found:
        assert (deep.frames.view(deep.frames.frame_of(slot)) == slot).all()
    nbytes = plan.summary_rows * row_bytes(DEEP, 16, channels=True)
    for offset in plan.summary_runs.offsets.tolist():
        assert offset % 4096 == 0
        assert plan.summary_offset <= offset
        assert offset + DEEP.frame_bytes <= plan.summary_offset + nbytes


def test_summaries_that_were_used_last_stay(deep: Rig) -> None:
    """Wherever they lie: what is older makes room for them."""
    deep.summarize(range(SLOTS))
    assert deep.known(range(SLOTS)) == list(range(SLOTS))
    for slot in range(0, SLOTS, 4):
        assert deep.known([slot]) == [slot]
    deep.fill(range(SLOTS - 4))
    assert 4 <= deep.summaries.open_rows < SLOTS // 4
    kept = set(deep.known(range(SLOTS)))
    assert kept <= set(range(0, SLOTS, 4))
    assert deep.summaries.held() == len(kept) == deep.summaries.open_rows
    # Rows that come back hold nothing, and can be used.
    deep.balancer.choose([array(range(SLOTS))], [0])
    assert deep.summaries.open_rows == SLOTS
    assert set(deep.known(range(SLOTS))) == kept
    deep.summarize(range(SLOTS))
    assert deep.known(range(SLOTS)) == list(range(SLOTS))


def test_rows_that_are_pinned_are_not_lent(deep: Rig) -> None:
    deep.summarize(range(SLOTS))
    rows = deep.summaries.pin(array(range(SLOTS)))
    runs = deep.plan.summary_runs
    inside = rows == runs.firsts[-1]
    deep.summaries.unpin(rows[~inside])
    deep.fill(range(SLOTS))
    having = (runs.firsts + runs.length > runs.firsts[-1]).sum()  # neighbours share rows
    assert 1 <= having <= 2
    assert deep.balancer.lent == len(deep.plan.lent_offsets) - having
    pinned = np.flatnonzero(inside).tolist()
    assert deep.known(pinned) == pinned
    assert len(pinned) == 1


def test_who_chooses_has_rows_whoever_uses_the_frames(deep: Rig) -> None:
    """Frames that nobody attends to as a whole go first."""
    exact = deep.fill(range(SLOTS))
    deep.frames.retain(array(exact))
    kept, few = list(exact), deep.summaries.open_rows
    contexts = [array(exact)]
    for blocks in range(5, SLOTS + 1, 5):
        chosen = array(range(SLOTS - blocks, SLOTS))
        deep.balancer.choose([*contexts, chosen], [1])
        assert deep.summaries.open_rows >= blocks
        assert deep.summaries.open_rows < max(blocks, few + 1) + deep.plan.summary_runs.length
        kept = [slot for slot in kept if deep.frames.frame_of(slot) != NO_FRAME]
    assert len(kept) == len(exact) - len(deep.plan.summary_runs.firsts)


def test_rows_are_there_before_they_are_needed(deep: Rig) -> None:
    """A hit that will be chosen from has them when it comes, a prompt while it is computed, and
    they stay for a while."""
    deep.fill(range(SLOTS))
    few = deep.summaries.open_rows
    deep.balancer.reserve(few + 1)
    assert few < deep.summaries.open_rows <= few + deep.plan.summary_runs.length
    for _ in range(40):
        deep.balancer.rebalance(NONE, ())
    deep.frames.forget(array(range(SLOTS)))
    deep.fill(range(SLOTS))
    assert deep.summaries.open_rows == few
    prompt = array(range(20))
    deep.balancer.rebalance([prompt], (), later={0})
    assert deep.summaries.open_rows >= 25  # and room to grow
    deep.frames.forget(array(range(SLOTS)))
    deep.fill(range(SLOTS))
    assert deep.summaries.open_rows >= 25
    # Rows that share their blocks need them once.
    deep.balancer.rebalance([prompt] * 4, (), later={0, 1, 2, 3})
    deep.balancer.choose([prompt] * 4, [0, 1, 2, 3])
    assert deep.summaries.open_rows < 30


def test_prompts_that_will_be_chosen_from_are_lent_places_and_no_rows(deep: Rig) -> None:
    deep.summarize(range(SLOTS))
    prompt, exact = array(range(30)), array(range(30, SLOTS))
    deep.balancer.rebalance([prompt], (), later={0})
    deep.balancer._rows_needed = 0  # as if there were rows for many more
    deep.fill(prompt.tolist())
    assert deep.balancer.lent == len(deep.plan.page_runs.firsts)
    assert deep.known(range(SLOTS)) == list(range(SLOTS))
    deep.fill(exact.tolist())
    assert deep.balancer.lent > len(deep.plan.page_runs.firsts)


def test_frames_in_use_are_waited_for_as_long_as_something_is_under_way(
    deep: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        time.sleep(seconds)

    clock = SimpleNamespace(monotonic=time.monotonic, sleep=sleep)
    monkeypatch.setattr(dram_balancer, "time", clock)
    deep.balancer.make_room(array(range(SLOTS)))
    frames = deep.frames.take(array(range(SLOTS)), FrameState.LOADING)
    few = deep.summaries.open_rows
    contexts = [array(range(SLOTS))]
    deep.balancer.choose(contexts, [0])  # nothing is under way that would end their use
    assert deep.summaries.open_rows == few
    assert slept == []
    begun = time.monotonic()
    deep.busy = True
    deep.balancer.choose(contexts, [0])
    assert time.monotonic() - begun >= DEADLINE_S
    assert deep.summaries.open_rows == few

    def end() -> None:
        deep.frames.finish_io(frames, FrameState.CLEAN)
        deep.busy = False

    loader = threading.Timer(0.02, end)
    deep.balancer._deadline_s = PATIENCE_S
    loader.start()
    deep.balancer.choose(contexts, [0])
    loader.join()
    assert deep.summaries.open_rows == SLOTS


def test_short_requests_find_frames_until_others_choose(make_store: MakeStore) -> None:
    """A whole store: a hit that is attended to as a whole is read once, all of it."""
    rig = make_store(SUMMED, slots=64, frames=10, lend=True)
    store = rig.store
    fewest = store.frames.frames
    assert store.open_frames == fewest
    names = {slot: 700 + slot for slot in range(40)}
    choosing = array(list(context(rig, range(44, 64), "choosing")))
    rig.write(names)
    store.frames.forget(array(list(names)))
    store.extend_context("whole", 0, array(list(names)))
    assert rig.load(names, [], whole=True).complete
    most = store.open_frames
    assert fewest + 15 < most < len(names)
    contexts = [array(list(names)), choosing]
    rig.assert_rows(rig.walk(list(names)), list(names.values()))
    assert store._stream is not None
    assert store._stream.pages_on_ssd == (len(names) - most) * SUMMED.kv_pages

    def choose(contexts: list[NDArray[np.int64]], row: int) -> None:
        """More than what is left of the single pages."""
        every = {row: [(block, page) for block in range(20) for page in range(4)]}
        chosen = store.choose(contexts, [row])
        for layer in range(SUMMED.layers):
            assert len(bring(rig, chosen, layer, every)) == 80
        chosen.close()
        store.rebalance_dram(contexts, [row])

    for _ in range(10):
        choose(contexts, 1)
    assert store.open_frames == most
    rig.assert_rows(rig.walk(list(names)), list(names.values()))
    assert store._stream.pages_on_ssd == (len(names) - most) * SUMMED.kv_pages
    store.drop_context("whole")
    for _ in range(10):
        choose([choosing], 0)
    assert store.open_frames < fewest + 5
    assert store._pages is not None
    evictions = store._pages.evictions
    choose([choosing], 0)
    assert store._pages.evictions == evictions
    store.drop_context("choosing")
    rig.assert_no_leak()


# ---- the border under random use: nobody's bytes are ever written by another ----


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
