"""Jobs of vLLM's whose chunks are on nodes: a thread asks the nodes, so that vLLM's waits for none.

A job ends when every chunk of it has: no copy touches vLLM's pool for it from then on.
"""

from __future__ import annotations

import contextlib
import itertools
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray
from vllm.v1.kv_offload.tiering.base import JobResult

from vllm_ssdkv.base.metrics import Counters
from vllm_ssdkv.node.client.remote_index import RemoteIndex
from vllm_ssdkv.node.client.remote_store import RemoteStore
from vllm_ssdkv.secondary_tier.chunk_writer import ChunkWrite, ChunkWriter, Pool
from vllm_ssdkv.secondary_tier.load_jobs import count_load
from vllm_ssdkv.store.index.computed_blocks import ComputedBlocks
from vllm_ssdkv.store.index.slot_index import NO_SLOT_CAUSES
from vllm_ssdkv.store.io.thread_errors import ThreadErrors
from vllm_ssdkv.store.read.load_job import LoadJob, LoadOutcome
from vllm_ssdkv.store.tier import Pairs

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import OffloadKey

_LOOK_S: Final = 0.001
"""Time between two looks for the end of what is under way."""

_REST_S: Final = 0.5
"""Time between two looks for a new session with a node, where nothing is under way."""

