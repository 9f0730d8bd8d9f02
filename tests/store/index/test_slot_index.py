"""The slot index: single steps, then any sequence of steps against a simple model."""

from __future__ import annotations

import os
import tempfile
import time
import tracemalloc
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch
from uuid import UUID

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from numpy.typing import NDArray

from tests.kit.child import Child
from tests.kit.clock import Clock
from vllm_ssdkv._index import Replay
from vllm_ssdkv.base.errors import StoreFullError
from vllm_ssdkv.store.format.journal_record import HEADER_BYTES, RECORD_BYTES, Kind, encode_records
from vllm_ssdkv.store.index.journal import Journal
from vllm_ssdkv.store.index.slot_index import EPOCH_COUNTER_BITS, SlotIndex, SlotState

STORE = UUID(int=5)
DIGEST = bytes(range(16))
DEADLINE_S = 60.0


def key(number: int) -> bytes:
    return number.to_bytes(4, "big") + bytes(28)


def slots_of(*numbers: int) -> NDArray[np.int64]:
    return np.array(numbers, dtype=np.int64)


def open_index(
    path: Path, num_slots: int = 8, *, open_number: int = 0, clock: Clock | None = None
) -> SlotIndex:
    journal = Journal(
        path,
        store=STORE,
        fingerprint=DIGEST,
        num_slots=num_slots,
        sync_interval_s=None,
        slack_records=3,
    )
    return SlotIndex(num_slots, journal, open_number=open_number, clock=clock or Clock())


def kill(index: SlotIndex) -> None:
    """End the process as SIGKILL does: descriptors are closed, nothing is written."""
    assert index._journal is not None
    index._journal._file.close()


def store(index: SlotIndex, *numbers: int) -> NDArray[np.int64]:
    """Allocate, publish, make durable and unpin one slot per key, as one chain."""
    slots = index.allocate(len(numbers))
    for slot, number in zip(slots.tolist(), numbers, strict=True):
        assert index.publish(slot, key(number))
    index.durable(slots)
    index.unpin(slots)
    return slots


def found(index: SlotIndex, *numbers: int) -> list[int]:
    return index.lookup([key(n) for n in numbers]).tolist()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal"


def test_lookup_finds_the_longest_ready_prefix() -> None:
    index = SlotIndex(8, None)
    slots = store(index, 1, 2, 3)
    assert found(index, 1, 2, 3, 4) == slots.tolist()
    assert found(index, 1, 9, 3) == slots[:1].tolist()
    assert found(index, 9, 1) == []
    assert index.lookup([]).shape == (0,)
    assert index.find(key(2)) == slots[1]
    assert index.find(key(9)) is None
    for bad in (lambda: index.find(b"abc"), lambda: index.lookup([key(1), b"abc"])):
        with pytest.raises(ValueError, match="key of 3 bytes"):
            bad()
    writing = index.allocate(1)
    assert found(index, 1, 2, 3, 4) == slots.tolist()
    assert index.publish(int(writing[0]), key(4))
    assert found(index, 1, 2, 3, 4) == [*slots.tolist(), *writing.tolist()]


def tagged(number: int, tag: int) -> bytes:
    return key(number)[:-1] + bytes((key(number)[-1] ^ tag,))


def test_the_last_place_where_all_tags_are_ready() -> None:
    index, keys = SlotIndex(8, None), [key(n) for n in range(6)]
    for name in (tagged(1, 1), tagged(1, 3), tagged(3, 1), tagged(3, 3), tagged(4, 1)):
        (slot,) = index.allocate(1)
        assert index.publish(int(slot), name)
    for first, end, tags, wanted in (
        (0, 6, [1, 3], 4),
        (0, 6, [1], 5),
        (0, 4, [1, 3], 4),
        (0, 3, [1, 3], 2),
        (2, 3, [1, 3], 2),  # not before the first
        (0, 1, [1, 3], 0),
        (0, 6, [7], 0),
        (0, 6, [], 6),
        (6, 6, [], 6),
    ):
        assert index.last(keys, first, end, tags) == wanted, (first, end, tags)
    assert index.last(tuple(keys), 0, 6, [1, 3]) == 4
    assert index.last([key(0), b"abc", keys[3]], 0, 3, [1, 3]) == 3, "no more is looked at"
    with pytest.raises(ValueError, match="key of 3 bytes"):
        index.last([key(0), b"abc"], 0, 2, [1])
    with pytest.raises(IndexError, match="end behind the keys"):
        index.last(keys, 0, 7, [1])


def test_slots_are_handed_out_in_order_then_by_age() -> None:
    index = SlotIndex(4, None)
    assert store(index, 1, 2, 3, 4).tolist() == [0, 1, 2, 3]
    index.touch(slots_of(0))
    # A chain's tail is older than its head, and 0 was used since.
    assert index.allocate(3).tolist() == [3, 2, 1]
    assert found(index, 1) == [0]
    assert index.counters["evictions"] == 3
    with pytest.raises(StoreFullError, match=r"2 slots are needed: of 4 slots 0 are free, 1 evict"):
        index.allocate(2)
    assert found(index, 1) == [0]


def test_touching_a_chain_evicts_its_tail_first() -> None:
    index = SlotIndex(6, None)
    for number in range(6):
        store(index, number)  # unpinned one by one: heads are older than tails
    index.touch(slots_of(0, 1, 2))
    assert [int(index.allocate(1)[0]) for _ in range(6)] == [3, 4, 5, 2, 1, 0]


def test_retained_slots_are_evicted_when_no_other_slot_is_left() -> None:
    clock = Clock()
    index = SlotIndex(6, None, clock=clock)
    old = store(index, 0, 1)
    index.retain(old, 60, 0.5)
    for number in range(2, 20):
        store(index, number)
    assert found(index, 0, 1) == old.tolist()
    assert index.gauges()["retained"] == 2
    slots = index.allocate(4)
    assert found(index, 0, 1) == old.tolist()
    assert index.counters["retentions_cut"] == 0
    index.allocate(1)
    assert found(index, 0, 1) == old.tolist()[:1]  # the head of the chain is worth most
    assert (index.gauges()["retained"], index.counters["retentions_cut"]) == (1, 1)
    index.unpin(slots)


def test_a_retention_ends_with_its_time_and_not_before() -> None:
    clock = Clock(1000.75)
    index = SlotIndex(4, None, clock=clock)
    first, second = store(index, 0, 1), store(index, 2, 3)
    index.retain(first, 10.5, 1.0)
    index.retain(first, 2.0, 1.0)  # another request wants less
    index.retain(second[:1], 5.0, 1.0)
    clock.sleep(10.4)
    assert index.gauges()["retained"] == 2
    assert index.order().tolist() == [*second[::-1].tolist(), *first[::-1].tolist()]
    clock.sleep(1.0)
    assert index.allocate(4).tolist() == [*second[::-1].tolist(), *first[::-1].tolist()]
    assert index.counters["retentions_cut"] == 0


