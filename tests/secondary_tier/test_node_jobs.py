"""Jobs on nodes end once, whatever nodes answer, and say of each chunk what has become of it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from vllm.v1.kv_offload.base import OffloadKey
from vllm.v1.kv_offload.tiering.base import JobResult

from tests.kit.waiting import PATIENCE_S, until
from vllm_ssdkv.base.metrics import Counters
from vllm_ssdkv.secondary_tier.chunk_writer import Pool
from vllm_ssdkv.secondary_tier.node_jobs import NodeChunk, NodeHalves, NodeJob, NodeJobs
from vllm_ssdkv.store.index.computed_blocks import ComputedBlocks
from vllm_ssdkv.store.index.slot_index import FULL, PAUSED, TAKEN
from vllm_ssdkv.store.read.load_job import LoadJob, LoadOutcome

ROW = 4096
I64 = NDArray[np.int64]


class Index:
    """Slots as a test says; slot ``n`` is of the key ``n``."""

    def __init__(self) -> None:
        self.node_replicas, self.connected, self.epoch = 1, True, 7
        self.members = ["node", "another"]
        self.claims: list[int] = []
        self.stored: set[int] = set()
        self.unpinned: list[int] = []
        self.touched: list[bytes] = []
        self.origins: list[ComputedBlocks] = []
        self.left: list[str] = []
        self.broken = False
        self.steps = 0

    def step(self) -> None:
        self.steps += 1

    def claim(self, keys: Sequence[bytes], *, of: ComputedBlocks) -> I64:
        self.origins.append(of)
        if self.broken:
            raise RuntimeError("no luck")
        return np.array(self.claims[: len(keys)], dtype=np.int64)

    def epochs(self, slots: I64) -> I64:
        return np.full(len(slots), self.epoch, dtype=np.int64)

    def find_each(self, keys: Sequence[bytes]) -> I64:
        return np.array([k[0] if k[0] in self.stored else -1 for k in keys], dtype=np.int64)

    def others(self, slots: I64) -> tuple[I64, I64]:
        return slots + 8, self.epochs(slots) + 1

    def touch_chain(self, keys: Sequence[bytes]) -> None:
        self.touched += keys

    def computes_no_more(self, name: str) -> None:
        assert self.origins
        self.left.append(name)

    def unpin(self, slots: I64) -> None:
        self.unpinned += slots.tolist()
        if self.broken:
            raise RuntimeError("no luck")

    def durable(self, slots: I64) -> None:
        """The node counts it."""


class Store:
    """A worker's half that does what a test says."""

    def __init__(self) -> None:
        self.memory = np.zeros((16, ROW), dtype=np.uint8)
        self.save_frames = SimpleNamespace(address=self._address)
        self.flushed: list[tuple[int, int]] = []
        self.written: deque[tuple[int, int]] = deque()
        self.failed: deque[tuple[int, int]] = deque()
        self.loads: list[list[int]] = []
        self.bad: set[int] = set()
        self.faults: set[int] = set()
        self.errors = 0
        self.refuses: list[int] = []
        self.has_places = [threading.Event(), threading.Event()]
        for node in self.has_places:
            node.set()
        self._outcomes: list[LoadOutcome] = []

    def _address(self, frames: NDArray[np.int32]) -> NDArray[np.uint64]:
        return np.array([self.memory[f].ctypes.data for f in frames.tolist()], dtype=np.uint64)

    def reserve_frames(self, slots: I64, *, wait: bool) -> NDArray[np.int32]:
        (node,) = {slot % 2 for slot in slots.tolist()}
        self.has_places[node].wait(PATIENCE_S)
        return slots.astype(np.int32)

    def flush(self, slots: I64, epochs: I64, keys: Sequence[bytes]) -> None:
        self.flushed += zip(slots.tolist(), epochs.tolist(), strict=True)

    def load(self, job: LoadJob) -> None:
        slots = job.slots.tolist()
        if slots == self.refuses:
            raise RuntimeError("no luck")
        self.loads.append(slots)
        assert job.block_ids.tolist() == [slot + 1 for slot in slots]
        assert job.others.tolist() == [slot + 8 for slot in slots]
        assert job.other_epochs.tolist() == [8] * len(slots)
        bad = [(slot, 7) for slot in slots if slot in self.bad]
        complete = not (bad or self.faults.intersection(slots))
        self._outcomes.append(LoadOutcome(job.request_id, complete, bad))

    def take_write_results(self) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        if self.errors:
            self.errors -= 1
            raise RuntimeError("no luck")
        failed = [self.failed.popleft() for _ in range(len(self.failed))]
        return [self.written.popleft() for _ in range(len(self.written))], failed

    def take_load_outcomes(self) -> list[LoadOutcome]:
        outcomes, self._outcomes = self._outcomes, []
        return outcomes


