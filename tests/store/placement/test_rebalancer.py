"""Striping anew: what can be found is where it was written; nothing is given up too soon."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kit.waiting import until
from tests.store.conftest import array, key_of
from vllm_ssdkv.base.errors import StoreError
from vllm_ssdkv.base.metrics import Counters
from vllm_ssdkv.store.device_weights import DeviceWeights
from vllm_ssdkv.store.format.segment import Segment
from vllm_ssdkv.store.format.slot_geometry import SUPERBLOCK_BYTES, SlotGeometry
from vllm_ssdkv.store.index.slot_index import FULL, SlotIndex, SlotState, Usage
from vllm_ssdkv.store.placement import rebalancer
from vllm_ssdkv.store.placement import segments as dividing
from vllm_ssdkv.store.placement.placement import Placement
from vllm_ssdkv.store.placement.rebalancer import BackgroundSaver, Rebalancer
from vllm_ssdkv.store.placement.segments import arrange

GEOMETRY = SlotGeometry("opaque", 3, 1, 1, 204_000)  # two units
DEVICES = 3
UNITS = 40


@dataclass
class Saver:
    """A manifest that is saved when the test says so."""

    at_once: bool = True
    pending: Sequence[Segment] | None = None
    manifest: Sequence[Segment] = ()

    def put(self, segments: Sequence[Segment]) -> None:
        self.pending = segments
        if self.at_once:
            self.save()

    def save(self) -> None:
        if self.pending is not None:
            self.manifest, self.pending = self.pending, None

    def saved(self) -> bool:
        return self.pending is None

    def error(self) -> str:
        return ""

    def wait(self, timeout_s: float) -> bool:
        return self.saved()

    def close(self, timeout_s: float) -> bool:
        return self.saved()


@dataclass
class Store:
    """An index on three devices whose bytes are remembered."""

    weights: list[float] = field(default_factory=lambda: [1.0] * DEVICES)
    saver: Saver = field(default_factory=Saver)
    units: int = UNITS

    def __post_init__(self) -> None:
        found = arrange(GEOMETRY, [], self.weights, [self.units * bool(w) for w in self.weights])
        everywhere = arrange(
            GEOMETRY,
            found.segments,
            [w or 1.0 for w in self.weights],
            [self.units] * DEVICES,
            [d for d, w in enumerate(self.weights) if not w],
        )
        self.counters = Counters()
        self.index = SlotIndex(everywhere.numbers, None)
        self.placement = Placement(GEOMETRY, everywhere.segments, DEVICES)
        numbers = np.arange(self.index.num_slots, dtype=np.int64)
        self.index.quarantine(~self.placement.holds(numbers))
        self.rebalancer = Rebalancer(
            self.index,
            self.placement,
            self.weights,
            self.saver,
            self.counters,
            clock=lambda: 0.0,
        )
        self.disk: dict[tuple[int, int], bytes] = {}
        self.names = 0
        self.writing: list[tuple[int, bytes]] = []

    def places(self, slot: int) -> list[tuple[int, int]]:
        unit = GEOMETRY.unit_bytes
        found = self.placement.extents(array([slot]), 0, GEOMETRY.slot_bytes)
        return [
            (int(d), (int(o) - SUPERBLOCK_BYTES) // unit + i)
            for d, o, n in zip(found.device, found.offset, found.length, strict=True)
            for i in range(-(-int(n) // unit))
        ]

    def begin(self, count: int) -> None:
        """Hand out slots; their bytes are written at once."""
        for slot in self.index.allocate(min(count, self.index.available())).tolist():
            key = key_of(self.names)
            self.names += 1
            for place in self.places(slot):
                self.disk[place] = key
            self.writing.append((slot, key))

    def end(self) -> None:
        for slot, key in self.writing:
            if self.index.state(slot) is SlotState.WRITING:
                self.index.publish(slot, key)
                self.index.durable(slot)
            self.index.unpin(array([slot]))
        self.writing = []

    def store(self, count: int) -> None:
        self.begin(count)
        self.end()

    def rewrite(self, slots: Sequence[int], *, good: bool = True) -> int:
        """As the connector stores blocks again that were read, all at once; how many were."""
        index = self.index
        old = array([s for s in slots if index.state(s) is SlotState.READY])
        old = old[self.rebalancer.outdated(old)]
        old = old[: min(index.free_now(), index.available() // 2)]
        index.pin(old)
        new = index.allocate(len(old))
        assert not self.rebalancer.outdated(new).any(), "they would be rewritten again"
        for before, after in zip(old.tolist(), new.tolist(), strict=True):
            for place in self.places(after):
                self.disk[place] = index.key(before)
        done = index.replace(old, new) if good else np.zeros(len(old), dtype=np.bool_)
        index.unpin(new)
        index.unpin(old)
        return int(done.sum())

    def lose(self, device: int) -> None:
        self.weights[device] = 0.0
        self.rebalancer.reweigh(self.weights)
        masked = self.index.gauges()["masked"]
        self.rebalancer.mask_lost()
        assert self.index.gauges()["masked"] >= masked

    def come_back(self, device: int) -> None:
        self.weights[device] = 1.0
        self.rebalancer.reweigh(self.weights)
        self.rebalancer.take_returned()

    def ready(self) -> dict[int, bytes]:
        names = (key_of(n) for n in range(self.names))
        return {s: key for key in names for s in self.index.lookup([key]).tolist()}

    def check(self) -> None:
        ready = self.ready()
        found = self.placement.extents(array(list(ready)), 0, GEOMETRY.slot_bytes)
        keys = list(ready.values())
        for device, offset, length, which in zip(
            found.device.tolist(),
            found.offset.tolist(),
            found.length.tolist(),
            found.slot_index.tolist(),
            strict=True,
        ):
            first = (offset - SUPERBLOCK_BYTES) // GEOMETRY.unit_bytes
            for unit in range(first, first - (-length // GEOMETRY.unit_bytes)):
                assert self.disk[device, unit] == keys[which]
        gauges = self.index.gauges()
        pinned = gauges["pinned"]
        assert (
            gauges["free"] + gauges["evictable"] + gauges["masked"] + gauges["lost"] + pinned
            == self.index.num_slots
        )


@pytest.fixture(autouse=True)
def _small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dividing, "MIN_SLOTS", 16)


actions = st.lists(
    st.one_of(
        st.tuples(st.just("begin"), st.integers(1, 30)),
        st.tuples(st.just("end"), st.just(0)),
        st.tuples(st.just("promise"), st.integers(1, 60)),
        st.tuples(st.just("rewrite"), st.integers(1, 30)),
        st.tuples(st.just("step"), st.just(0)),
        st.tuples(st.just("save"), st.just(0)),
        st.tuples(st.just("weigh"), st.integers(0, 6)),
        st.tuples(st.just("lose"), st.integers(0, DEVICES - 1)),
        st.tuples(st.just("come back"), st.integers(0, DEVICES - 1)),
    ),
    max_size=25,
)


@settings(max_examples=50, deadline=None)
@given(actions, st.booleans(), st.sampled_from([[1.0, 1.0, 1.0], [1.0, 0.0, 1.0]]))
def test_what_is_found_is_where_it_was_written(
    history: list[tuple[str, int]], at_once: bool, weights: list[float]
) -> None:
    store = Store(list(weights), Saver(at_once))
    gone: set[int] = set()
    for what, number in history:
        if what == "begin":
            store.begin(number)
        elif what == "end":
            store.end()
        elif what == "promise":
            store.index.reserve(min(number, store.index.available()))
        elif what == "rewrite":
            ready = sorted(store.ready())
            store.rewrite(ready[number % max(1, len(ready)) :][:number], good=number % 5 > 0)
        elif what == "step":
            store.rebalancer.step()
        elif what == "save":
            store.saver.save()
        elif what == "weigh":
            store.weights = [0.2 if d == number else 1.0 for d in range(DEVICES)]
            for device in gone:
                store.weights[device] = 0.0
            store.rebalancer.reweigh(store.weights)
        elif what == "come back" and number in gone:
            gone.remove(number)
            store.come_back(number)
        elif what == "lose" and number not in gone:
            gone.add(number)
            store.lose(number)
        store.check()
        gauges = store.index.gauges()
        if not gone:  # a lost device may take what was promised with it, nothing else may
            assert gauges["free"] + gauges["evictable"] >= gauges["reserved"]
    # In the end, every segment that could be emptied has the lanes it should have.
    store.end()
    store.index.unreserve(store.index.gauges()["reserved"])
    store.saver.at_once = True
    store.saver.save()
    for _ in range(50):
        store.rebalancer.step()
        store.store(8)
        store.check()
    if any(store.weights):
        assert store.index.available() > 0
        assert not store.rebalancer._stale


def test_an_added_device_takes_part_in_new_slots_and_costs_little() -> None:
    """What holds nothing is striped anew, what is stored stays."""
    store = Store([1.0, 1.0, 0.0])
    slots = store.placement.slots
    store.store(slots)
    store.index.drop(array([s for s in range(slots) if s >= store.placement.segments[0].slots]))
    before = store.ready()
    store.rebalancer.reweigh([1.0, 1.0, 1.0])
    store.rebalancer.step()
    store.rebalancer.step()
    kept = store.ready()
    assert kept == {s: k for s, k in before.items() if s in kept}
    assert len(kept) == len(before)
    (fresh,) = store.index.allocate(1).tolist()
    assert {d for d, _ in store.places(fresh)} <= {0, 1, 2}
    wide = [s for s in store.placement.segments if 2 in s.lanes]
    assert wide
    assert store.counters.total("slots_dropped", cause="restriped") == 0


def test_a_full_store_gives_up_one_segment_at_a_time() -> None:
    store = Store()
    store.store(store.placement.slots)
    largest = max(s.slots for s in store.placement.segments)
    store.rebalancer.reweigh([1.0, 1.0, 0.2])
    for _ in range(4):
        store.rebalancer.step()
    assert 0 < store.counters.total("slots_dropped", cause="restriped") <= largest
    assert store.index.free_now() > 0
    assert store.index.gauges()["ready"] >= store.placement.slots - 2 * largest


@pytest.mark.parametrize(("units", "at_once", "count"), [(UNITS, False, 4), (400, True, 20)])
def test_fast_writes_find_new_slots_all_the_same(units: int, at_once: bool, count: int) -> None:
    """Slots of the old kind are handed out only until it is known how many are wanted while the
    manifest is saved, or, where that takes no time, at a time."""
    store = Store(saver=Saver(at_once), units=units)
    store.store(store.placement.slots)
    store.rebalancer.reweigh([1.0, 1.0, 0.2])
    old = []
    for _ in range(12):
        for _ in range(1 + at_once):
            store.rebalancer.step()  # begins to save, or ends
        before = set(store.rebalancer.placement.segments)
        store.begin(count)
        fresh = {slot for slot, _ in store.writing}
        stale = [s for s in before if s.lanes.count(2) * 3 == len(s.lanes)]
        old.append(sum(s.first <= slot < s.first + s.slots for slot in fresh for s in stale))
        store.end()
        store.saver.save()
        store.check()
    assert old[0] > 0
    assert sum(old[6:]) == 0


def test_pinned_slots_are_left_alone() -> None:
    store = Store()
    store.begin(store.placement.slots)
    segments = store.placement.segments
    store.rebalancer.reweigh([1.0, 1.0, 0.2])
    store.rebalancer.step()
    assert store.placement.segments == segments
    assert not store.rebalancer.under_way
    store.end()
    store.rebalancer.step()
    store.rebalancer.step()
    assert store.placement.segments != segments


def test_looking_in_vain_takes_a_part_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes as long as the store is large, and steps come one after the other."""
    store, now, looks = Store(), [100.0], [0]
    usage = store.index.usage

    def slow_usage(first: int, count: int) -> Usage:
        now[0] += 0.01
        looks[0] += 1
        return usage(first, count)

    monkeypatch.setattr(store.index, "usage", slow_usage)
    store.rebalancer._clock = lambda: now[0]
    store.begin(store.placement.slots)
    segments = len(store.placement.segments)
    store.rebalancer.reweigh([1.0, 1.0, 0.2])
    for _ in range(100):
        store.rebalancer.step()
    assert looks == [segments]
    store.rebalancer.step(patient=False)
    assert looks == [2 * segments]
    now[0] += rebalancer.LOOK_SHARE * 0.01 * segments + 0.001
    store.rebalancer.step()
    assert looks == [3 * segments]


