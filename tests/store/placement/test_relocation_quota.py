"""Room for blocks that move: it costs few of those that are stored, and the cold ones."""

from __future__ import annotations

import random

import pytest

from tests.store.conftest import array
from tests.store.placement.test_rebalancer import Saver, Store
from vllm_ssdkv.store.placement import segments as dividing
from vllm_ssdkv.store.placement.relocation_quota import MovingRoom

SLOW = [1.0, 1.0, 0.2]
UNITS = 1000


@pytest.fixture(autouse=True)
def _small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dividing, "MIN_SLOTS", 16)


def dropped(store: Store) -> float:
    return store.counters.total("slots_dropped", cause="restriped")


def largest(store: Store) -> int:
    return max(s.slots for s in store.placement.segments)


def full(weights: list[float], **options: object) -> Store:
    store = Store(weights, units=UNITS, **options)  # type: ignore[arg-type]
    store.store(store.placement.slots)
    assert store.index.free_now() == 0
    return store


def read_all(store: Store, slots: list[int], at_once: int = 8) -> int:
    """Steps in which blocks are read, and move as far as there is room; how many did."""
    moved = 0
    for begin in range(0, len(slots), at_once):
        store.rebalancer.step()
        part = slots[begin : begin + at_once]
        for _ in range(4):
            moved += store.move(part)
            store.rebalancer.step()
        store.check()
    return moved


def test_nothing_moves_as_long_as_devices_are_what_they_were() -> None:
    store = full([1.0] * 3)
    assert not store.rebalancer.moving
    assert not store.rebalancer.to_move(array(range(store.placement.slots))).any()
    assert len(store.rebalancer.take_room(8)) == 0
    assert not store.rebalancer.makes_room
    assert dropped(store) == 0


def test_an_added_device_is_used_by_all_that_is_read() -> None:
    """What has moved away leaves room for what moves next: little is given up."""
    store = full([1.0, 1.0, 0.0])
    most = largest(store)
    store.rebalancer.reweigh([1.0, 1.0, 1.0])
    for _ in range(2):
        read_all(store, sorted(store.ready()))
    assert {d for slot in store.ready() for d, _ in store.places(slot)} == {0, 1, 2}
    assert not store.rebalancer.to_move(array(list(store.ready()))).any()
    assert dropped(store) <= 2 * most


def test_a_device_of_many_that_is_as_fast_again_moves_nothing() -> None:
    store = full([1.0] * 3)
    store.rebalancer.reweigh([1.0, 1.0, 0.85])
    assert not store.rebalancer.moving
    store.rebalancer.step()
    assert store.move(range(64)) == 0


def test_a_slow_device_costs_what_its_segments_lose_and_no_more() -> None:
    """Striped for it they have less slots: of 3 devices, 2.2 are used."""
    store = full([1.0] * 3)
    before, most = store.placement.slots, largest(store)
    store.rebalancer.reweigh(SLOW)
    for _ in range(3):
        read_all(store, sorted(store.ready()))
    assert not store.rebalancer.to_move(array(list(store.ready()))).any()
    lost = before - store.placement.slots
    assert lost > 0.2 * before
    assert dropped(store) <= lost + 3 * most


def test_scattered_reads_take_no_more_than_an_eighth() -> None:
    """What is cold is not given up for them any more. They go on as new blocks are stored."""
    store = full([1.0] * 3)
    most = largest(store)
    hot = random.Random(1).sample(sorted(store.ready()), store.placement.slots // 3)
    store.rebalancer.reweigh(SLOW)
    moved = sum(read_all(store, hot) for _ in range(3))
    assert dropped(store) <= store.placement.slots // 8 + 2 * most
    assert most < moved < len(hot)
    for _ in range(20):
        store.store(8)
        store.rebalancer.step()
    still = [slot for slot in hot if slot in store.ready()]
    assert read_all(store, still) > 0


def test_what_is_being_read_keeps_nothing_else_from_moving() -> None:
    """Its segment cannot be striped anew: another one is."""
    store = full([1.0] * 3)
    slots = sorted(store.ready())
    store.index.pin(array(slots[:1]))
    store.rebalancer.reweigh(SLOW)
    hot = [slot for slot in slots if slot % 8]
    moved = read_all(store, hot)
    assert moved + dropped(store) >= len(hot)
    assert slots[0] in store.ready()


def test_new_blocks_keep_what_is_free_for_them() -> None:
    store = full([1.0] * 3)
    store.rebalancer.reweigh(SLOW)
    store.rebalancer.step()
    store.rebalancer.step()
    ahead = store.rebalancer._ahead()
    for _ in range(50):
        store.move(sorted(store.ready())[::7])
        store.rebalancer.step()
        assert store.rebalancer.under_way or store.index.free_now() >= ahead


def test_moves_are_no_reason_to_empty_more_ahead() -> None:
    """As many new blocks at a time would be."""
    store = full([1.0] * 3, saver=Saver(at_once=False))
    store.rebalancer.reweigh(SLOW)
    ahead = store.rebalancer._ahead()
    for _ in range(20):
        store.rebalancer.step()
        store.move(sorted(store.ready())[:30])
        store.saver.save()
    assert store.rebalancer._ahead() <= ahead


def test_running_requests_keep_what_they_were_promised() -> None:
    store = Store([1.0] * 3, units=UNITS)
    store.store(100)
    store.rebalancer.reweigh(SLOW)
    store.rebalancer.step()
    store.rebalancer.step()
    index = store.index
    index.reserve(index.available() - 5)
    assert store.move(range(20)) == 2
    gauges = index.gauges()
    assert gauges["free"] + gauges["evictable"] >= gauges["reserved"]


def test_a_move_without_effect_gives_its_room_back() -> None:
    store = full([1.0] * 3)
    store.rebalancer.reweigh(SLOW)
    last = store.placement.slots - 1
    for _ in range(3):
        assert store.move([last], good=False) == 0
        store.rebalancer.step()
        store.rebalancer.step()
    store.move([last], good=False)
    room = store.rebalancer._room
    assert room.slots == room.total > 0
    free = store.index.free_now()
    assert store.move([last], good=False) == 0
    assert (room.slots, store.index.free_now()) == (room.total, free)


def test_room_is_counted_until_segments_come_back() -> None:
    room = MovingRoom()
    room.grant(10)
    room.slots -= 7  # taken
    room.vacate(100, 4, ready=6)
    room.vacate(200, 3, ready=0)
    assert (room.slots, room.total) == (3, 10)
    assert (room.left(100), room.left(200), room.left(300)) == (6, 0, None)
    assert room.emptiest_first() == [200]
    assert not room.spent(100, 5)
    assert room.spent(100, 4)
    assert not room.spent(300, 0)
    assert room.returning(200, 100) == 3
    room.back(200, 100)
    room.back(300, 100)  # nothing has moved away from it
    assert (room.slots, room.total) == (6, 10)
    assert room.emptiest_first() == []
    room.vacate(100, 2, ready=4)
    assert room.emptiest_first() == [100]
    assert room.returning(100, 3) == 3
    room.back(100, 3)  # it has become smaller
    assert (room.slots, room.total) == (9, 7)
    room.clear()
    assert (room.slots, room.total, room.emptiest_first()) == (0, 0, [])