def test_beyond_the_share_the_least_recently_used_retained_slots_are_ordinary() -> None:
    index = SlotIndex(8, None)
    first, second, third = store(index, 0, 1), store(index, 2, 3), store(index, 4, 5)
    for chain in (first, second):
        index.retain(chain, 60, 0.5)
    index.touch(first)
    index.retain(third, 60, 0.5)
    assert (index.gauges()["retained"], index.counters["retentions_cut"]) == (4, 2)
    assert index.order().tolist() == [*second[::-1], *first[::-1], *third[::-1]]
    index.retain(first, 60, 0.125)
    assert index.order().tolist()[-1] == first[0]
    index.retain(first, 60, 0.0)
    assert index.gauges()["retained"] == 0


def test_the_share_is_kept_when_requests_let_go_of_slots() -> None:
    index = SlotIndex(4, None)
    slots = store(index, 0, 1, 2)
    index.pin(slots)
    index.retain(slots, 60, 0.5)
    assert index.gauges()["retained"] == 3
    index.unpin(slots)
    assert index.gauges()["retained"] == 2
    assert index.order().tolist() == slots[::-1].tolist()


def test_many_retentions_end_a_part_at_a_time() -> None:
    """Ending all at once would hold up the scheduler."""
    now = [0.0]
    count = 40_000
    index = SlotIndex(count, None, clock=lambda: now[0])
    slots = index.allocate(count)
    for slot in slots.tolist():
        index.publish(slot, slot.to_bytes(32, "big"))
    index.unpin(slots)
    index.retain(slots, 5.0, 1.0)
    now[0] = 10.0
    left = [index.gauges()["retained"] for _ in range(3)]
    assert count > left[0] > left[1] > left[2] == 0
    assert index.order().tolist() == slots.tolist()[::-1], "tails first, as ever"


def test_retaining_the_same_slots_again_and_again_takes_no_more_memory() -> None:
    clock = Clock()
    index = SlotIndex(64, None, clock=clock)
    slots, before = store(index, *range(32)), index.nbytes
    for number in range(500):
        index.retain(slots, 100_000 + number, 1.0)
    assert 0 < index.nbytes - before < 5000
    clock.sleep(100_498)
    assert index.gauges()["retained"] == 32
    clock.sleep(1)
    assert index.gauges()["retained"] == 0
    assert index.order().tolist() == slots[::-1].tolist()
    assert index.nbytes == before


def test_pinned_slots_stay() -> None:
    index = SlotIndex(3, None)
    slots = store(index, 1, 2, 3)
    index.pin(slots[:1])
    index.pin(slots_of(0, 0))
    assert index.available() == 2
    index.allocate(2)
    with pytest.raises(StoreFullError):
        index.allocate(1)
    index.unpin(slots_of(0, 0))
    assert index.available() == 0
    index.unpin(slots_of(0))
    assert index.available() == 1
    with pytest.raises(ValueError, match="unpin of slot 0"):
        index.unpin(slots_of(0))
    assert index.allocate(1).tolist() == [0]


def test_reservations_are_kept_from_everybody_else() -> None:
    index = SlotIndex(4, None)
    slots = store(index, 1, 2)
    index.reserve(3)
    assert index.available() == 1
    with pytest.raises(StoreFullError, match="2 slots are to be reserved"):
        index.reserve(2)
    index.pin(slots[:1])
    with pytest.raises(StoreFullError):
        index.allocate(1)
    # A hit takes the place of an allocation: one pin more, one reservation less.
    index.pin(slots[1:])
    index.unreserve(1)
    assert index.available() == 0
    assert index.allocate(2, reserved=True).tolist() == [2, 3]
    index.unpin(slots[1:])
    with pytest.raises(ValueError, match="0 are reserved"):
        index.allocate(1, reserved=True)
    index.unpin(slots_of(0))
    index.reserve(1)
    index.unreserve(1)
    for bad in (lambda: index.unreserve(1), lambda: index.reserve(-1), lambda: index.allocate(-1)):
        with pytest.raises(ValueError, match="reserve"):
            bad()


def test_a_duplicate_stays_private() -> None:
    index = SlotIndex(2, None)
    store(index, 1)
    second = index.allocate(1)
    assert not index.publish(int(second[0]), key(1))
    assert found(index, 1) == [0]
    index.durable(second)
    assert index.state(1) is SlotState.PRIVATE
    index.unpin(second)
    assert index.state(1) is SlotState.FREE
    assert index.counters["duplicates"] == 1


def test_an_abandoned_write_is_freed() -> None:
    index = SlotIndex(1, None)
    slots = index.allocate(1)
    assert (index.gauges()["writing"], index.gauges()["pinned"]) == (1, 1)
    index.unpin(slots)
    assert (index.gauges()["writing"], index.gauges()["pinned"]) == (0, 0)
    assert index.state(0) is SlotState.FREE
    assert index.allocate(1).tolist() == [0]


def test_a_slot_dropped_while_pinned_is_freed_at_the_last_unpin() -> None:
    index = SlotIndex(2, None)
    slots = store(index, 1)
    index.pin(slots)
    index.pin(slots)
    index.drop(0)
    assert found(index, 1) == []
    index.drop(0)
    assert index.counters["dropped"] == 1
    index.unpin(slots)
    assert index.state(0) is SlotState.PRIVATE
    again = store(index, 1)  # the key is free for another slot at once
    assert again.tolist() == [1]
    index.unpin(slots)
    assert index.state(0) is SlotState.FREE
    assert found(index, 1) == [1]


def test_a_write_dropped_before_it_was_published() -> None:
    index = SlotIndex(1, None)
    slots = index.allocate(1)
    index.drop(slots)
    assert not index.publish(0, key(1))
    index.durable(slots)
    index.unpin(slots)
    assert index.gauges() == {
        "free": 1,
        "ready": 0,
        "writing": 0,
        "pinned": 0,
        "evictable": 0,
        "retained": 0,
        "reserved": 0,
        "masked": 0,
        "lost": 0,
        "journal_bytes": 0,
        "journal_degraded": 0,
    }


def test_misuse_is_refused() -> None:
    index = SlotIndex(3, None)
    store(index, 1)
    writing = index.allocate(1)
    with pytest.raises(ValueError, match="publish of slot 0, which is READY"):
        index.publish(0, key(2))
    with pytest.raises(ValueError, match="publish of slot 2, which is FREE"):
        index.publish(2, key(2))
    with pytest.raises(ValueError, match="key of 3 bytes"):
        index.publish(1, b"abc")
    with pytest.raises(ValueError, match="durable before it was published"):
        index.durable(writing)
    with pytest.raises(ValueError, match="holds nothing"):
        index.pin(slots_of(0, 2))
    with pytest.raises(ValueError, match="mask of shape"):
        index.quarantine(np.zeros(2, dtype=np.bool_))
    for number in (0, 2**31 - 1):
        with pytest.raises(ValueError, match="num_slots"):
            SlotIndex(number, None)