def test_what_is_lost_while_the_manifest_is_saved_is_not_handed_out() -> None:
    store = Store(saver=Saver(at_once=False))
    store.rebalancer.reweigh([1.0, 1.0, 0.2])
    store.rebalancer.step()
    assert store.rebalancer.under_way
    # So much is promised that what comes back cannot be taken out of use again at once.
    store.index.quarantine(store.placement.touches(2, np.arange(store.index.num_slots)))
    store.weights[2] = 0.0
    store.rebalancer.weights[2] = 0.0
    store.saver.save()
    store.rebalancer._finish()
    free = store.index.free_slots()
    assert not store.placement.lost(store.rebalancer.out_of_use(), free).any()


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("stored", [0, 7])
def test_devices_that_come_back_bring_their_slots(at_once: bool, stored: int) -> None:
    """No segment is missing and none is twice, striped anew meanwhile or not."""
    store = Store()
    store.begin(stored)
    slots = store.placement.slots
    store.saver.at_once = at_once
    weights = DeviceWeights(store.rebalancer, ["/a", "/b", "/c"], return_s=60.0)
    assert not weights.may_return
    for device in range(DEVICES):
        weights.mark_lost(device, rank=0)
        weights.mark_lost(device, rank=1)
    assert weights.may_return
    assert store.index.gauges()["free"] == 0
    for device in range(DEVICES):
        weights.mark_returned(device, rank=1)
    assert store.index.gauges()["free"] == 0  # one rank has them, the other has not
    for device in range(DEVICES):
        weights.mark_returned(device, rank=0)
    for _ in range(8):  # segments that were striped anew for fewer devices are so once more
        store.saver.save()
        store.rebalancer.step()
    gauges = store.index.gauges()
    assert gauges["free"] >= slots - stored - 1
    assert not weights.may_return
    assert len(set(store.index.free_slots().tolist())) == gauges["free"]


