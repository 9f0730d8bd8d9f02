"""Slots of new blocks: found, written, given up."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from vllm_ssdkv.base.errors import StoreFullError
from vllm_ssdkv.base.metrics import Counters
from vllm_ssdkv.connector.scheduler.slot_ledger import SlotLedger
from vllm_ssdkv.connector.scheduler.step_draft import StepDraft
from vllm_ssdkv.store.index.computed_blocks import ComputedBlocks
from vllm_ssdkv.store.index.slot_index import SlotIndex, SlotState

KEY = bytes(range(32))


@dataclass
class Rig:
    index: SlotIndex = field(default_factory=lambda: SlotIndex(3, None))
    draft: StepDraft = field(default_factory=StepDraft)
    counters: Counters = field(default_factory=Counters)

    def __post_init__(self) -> None:
        self.ledger = SlotLedger(self.index, self.index, 1, self.draft, self.counters)

    def publish(self, key: bytes, *, needed: bool = False) -> int:
        slot = self.ledger.allocate(7)
        self.ledger.publish(slot, key, needed=needed)
        return slot


def test_a_published_slot_is_copied_written_and_found() -> None:
    rig = Rig()
    slot = rig.publish(KEY)
    epoch = rig.index.epoch(slot)
    assert rig.draft.copies == [(slot, epoch, 7, -1)]
    assert rig.draft.flushes == [(slot, epoch, KEY)]
    assert slot in rig.ledger.writing
    assert rig.index.find(KEY) == slot
    assert rig.ledger.unverified.slots().tolist() == [slot]
    assert len(rig.ledger) == 0


@pytest.mark.parametrize("needed", [False, True])
def test_a_second_slot_of_a_key_is_written_only_if_it_is_needed(needed: bool) -> None:
    rig = Rig()
    first, second = rig.publish(KEY), rig.publish(KEY, needed=needed)
    assert rig.index.find(KEY) == first
    assert (second in rig.ledger.writing) == needed
    assert (second in rig.draft.discard) == (not needed)
    assert (rig.index.state(second) is SlotState.FREE) == (not needed)


def test_a_block_that_nobody_needs_frees_its_slot() -> None:
    rig = Rig()
    slot = rig.ledger.allocate(7)
    assert len(rig.ledger) == 1
    rig.ledger.abandon(slot)
    assert len(rig.ledger) == 0
    assert rig.draft.discard == [slot]
    assert rig.index.gauges()["free"] == 3


@pytest.mark.parametrize("published", [False, True])
def test_a_failed_write_frees_the_slot_and_is_counted_once(published: bool) -> None:
    rig = Rig()
    slot = rig.publish(KEY) if published else rig.ledger.allocate(7)
    for _ in range(2):
        rig.ledger.write_failed(slot)
    assert rig.index.find(KEY) is None
    assert rig.index.gauges()["free"] == 3
    assert rig.draft.discard == [slot]
    assert not rig.ledger.writing
    assert rig.counters.total("slots_dropped", cause="write_error") == 1


@dataclass
class NodeSlots:
    """An index on a node, which gives one slot away in each session."""

    num_slots: int = 3
    node_replicas: int = 1
    session: int = 1
    pins: int = 0

    def claim(self, keys: list[bytes], *, again: bool, of: ComputedBlocks) -> NDArray[np.int64]:
        del again, of
        self.pins += len(keys)
        return np.ones(len(keys), dtype=np.int64)

    def epoch(self, slot: int) -> int:
        return 10 * self.session + slot

    def state(self, slot: int) -> SlotState:
        del slot
        return SlotState.READY

    def unpin(self, slots: NDArray[np.int64]) -> None:
        self.pins -= len(slots)


def test_a_slot_that_another_session_gives_anew_is_pinned_for_the_new_block_alone() -> None:
    index: Any = NodeSlots()
    ledger = SlotLedger(index, None, 1, StepDraft(), Counters())
    of: Any = None
    ledger.claim([(KEY, 7)], of, again=False)
    index.session = 2
    ledger.claim([(KEY, 8)], of, again=False)
    assert index.pins == 1
    assert ledger.writing.done(1, 21)
    assert not ledger.writing.awaits(1, 11)


def test_a_block_computed_anew_takes_the_place_of_an_unreadable_one() -> None:
    rig = Rig()
    old = rig.publish(KEY)
    assert rig.ledger.writing.done(old, rig.index.epoch(old))
    rig.index.durable(np.array([old]))
    rig.ledger.unpin([old])
    rig.ledger.replace(old)
    assert rig.draft.discard == [old]
    assert rig.index.find(KEY) is None
    new = rig.publish(KEY)
    assert rig.index.find(KEY) == new


def test_no_slot_orders_nothing() -> None:
    rig = Rig()
    for block in range(3):
        rig.ledger.allocate(block)
    with pytest.raises(StoreFullError):
        rig.ledger.allocate(3)
    assert len(rig.draft.copies) == len(rig.ledger) == 3


def test_a_write_is_awaited_under_the_epoch_that_it_was_ordered_with() -> None:
    """The index of a node that was started again says 0 of the slot by then."""
    rig = Rig()
    slot = rig.publish(KEY)
    epoch, writing = rig.index.epoch(slot), rig.ledger.writing
    assert writing.awaits(slot, epoch)
    assert not writing.awaits(slot, epoch + 1)
    assert not writing.awaits(slot + 1, epoch)
    assert writing.drop(slot)
    assert not writing.awaits(slot, epoch)