def test_quarantined_slots_are_never_handed_out_again() -> None:
    index = SlotIndex(6, None)
    store(index, 1, 2, 3)
    index.pin(slots_of(1))
    writing = index.allocate(1)
    assert writing.tolist() == [3]
    mask = np.array([True, True, False, True, True, False])
    index.reserve(2)
    assert index.quarantine(mask) == 3  # two ready, one writing; slot 4 was free
    assert index.quarantine(mask) == 0
    assert found(index, 1) == found(index, 2) == []
    assert found(index, 3) == [2]
    assert index.available() == 0  # 2 and 5 are left, and reserved
    assert not index.publish(3, key(9))
    index.unpin(slots_of(1, 3))
    assert [index.state(s) for s in (0, 1, 3, 4)] == [SlotState.LOST] * 4
    assert index.allocate(2, reserved=True).tolist() == [5, 2]
    with pytest.raises(StoreFullError, match="4 on lost devices"):
        index.allocate(1)
    with pytest.raises(ValueError, match="holds nothing"):
        index.pin(slots_of(4))
    assert index.quarantine(slots_of(5)) == 1


class Heard:
    """Remembers which slots are gone."""

    def __init__(self) -> None:
        self.slots: list[int] = []

    def durable(self, slots: Iterable[int]) -> None:
        pass

    def moved(self, old: Iterable[int], new: Iterable[int]) -> None:
        pass

    def gone(self, slots: Iterable[int]) -> None:
        self.slots += slots


def test_a_listener_hears_of_slots_that_were_never_durable() -> None:
    index = SlotIndex(4, None)
    index.listener = heard = Heard()
    slots = index.allocate(2)
    for slot in slots.tolist():
        assert index.publish(slot, key(slot))
    index.drop(slots[0])
    assert heard.slots == [0]
    index.quarantine(slots[1:])
    assert heard.slots == [0, 1]


def test_restored_slots_are_handed_out_before_all_others() -> None:
    index = SlotIndex(6, None)
    store(index, 1, 2)
    index.quarantine(slots_of(1, 3, 4))
    with pytest.raises(ValueError, match="not lost"):
        index.restore(slots_of(3, 0))
    assert index.gauges()["lost"] == 3
    index.restore(slots_of(3, 1))
    assert index.allocate(2).tolist() == [3, 1]
    assert index.gauges()["lost"] == 1
    index.unpin(slots_of(3))
    assert index.state(3) is SlotState.FREE


def test_deferred_slots_are_handed_out_after_other_free_ones() -> None:
    index = SlotIndex(5, None)
    store(index, 1)
    index.defer(np.array([True, True, True, False, False]))
    assert (index.gauges()["free"], index.free_now()) == (4, 2)
    assert index.usage(0, 3) == (1, 0, 0, 3)
    assert index.allocate(3).tolist() == [3, 4, 1]
    assert index.usage(0, 3) == (1, 0, 1, 2)
    index.unpin(slots_of(1, 3))
    index.defer(np.array([False, False, False, True, False]))
    assert index.allocate(4).tolist() == [1, 2, 3, 0]  # the last one was evicted
    assert found(index, 1) == []
    with pytest.raises(ValueError, match="mask of 2"):
        index.defer(np.zeros(2, dtype=np.bool_))


def test_slots_outside_are_refused() -> None:
    index = SlotIndex(2, None)
    for call in (index.epochs, index.touch, index.pin, index.unpin, index.durable, index.drop):
        for number in (-1, 2):
            with pytest.raises(IndexError, match=f"slot {number} of 2"):
                call(slots_of(0, number))
    with pytest.raises(IndexError):
        index.quarantine(slots_of(2))
    with pytest.raises(IndexError):
        index.publish(2, key(1))
    assert index.gauges()["free"] == 2


def test_a_reservation_that_a_quarantine_took_away_says_so() -> None:
    index = SlotIndex(2, None)
    index.reserve(2)
    index.quarantine(slots_of(0))
    with pytest.raises(StoreFullError, match="1 on lost devices"):
        index.allocate(2, reserved=True)
    assert index.gauges()["reserved"] == 2
    assert index.allocate(1, reserved=True).tolist() == [1]


def test_only_durable_slots_survive_a_kill(path: Path) -> None:
    index = open_index(path)
    store(index, 1, 2)
    published = index.allocate(2)
    index.publish(int(published[0]), key(3))
    epochs = index.epochs(slots_of(0, 1)).tolist()
    kill(index)
    again = open_index(path)
    assert found(again, 1, 2, 3) == [0, 1]
    assert again.epochs(slots_of(0, 1)).tolist() == epochs
    assert again.gauges()["free"] == 6
    assert again.counters["recovered"] == 2
    assert again.counters["journal_corrupt_records"] == 0


def test_an_evicted_slot_is_not_found_after_a_kill(path: Path) -> None:
    index = open_index(path, 2)
    store(index, 1, 2)
    taken = index.allocate(1)
    kill(index)
    again = open_index(path, 2)
    assert taken.tolist() == [1]
    assert found(again, 2) == []
    assert found(again, 1) == [0]


def test_the_eviction_order_survives_a_clean_close(path: Path) -> None:
    index = open_index(path, 4)
    for number in range(4):
        store(index, number)
    index.touch(slots_of(1))
    index.touch(slots_of(3))
    index.pin(slots_of(0))
    assert index.flush()
    assert index.close()
    again = open_index(path, 4)
    assert again.allocate(4).tolist() == [2, 1, 3, 0]


def test_retained_blocks_are_the_newest_after_a_clean_close(path: Path) -> None:
    index = open_index(path)
    kept, other = store(index, 0, 1), store(index, 2, 3)
    index.durable(np.concatenate([kept, other]))
    index.retain(kept, 60, 1.0)
    assert index.close()
    after = open_index(path)
    assert after.order().tolist() == [*other[::-1], *kept[::-1]]
    assert after.gauges()["retained"] == 0
    kill(after)


def test_epochs_never_repeat(path: Path) -> None:
    seen: list[int] = []
    for open_number in (0, 1, 1, 7, 2):  # a manifest that was not saved, or restored from a copy
        index = open_index(path, 4, open_number=open_number)
        seen += index.epochs(index.allocate(2)).tolist()
        seen += index.epochs(store(index, len(seen))).tolist()
        kill(index)
    assert sorted(set(seen)) == seen
    assert seen[0] == (1 << EPOCH_COUNTER_BITS) + 1
    assert seen[9] >> EPOCH_COUNTER_BITS == 7


def test_epochs_of_slots_never_journalled_differ_by_open_number(path: Path) -> None:
    first = open_index(path, 4, open_number=3)
    before = first.epochs(first.allocate(4)).tolist()
    kill(first)
    second = open_index(path, 4, open_number=4)
    assert min(second.epochs(second.allocate(4)).tolist()) > max(before)
    assert second.epoch(0) == int(second.epochs(slots_of(0))[0])


def test_a_smaller_store_forgets_what_lies_beyond(path: Path) -> None:
    index = open_index(path, 8)
    store(index, 1, 2, 3, 4)
    kill(index)
    smaller = open_index(path, 2)
    assert found(smaller, 1, 2, 3) == [0, 1]
    assert smaller.counters["out_of_range"] == 2
    kill(smaller)
    assert open_index(path, 8).counters["recovered"] == 2