def test_numbers_that_a_smaller_segment_has_left_are_not_handed_out() -> None:
    """A read of such a slot failed, and its time to be tried again comes later."""
    store = Store()
    store.store(store.placement.slots)
    slots = np.array(sorted(store.ready()), dtype=np.int64)
    store.lose(1)
    store.store(1)
    store.index.claim([key_of(10**6)])
    for _ in range(4):
        store.rebalancer.step(patient=False)
    left = slots[~store.placement.holds(slots)]
    assert len(left)
    store.rebalancer.unmask(left)
    assert store.placement.holds(store.index.free_slots()).all()


def test_what_a_device_has_is_there_again_with_it() -> None:
    """Masked blocks are given up only where new blocks need their places."""
    store = Store()
    store.store(store.placement.slots)
    before = store.ready()
    store.lose(1)
    store.lose(2)
    assert store.ready() == {}  # every slot has a piece on one of them
    for _ in range(5):
        store.rebalancer.step()
    assert store.index.gauges()["masked"] == len(before)
    store.store(1)
    assert store.index.claim([key_of(10**6)]).tolist() == [FULL]
    store.rebalancer.step(patient=False)
    store.rebalancer.step()
    given = int(store.counters.total("slots_dropped", cause="restriped"))
    assert 0 < given < len(before)
    store.store(1)
    store.come_back(1)
    store.come_back(2)
    now = store.ready()
    assert len(now) == len(before) - given + 1
    assert {slot: key for slot, key in now.items() if before.get(slot) == key} == {
        slot: key for slot, key in before.items() if key in now.values()
    }
    store.check()


