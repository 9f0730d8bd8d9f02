"""Residency in nodes, one or several, as a worker asks for it.

The worker's half of a tier, ``TierStore``.
"""

from __future__ import annotations

import functools
import logging
import queue
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from vllm_ssdkv.base.errors import StoreError
from vllm_ssdkv.base.metrics import Counters
from vllm_ssdkv.node.client.hedging import HedgeBudget, LoadTimes
from vllm_ssdkv.node.client.node_link import START_S
from vllm_ssdkv.node.client.node_links import ConnectedShare, start_links
from vllm_ssdkv.node.client.node_residency import NodeResidency, PinMemory
from vllm_ssdkv.node.client.session import Peer
from vllm_ssdkv.node.client.transfer import TransferRegion
from vllm_ssdkv.node.protocol.messages import Welcome
from vllm_ssdkv.store.read.load_job import LoadJob, LoadOutcome
from vllm_ssdkv.store.read.prefix_loader import CopyIn
from vllm_ssdkv.store.tier import I32, I64, FrameMemory, Pairs

logger = logging.getLogger(__name__)

STOP_S: Final = 5.0
"""Wait for the thread at the end, in seconds."""


class PooledFrames:
    """Frames of several memories: frame ``f`` of memory ``i`` of n has number ``f * n + i``.

    Example:
        frames = PooledFrames([store.save_frames for store in stores])
        frames.address(frames.numbers(1, np.array([0, 1], dtype=np.int32)))
    """

    def __init__(self, memories: Sequence[FrameMemory]):
        self._memories = memories

    def numbers(self, memory: int, frames: I32) -> I32:
        """Numbers of frames of one memory, [n]."""
        return (frames * len(self._memories) + memory).astype(np.int32, copy=False)

    def address(self, frames: I32) -> NDArray[np.uint64]:
        """Absolute address of each frame, [n]."""
        if len(self._memories) == 1:
            return self._memories[0].address(frames)
        found = np.zeros(len(frames), dtype=np.uint64)
        for i, memory in enumerate(self._memories):
            here = frames % len(self._memories) == i
            if here.any():
                found[here] = memory.address(frames[here] // len(self._memories))
        return found

    def view(self, frame: int) -> NDArray[np.uint8]:
        """Bytes of a frame, without a copy."""
        frame, memory = divmod(frame, len(self._memories))
        return self._memories[memory].view(frame)


class _Nowhere:
    """One place for all blocks whose node is gone: their copy must go somewhere."""

    def __init__(self) -> None:
        self.region: TransferRegion | None = None

    def open(self, frame_bytes: int) -> None:
        """Make the place."""
        self.region = TransferRegion(frame_bytes, frame_bytes, shared=False)

    def address(self, frames: I32) -> NDArray[np.uint64]:
        """See :class:`FrameMemory`."""
        if self.region is None:
            raise StoreError("no session was opened")
        return self.region.frames.address(np.zeros_like(frames))

    def view(self, frame: int) -> NDArray[np.uint8]:
        """See :class:`FrameMemory`."""
        if self.region is None:
            raise StoreError("no session was opened")
        return self.region.frames.view(0)


@dataclass(slots=True, eq=False)
class _Load:
    """A load that the worker asked for; ``left`` of its parts have not come."""

    job: LoadJob
    outcome: LoadOutcome
    handles: I64
    left: int = 0
    over: bool = False


@dataclass(slots=True, eq=False)
class _Part:
    """Blocks of a load that lie on the same nodes.

    Attributes:
        load: Whose part it is.
        which: Indices of its slots.
        node, other: Nodes that have them; -1: no other.
        under_way: Nodes that were asked and have not answered.
        other_asked: The other one was asked.
        hedged: It was, while the first one had not answered.
        done: All of it has come.
    """

    load: _Load
    which: I64
    node: int
    other: int
    under_way: int = 0
    other_asked: bool = False
    hedged: bool = False
    done: bool = False


class RemoteStore:
    """The store of one rank in a pool of nodes, often of one.

    The thread of the forward pass calls all methods; or a thread for each node saves its slots
    (:meth:`reserve_frames`, :meth:`flush`, :meth:`abandon`), and another one calls the rest. A
    thread of its own waits for the nodes: of each part of a load that fails, or is late by what
    loads of the other node take, that other node is asked too, where it has the blocks.

    HBM blocks are known to nodes by handles, which are good until the block has come once, or the
    load is over. So what an overtaken node sends is not copied. A node tells of a block when it has
    checked it, so that the first one counts.

    Example:
        store = RemoteStore(peers, counters, deadline_s=10.0)
        store.open()
        store.start(copy_in)
        frames = store.reserve_frames(slots, wait=False)
    """

    def __init__(self, peers: Sequence[Peer], counters: Counters, deadline_s: float):
        """
        Args:
            peers: The nodes, in the order of the option, and this rank of the engine.
            counters: Of this rank.
            deadline_s: For which a load or a save may stand still.
        """
        self._counters = counters
        self._ended: queue.SimpleQueue[LoadOutcome | None] = queue.SimpleQueue()
        share, pooled = ConnectedShare(counters, len(peers)), len(peers) > 1
        self.stores = [
            NodeResidency(
                peer,
                counters,
                deadline_s,
                self._part_came,
                functools.partial(share.set, node),
                pooled=pooled,
            )
            for node, peer in enumerate(peers)
        ]
        self._nowhere = _Nowhere()
        self.save_frames = PooledFrames([*(s.save_frames for s in self.stores), self._nowhere])
        self.load_frames = PooledFrames([s.load_frames for s in self.stores])
        self._copy_in: CopyIn | None = None
        self._wanted: dict[int, int] = {}
        """HBM block by handle. Taken out under ``_copying`` only."""
        self._copying, self._lock = threading.Lock(), threading.Lock()
        self._parts: dict[str, tuple[_Part, int, float]] = {}
        """Parts that nodes were asked for, by name, the node, and when, of the monotonic clock."""
        self._number = 0
        self._next_handle = 1
        self._times = [LoadTimes() for _ in peers]
        self._budget = HedgeBudget()
        self._outcomes: queue.SimpleQueue[LoadOutcome] = queue.SimpleQueue()
        self._under_way = 0
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ssdkv-pool", daemon=True)

    # ---- sessions ----

    def open(self, timeout: float = START_S) -> Welcome:
        """Open the first sessions. What a node says of its store.

        ``timeout``: seconds for which a node that does not answer is waited for.

        Raises:
            StoreError: no node answers, or one refuses; the text names the way out.
        """
        welcome = start_links([store.link for store in self.stores], timeout)
        for store in self.stores:
            store.adopt()
        self._nowhere.open(welcome.frame_bytes)
        return welcome

    def describe(self) -> list[str]:
        """Lines of the start-up summary."""
        return [line for store in self.stores for line in store.describe()]

    def tell_weights(self, digest: bytes) -> None:
        """Tell the nodes, and each session from now on, what weights this rank holds.

        Raises:
            StoreError: all nodes are gone.
        """
        failed: list[StoreError] = []
        for store in self.stores:
            try:
                store.tell_weights(digest)
            except StoreError as error:
                failed.append(error)
        if len(failed) == len(self.stores):
            raise failed[0]

    def start(self, copy_in: CopyIn) -> None:
        """Begin to receive, once. ``copy_in`` copies frames into HBM blocks, on one thread at a
        time."""
        self._copy_in = copy_in
        self._thread.start()
        for node, store in enumerate(self.stores):
            store.start(functools.partial(self._arrived, node))

    def pin_with(self, pin: PinMemory) -> None:
        """Register the memory of these sessions and of each later one by ``pin``.

        Raises:
            StoreError: of ``pin``.
        """
        for store in self.stores:
            store.pin_with(pin)
        if self._nowhere.region is not None:
            region = self._nowhere.region
            pin(region.frames.start, region.nbytes, writable=True)

    def leave(self) -> None:
        """End all sessions."""
        for store in self.stores:
            store.leave()

    @property
    def open_frames(self) -> int:
        """Frames of DRAM that the nodes have for this rank's store."""
        return sum(store.open_frames for store in self.stores)

    # ---- write path ----

    def _by_node(self, slots: I64) -> list[tuple[NodeResidency, NDArray[np.bool_]]]:
        """Nodes that have some of these slots, and which, [n]."""
        count = len(self.stores)
        found = [(store, slots % count == node) for node, store in enumerate(self.stores)]
        return [(store, here) for store, here in found if here.any()]

    def _own(self, slots: I64) -> I64:
        """Numbers of slots on their nodes."""
        return slots // len(self.stores)

    def reserve_frames(self, slots: I64, *, wait: bool, spare_contexts: bool = False) -> I32:
        """Places for the first of these slots, [k], k <= n, for the caller to fill.

        Those of a node that is gone are copied nowhere, and told as failed when they are flushed.
        Where all nodes are gone there are none.
        """
        count, frames = len(self.stores), np.full(len(slots), -1, dtype=np.int32)
        if not any(store.usable for store in self.stores):
            return frames[:0]
        for node, store in enumerate(self.stores):
            here = np.flatnonzero(slots % count == node)
            if not len(here):
                continue
            if not store.usable:
                frames[here] = self.save_frames.numbers(count, np.zeros(len(here), dtype=np.int32))
                continue
            places = store.reserve_frames(self._own(slots[here]))
            frames[here[: len(places)]] = self.save_frames.numbers(node, places)
        lacking = np.flatnonzero(frames < 0)
        if len(lacking):
            self.abandon(slots[lacking[0] :])
            frames = frames[: lacking[0]]
        return frames

    def flush(self, slots: I64, epochs: I64, keys: Sequence[bytes], *, bound: bool = True) -> None:
        """Have the nodes save blocks whose places are filled. Never waits for a device."""
        for store, here in self._by_node(slots):
            chosen = [key for key, wanted in zip(keys, here.tolist(), strict=True) if wanted]
            store.flush(self._own(slots[here]), epochs[here], chosen, bound=bound)

    def abandon(self, slots: I64) -> None:
        """Forget what is held for these slots, and have nodes forget what they saved of them."""
        for store, here in self._by_node(slots):
            store.abandon(self._own(slots[here]))

    def take_write_results(self) -> tuple[Pairs, Pairs]:
        """(slot, epoch) pairs written and failed since the last call."""
        written: Pairs = []
        failed: Pairs = []
        for node, store in enumerate(self.stores):
            done, not_done = store.take_write_results()
            written += self._named(node, done)
            failed += self._named(node, not_done)
        return written, failed

    def _named(self, node: int, pairs: Iterable[tuple[int, int]]) -> Pairs:
        """Pairs of one node, with numbers of all."""
        return [(slot * len(self.stores) + node, epoch) for slot, epoch in pairs]

    # ---- load path ----

    def load(self, job: LoadJob, *, whole: bool = False) -> None:
        """Ask for a hit. Never waits for a device."""
        self._under_way += 1
        handles = [0] * len(job.slots)
        for at, block in enumerate(job.block_ids.tolist(), job.first_in_hbm):
            if block:
                handles[at] = self._next_handle
                self._wanted[self._next_handle] = block
                self._next_handle += 1
        load = _Load(job, LoadOutcome(job.request_id), np.array(handles, dtype=np.int64))
        with self._lock:
            parts = self._cut(load)
            load.left = len(parts)
            for part in parts:
                self._budget.earn()
                self._ask(part, part.node, job.slots, job.epochs)
            if not parts:
                self._finish(load, complete=True)
        if any(part.other >= 0 for part in parts):
            self._ended.put(None)  # the thread has something to be late for

    def _cut(self, load: _Load) -> list[_Part]:
        """Parts of a load by the nodes that have them."""
        job, count = load.job, len(self.stores)
        if count == 1 and len(job.slots):
            return [_Part(load, np.arange(len(job.slots)), 0, -1)]
        others = job.others if len(job.others) else np.full(len(job.slots), -1, dtype=np.int64)
        node, other = job.slots % count, np.where(others >= 0, others % count, -1)
        pairs = node * (count + 1) + other + 1
        return [
            _Part(load, np.flatnonzero(pairs == pair), pair // (count + 1), pair % (count + 1) - 1)
            for pair in np.unique(pairs).tolist()
        ]

    def _ask(self, part: _Part, node: int, slots: I64, epochs: I64) -> None:
        """Ask a node for a part. ``slots``, ``epochs``: of the whole load. Lock held."""
        job, which = part.load.job, part.which
        self._number += 1
        name = f"{job.request_id} part {self._number}"
        self._parts[name] = part, node, time.monotonic()
        part.under_way += 1
        chain = len(job.slots) if job.chain is None else job.chain
        keys, handles = job.keys, part.load.handles
        if len(which) < len(slots):
            slots, epochs, handles = slots[which], epochs[which], handles[which]
            keys = tuple(keys[i] for i in which.tolist())
            chain = int(np.count_nonzero(which < chain))
        self.stores[node].load(
            LoadJob(
                name,
                self._own(slots),
                epochs,
                keys,
                handles,
                chain,
                job.behind if which[0] == 0 else 0,
                job.compared and bool(which[-1] == len(job.slots) - 1),
            )
        )

    def _ask_other(self, part: _Part) -> None:
        """Ask the other node for a part. Lock held."""
        part.other_asked = True
        job = part.load.job
        self._ask(part, part.other, job.others, job.other_epochs)

    def _arrived(self, node: int, frames: I32, handles: I64) -> None:
        """Copy those blocks that have not come yet. In the thread of a session."""
        known = handles.tolist()
        with self._copying:
            blocks = [self._wanted.get(handle, -1) for handle in known]
            if -1 in blocks:  # they have come from another node, or the load is over
                new = np.array(blocks) >= 0
                frames, known = frames[new], handles[new].tolist()
                blocks = [block for block in blocks if block >= 0]
            if not blocks or self._copy_in is None:
                return
            self._copy_in(self.load_frames.numbers(node, frames), np.array(blocks))
            if not self.stores[node].lends:
                return  # it may have been other blocks' bytes: another node brings them
            for handle in known:
                del self._wanted[handle]

    # ---- the thread ----

    def _part_came(self, outcome: LoadOutcome) -> None:
        """A node has answered. The thread of its session passes what is complete on by itself, so
        that nobody waits for one more thread; it never waits for who sends under the lock."""
        if outcome.complete and self._lock.acquire(blocking=False):
            try:
                self._part_ended(outcome)
            finally:
                self._lock.release()
        else:
            self._ended.put(outcome)

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                self._wait()
            except Exception:  # whatever it is, requests must not wait for ever
                self._counters.add("thread_errors", 1, thread="node")
                logger.exception("ssdkv: loading from nodes failed")
                with self._lock:
                    for load in {part.load for part, _, _ in self._parts.values()}:
                        self._finish(load, complete=False)

    def _wait(self) -> None:
        """Wait for what comes first: the end of a part, or that one is late."""
        outcome = None
        with self._lock:
            pause_s = self._hedge_late()
        try:
            outcome = self._ended.get(timeout=pause_s)
        except queue.Empty:
            return
        if outcome is not None:
            with self._lock:
                self._part_ended(outcome)

    def _hedge_late(self) -> float | None:
        """Ask others for what is late; seconds until something else is. Lock held."""
        soonest: float | None = None
        now = time.monotonic()
        for part, _, asked in list(self._parts.values()):
            if part.other < 0 or part.other_asked or part.done or part.load.over:
                continue
            late_s = self._times[part.other].late(len(part.which))
            if late_s is None or not self.stores[part.other].usable:
                continue
            left_s = asked + late_s - now
            if left_s > 0:
                soonest = left_s if soonest is None else min(soonest, left_s)
            elif self._budget.spend():
                part.hedged = True
                self._counters.add("pool_loads", 1, kind="hedged")
                self._ask_other(part)
        return soonest

    def _part_ended(self, outcome: LoadOutcome) -> None:
        """A node has answered. Lock held."""
        part, node, asked = self._parts.pop(outcome.request_id)
        part.under_way -= 1
        load = part.load
        if outcome.complete:
            self._times[node].record(time.monotonic() - asked, len(part.which))
        load.outcome.bad += self._named(node, outcome.bad)
        if part.done or load.over:
            return
        if outcome.complete:
            part.done = True
            load.left -= 1
            self._count(part, node)
            _merge(load, outcome)
            if not load.left:
                self._finish(load, complete=True)
        elif part.other >= 0 and not part.other_asked:
            self._counters.add("pool_loads", 1, kind="failed_over")
            self._ask_other(part)
        elif not part.under_way:
            self._finish(load, complete=False)

    def _count(self, part: _Part, node: int) -> None:
        if part.hedged and node == part.other:
            self._counters.add("pool_loads", 1, kind="overtaken")

    def _finish(self, load: _Load, *, complete: bool) -> None:
        """A load is over: nothing of it is copied any more. Lock held."""
        if load.over:
            return
        load.over = True
        with self._copying:
            for handle in load.handles.tolist():
                self._wanted.pop(handle, None)  # 0 stands for no block, and is none's
        outcome = load.outcome
        if not complete:
            outcome = LoadOutcome(load.job.request_id, False, load.outcome.bad)
        outcome.ended = time.monotonic()
        self._outcomes.put(outcome)

    def take_load_outcomes(self, patience_s: float = 0.0) -> list[LoadOutcome]:
        """Loads that ended since the last call; waits so long for the first one, if any is under
        way. A node that lets one stand still for the deadline counts as gone. Where nothing is
        under way, the step has nothing to do, and its core is free for so long."""
        for store in self.stores:
            store.end_if_still()
        if patience_s > 0 and not self._under_way:
            time.sleep(patience_s)  # who computes for requests that wait may need the core
        found: list[LoadOutcome] = []
        while len(found) < self._under_way:
            try:
                timeout = 0.0 if found else patience_s
                found.append(self._outcomes.get(timeout > 0, timeout))
            except queue.Empty:
                break
        self._under_way -= len(found)
        return found

    # ---- end ----

    def close(self, *, read_elsewhere: bool = False) -> None:
        """Wait until the nodes have what was flushed, and end the sessions."""
        for store in self.stores:
            store.close()
        self._stopping.set()
        self._ended.put(None)
        if self._thread.is_alive():
            self._thread.join(STOP_S)


def _merge(load: _Load, outcome: LoadOutcome) -> None:
    """Add the outcome of a part; its time goes by beside that of the others."""
    total = load.outcome
    for name in ("queued_s", "dram_s", "ssd_s"):
        setattr(total, name, max(getattr(total, name), getattr(outcome, name)))
    total.tokens_from_dram += outcome.tokens_from_dram
    total.tokens_from_ssd += outcome.tokens_from_ssd
    total.hit_tokens_from_dram += outcome.hit_tokens_from_dram
    total.hit_tokens_from_ssd += outcome.hit_tokens_from_ssd
    if outcome.copy is not None:
        job = load.job
        total.copy = int(job.slots[-1]), int(job.epochs[-1]), outcome.copy[2]