def test_memory_is_the_same_whatever_slots_hold() -> None:
    index = SlotIndex(20_000, None)
    per_slot = index.nbytes / index.num_slots
    assert per_slot == pytest.approx(76, abs=0.1)
    tracemalloc.start()
    store(index, *range(index.num_slots))
    left, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert index.gauges()["ready"] == index.num_slots
    assert left < index.num_slots  # not even a byte of Python objects per slot
    assert index.nbytes / index.num_slots == per_slot


@pytest.mark.parametrize(
    "options", ["sync_interval_s=None, slack_records=3", "sync_interval_s=0.001"]
)
def test_a_killed_process_loses_nothing_that_was_durable(path: Path, options: str) -> None:
    """A child fills 16 slots round and round; it is killed in the middle, often in a rewrite."""
    code = f"""
import sys
import numpy as np
from uuid import UUID
from vllm_ssdkv.store.index.slot_index import SlotIndex
from vllm_ssdkv.store.index.journal import Journal
journal = Journal(sys.argv[1], store=UUID(int=5), fingerprint=bytes(range(16)), num_slots=16,
                  {options})
index = SlotIndex(16, journal)
number = 0
while True:
    slot = index.allocate(1)
    index.publish(int(slot[0]), number.to_bytes(4, "big") + bytes(28))
    index.durable(slot)
    index.unpin(slot)
    print(number, flush=True)
    number += 1
    if journal.nbytes > journal.max_bytes * 3 // 4:  # the drive is slow: let a rewrite end
        index.flush()
"""
    with Child.python("-c", code, path, cwd="/") as child:
        last = -1
        while last < 300:
            last = int(child.hear())
        assert child.kill() == -9
        last = int([last, *child.rest()][-1])
    index = open_index(path, 16)
    recovered = {n for n in range(last + 2) if found(index, n)}
    # The step that was cut off may have evicted one more and stored one more.
    assert set(range(last - 14, last + 1)) <= recovered <= set(range(last - 15, last + 2))
    assert index.counters["journal_corrupt_records"] <= 1


# ---- slots that are taken away and come back ----


def test_restored_slots_are_handed_out_first_lowest_on_top() -> None:
    index = SlotIndex(8, None)
    index.quarantine(slots_of(2, 3, 6))
    assert index.gauges()["lost"] == 3
    assert index.free_now() == 5
    index.restore(slots_of(3, 6))
    assert index.allocate(3).tolist() == [3, 6, 0]
    assert index.gauges()["lost"] == 1
    with pytest.raises(ValueError, match="not lost"):
        index.restore(slots_of(2, 3))
    assert index.gauges()["lost"] == 1
    index.unpin(slots_of(3, 6, 0))
    index.quarantine(slots_of(3))
    assert index.gauges()["lost"] == 2


def test_deferred_slots_are_handed_out_last() -> None:
    index = SlotIndex(6, None)
    mask = np.array([True, False, True, False, False, False])
    index.defer(mask)
    assert index.free_now() == 4
    assert index.available() == index.gauges()["free"] == 6
    assert index.allocate(5).tolist() == [1, 3, 4, 5, 0]
    # One that is given back keeps its place at the end of the line; so does an evicted one.
    index.unpin(slots_of(0, 4))
    assert index.free_now() == 1
    assert index.allocate(1).tolist() == [4]
    (slot,) = index.allocate(1).tolist()
    assert slot in (0, 2)
    with pytest.raises(ValueError, match="mask of"):
        index.defer(mask[:3])
    index.unpin(slots_of(1, 3))
    index.defer(np.zeros(6, dtype=np.bool_))
    assert index.free_now() == index.gauges()["free"] == 3


def test_a_quarantine_takes_deferred_slots_too_and_restoring_ends_it() -> None:
    index = SlotIndex(4, None)
    index.defer(np.array([True, True, False, False]))
    index.quarantine(slots_of(1, 2))
    assert (index.free_now(), index.gauges()["free"]) == (1, 2)
    index.restore(slots_of(1))
    assert (index.free_now(), index.gauges()["free"]) == (2, 3)
    assert index.allocate(3).tolist() == [1, 3, 0]


def test_usage_counts_what_can_be_found_and_what_is_pinned() -> None:
    index = SlotIndex(8, None)
    slots = index.allocate(4)
    for slot in (0, 1):
        index.publish(slot, key(slot))
    index.unpin(slots_of(0))
    assert index.usage(0, 8) == (2, 0, 3, 5)
    assert index.usage(0, 1) == (1, 0, 0, 1)
    assert index.usage(2, 2) == (0, 0, 2, 0)
    assert index.usage(4, 4) == (0, 0, 0, 4)
    assert len(slots) == 4


# ---- the index against a simple model: any sequence of calls, kills and recoveries included ----


SLOTS = 6
numbers = st.integers(0, 7)
any_slots = st.lists(st.integers(0, SLOTS - 1), max_size=4)


