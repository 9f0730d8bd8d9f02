"""A rewrite walks over a table that goes on changing: nothing is lost, everything is bounded."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.store.index.test_slot_index import DIGEST, STORE, key, open_index, slots_of, store
from vllm_ssdkv._index import Replay
from vllm_ssdkv.base.errors import StoreFullError
from vllm_ssdkv.store.format.journal_record import RECORD_BYTES, Kind, encode_records
from vllm_ssdkv.store.index.journal import Journal
from vllm_ssdkv.store.index.slot_index import SlotIndex

SLOTS = 12
DEADLINE_S = 120.0


class Tail:
    """Stands for a journal in the middle of a rewrite: keeps what is appended."""

    def __init__(self) -> None:
        self.recovered = Replay(SLOTS)
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
@given(st.integers(0, SLOTS), steps)
def test_what_changes_during_a_walk_is_right_afterwards(
    first: int, steps: list[tuple[str, int]]
) -> None:
    tail: Any = Tail()
    index = SlotIndex(SLOTS, tail)
    store(index, *range(first))
    number, pinned, moves, walked, more = first, 0, 0, b"", True
    tail.data = b""  # the new file has none of this
    index.live_records.begin_walk()
    for step, value in steps:
        slot = slots_of(value % SLOTS)
        ready = index.state(value % SLOTS).name == "READY"
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
            if index.state(value % SLOTS).name == "READY":
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
    found = Replay(SLOTS)
    found.feed(walked + tail.data)
    live = zip(found.slots.tolist(), found.epochs.tolist(), found.keys, strict=True)
    assert set(live) == state(index, range(number))
    # A slot that gets a new life may come twice.
    assert len(walked) // RECORD_BYTES <= SLOTS + number - first + moves


def test_an_undisturbed_walk_is_the_order_of_eviction() -> None:
    tail: Any = Tail()
    index = SlotIndex(SLOTS, tail)
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
        found = Replay(SLOTS)
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
    deadline, number = time.monotonic() + DEADLINE_S, 0
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
