"""The slot index: single steps, then any sequence of steps against a simple model."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from uuid import UUID

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.kit.child import Child
from vllm_ssdkv.base.errors import StoreFullError
from vllm_ssdkv.store.index.journal import Journal
from vllm_ssdkv.store.index.slot_index import EPOCH_COUNTER_BITS, SlotIndex, SlotState

STORE = UUID(int=5)
DIGEST = bytes(range(16))
DEADLINE_S = 60.0


def key(number: int) -> bytes:
    return number.to_bytes(4, "big") + bytes(28)


def slots_of(*numbers: int) -> NDArray[np.int64]:
    return np.array(numbers, dtype=np.int64)


def open_index(path: Path, num_slots: int = 8, *, open_number: int = 0) -> SlotIndex:
    journal = Journal(
        path,
        store=STORE,
        fingerprint=DIGEST,
        num_slots=num_slots,
        sync_interval_s=None,
        slack_records=3,
    )
    return SlotIndex(num_slots, journal, open_number=open_number)


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