class IndexMachine(RuleBasedStateMachine):
    """Drives a journalled index and a model made of dictionaries and lists."""

    @initialize()
    def start(self) -> None:
        # Durability against power loss is not what this machine looks at; speed is.
        self.patches = [patch.object(os, name) for name in ("fsync", "fdatasync")]
        for one in self.patches:
            one.start()
        self.directory = tempfile.TemporaryDirectory()
        self.path = Path(self.directory.name) / "journal"
        self.opened = 1
        self.clock = Clock()
        self.index = open_index(self.path, SLOTS, open_number=self.opened, clock=self.clock)
        self.state: dict[int, str] = dict.fromkeys(range(SLOTS), "free")
        self.pins: dict[int, int] = dict.fromkeys(range(SLOTS), 0)
        self.key_of: dict[int, bytes] = {}
        self.durable_set: dict[int, tuple[int, bytes]] = {}
        self.ever_durable: set[tuple[int, int, bytes]] = set()
        self.lru: list[int] = []
        """Evictable ordinary slots; of those that are retained, :attr:`kept`."""
        self.kept: list[int] = []
        self.until: dict[int, float] = {}
        self.limit = self.cut = 0
        self.dead: set[int] = set()
        self.masked: dict[int, bytes] = {}
        """Keys of slots that are masked, pinned ones included."""
        self.masked_order: list[int] = []
        self.reserved = 0
        self.last_epoch = 0
        self.evictions = 0

    def teardown(self) -> None:
        if hasattr(self, "index"):
            kill(self.index)
            self.directory.cleanup()
            for one in self.patches:
                one.stop()

    # The model's own arithmetic.

    def obtainable(self) -> int:
        return sum(s == "free" for s in self.state.values()) + len(self.lru + self.kept)

    def available(self) -> int:
        return max(0, self.obtainable() - self.reserved)

    def let_go(self, slot: int) -> None:
        if slot in self.masked:
            self.state[slot] = "masked"
            self.masked_order.append(slot)
        else:
            self.state[slot] = "lost" if slot in self.dead else "free"

    def make_ordinary(self, slot: int) -> None:
        del self.until[slot]
        if slot in self.kept:
            self.kept.remove(slot)
            self.lru.append(slot)

    def cut_short(self, slot: int) -> None:
        if slot in self.until:
            self.make_ordinary(slot)
            self.cut += 1

    def keep_share(self) -> None:
        while len(self.until) > self.limit and self.kept:
            self.cut_short(self.kept[0])

    def forget(self, slot: int) -> None:
        self.cut_short(slot)
        if self.masked.pop(slot, None) and slot in self.masked_order:
            self.masked_order.remove(slot)
        self.key_of.pop(slot, None)
        self.durable_set.pop(slot, None)
        if slot in self.lru:
            self.lru.remove(slot)

    # The steps.

    @rule(n=st.integers(0, 4), reserved=st.booleans())
    def allocate(self, n: int, reserved: bool) -> None:
        if reserved and n > self.reserved:
            with pytest.raises(ValueError, match="reserved"):
                self.index.allocate(n, reserved=True)
            return
        if n > (self.obtainable() if reserved else self.available()):
            with pytest.raises(StoreFullError):
                self.index.allocate(n, reserved=reserved)
            return
        order = self.lru + self.kept
        got = self.index.allocate(n, reserved=reserved).tolist()
        free = {s for s, state in self.state.items() if state == "free"}
        from_free = min(n, len(free))
        assert len(set(got)) == n
        assert set(got[:from_free]) <= free
        assert got[from_free:] == order[: n - from_free]
        self.evictions += n - from_free
        for slot in got:
            self.forget(slot)
            self.state[slot] = "writing"
            self.pins[slot] = 1
            assert self.index.epoch(slot) > self.last_epoch
            self.last_epoch = self.index.epoch(slot)
        if reserved:
            self.reserved -= n

    @rule(chain=st.lists(numbers, min_size=1, max_size=3, unique=True), durable=st.booleans())
    def store_chain(self, chain: list[int], durable: bool) -> None:
        """The usual life of a slot in one step, or states that need many steps stay rare."""
        fresh = [n for n in chain if key(n) not in self.key_of.values()]
        before = {s for s, state in self.state.items() if state == "writing"}
        self.allocate(len(fresh), False)
        fresh = [n for n in fresh if key(n) not in self.key_of.values()]
        slots = [s for s, state in self.state.items() if state == "writing" and s not in before]
        for slot, number in zip(slots, fresh, strict=False):
            assert self.index.publish(slot, key(number))
            self.state[slot] = "ready"
            self.key_of[slot] = key(number)
            if durable:
                self.make_durable([slot])
        self.model_unpin(slots)

    @rule(n=st.integers(0, 4))
    def reserve(self, n: int) -> None:
        if n > self.available():
            with pytest.raises(StoreFullError):
                self.index.reserve(n)
        else:
            self.index.reserve(n)
            self.reserved += n

    @precondition(lambda self: self.reserved)
    @rule(data=st.data())
    def unreserve(self, data: st.DataObject) -> None:
        n = data.draw(st.integers(0, self.reserved))
        self.index.unreserve(n)
        self.reserved -= n

    @rule(data=st.data(), number=numbers)
    def publish(self, data: st.DataObject, number: int) -> None:
        writing = [s for s, state in self.state.items() if state == "writing"]
        slot = data.draw(st.sampled_from(writing * 3 + list(range(SLOTS))))
        if self.state[slot] not in ("writing", "private"):
            with pytest.raises(ValueError, match="publish"):
                self.index.publish(slot, key(number))
            return
        fresh = self.state[slot] == "writing" and key(number) not in self.key_of.values()
        assert self.index.publish(slot, key(number)) is fresh
        self.state[slot] = "ready" if fresh else "private"
        if fresh:
            self.key_of[slot] = key(number)

    @rule(slots=any_slots)
    def make_durable(self, slots: list[int]) -> None:
        slots = [s for s in slots if self.state[s] != "writing"]
        self.index.durable(slots_of(*slots))
        for slot in slots:
            if self.state[slot] == "ready":
                for other in [s for s, k in self.masked.items() if k == self.key_of[slot]]:
                    self.model_drop(other)
                self.durable_set[slot] = (self.index.epoch(slot), self.key_of[slot])
                self.ever_durable.add((slot, *self.durable_set[slot]))

    @rule(slots=any_slots)
    def pin(self, slots: list[int]) -> None:
        if any(self.state[s] in ("free", "lost", "masked") for s in slots):
            with pytest.raises(ValueError, match="pin"):
                self.index.pin(slots_of(*slots))
        else:
            self.index.pin(slots_of(*slots))
            for slot in slots:
                self.pins[slot] += 1
                for listed in (self.lru, self.kept):
                    if slot in listed:
                        listed.remove(slot)

    @precondition(lambda self: any(self.pins.values()))
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        pinned = [s for s in self.pins for _ in range(self.pins[s])]
        self.model_unpin(
            data.draw(st.permutations(pinned))[: data.draw(st.integers(1, len(pinned)))]
        )

    def model_unpin(self, slots: list[int]) -> None:
        self.index.unpin(slots_of(*slots))
        for slot in reversed(slots):
            self.pins[slot] -= 1
            if self.pins[slot] == 0:
                if self.state[slot] == "ready":
                    (self.kept if slot in self.until else self.lru).append(slot)
                    self.keep_share()
                else:
                    self.let_go(slot)

    @rule(
        slots=st.permutations(range(SLOTS)),
        n=st.integers(0, SLOTS),
        seconds=st.integers(1, 3),
        share=st.sampled_from([0.0, 0.34, 0.5, 1.0]),
    )
    def retain(self, slots: list[int], n: int, seconds: int, share: float) -> None:
        slots = slots[:n]
        self.index.retain(slots_of(*slots), seconds, share)
        for slot in reversed(slots):
            if self.state[slot] == "ready":
                self.until[slot] = max(self.until.get(slot, 0), self.clock.now + seconds)
                for listed in (self.lru, self.kept):
                    if slot in listed:
                        listed.remove(slot)
                        self.kept.append(slot)
                        break
        self.limit = int(share * sum(state != "lost" for state in self.state.values()))
        self.keep_share()

    @rule(seconds=st.integers(1, 2))
    def time_passes(self, seconds: int) -> None:
        """Slots whose time has come are ordinary, in whatever order among themselves."""
        self.clock.sleep(seconds)
        ended = {s for s, end in self.until.items() if end <= self.clock.now}
        assert self.index.gauges()["retained"] == len(self.until) - len(ended)
        order = self.index.order().tolist()
        for slot in [s for s in order if s in ended] + [s for s in ended if s not in order]:
            self.make_ordinary(slot)

    @rule(slots=st.permutations(range(SLOTS)), n=st.integers(0, SLOTS))
    def touch(self, slots: list[int], n: int) -> None:
        slots = slots[:n]
        self.index.touch(slots_of(*slots))
        for slot in reversed(slots):
            for listed in (self.lru, self.kept):
                if slot in listed:
                    listed.remove(slot)
                    listed.append(slot)

    @rule(data=st.data())
    def replace(self, data: st.DataObject) -> None:
        """Blocks move; some of them were dropped meanwhile."""
        pinned = [s for s in self.pins if self.pins[s]]
        new = [s for s in pinned if self.state[s] == "writing"]
        if not new:
            self.allocate(1, False)
            new = [s for s, state in self.state.items() if state == "writing"]
        old = [s for s in pinned if s not in new]
        ready = [s for s in old if self.state[s] == "ready"]
        count = min(len(new), len(old), data.draw(st.integers(1, 2)))
        old = data.draw(st.permutations(ready * 3 + old).map(lambda s: list(dict.fromkeys(s))))
        old, new = old[:count], new[:count]
        was = [self.state[s] == "ready" for s in old]
        assert self.index.replace(slots_of(*old), slots_of(*new)).tolist() == was
        for before, after, moved in zip(old, new, was, strict=True):
            if moved:
                self.state[before], self.state[after] = "private", "ready"
                self.key_of[after] = self.key_of.pop(before)
                if before in self.until:
                    self.until[after] = self.until.pop(before)
                if self.durable_set.pop(before, None):
                    self.make_durable([after])

    @precondition(
        lambda self: any(s == "ready" and not self.pins[i] for i, s in self.state.items())
    )
    @rule(data=st.data())
    def replace_what_nobody_uses(self, data: st.DataObject) -> None:
        free = [i for i, s in self.state.items() if s == "ready" and not self.pins[i]]
        with pytest.raises(ValueError, match="not pinned"):
            self.index.replace(slots_of(data.draw(st.sampled_from(free))), slots_of(0))

    def model_drop(self, slot: int) -> None:
        if self.state[slot] in ("ready", "writing") or slot in self.masked:
            self.forget(slot)
            self.state[slot] = "private"
            if self.pins[slot] == 0:
                self.let_go(slot)

    @rule(slots=any_slots)
    def drop(self, slots: list[int]) -> None:
        self.index.drop(slots_of(*slots))
        for slot in slots:
            self.model_drop(slot)

    @precondition(lambda self: len(self.dead) < 3)
    @rule(slot=st.integers(0, SLOTS - 1), as_mask=st.booleans())
    def quarantine(self, slot: int, as_mask: bool) -> None:
        counted = slot in self.masked or self.state[slot] in ("ready", "writing")
        which = np.arange(SLOTS) == slot if as_mask else slots_of(slot)
        assert self.index.quarantine(which) == int(counted)
        self.dead.add(slot)
        if self.state[slot] == "free":
            self.state[slot] = "lost"
        self.model_drop(slot)

    @precondition(lambda self: len(self.dead) < 4)
    @rule(slots=any_slots)
    def mask(self, slots: list[int]) -> None:
        """A device goes with these slots."""
        new = [s for s in dict.fromkeys(slots) if s not in self.dead]
        kept = [s for s in new if s in self.durable_set]
        dropped = [s for s in new if s not in kept and self.state[s] in ("ready", "writing")]
        assert self.index.mask(slots_of(*slots)) == (len(kept), len(dropped))
        for slot in kept:
            self.cut_short(slot)
        for slot in [s for s in new if s not in kept]:
            self.dead.add(slot)
            self.model_drop(slot)
            if self.state[slot] == "free":
                self.state[slot] = "lost"
        for slot in sorted(kept, key=lambda s: self.lru.index(s) if s in self.lru else -1):
            self.dead.add(slot)
            self.masked[slot] = self.key_of.pop(slot)
            self.state[slot] = "private"
            if self.pins[slot] == 0:
                self.lru.remove(slot)
                self.let_go(slot)

    @precondition(lambda self: self.dead)
    @rule(slots=any_slots, everything=st.booleans())
    def unmask(self, slots: list[int], everything: bool) -> None:
        """The device is back: what is durable is found again, before what is not."""
        slots = list(range(SLOTS)) if everything else slots
        back = [s for s in dict.fromkeys(slots) if s in self.dead]
        shown = [s for s in back if s in self.masked]
        self.dead -= set(back)
        assert self.index.unmask(slots_of(*slots)) == len(shown)
        first = [s for s in self.masked_order if s in shown]
        self.masked_order = [s for s in self.masked_order if s not in shown]
        for slot in shown:
            for other in [s for s, k in self.key_of.items() if k == self.masked[slot]]:
                assert other not in self.durable_set
                self.model_drop(other)
            self.key_of[slot] = self.masked.pop(slot)
            self.state[slot] = "ready"
        for slot in back:
            if self.state[slot] == "lost":
                self.state[slot] = "free"
        self.lru = first + self.lru

    @rule(clean=st.booleans(), how=st.integers(0, 2))
    def restart(self, clean: bool, how: int) -> None:
        if how:  # most runs shall get further than a few steps
            return
        if clean:
            assert self.index.close()
        else:
            kill(self.index)
        self.opened += 1
        self.index = open_index(self.path, SLOTS, open_number=self.opened, clock=self.clock)
        self.state = dict.fromkeys(range(SLOTS), "free")
        self.state.update(dict.fromkeys(self.durable_set, "ready"))
        self.pins = dict.fromkeys(range(SLOTS), 0)
        self.key_of = {slot: k for slot, (_, k) in self.durable_set.items()}
        order = self.index.order().tolist()
        if clean:  # pinned ones come last, by number
            listed = self.masked_order + self.lru + self.kept
            kept = [s for s in listed if s in self.durable_set]
            assert order == kept + sorted(set(self.durable_set) - set(kept))
        self.lru, self.kept, self.until = order, [], {}
        self.limit = self.cut = 0
        self.dead = set()
        self.masked, self.masked_order = {}, []
        self.reserved = self.evictions = 0
        assert self.index.counters["recovered"] == len(self.durable_set)
        for slot, (epoch, _) in self.durable_set.items():
            assert self.index.epoch(slot) == epoch

    @rule(data=st.data())
    def a_crash_cuts_the_journal(self, data: st.DataObject) -> None:
        """Whatever is left of the file: no block is found that was not stored there."""
        whole = self.path.read_bytes()
        length = data.draw(st.integers(HEADER_BYTES, len(whole)))
        copy = self.path.with_name("cut")
        copy.write_bytes(whole[:length])
        after = open_index(copy, SLOTS)
        assert after.counters["journal_corrupt_records"] == (
            (length - HEADER_BYTES) % RECORD_BYTES > 0
        )
        stored = 0
        for number in range(8):
            for slot in found(after, number):
                assert (slot, after.epoch(slot), key(number)) in self.ever_durable
                stored += 1
        assert after.gauges()["ready"] == stored
        kill(after)

    # What must hold after each.

    @invariant()
    def everything_agrees(self) -> None:
        if not hasattr(self, "index"):
            return
        for number in range(8):
            slots = [s for s, k in self.key_of.items() if k == key(number)]
            assert found(self.index, number) == slots
        for slot, state in self.state.items():
            assert self.index.state(slot).name == state.upper()
        assert self.index.order().tolist() == self.lru + self.kept
        assert self.index.available() == self.available()
        gauges = self.index.gauges()
        states = list(self.state.values())
        journal_bytes = gauges.pop("journal_bytes")
        assert self.path.stat().st_size == journal_bytes
        assert gauges == {
            "free": states.count("free"),
            "ready": states.count("ready"),
            "writing": states.count("writing"),
            "pinned": sum(p > 0 for p in self.pins.values()),
            "evictable": len(self.lru + self.kept),
            "retained": len(self.until),
            "reserved": self.reserved,
            "masked": states.count("masked"),
            "lost": states.count("lost"),
            "journal_degraded": 0,
        }
        assert self.index.counters["evictions"] == self.evictions
        assert self.index.counters["retentions_cut"] == self.cut
        # What a kill now would leave, read by a second index from a copy.
        copy = self.path.with_name("copy")
        copy.write_bytes(self.path.read_bytes())
        after = open_index(copy, SLOTS)
        assert after.gauges()["ready"] == len(self.durable_set)
        for slot, (epoch, k) in self.durable_set.items():
            assert after.lookup([k]).tolist() == [slot]
            assert after.epoch(slot) == epoch
        kill(after)