def test_what_running_requests_were_promised_is_left_to_them() -> None:
    """While the manifest is saved, nobody has the slots of a segment that was emptied."""
    store = Store(saver=Saver(at_once=False))
    segments = store.placement.segments
    promised = store.placement.slots - min(s.slots for s in segments)
    store.index.reserve(promised)
    store.rebalancer.reweigh([1.0, 1.0, 0.2])
    store.rebalancer.step()
    assert store.rebalancer.under_way
    taken = store.index.allocate(promised, reserved=True)
    assert len(taken) == promised
    store.saver.save()
    store.rebalancer.step()
    assert store.index.available() > 0


def test_slots_are_handed_out_after_the_manifest_has_them() -> None:
    store = Store(saver=Saver(at_once=False))
    store.rebalancer.reweigh([1.0, 1.0, 0.2])
    before = store.placement.segments
    for _ in range(3):
        store.rebalancer.step()
        assert store.rebalancer.under_way
        assert store.placement.segments == before
        assert store.rebalancer.take_segments() is None
        assert store.index.available() == 0
    store.saver.save()
    store.rebalancer.step()
    assert not store.rebalancer.under_way
    assert (
        store.rebalancer.take_segments() == store.placement.segments == tuple(store.saver.manifest)
    )
    assert store.rebalancer.take_segments() is None
    assert store.index.available() == store.placement.slots
    assert {s.lanes.count(2) / len(s.lanes) for s in store.placement.segments} == {1 / 11}


