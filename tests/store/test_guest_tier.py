"""Both halves of a tier over a guest: what it loses, spoils, refuses or does not answer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.kit.waiting import PATIENCE_S
from vllm_ssdkv.base.errors import StoreError
from vllm_ssdkv.base.metrics import Counters
from vllm_ssdkv.store.guest_tier import GuestIndex, GuestStore, take_weights, tell_weights
from vllm_ssdkv.store.index.slot_index import TAKEN, SlotState
from vllm_ssdkv.store.read.load_job import LoadJob, LoadOutcome

BYTES = 4096
KEYS = [bytes([i]) * 32 for i in range(12)]
DEADLINE_S = 0.3
"""Deadline for a guest that does not answer; another one is never late."""


class Shelf:
    """A tier in memory."""

    def __init__(self) -> None:
        self.blocks: dict[bytes, bytes] = {}
        self.asked = 0
        self.open = threading.Event()
        self.open.set()
        self.fails: set[str] = set()

    def _enter(self, name: str) -> None:
        if name in self.fails:
            raise OSError(name)

    def find(self, keys: Sequence[bytes]) -> list[bool]:
        self.asked += 1
        self._enter("find")
        return [key in self.blocks for key in keys]

    def put(self, key: bytes, block: memoryview) -> None:
        self.open.wait()
        self._enter("put")
        self.blocks[key] = bytes(block)

    def load(self, key: bytes, into: memoryview) -> bool:
        self.open.wait()
        self._enter("load")
        if key in self.blocks:
            into[:] = self.blocks[key]
        return key in self.blocks

    def drop(self, keys: Sequence[bytes]) -> None:
        self._enter("drop")
        for key in keys:
            self.blocks.pop(key, None)

    def close(self) -> None:
        self._enter("close")


class Rig:
    """A worker's half, its HBM blocks, and the scheduler's half."""

    def __init__(self) -> None:
        self.shelf, self.counters = Shelf(), Counters()
        self.hbm: dict[int, int] = {}
        self.store = GuestStore(self.shelf, BYTES, self.counters, 8 * BYTES, PATIENCE_S)
        self.store.start(self.copy_in, 16)
        self.index = GuestIndex([self.shelf], self.counters, numbers=16)

    def copy_in(self, frames: NDArray[np.int32], blocks: NDArray[np.int64]) -> None:
        for frame, block in zip(frames.tolist(), blocks.tolist(), strict=True):
            self.hbm[block] = int(self.store.load_frames.view(frame)[100])

    def save(self, keys: Sequence[bytes]) -> NDArray[np.int64]:
        """Claim and flush blocks that hold the first byte of their key."""
        slots = self.index.claim(keys)
        for slot, key in zip(slots.tolist(), keys, strict=True):
            one = np.array([slot])
            self.until(lambda one=one: len(self.store.reserve_frames(one, wait=False)))  # type: ignore[misc]
            self.store.save_frames.view(self.store._held[slot])[:] = key[0]
            self.store.flush(one, self.index.epochs(one), [key])
        return slots

    def written(self, count: int) -> tuple[set[int], set[int]]:
        """Slots written and failed, when so many were told."""
        done: set[int] = set()
        failed: set[int] = set()

        def all_of_them() -> bool:
            told, not_done = self.store.take_write_results()
            done.update(slot for slot, _ in told)
            failed.update(slot for slot, _ in not_done)
            return len(done) + len(failed) >= count

        self.until(all_of_them)
        return done, failed

    def load(self, keys: Sequence[bytes], *, compared: bool = False) -> LoadOutcome:
        slots = self.index.lookup(keys)
        blocks = np.arange(1, len(slots) + 1)
        epochs = self.index.epochs(slots)
        job = LoadJob("a", slots, epochs, tuple(keys[: len(slots)]), blocks, compared=compared)
        self.store.load(job)
        found: list[LoadOutcome] = []
        self.until(lambda: found.extend(self.store.take_load_outcomes(0.01)) or found)
        return found[0]

    @staticmethod
    def until(condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline
            time.sleep(0.002)

    def errors(self) -> float:
        return self.counters.total("thread_errors", thread="tier")


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    made.shelf.open.set()
    made.store.close()
    made.store.close()
    assert made.index.close()


def test_blocks_come_back_and_are_found_by_another_engine(rig: Rig) -> None:
    slots = rig.save(KEYS)
    assert rig.written(12) == (set(slots.tolist()), set())
    assert rig.index.claim(KEYS[:1]).tolist() == [TAKEN]
    other = GuestIndex([rig.shelf, rig.shelf], rig.counters, numbers=8)
    assert len(other.lookup(KEYS)) == 8, "it has no more numbers"
    assert other.last(KEYS[:2], 0, 2, [0]) == 2
    rig.index = GuestIndex([rig.shelf], rig.counters)
    outcome = rig.load([*KEYS, b"x" * 32], compared=True)
    assert outcome.complete
    assert outcome.hit_tokens_from_ssd == 12 * 16
    assert rig.hbm == {block: block - 1 for block in range(1, 13)}
    assert outcome.copy is not None
    assert outcome.copy[2][100] == 11
    asked = rig.shelf.asked
    rig.index.lookup([*KEYS, b"x" * 32])
    assert rig.shelf.asked == asked, "what is not there is asked for once in a step"
    rig.index.step()
    rig.index.lookup([*KEYS, b"x" * 32])
    assert rig.shelf.asked == asked + 1


@pytest.mark.parametrize("how", ["lost", "spoiled", "another", "raises"])
def test_a_block_that_cannot_be_had_fails_the_load_and_is_dropped(rig: Rig, how: str) -> None:
    rig.written(len(rig.save(KEYS[:2])))
    block = rig.shelf.blocks.pop(KEYS[1])
    if how == "spoiled":
        rig.shelf.blocks[KEYS[1]] = block[:-1] + bytes((block[-1] ^ 1,))
    elif how == "another":
        rig.shelf.blocks[KEYS[1]] = rig.shelf.blocks[KEYS[0]]
    elif how == "raises":
        rig.shelf.fails.add("load")
    outcome = rig.load(KEYS[:2])
    assert not outcome.complete
    assert not rig.hbm, "nothing of it is used"
    bad = [slot for slot, _ in outcome.bad]
    assert int(rig.index.lookup(KEYS[:2])[-1]) in bad
    rig.index.drop(np.array(bad))
    assert KEYS[1] not in rig.shelf.blocks
    assert len(rig.index.lookup(KEYS[:2])) == 2 - len(bad)
    assert bool(rig.errors()) == (how == "raises")


def test_a_guest_that_raises_stores_and_finds_nothing_and_counts(rig: Rig) -> None:
    rig.shelf.fails |= {"put", "find", "drop"}
    slots = rig.save(KEYS[:2])
    assert rig.written(2) == (set(), set(slots.tolist()))
    assert rig.errors() == 2
    rig.index.drop(slots)
    assert rig.errors() == 3
    rig.index.step()
    assert not len(rig.index.lookup(KEYS))
    assert rig.errors() == 4


def test_a_guest_that_does_not_answer_fails_what_waits_for_it(rig: Rig) -> None:
    rig.written(len(rig.save(KEYS[:1])))
    rig.shelf.open.clear()
    slots = rig.save(KEYS[1:4])
    rig.store._deadline_s = DEADLINE_S
    begun = time.monotonic()
    assert not rig.load(KEYS[:1]).complete
    assert rig.written(3)[1] == set(slots.tolist())
    assert DEADLINE_S / 2 < time.monotonic() - begun < 10.0
    rig.store._deadline_s = PATIENCE_S
    rig.shelf.open.set()
    rig.until(lambda: len(rig.store.save_frames.free) == 4)
    assert not rig.hbm, "the load was over"
    assert rig.load(KEYS[:1]).complete
    assert rig.store.take_write_results() == ([], [])


def test_what_is_abandoned_is_not_put(rig: Rig) -> None:
    rig.shelf.open.clear()
    slots = rig.save(KEYS[:2])
    rig.until(lambda: rig.store._putting is not None)
    rig.store.abandon(slots)
    rig.shelf.open.set()
    assert rig.written(2) == ({int(slots[0])}, {int(slots[1])})
    assert set(rig.shelf.blocks) == {KEYS[0]}
    assert len(rig.store.reserve_frames(np.arange(9), wait=False)) == 4


@pytest.mark.parametrize("claimed", [False, True])
def test_what_is_dropped_on_its_way_goes_when_it_has_come(rig: Rig, claimed: bool) -> None:
    """Unless it is stored anew meanwhile."""
    rig.shelf.open.clear()
    slots = rig.save(KEYS[:1])
    rig.index.drop(slots)
    if claimed:
        rig.save(KEYS[:1])
    rig.shelf.open.set()
    rig.written(1 + claimed)
    assert KEYS[0] in rig.shelf.blocks
    rig.index.unpin(slots)
    assert rig.index.state(int(slots[0])) is SlotState.FREE
    assert (KEYS[0] in rig.shelf.blocks) == claimed


def test_workers_tell_the_scheduler_of_their_weights() -> None:
    shelf = Shelf()
    tell_weights(shelf, "run", BYTES, b"digest")
    assert take_weights(shelf, "run", BYTES) == b"digest"
    with pytest.raises(StoreError, match="does not have what a worker has just put there"):
        take_weights(shelf, "run", BYTES)