IndexMachine.TestCase.settings = settings(stateful_step_count=40)
TestIndexMachine = IndexMachine.TestCase


# ---- blocks that move ----


def moving(index: SlotIndex, *numbers: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Pinned old slots of these keys, and slots that are written for them."""
    old = slots_of(*(found(index, n)[0] for n in numbers))
    index.pin(old)
    return old, index.allocate(len(numbers))


def test_a_block_that_moved_is_found_in_its_new_slot() -> None:
    index = SlotIndex(8, None)
    store(index, 1, 2)
    old, new = moving(index, 1, 2)
    assert found(index, 1, 2) == old.tolist()  # until it is written
    assert index.key(int(old[0])) == key(1)
    with pytest.raises(ValueError, match="WRITING"):
        index.key(int(new[0]))
    assert index.replace(old, new).tolist() == [True, True]
    assert found(index, 1, 2) == new.tolist()
    index.unpin(new)
    index.unpin(old)
    assert [index.state(s) for s in old.tolist()] == [SlotState.FREE] * 2
    assert index.order().tolist() == new.tolist()[::-1]
    assert index.gauges()["ready"] == 2


def test_a_block_that_moved_is_retained_as_long_as_before() -> None:
    clock = Clock()
    index = SlotIndex(6, None, clock=clock)
    store(index, 0)
    old, new = moving(index, 0)
    index.retain(old, 60, 0.5)
    index.replace(old, new)
    index.unpin(old)
    index.unpin(new)
    for number in range(1, 20):
        store(index, number)
    assert found(index, 0) == new.tolist()
    clock.sleep(60)
    assert index.gauges()["retained"] == 0
    assert index.counters["retentions_cut"] == 0


def test_who_reads_the_old_slot_keeps_it() -> None:
    index = SlotIndex(4, None)
    store(index, 1)
    old, new = moving(index, 1)
    index.pin(old)  # a running request
    index.replace(old, new)
    index.unpin(old)
    index.unpin(new)
    assert index.state(int(old[0])) is SlotState.PRIVATE
    assert not set(index.allocate(2).tolist()) & {int(old[0]), int(new[0])}
    index.unpin(old)
    assert index.state(int(old[0])) is SlotState.FREE


@pytest.mark.parametrize("which", ["old", "new"])
def test_what_is_dropped_while_it_moves_does_not_come_back(path: Path, which: str) -> None:
    index = open_index(path)
    store(index, 1)
    old, new = moving(index, 1)
    index.drop(old if which == "old" else new)
    assert index.replace(old, new).tolist() == [False]
    index.unpin(new)
    index.unpin(old)
    kept = old.tolist() if which == "new" else []
    assert found(index, 1) == kept
    kill(index)
    assert found(open_index(path), 1) == kept


def test_a_block_that_no_restart_would_find_stays_so(path: Path) -> None:
    index = open_index(path)
    slots = index.allocate(1)
    index.publish(int(slots[0]), key(1))
    index.unpin(slots)
    old, new = moving(index, 1)
    index.replace(old, new)
    kill(index)
    assert found(open_index(path), 1) == []


@pytest.mark.parametrize("records", [2, 3, 4])
def test_a_crash_in_the_middle_of_a_move_leaves_one_of_both(path: Path, records: int) -> None:
    """Records: two of what was stored, that of the new slot, that the old one is gone."""
    index = open_index(path)
    store(index, 1, 2)
    old, new = moving(index, 1)
    epochs = index.epochs(np.concatenate([old, new]))
    index.replace(old, new)
    index.unpin(new)
    index.unpin(old)
    kill(index)
    whole = path.read_bytes()
    assert len(whole) == HEADER_BYTES + 4 * RECORD_BYTES
    for torn in (0, 1, RECORD_BYTES - 1):
        path.write_bytes(whole[: HEADER_BYTES + records * RECORD_BYTES + torn])
        after = open_index(path)
        (slot,) = found(after, 1)
        assert slot == (old if records == 2 else new)[0]
        assert after.epoch(slot) == epochs[int(records > 2)]
        assert after.gauges()["ready"] == 2
        kill(after)


def test_what_a_crash_left_of_a_move_does_not_come_back(path: Path) -> None:
    """Its slot may be half overwritten by the time that the newer one is gone."""
    index = open_index(path)
    store(index, 1, 2)
    old, new = moving(index, 1)
    index.replace(old, new)
    kill(index)
    path.write_bytes(path.read_bytes()[: HEADER_BYTES + 3 * RECORD_BYTES])
    index = open_index(path)
    assert found(index, 1) == new.tolist()
    index.drop(new)
    kill(index)
    assert found(open_index(path), 1) == []


def test_no_rewrite_of_the_journal_loses_a_block_that_moves(path: Path) -> None:
    """Whatever it has walked over when the block moves, and wherever a crash ends it."""
    for walked in range(5):
        path.unlink(missing_ok=True)
        index = open_index(path)
        store(index, 1, 2)
        journal = index._journal
        assert journal is not None
        old, new = moving(index, 1)
        append, seen = journal.append, []

        def crash_here(*arguments: object, append=append, seen=seen, index=index) -> bool:  # type: ignore[no-untyped-def]
            # The rest of the walk, as if the new file took its name now.
            rest, more = b"", True
            while more:
                some, more = index._table.walk(1000 + len(rest))
                rest += some
            seen.append(rest)
            return bool(append(*arguments))

        journal.append = crash_here  # type: ignore[method-assign]
        index.live_records.begin_walk()
        before = b"".join(index._table.walk(900 + i, 1)[0] for i in range(walked))
        index.replace(old, new)
        replay = Replay(8)
        replay.feed(before + seen[0])
        assert key(1) in replay.keys
        kill(index)


# ---- a rewrite walks over a table that goes on changing ----


WALKED = 12
WALK_S = 120.0


class Tail:
    """Stands for a journal in the middle of a rewrite: keeps what is appended."""

    def __init__(self) -> None:
        self.recovered = Replay(WALKED)
        self.data = b""
        self.sequence = 1

    def attach(self, owner: object, *, stale: bool) -> None:
        pass

    def append(
        self,
        kind: Kind,
        slots: NDArray[np.int64],
        epochs: NDArray[np.int64],
        keys: Sequence[bytes] | None = None,
    ) -> bool:
        self.data += encode_records(kind, slots, epochs, keys, self.sequence)
        self.sequence += slots.size
        return True


def state(index: SlotIndex, numbers: range) -> set[tuple[int, int, bytes]]:
    """Slot, epoch and key of what is findable."""
    found = {key(n): index.find(key(n)) for n in numbers}
    return {(slot, index.epoch(slot), k) for k, slot in found.items() if slot is not None}


step = st.sampled_from(["store", "drop", "touch", "pin", "move", "walk"])
steps = st.lists(st.tuples(step, st.integers(0, 99)), max_size=40)


@settings(max_examples=200)
@given(st.integers(0, WALKED), steps)
def test_what_changes_during_a_walk_is_right_afterwards(
    first: int, steps: list[tuple[str, int]]
) -> None:
    tail: Any = Tail()
    index = SlotIndex(WALKED, tail)
    store(index, *range(first))
    number, pinned, moves, walked, more = first, 0, 0, b"", True
    tail.data = b""  # the new file has none of this
    index.live_records.begin_walk()
    for step, value in steps:
        slot = slots_of(value % WALKED)
        ready = index.state(value % WALKED).name == "READY"
        if step == "store":
            count = 1 + value % 3
            try:
                store(index, *range(number, number + count))
            except StoreFullError:
                continue
            number += count
        elif step == "drop":
            index.drop(slot)
        elif step == "touch":
            index.touch(slot)
        elif step == "pin" and ready and pinned < 3:
            index.pin(slot)
            pinned += 1
        elif step == "move" and ready and index.available() > 1:
            index.pin(slot)
            new = index.allocate(1)
            if index.state(value % WALKED).name == "READY":
                assert index.replace(slot, new).all()
                moves += 1
            index.unpin(np.concatenate([new, slot]))
        elif step == "walk":
            some, more = index._table.walk(tail.sequence, 1)
            tail.sequence += len(some) // RECORD_BYTES
            walked += some
    while more:
        some, more = index._table.walk(tail.sequence, 1)
        tail.sequence += len(some) // RECORD_BYTES
        walked += some
    assert index._table.walk(tail.sequence) == (b"", False)
    found = Replay(WALKED)
    found.feed(walked + tail.data)
    live = zip(found.slots.tolist(), found.epochs.tolist(), found.keys, strict=True)
    assert set(live) == state(index, range(number))
    # A slot that gets a new life may come twice.
    assert len(walked) // RECORD_BYTES <= WALKED + number - first + moves


def test_an_undisturbed_walk_is_the_order_of_eviction() -> None:
    tail: Any = Tail()
    index = SlotIndex(WALKED, tail)
    for number in range(8):
        store(index, number)
    index.touch(slots_of(2))
    index.pin(slots_of(7))
    index.pin(slots_of(0))
    for _ in range(2):  # the second walk finds all again
        tail.data, more = b"", True
        index.live_records.begin_walk()
        while more:
            some, more = index._table.walk(tail.sequence, 1)
            tail.sequence += len(some) // RECORD_BYTES
            tail.data += some
        found = Replay(WALKED)
        found.feed(tail.data)
        assert found.slots.tolist() == [1, 3, 4, 5, 6, 2, 0, 7]
        assert found.records == 8


def test_sustained_churn_is_bounded(tmp_path: Path) -> None:
    """Many times the store's size goes through it: file, table and Python memory stay put."""
    slots, batch, rounds = 500, 20, 400
    path = tmp_path / "journal"
    index = open_index(path, slots)
    before, largest, left_over = index.nbytes, 0, 0
    for number in range(rounds // 4):
        store(index, *range(number * batch, (number + 1) * batch))
    tracemalloc.start()
    for number in range(rounds // 4, rounds):
        store(index, *range(number * batch, (number + 1) * batch))
        largest = max(largest, path.stat().st_size)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    left_over = len(list(tmp_path.iterdir()))
    counters = index.counters
    assert index.nbytes == before
    assert peak < 256 * 1024
    # Twice the live ones start a rewrite; one batch of each kind may come on top.
    assert largest <= 128 + RECORD_BYTES * (2 * slots + 3 + 2 * batch)
    assert index.gauges()["journal_bytes"] == path.stat().st_size
    assert left_over == 1
    # Each store is one write, and each eviction of a batch another.
    stored = rounds * batch
    assert counters["journal_appended_records"] == stored + counters["evictions"]
    assert counters["journal_writes"] == rounds + (rounds - slots // batch)
    assert counters["journal_lost_records"] == counters["journal_rewrite_errors"] == 0
    assert counters["journal_rewrites"] >= (stored - 2 * slots) // (slots + 3 + 2 * batch)
    assert index.close()
    again = open_index(path, slots)
    assert again.gauges()["ready"] == slots
    assert again.counters["journal_corrupt_records"] == 0


def test_rewrites_in_the_background_lose_nothing(tmp_path: Path) -> None:
    """The thread walks while slots are stored, evicted, dropped and pinned."""
    slots = 500
    path, copy = tmp_path / "journal", tmp_path / "copy"
    journal = Journal(
        path,
        store=STORE,
        fingerprint=DIGEST,
        num_slots=slots,
        slack_records=2000,
        sync_interval_s=0.001,
        retry_interval_s=0.01,
    )
    index = SlotIndex(slots, journal)
    deadline, number = time.monotonic() + WALK_S, 0
    while journal.counters["rewrites"] < 5:
        assert time.monotonic() < deadline
        fresh = store(index, *range(number, number + 8))
        number += 8
        index.drop(fresh[::7])
        index.pin(fresh[1:2])
        index.touch(fresh[2:5])
        index.unpin(fresh[1:2])
        if journal.nbytes > journal.max_bytes * 3 // 4:  # the drive is slow: let a rewrite end
            index.flush()
        time.sleep(0.001)
    assert index.flush()
    expected = state(index, range(number))
    copy.write_bytes(path.read_bytes())  # a kill now
    assert state(open_index(copy, slots), range(number)) == expected
    assert index.close()
    assert state(open_index(path, slots), range(number)) == expected


def test_slots_that_are_not_written_are_left_out_where_somebody_reads_the_devices() -> None:
    index, keys = SlotIndex(8, None), [bytes([number]) * 32 for number in range(4)]
    slots = index.claim(keys)
    assert index.lookup(keys).tolist() == slots.tolist()
    index.unwritten = {int(slots[2])}
    assert index.lookup(keys).tolist() == slots[:2].tolist()
    assert index.lookup(keys[3:]).tolist() == slots[3:].tolist()
    assert (index.claim(keys) < 0).all(), "they are not stored twice"
    index.unpin(slots)
    index.retain_chain(keys, 60, 0.5)
    assert index.gauges()["retained"] == 4, "they are there when their request ends"
    index.unwritten = ()
    assert index.lookup(keys).tolist() == slots.tolist()
