"""The page cache's tables against a model that counts everything at every step."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from vllm_ssdkv.store.cache.selected_pages import NO_PLACE, Asked, Pages, SelectedPageCache
from vllm_ssdkv.store.format.slot_geometry import SlotGeometry
from vllm_ssdkv.store.memory.arena import Arena
from vllm_ssdkv.store.memory.memory_plan import PageEvictionPolicy

GEOMETRY = SlotGeometry("paged", layers=2, heads=2, groups=1, payload_bytes=4096, summary_pages=1)
SLOTS = 6
RATES = np.array([1.0, 0.25, 3.0])
FRAME = 1 << 40
"""Address of a frame that nobody looks into."""


def pages(keys: list[int], framed: frozenset[int] = frozenset()) -> Pages:
    slots, numbers = np.divmod(np.array(keys, dtype=np.int64), GEOMETRY.pages)
    frames = np.array([FRAME * (key in framed) for key in keys], dtype=np.uint64)
    return Pages(slots, numbers, frames)


def make(places: int, policy: PageEvictionPolicy = "lru") -> tuple[SelectedPageCache, Arena]:
    arena = Arena(max(1, places) * GEOMETRY.page_bytes)
    return SelectedPageCache(arena, 0, GEOMETRY, places, SLOTS, policy), arena


def arrive(
    cache: SelectedPageCache,
    keys: NDArray[np.int64],
    places: NDArray[np.int32],
    bad: frozenset[int] = frozenset(),
) -> None:
    right = np.array([key not in bad for key in keys.tolist()], dtype=np.bool_)
    cache.complete(keys, places, right, (keys % len(RATES)).astype(np.uint16))


def bring(cache: SelectedPageCache, keys: list[int]) -> Asked:
    """Ask for pages, read what has to be read, and use them."""
    asked = cache.acquire(pages(keys))
    arrive(cache, asked.keys[asked.held :], asked.places[asked.held :])
    return asked


@dataclass
class Model:
    """What is held, by whom, and what each page is worth: by the definitions, page by page."""

    policy: PageEvictionPolicy
    held: dict[int, int] = field(default_factory=dict)
    users: dict[int, int] = field(default_factory=dict)
    clock: int = 0
    freed: dict[int, int] = field(default_factory=dict)
    frequency: dict[int, float] = field(default_factory=dict)
    """Of pages that are held or known, after the steps before this one."""
    chosen: set[int] = field(default_factory=set)
    counted: set[int] = field(default_factory=set)
    """Pages that left in this step, having been chosen in it."""

    def after(self, key: int, *, chosen: bool) -> float:
        frequency = self.frequency.get(key, 0.0)
        if self.policy == "decay":
            return 0.7 * frequency + chosen
        if chosen:
            return frequency + 1
        return max(0.0, frequency - 1) if key in self.held else frequency

    def step(self) -> None:
        for key in {*self.held, *self.frequency} - self.counted:
            self.frequency[key] = self.after(key, chosen=key in self.chosen)
        self.chosen.clear()
        self.counted.clear()

    def score(self, key: int) -> float:
        """Low ones go first."""
        if self.policy == "lru":
            return self.freed[key]
        cost = 1 / float(RATES[key % len(RATES)]) if self.policy == "frequency" else 1
        return self.frequency.get(key, 0.0) * cost

    def idle(self) -> set[int]:
        return {key for key in self.held if not self.users.get(key)}

    def drop(self, key: int) -> None:
        for table in (self.held, self.frequency, self.freed):
            table.pop(key, None)
        self.chosen.discard(key)

    def evict(self, key: int) -> None:
        frequency = self.frequency.get(key, 0.0)
        if key in self.chosen and key not in self.counted:
            frequency = self.after(key, chosen=True)
            self.counted.add(key)
        self.drop(key)
        self.frequency[key] = frequency


RUN = 2


def move_runs(
    cache: SelectedPageCache, model: Model, closed: set[int], data: st.DataObject
) -> None:
    """Close some runs of places and open others, while none is taken."""
    firsts = st.sets(st.integers(0, max(0, cache.places - RUN)), max_size=2)
    if cache.places < RUN:
        return
    runs = np.array(sorted(data.draw(firsts)), dtype=np.int32)
    inside = [{first + i for i in range(RUN)} for first in runs.tolist()]
    held = [sum(place in run for place in model.held.values()) for run in inside]
    assert cache.held_in(runs, RUN).tolist() == held
    if data.draw(st.booleans()):
        assert cache.close(runs, RUN).all()
        closed |= set().union(*inside)
        for key in [key for key, place in model.held.items() if place in closed]:
            model.drop(key)
    else:
        cache.open(runs, RUN)
        closed -= set().union(*inside)
    assert cache.open_places == cache.usable() == cache.places - len(closed)


@settings(max_examples=100, deadline=None)
@given(
    policy=st.sampled_from(["lru", "frequency", "decay"]),
    places=st.integers(1, 9),
    data=st.data(),
)
def test_the_model_agrees(policy: PageEvictionPolicy, places: int, data: st.DataObject) -> None:
    cache, arena = make(places, policy)
    model = Model(policy)
    every = st.integers(0, SLOTS * GEOMETRY.pages - 1)
    cache.step(RATES)
    closed: set[int] = set()
    evicted = 0
    for _ in range(data.draw(st.integers(1, 14))):
        move_runs(cache, model, closed, data)
        if data.draw(st.booleans()):
            cache.step(RATES)
            model.step()
        framed = data.draw(st.frozensets(every, max_size=3))
        wanted = data.draw(st.lists(every, max_size=12))
        bad = data.draw(st.frozensets(every, max_size=2))
        outside = {key for key in wanted if key not in framed}
        found = outside & set(model.held)
        asked = cache.acquire(pages(wanted, framed))
        assert asked.framed == len(framed & set(wanted))
        assert set(asked.keys[: asked.held].tolist()) == found
        read = asked.keys[asked.held :].tolist()
        assert read == sorted(outside - found)
        for key, place in zip(asked.keys.tolist(), asked.places.tolist(), strict=False):
            assert key not in found or model.held[key] == place
        # What makes room is worth least.
        model.chosen |= found
        model.users = dict.fromkeys(found, 1)
        room = asked.places[asked.held :]
        taken = set(room[room != NO_PLACE].tolist())
        victims = {key for key, place in model.held.items() if place in taken}
        assert not victims & found
        spared = model.idle() - victims
        there = places - len(closed)
        assert not taken & closed
        assert len(taken) == min(len(read), there - len(found))
        assert len(victims) == max(0, len(taken) - (there - len(model.held)))
        evicted += len(victims)
        assert cache.evictions == evicted
        # The frequencies of so many pages that have left are known.
        if victims and spared and (policy == "lru" or evicted <= 4 * places):
            worst = max(model.score(key) for key in victims)
            assert worst <= min(model.score(key) for key in spared) + 1e-12
        for key in victims:
            model.evict(key)
        arrive(cache, asked.keys[asked.held :], room, bad)
        for key, place in zip(read, room.tolist(), strict=True):
            if place != NO_PLACE and key not in bad:
                model.held[key] = place
                model.chosen.add(key)
            elif place != NO_PLACE:
                model.drop(key)
        address, here = cache.find(asked, pages(wanted, framed))
        for key, at, there in zip(wanted, address.tolist(), here.tolist(), strict=True):
            if key in framed:
                inside = GEOMETRY.header_bytes + key % GEOMETRY.pages * GEOMETRY.page_bytes
                assert (at, there) == (FRAME + inside, True)
            else:
                assert there == (key in model.held)
                assert at == (there and arena.address + model.held[key] * GEOMETRY.page_bytes)
        cache.release(asked.places)
        model.users = {}
        model.clock += 1
        for order, (key, place) in enumerate(zip(asked.keys.tolist(), asked.places, strict=True)):
            if place != NO_PLACE and key in model.held:
                model.freed[key] = model.clock * 1000 + order
        assert cache.held() == len(model.held)
        assert cache.taken() == 0
        for slot in data.draw(st.sets(st.integers(0, SLOTS - 1), max_size=1)):
            cache.forget(np.array([slot], dtype=np.int64))
            for key in [k for k in (*model.held, *model.frequency) if k // GEOMETRY.pages == slot]:
                model.drop(key)


LAYERS, CHOSEN = 8, 10


def hits(policy: PageEvictionPolicy, places: int, steps: int = 60) -> list[int]:
    """Pages that each layer's choice finds, added up by step, [steps].

    Of a layer's ten pages six are chosen in every step; four are other ones each time.
    """
    geometry = SlotGeometry("paged", LAYERS, 1, 1, payload_bytes=4096, summary_pages=0)
    arena = Arena(places * geometry.page_bytes)
    slots = 6 + 4 * steps
    cache = SelectedPageCache(arena, 0, geometry, places, slots, policy)
    found = []
    for step in range(steps):
        cache.step(np.ones(1))
        found.append(0)
        for layer in range(LAYERS):
            others = np.arange(6 + 4 * step, 10 + 4 * step)
            chosen = np.concatenate([np.arange(6), others]).astype(np.int64)
            numbers = np.full(CHOSEN, geometry.first_page(layer), dtype=np.int64)
            asked = cache.acquire(Pages(chosen, numbers, np.zeros(CHOSEN, dtype=np.uint64)))
            arrive(cache, asked.keys[asked.held :], asked.places[asked.held :])
            cache.release(asked.places)
            found[-1] += asked.held
    arena.close()
    return found


@pytest.mark.parametrize("policy", ["frequency", "decay"])
def test_what_is_counted_stays_where_a_step_chooses_more_than_there_is_room_for(
    policy: PageEvictionPolicy,
) -> None:
    """40 places for 80 pages a step, 48 of which come again: least recently used finds none."""
    assert hits("lru", 40) == [0] * 60
    # A layer's ten lie there while it is attended to, so 30 at most can be found.
    assert min(hits(policy, 40)[20:]) >= 24
    # There is no page in vain where a step's choice has room.
    assert hits(policy, 80)[20:] == hits("lru", 80)[20:] == [48] * 40


def test_what_was_chosen_often_and_no_more_is_gone_sooner_by_decay_than_by_frequency() -> None:
    def survivor(policy: PageEvictionPolicy) -> int:
        cache, arena = make(2, policy)
        for key in [3] * 20 + [6] * 4:
            cache.step(RATES)
            cache.release(bring(cache, [key]).places)
        cache.step(RATES)
        cache.release(bring(cache, [9]).places)
        held = cache.holds(pages([3, 6]))
        arena.close()
        return 3 if held[0] else 6

    assert (survivor("decay"), survivor("frequency")) == (6, 3)


def test_neighbours_get_neighbouring_places() -> None:
    cache, _ = make(12)
    cache.release(bring(cache, list(range(12))).places)
    # Places 1, 4 and 7 are in use; 2 and 3, 5 and 6, 8 to 10 lie side by side and go first.
    bring(cache, [1, 4, 7])
    asked = bring(cache, [19, 21, 22, 24, 25, 27, 28, 29])
    place = dict(zip(asked.keys.tolist(), asked.places.tolist(), strict=True))
    assert place[28] == place[27] + 1
    assert place[29] == place[28] + 1
    assert place[25] == place[24] + 1
    assert place[22] == place[21] + 1


def test_places_that_somebody_uses_stay_open() -> None:
    cache, arena = make(6)
    cache.release(bring(cache, [0, 1]).places)
    used = bring(cache, [2])
    coming = cache.acquire(pages([3]))
    runs = np.array([0, 2, 4], dtype=np.int32)
    taken = {used.places[0] // 2, coming.places[0] // 2}
    assert [number == -1 for number in cache.held_in(runs, 2).tolist()] == [
        run in taken for run in range(3)
    ]
    closed = cache.close(runs, 2)
    assert closed.tolist() == [run not in taken for run in range(3)]
    assert cache.find(used, pages([2]))[1].all()
    arrive(cache, coming.keys, coming.places)
    cache.release(used.places)
    cache.release(coming.places)
    assert cache.close(runs, 2).all()
    assert (cache.held(), cache.open_places) == (0, 0)
    assert cache.acquire(pages([2])).places.tolist() == [NO_PLACE]
    cache.open(runs, 2)
    assert (cache.acquire(pages([2, 3])).places != NO_PLACE).all()
    for bad in (-1, 5):
        with pytest.raises(IndexError):
            cache.close(np.array([bad], dtype=np.int32), 2)
    arena.close()


def test_a_page_on_its_way_is_not_read_twice() -> None:
    cache, _ = make(4)
    first = cache.acquire(pages([3, 5]))
    second = cache.acquire(pages([5, 3, 9]))
    assert (second.held, second.coming, second.keys.tolist()[2:]) == (2, 2, [9])
    assert set(second.places[:2].tolist()) == set(first.places.tolist())
    assert not cache.find(second, pages([5, 3, 9]))[1].any()
    arrive(cache, first.keys, first.places, frozenset([5]))
    arrive(cache, second.keys[2:], second.places[2:])
    assert cache.find(second, pages([5, 3, 9]))[1].tolist() == [False, True, True]
    cache.release(first.places)
    assert cache.taken() == 3
    cache.release(second.places)
    assert (cache.taken(), cache.held()) == (0, 2)


def test_what_is_forgotten_while_it_is_read_is_not_served() -> None:
    cache, _ = make(4)
    asked = cache.acquire(pages([3]))
    cache.forget(np.array([0], dtype=np.int64))
    again = cache.acquire(pages([3]))
    assert (again.held, again.places[0] != asked.places[0]) == (0, True)
    arrive(cache, asked.keys, asked.places)
    assert cache.find(again, pages([3]))[1].tolist() == [False]
    arrive(cache, again.keys, again.places)
    assert cache.find(again, pages([3]))[1].tolist() == [True]
    cache.release(asked.places)
    cache.release(again.places)
    assert (cache.taken(), cache.held()) == (0, 1)


def test_guesses_take_what_nobody_uses_and_share_it() -> None:
    cache, _ = make(8)
    used = bring(cache, [0, 1])
    cache.release(bring(cache, [2, 3]).places)
    greedy, modest = [*range(4, 14), 2], [20, 21, 0]
    begin = np.array([0, len(greedy), len(greedy) + len(modest)], dtype=np.int32)
    keys, places = cache.prefetch(pages(greedy + modest), begin, 5)
    # Equal shares, and nothing for what DRAM has.
    assert keys.tolist() == [4, 5, 6, 20, 21]
    assert not set(places.tolist()) & set(used.places.tolist())
    # Nobody who is in use makes room for guesses.
    keys, _ = cache.prefetch(pages([25, 26, 27, 28]), np.array([0, 4], dtype=np.int32), 10)
    assert len(keys) == 1


def test_each_device_reads_no_more_than_its_quota() -> None:
    cache, _ = make(8)
    cache.release(bring(cache, [2]).places)
    # Of device 1 there is one page too many; what is held already uses up nothing.
    numbers, devices = [2, 10, 11, 20, 21, 22], [1, 1, 0, 1, 1, 0]
    begin = np.array([0, 3, 6], dtype=np.int32)
    quota = np.array([1, 2, 5], dtype=np.int64)
    keys, _ = cache.prefetch(pages(numbers), begin, 8, np.array(devices, dtype=np.uint16), quota)
    assert keys.tolist() == [10, 11, 20]
    assert quota.tolist() == [1, 2, 5]
    with pytest.raises(IndexError):
        cache.prefetch(pages([25]), begin[:1], 8, np.array([3], dtype=np.uint16), quota)
    with pytest.raises(ValueError, match="device"):
        cache.prefetch(pages([25, 26]), begin[:1], 8, np.array([0], dtype=np.uint16), quota)


def test_a_page_that_lists_share_takes_one_place_and_one_read() -> None:
    """Eight rows over one prefix leave as much for the others as one row would."""
    for quota in (None, np.array([4], dtype=np.int64)):
        cache, _ = make(8)
        shared, begin = [4, 5, 6, 20] * 8, np.arange(0, 33, 4, dtype=np.int32)
        devices = None if quota is None else np.zeros(len(shared), dtype=np.uint16)
        keys, places = cache.prefetch(pages(shared), begin, 4, devices, quota)
        assert keys.tolist() == [4, 5, 6, 20]
        assert len(set(places.tolist())) == 4
        cache, _ = make(8)
        # What one list has for nothing, because another one wants it too, costs it no turn.
        lists, edges = [4, 5, 6, 4, 5, 7], np.array([0, 3, 6], dtype=np.int32)
        devices = None if quota is None else np.zeros(len(lists), dtype=np.uint16)
        keys, _ = cache.prefetch(pages(lists), edges, 4, devices, quota)
        assert keys.tolist() == [4, 5, 6, 7]


def test_a_guess_counts_once() -> None:
    cache, _ = make(8)
    keys, places = cache.prefetch(pages([4, 5]), np.array([0, 2], dtype=np.int32), 8)
    arrive(cache, keys, places)
    cache.release(places)
    for guessed in (1, 0):
        asked = bring(cache, [5, 6])
        assert asked.guessed == guessed
        cache.release(asked.places)


@pytest.mark.parametrize(
    ("keys", "places"),
    [([-1], 4), ([SLOTS * GEOMETRY.pages], 4)],
)
def test_pages_that_do_not_exist_are_refused(keys: list[int], places: int) -> None:
    cache, _ = make(places)
    with pytest.raises(IndexError):
        cache.acquire(pages(keys))
    assert cache.taken() == 0
    with pytest.raises(IndexError):
        cache.release(np.array([places], dtype=np.int32))
    with pytest.raises(IndexError):
        cache.forget(np.array([SLOTS], dtype=np.int64))


def test_looking_whether_pages_are_held_changes_nothing() -> None:
    cache, arena = make(2)
    cache.release(bring(cache, [1]).places)
    cache.release(bring(cache, [2]).places)
    coming = cache.acquire(pages([3]))  # in the place of 1
    assert cache.holds(pages([1, 2, 3, 2])).tolist() == [False, True, False, True]
    arrive(cache, coming.keys, coming.places)
    cache.release(coming.places)
    assert cache.holds(pages([3])).all()
    cache.release(bring(cache, [4]).places)
    assert cache.holds(pages([2, 3, 4])).tolist() == [False, True, True]
    with pytest.raises(IndexError):
        cache.holds(pages([SLOTS * GEOMETRY.pages]))
    arena.close()