_NO_SLOTS: Final = np.zeros(0, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class NodeChunk:
    """A chunk of a job: vLLM's key and ours, and the row of vLLM's pool that it is in, or gets."""

    name: OffloadKey
    key: bytes
    row: int


@dataclass(slots=True, eq=False)
class NodeJob:
    """One of vLLM's jobs. The thread that asks nodes has it until it is done.

    Attributes:
        number: vLLM's.
        request: Whose it is.
        chunks: Those that have a key, head first.
        wanted: Chunks that vLLM has named.
        loads: True of a load, False of a store.
        begun: Of the monotonic clock.
        left: Loads, or chunks to be written, that have not ended.
        slots: Slots that it has claimed.
        good: Chunks that were loaded or written.
        failed: A chunk was not stored that should have been.
    """

    number: int
    request: str
    chunks: list[NodeChunk]
    wanted: int
    loads: bool
    begun: float = field(default_factory=time.monotonic)
    left: int = 0
    slots: list[int] = field(default_factory=list)
    good: list[NodeChunk] = field(default_factory=list)
    failed: bool = False

    def result(self, chunk_bytes: int) -> JobResult:
        """The job as vLLM wants to know of it."""
        if self.loads:
            good = len(self.good) == self.wanted
            names = None if good else tuple(chunk.name for chunk in self.good)
        else:
            good, names = not self.failed, None
        moved = len({chunk.key for chunk in self.good})  # replicas move no chunk of vLLM's twice
        spent_s = time.monotonic() - self.begun
        return JobResult(self.number, good, names, spent_s, moved * chunk_bytes)

    @property
    def missing(self) -> list[bytes]:
        """Keys of chunks that a load has not brought."""
        good = {chunk.key for chunk in self.good} if self.loads else None
        return [] if good is None else [c.key for c in self.chunks if c.key not in good]


@dataclass(frozen=True, slots=True)
class _Write:
    """A chunk on its way."""

    job: NodeJob
    chunk: NodeChunk
    epoch: int


@dataclass(frozen=True, slots=True)
class _Loading:
    """Chunks of a load that a node was asked for, and where they are: slots and epochs, and those
    of the same chunks on other nodes, or none; each [n]."""

    job: NodeJob
    chunks: list[NodeChunk]
    slots: NDArray[np.int64]
    epochs: NDArray[np.int64]
    others: NDArray[np.int64]
    other_epochs: NDArray[np.int64]

    def one(self, at: int) -> _Loading:
        """One of the chunks."""
        part = slice(at, at + 1)
        return _Loading(
            self.job,
            self.chunks[part],
            *(self.slots[part], self.epochs[part], self.others[part], self.other_epochs[part]),
        )


class NodeHalves:
    """Both halves of an engine's way to its nodes.

    Attributes:
        index: Slots by key; used by several threads, with ``asking`` held.
        store: Bytes; saved by a thread for each node, loaded by one for all.
    """

    def __init__(self, index: RemoteIndex, store: RemoteStore):
        self.index, self.store = index, store
        self.asking = threading.Lock()

    def found(self, keys: Sequence[bytes]) -> list[bool]:
        """Say of each key whether it is stored. Waits for nodes, for the deadline of a call at
        most."""
        with self.asking:
            self.index.step()
            return [slot >= 0 for slot in self.index.find_each(keys).tolist()]

    def awaits(self, request: str, keys: Sequence[bytes], heads: Mapping[str, bytes]) -> bool:
        """Check whether a request that lacks these chunks had better wait: others compute them. If
        not, it computes them itself, until :meth:`NodeJobs.leave`. Waits for nodes as above.

        ``heads``: key of the first block of each request that has not ended.
        """
        with self.asking:
            head = heads.get(request)
            if head is None:
                return False
            self.index.step()
            return self.index.awaits(request, keys, lambda: None, head)


class NodeJobs:
    """Carries out jobs in a thread of its own, and copies chunks in a thread for each node, so that
    a node that takes none holds up no other. vLLM's thread calls the public methods.

    Of a load that fails the chunks that are not to blame are loaded once more, each by itself, so
    that vLLM learns of each chunk whether it has it.
    """

    def __init__(
        self, halves: NodeHalves, pool: Pool, offset: int, deadline_s: float, counters: Counters
    ):
        """``offset``: of the chunk in a frame. ``deadline_s``: as of :class:`ChunkWriter`."""
        self._halves, self._counters = halves, counters
        self._writers = [
            ChunkWriter(halves.store, pool, offset, deadline_s, counters)
            for _ in halves.index.members
        ]
        self._errors = ThreadErrors(counters, "node")
        self._orders: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[NodeJob] = queue.SimpleQueue()
        self._writes: dict[int, _Write] = {}
        """Chunks on their way to a node, by slot."""
        self._loads: dict[str, _Loading] = {}
        """Loads under way, by name."""
        self._names = itertools.count()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="ssdkv-tier-jobs", daemon=True)
        self._thread.start()

    def begin(self, job: NodeJob) -> None:
        """Carry out a job, in the background."""
        self._orders.put(lambda: self._begin(job))

    def touch(self, keys: Sequence[bytes]) -> None:
        """Mark chunks, head first, as just used, in the background."""
        self._orders.put(lambda: self._touch(keys))

    def leave(self, request: str) -> None:
        """A request has ended, and all of its jobs have begun: it computes nothing more."""
        self._orders.put(lambda: self._leave(request))

    def take_done(self) -> list[NodeJob]:
        """Jobs that ended since the last call."""
        found = []
        while not self._done.empty():
            found.append(self._done.get())
        return found

    def close(self) -> None:
        """End the threads. Jobs under way do not end."""
        for writer in self._writers:
            writer.close()
        self._stopping = True
        self._orders.put(lambda: None)
        self._thread.join()

    # ---- the thread ----

    def _run(self) -> None:
        while not self._stopping:
            order, busy = None, self._writes or self._loads
            with contextlib.suppress(queue.Empty):
                order = self._orders.get(timeout=_LOOK_S if busy else _REST_S)
            with self._errors.swallowed("jobs of the tier are late"):
                self._poll()
            if order is not None:  # else the job would never end, and a reset would wait for it
                with self._errors.swallowed("nodes are not told what is in use"):
                    order()

    def _touch(self, keys: Sequence[bytes]) -> None:
        with self._halves.asking:
            self._halves.index.touch_chain(keys)

    def _leave(self, request: str) -> None:
        with self._halves.asking:
            self._halves.index.computes_no_more(request)

    def _begin(self, job: NodeJob) -> None:
        job.failed = True  # unless the rest says otherwise
        with self._errors.swallowed("a job of the tier fails"):
            (self._load if job.loads else self._store)(job)
        if not job.left:
            self._end(job)

    def _end(self, job: NodeJob) -> None:
        if job.slots:
            with self._errors.swallowed("slots stay pinned"), self._halves.asking:
                self._halves.index.unpin(np.array(job.slots, dtype=np.int64))
        self._done.put(job)

    def _store(self, job: NodeJob) -> None:
        """Claim slots for chunks that no node has, and have them written."""
        index = self._halves.index
        chunks = [chunk for chunk in job.chunks for _ in range(index.node_replicas)]
        with self._halves.asking:
            index.step()
            keys = [chunk.key for chunk in chunks]
            slots = index.claim(keys, of=ComputedBlocks(job.request, keys))
            epochs = index.epochs(slots.clip(0)).tolist()
            job.failed = not index.connected
        orders = []
        for chunk, slot, epoch in zip(chunks, slots.tolist(), epochs, strict=True):
            if slot >= 0:
                if slot in self._writes:  # claimed anew in another session: nobody tells of it
                    self._write_ended((slot, self._writes[slot].epoch), good=False)
                self._writes[slot] = _Write(job, chunk, epoch)
                orders.append(ChunkWrite(slot, epoch, chunk.key, chunk.row))
            elif slot in NO_SLOT_CAUSES:
                self._counters.add("stores_skipped", 1, cause=NO_SLOT_CAUSES[slot])
        job.slots = [order.slot for order in orders]
        job.left = len(orders)
        count = len(self._writers)
        for node, writer in enumerate(self._writers):
            here = [order for order in orders if order.slot % count == node]
            if here:
                writer.write(here)

    def _load(self, job: NodeJob) -> None:
        """Ask for the chunks that nodes have."""
        index = self._halves.index
        with self._halves.asking:
            index.step()
            slots = index.find_each([chunk.key for chunk in job.chunks])
            there = np.flatnonzero(slots >= 0)
            slots = slots[there]
            epochs, (others, other_epochs) = index.epochs(slots), index.others(slots)
        chunks = [job.chunks[at] for at in there.tolist()]
        if chunks:
            self._ask(_Loading(job, chunks, slots, epochs, others, other_epochs))

    def _ask(self, loading: _Loading) -> None:
        """Ask for chunks. What has become of them :meth:`_poll` hears, in this thread."""
        name = f"job {loading.job.number} load {next(self._names)}"
        self._halves.store.load(
            LoadJob(
                name,
                loading.slots,
                loading.epochs,
                tuple(chunk.key for chunk in loading.chunks),
                np.array([chunk.row + 1 for chunk in loading.chunks], dtype=np.int64),
                others=loading.others,
                other_epochs=loading.other_epochs,
            )
        )
        self._loads[name] = loading
        loading.job.left += 1

    def _poll(self) -> None:
        """Take in what nodes have told."""
        written, failed = self._halves.store.take_write_results()
        outcomes = self._halves.store.take_load_outcomes()
        for writer in self._writers:
            failed += writer.take_failed()
        self._written(written)
        lost = sum(self._write_ended(pair, good=False) for pair in failed)
        if lost:
            self._counters.add("slots_dropped", lost, cause="write_error")
        for outcome in outcomes:
            self._loaded(outcome)

    def _written(self, pairs: Pairs) -> None:
        done = [pair[0] for pair in pairs if self._write_ended(pair, good=True)]
        if done:
            self._halves.index.durable(np.array(done, dtype=np.int64))

    def _write_ended(self, pair: tuple[int, int], *, good: bool) -> bool:
        """Take in the end of one chunk's write; False where nobody waits for it."""
        slot, epoch = pair
        write = self._writes.get(slot)
        if write is None or write.epoch != epoch:
            return False
        del self._writes[slot]
        job = write.job
        if good:
            job.good.append(write.chunk)
        job.failed |= not good
        job.left -= 1
        if not job.left:
            self._end(job)
        return True

    def _loaded(self, outcome: LoadOutcome) -> None:
        loading = self._loads.pop(outcome.request_id)
        job = loading.job
        job.left -= 1
        count_load(self._counters, outcome)
        if outcome.complete:
            job.good += loading.chunks
        elif len(loading.chunks) > 1:
            bad = {slot for slot, _ in outcome.bad}
            with self._errors.swallowed("chunks are not loaded once more"):
                for at, slot in enumerate(loading.slots.tolist()):
                    if slot not in bad:
                        self._ask(loading.one(at))
        if not job.left:
            self._end(job)