class Rig:
    """Jobs over such halves."""

    def __init__(self) -> None:
        self.index, self.store, self.counters = Index(), Store(), Counters()
        rows = np.arange(16 * ROW, dtype=np.uint8).reshape(16, ROW)
        self.rows = rows
        index: Any = self.index
        store: Any = self.store
        halves = NodeHalves(index, store)
        self.jobs = NodeJobs(halves, Pool(rows.ctypes.data, ROW), 0, 1.0, self.counters)
        self.ended: list[NodeJob] = []

    def begin(self, number: int, chunks: list[int], *, loads: bool) -> NodeJob:
        named = [NodeChunk(OffloadKey(b"v%d" % n), bytes([n]), n) for n in chunks]
        job = NodeJob(number, "request", named, len(chunks), loads)
        self.jobs.begin(job)
        return job

    def end(self, job: NodeJob) -> JobResult:
        def has_ended() -> bool:
            self.ended += self.jobs.take_done()
            return job in self.ended

        until(has_ended, "the end of a job")
        assert self.ended.count(job) == 1
        return job.result(ROW)


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    made.jobs.close()


def test_a_chunk_that_fails_fails_its_job_and_no_other(rig: Rig) -> None:
    rig.index.claims = [1, 2, TAKEN]
    one = rig.begin(1, [1, 2, 3], loads=False)
    until(lambda: sorted(rig.store.flushed) == [(1, 7), (2, 7)])
    rig.index.claims = [4, FULL, PAUSED]
    other = rig.begin(2, [4, 5, 6], loads=False)
    until(lambda: (4, 7) in rig.store.flushed)
    np.testing.assert_array_equal(rig.store.memory[[1, 2, 4]], rig.rows[[1, 2, 4]])
    rig.store.written.extend([(1, 7), (2, 6)])  # and one of another epoch, which nobody waits for
    rig.store.failed.extend([(2, 7)])
    result = rig.end(one)
    assert (result.success, result.transfer_bytes) == (False, ROW)
    assert sorted(rig.index.unpinned) == [1, 2]
    assert other not in rig.ended
    rig.store.written.extend([(4, 7)])
    assert rig.end(other).success
    assert rig.counters.total("slots_dropped", cause="write_error") == 1
    assert rig.counters.total("stores_skipped", cause="store_full") == 1
    assert rig.counters.total("stores_skipped", cause="writes_paused") == 1


def test_a_slot_that_is_claimed_anew_ends_the_job_before(rig: Rig) -> None:
    """As behind another session: nobody tells of the write before."""
    rig.index.claims = [1]
    before = rig.begin(1, [1], loads=False)
    until(lambda: rig.store.flushed == [(1, 7)])
    rig.index.epoch = 9
    after = rig.begin(2, [1], loads=False)
    assert not rig.end(before).success
    rig.store.written.extend([(1, 9)])
    assert rig.end(after).success


def test_each_replica_is_a_write_of_its_own(rig: Rig) -> None:
    rig.index.node_replicas, rig.index.claims = 2, [1, 2]
    job = rig.begin(1, [1], loads=False)
    until(lambda: sorted(rig.store.flushed) == [(1, 7), (2, 7)])
    rig.store.written.extend([(1, 7)])
    rig.store.failed.extend([(2, 7)])
    assert not rig.end(job).success
    rig.store.flushed.clear()
    job = rig.begin(2, [1], loads=False)
    until(lambda: len(rig.store.flushed) == 2)
    rig.store.written.extend([(1, 7), (2, 7)])
    result = rig.end(job)
    assert (result.success, result.transfer_bytes) == (True, ROW)  # one chunk has left the pool


