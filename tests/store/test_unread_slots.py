"""Slots that could not be read: not found for a while, never forgotten for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from tests.store.conftest import array, key_of
from tests.store.placement.test_rebalancer import GEOMETRY, Saver
from vllm_ssdkv.base.metrics import Counters
from vllm_ssdkv.store.device_weights import DeviceWeights
from vllm_ssdkv.store.index.slot_index import SlotIndex
from vllm_ssdkv.store.placement.placement import Placement
from vllm_ssdkv.store.placement.rebalancer import Rebalancer
from vllm_ssdkv.store.placement.segments import arrange
from vllm_ssdkv.store.unread_slots import RETRY_S, UnreadSlots

SLOTS = 6


@dataclass
class Rig:
    """An index on one device, full of durable blocks, and a clock."""

    now: float = 1000.0
    counters: Counters = field(default_factory=Counters)

    def __post_init__(self) -> None:
        found = arrange(GEOMETRY, [], [1.0], [SLOTS * 2])
        self.index = SlotIndex(found.numbers, None)
        placement = Placement(GEOMETRY, found.segments, 1)
        rebalancer = Rebalancer(self.index, placement, [1.0], Saver(), self.counters)
        self.weights = DeviceWeights(rebalancer, ["/a"])
        self.unread = UnreadSlots(self.index, rebalancer, self.counters, clock=lambda: self.now)
        self.slots = [self.store(name) for name in range(SLOTS)]

    def store(self, name: int, *, durable: bool = True) -> int:
        slots = self.index.allocate(1)
        assert self.index.publish(int(slots[0]), key_of(name))
        if durable:
            self.index.durable(slots)
        self.index.unpin(slots)
        return int(slots[0])

    def failed(self, *slots: int, epoch: int = -1) -> None:
        self.unread.failed([(slot, epoch) for slot in slots])

    def found(self, names: Sequence[int] = range(SLOTS)) -> list[int]:
        return [name for name in names if self.index.find(key_of(name)) is not None]

    def dropped(self) -> float:
        return self.counters.total("slots_dropped", cause="read_error")

    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.unread.step()


@pytest.fixture
def rig() -> Rig:
    return Rig()


def test_it_is_found_again_after_a_while(rig: Rig) -> None:
    rig.failed(rig.slots[2])
    rig.wait(RETRY_S / 2)
    rig.failed(rig.slots[4], rig.slots[4])
    assert rig.found() == [0, 1, 3, 5]
    rig.wait(RETRY_S / 2)
    assert rig.found() == [0, 1, 2, 3, 5]
    rig.wait(RETRY_S / 2)
    assert rig.found() == [0, 1, 2, 3, 4, 5]
    assert rig.dropped() == 0


def test_who_uses_it_keeps_it_meanwhile(rig: Rig) -> None:
    slots = array([rig.slots[2]])
    rig.index.pin(slots)
    rig.failed(rig.slots[2])
    assert rig.found([2]) == []
    rig.index.unpin(slots)
    rig.wait(RETRY_S)
    assert rig.found([2]) == [2]


def test_a_report_of_an_earlier_block_means_nothing(rig: Rig) -> None:
    rig.failed(rig.slots[2], epoch=rig.index.epoch(rig.slots[2]) - 1)
    assert rig.found([2]) == [2]


def test_what_is_stored_anew_meanwhile_takes_its_place(rig: Rig) -> None:
    rig.failed(rig.slots[2])
    again = rig.store(2)
    assert again != rig.slots[2]
    rig.wait(RETRY_S)
    assert rig.index.find(key_of(2)) == again


def test_what_is_not_durable_yet_is_dropped_and_counted(rig: Rig) -> None:
    slot = rig.store(7, durable=False)
    rig.failed(slot)
    assert (rig.found([7]), rig.dropped()) == ([], 1)
    rig.wait(RETRY_S)
    assert rig.index.gauges()["free"] == 1, "the slot serves again"


def test_it_stays_away_with_its_device(rig: Rig) -> None:
    rig.failed(rig.slots[2])
    rig.weights.mark_lost(0, 0)
    rig.wait(RETRY_S)
    assert rig.found() == []
    rig.weights.mark_returned(0, 0)
    assert rig.found() == [0, 1, 2, 3, 4, 5]


def test_it_goes_first_where_a_request_needs_room(rig: Rig) -> None:
    rig.failed(rig.slots[2], rig.slots[3])
    assert rig.index.available() == SLOTS - 2
    rig.unread.give_up()
    assert (rig.index.available(), rig.dropped()) == (SLOTS, 2)
    assert rig.found() == [0, 1, 4, 5]
    rig.unread.give_up()
    assert rig.dropped() == 2


def test_nothing_is_taken_from_what_was_promised(rig: Rig) -> None:
    rig.index.reserve(SLOTS)
    rig.failed(rig.slots[2])
    assert (rig.found([2]), rig.dropped()) == ([], 1)
    assert len(rig.index.allocate(SLOTS, reserved=True)) == SLOTS