def test_settling_waits_for_the_manifest() -> None:
    store = Store(saver=Saver(at_once=False))
    store.rebalancer.step_and_wait(0.0)  # nothing to do
    store.rebalancer.reweigh([0.0, 1.0, 1.0])
    with pytest.raises(StoreError, match=r"store\.json could not be saved within 0\.5 s"):
        store.rebalancer.step_and_wait(0.5)


# ---- the thread that saves ----


@pytest.mark.parametrize("error", [StoreError("of a test"), ValueError("of a test")])
def test_saving_goes_on_until_it_works(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """Whatever went wrong: the slots of these segments wait for it."""
    monkeypatch.setattr(rebalancer, "_RETRY_S", 0.01)
    counters = Counters()
    tried: list[Sequence[Segment]] = []
    go = threading.Event()

    def save(segments: Sequence[Segment]) -> None:
        tried.append(segments)
        go.wait(20)
        if len(tried) == 1:
            raise error

    saver = BackgroundSaver(save, lambda: False, counters)
    assert saver.saved()
    first, second = [Segment(0, 0, 0, (), ())], [Segment(1, 0, 0, (), ())]
    saver.put(first)
    assert not saver.wait(0.0)
    until(lambda: tried == [first], "the first attempt")
    saver.put(second)
    go.set()
    assert saver.wait(30)
    assert tried == [first, second]
    assert counters.total("manifest_errors") == 1
    assert saver.close(30)


def test_a_save_that_never_works_ends_with_the_store() -> None:
    def save(segments: Sequence[Segment]) -> None:
        raise StoreError("of a test")

    counters = Counters()
    saver = BackgroundSaver(save, lambda: False, counters)
    saver.put([])
    until(lambda: counters.total("manifest_errors") > 0, "an attempt")
    until(lambda: saver.error() == "of a test", "what it failed with")
    assert not saver.close(0.2)
    assert not saver.saved()


def test_what_is_under_way_is_late_after_its_deadline() -> None:
    """Segments that are striped anew, until the manifest has them."""
    now = [100.0]
    store = Store(saver=Saver(at_once=False))
    store.rebalancer._clock = lambda: now[0]
    store.rebalancer.check_progress(0.0)
    store.rebalancer.reweigh([1.0, 1.0, 0.2])
    store.rebalancer.step()
    now[0] += 60.0
    store.rebalancer.check_progress(60.0)
    now[0] += 1.0
    with pytest.raises(StoreError, match=r"no new slots since 61 s, since a file system hangs"):
        store.rebalancer.check_progress(60.0)
    store.saver.save()
    store.rebalancer.step()
    store.rebalancer.check_progress(0.0)


def full(weights: list[float]) -> Store:
    store = Store(weights, units=1000)
    store.store(store.placement.slots)
    assert store.index.free_now() == 0
    return store


def read_all(store: Store, slots: Sequence[int], at_once: int = 8) -> int:
    """Steps in which blocks are read and, as far as there is room, rewritten; how many were."""
    done = 0
    for begin in range(0, len(slots), at_once):
        for _ in range(4):
            store.rebalancer.step()
            done += store.rewrite(slots[begin : begin + at_once])
        store.check()
    return done


def dropped(store: Store) -> float:
    return store.counters.total("slots_dropped", cause="restriped")


def test_nothing_is_outdated_as_long_as_devices_are_what_they_were() -> None:
    store = full([1.0] * 3)
    assert not store.rebalancer.outdated(array(range(store.placement.slots))).any()
    store.rebalancer.reweigh([1.0, 1.0, 0.85])  # not worth a write
    assert not store.rebalancer.outdated(array(range(store.placement.slots))).any()


def test_an_added_device_is_used_by_all_that_is_read() -> None:
    """In a full store rewrites leave free segments behind: little is given up."""
    store = full([1.0, 1.0, 0.0])
    largest = max(s.slots for s in store.placement.segments)
    store.rebalancer.reweigh([1.0, 1.0, 1.0])
    for _ in range(2):
        read_all(store, sorted(store.ready()))
    assert {d for slot in store.ready() for d, _ in store.places(slot)} == {0, 1, 2}
    assert not store.rebalancer.outdated(array(list(store.ready()))).any()
    assert dropped(store) <= 3 * largest


def test_a_slow_device_costs_what_its_segments_lose_and_little_more() -> None:
    """Striped for it they have less slots: of 3 devices, 2.2 are used."""
    store = full([1.0] * 3)
    before, largest = store.placement.slots, max(s.slots for s in store.placement.segments)
    store.rebalancer.reweigh([1.0, 1.0, 0.2])
    for _ in range(3):
        read_all(store, sorted(store.ready()))
    assert not store.rebalancer.outdated(array(list(store.ready()))).any()
    lost = before - store.placement.slots
    assert lost > 0.2 * before
    assert dropped(store) <= lost + 4 * largest


def test_a_scattered_rewrite_costs_at_most_one_stored_block() -> None:
    store = full([1.0] * 3)
    hot = random.Random(1).sample(sorted(store.ready()), store.placement.slots // 3)
    largest = max(s.slots for s in store.placement.segments)
    shrinks = 0.2 * store.placement.slots
    store.rebalancer.reweigh([1.0, 1.0, 0.2])
    done = sum(read_all(store, hot) for _ in range(3))
    assert done > len(hot) / 3
    assert dropped(store) <= done + shrinks + 2 * largest


def test_a_segment_that_is_being_read_keeps_no_other_from_being_rewritten() -> None:
    """It cannot be striped anew: another one is."""
    store = full([1.0] * 3)
    slots = sorted(store.ready())
    store.index.pin(array(slots[:1]))
    store.rebalancer.reweigh([1.0, 1.0, 0.2])
    assert read_all(store, [slot for slot in slots if slot % 8]) > 0
    assert slots[0] in store.ready()


def test_rewrites_leave_running_requests_what_they_were_promised() -> None:
    store = Store([1.0] * 3, units=1000)
    store.store(100)
    store.rebalancer.reweigh([1.0, 1.0, 0.2])
    store.rebalancer.step()
    store.rebalancer.step()
    index = store.index
    index.reserve(index.available() - 5)
    assert store.rewrite(range(20)) == 2
    gauges = index.gauges()
    assert gauges["free"] + gauges["evictable"] >= gauges["reserved"]


def test_a_rewrite_without_effect_leaves_its_slot_free() -> None:
    store = full([1.0] * 3)
    store.rebalancer.reweigh([1.0, 1.0, 0.2])
    for _ in range(2):
        store.rebalancer.step()
    before, free = store.ready(), store.index.free_now()
    assert free > 0
    assert store.rewrite(sorted(before)[-3:], good=False) == 0
    assert (store.ready(), store.index.free_now()) == (before, free)