def test_a_node_without_places_holds_up_no_other(rig: Rig) -> None:
    rig.store.has_places[1].clear()
    rig.index.claims, rig.index.stored = [1, 2], {3}
    job = rig.begin(1, [1, 2], loads=False)
    until(lambda: rig.store.flushed == [(2, 7)])
    assert rig.end(rig.begin(2, [3], loads=True)).success
    rig.store.written.extend([(2, 7)])
    rig.store.has_places[1].set()
    until(lambda: rig.store.flushed == [(2, 7), (1, 7)])
    rig.store.written.extend([(1, 7)])
    assert rig.end(job).success


def test_nodes_that_are_gone_fail_a_store(rig: Rig) -> None:
    rig.index.claims, rig.index.connected = [TAKEN], False
    assert not rig.end(rig.begin(1, [1], loads=False)).success
    rig.index.connected = True
    assert rig.end(rig.begin(2, [1], loads=False)).success  # it is stored already


@pytest.mark.parametrize(
    ("bad", "faults", "asked"),
    [
        (set(), set(), [[1, 2, 3]]),
        ({2}, set(), [[1, 2, 3], [1], [3]]),
        (set(), {2}, [[1, 2, 3], [1], [2], [3]]),
    ],
)
def test_a_load_names_each_chunk_that_it_has(
    rig: Rig, bad: set[int], faults: set[int], asked: list[list[int]]
) -> None:
    rig.index.stored, rig.store.bad, rig.store.faults = {1, 2, 3}, bad, faults
    job = rig.begin(1, [1, 2, 3, 4], loads=True)
    result = rig.end(job)
    assert rig.store.loads == asked
    good = [n for n in (1, 2, 3) if n not in bad | faults]
    assert result.successful_keys is not None
    assert sorted(result.successful_keys) == [OffloadKey(b"v%d" % n) for n in good]
    assert not result.success
    assert job.missing == [bytes([n]) for n in (1, 2, 3, 4) if n not in good]
    assert rig.counters.total("load_failures") == len([a for a in asked if {2} & {*a}]) * bool(
        bad | faults
    )


def test_a_load_of_all_has_no_names(rig: Rig) -> None:
    rig.index.stored = {1, 2}
    result = rig.end(rig.begin(1, [1, 2], loads=True))
    assert (result.success, result.successful_keys) == (True, None)
    assert not rig.end(rig.begin(2, [3], loads=True)).success


def test_an_error_that_nothing_foresaw_fails_one_job(rig: Rig) -> None:
    rig.index.broken, rig.index.claims = True, [1]
    assert not rig.end(rig.begin(1, [1], loads=False)).success
    assert rig.counters.total("thread_errors", thread="node") == 1
    rig.index.broken = False
    job = rig.begin(2, [1], loads=False)
    until(lambda: rig.store.flushed == [(1, 7)])
    rig.store.written.extend([(1, 7)])
    assert rig.end(job).success


def test_no_error_keeps_a_job_from_its_end(rig: Rig) -> None:
    """A reset of vLLM's cache waits for every job."""
    rig.store.errors, rig.index.stored = 2, {1, 2}  # of two looks, the order's and another one
    assert rig.end(rig.begin(1, [1, 2], loads=True)).success
    assert not rig.store.errors
    rig.store.faults, rig.store.refuses = {1}, [1]
    assert not rig.end(rig.begin(2, [1, 2], loads=True)).success
    rig.index.claims = [1]
    job = rig.begin(3, [1], loads=False)
    until(lambda: rig.store.flushed == [(1, 7)])
    rig.index.broken = True
    rig.store.written.extend([(1, 7)])
    assert rig.end(job).success
    assert rig.counters.total("thread_errors", thread="node") == 4


def test_chunks_in_use_are_touched(rig: Rig) -> None:
    rig.jobs.touch([b"a", b"b"])
    until(lambda: rig.index.touched == [b"a", b"b"])


def test_a_request_leaves_when_its_chunks_are_claimed(rig: Rig) -> None:
    """Others would otherwise compute the chunks that it is about to store."""
    rig.index.claims = [TAKEN]
    job = rig.begin(1, [1], loads=False)
    rig.jobs.leave("request")
    until(lambda: rig.index.left == ["request"])
    assert rig.index.origins == [ComputedBlocks("request", [bytes([1])])]
    rig.end(job)
