"""Jobs of vLLM's that load chunks, from their pins until each chunk is known to be right or not."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from vllm.v1.kv_offload.tiering.base import JobResult, TransferJob

from vllm_ssdkv.base.metrics import Counters
from vllm_ssdkv.secondary_tier.tier_events import TierEvents
from vllm_ssdkv.secondary_tier.tier_store import TierStore
from vllm_ssdkv.store.own_store import owned
from vllm_ssdkv.store.read.load_job import LoadJob, LoadOutcome
from vllm_ssdkv.store.tier import Pairs

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import OffloadKey


@dataclass(frozen=True, slots=True)
class _Chunk:
    """A chunk to load: vLLM's key and ours, its slot, and the pool's number of its place."""

    name: OffloadKey
    key: bytes
    slot: int
    epoch: int
    place: int


@dataclass(slots=True)
class _Job:
    """One of vLLM's jobs."""

    number: int
    wanted: int
    """Chunks that vLLM has asked for."""
    pinned: list[int]
    loads: dict[str, list[_Chunk]] = field(default_factory=dict)
    """Loads of the store that are under way."""
    good: list[OffloadKey] = field(default_factory=list)
    begun: float = field(default_factory=time.monotonic)


def count_load(counters: Counters, outcome: LoadOutcome) -> None:
    """Count a load that has ended."""
    for tier in ("dram", "ssd"):
        counters.add("hit_tokens", getattr(outcome, f"hit_tokens_from_{tier}"), tier=tier)
        counters.add("load_seconds", getattr(outcome, f"{tier}_s"), tier=tier)
    if not outcome.complete:
        counters.add("load_failures")


class LoadJobs:
    """Loads into vLLM's pool. Used by the scheduler's thread.

    A job is one load of the store. If that fails, the chunks that are not to blame are loaded once
    more, each by itself, so that vLLM learns of each chunk whether it has it. Where no chunk is to
    blame, none of them is found for a while: vLLM would ask for them again at once.
    """

    def __init__(self, parts: TierStore, events: TierEvents):
        self._parts, self._events = parts, events
        self._own, self._counters = owned(parts.store.own), parts.store.counters
        self._index = self._own.index
        self._jobs: dict[str, _Job] = {}
        """Job of each load of the store, by the load's name."""
        self._done: list[JobResult] = []
        self._names = 0

    def __bool__(self) -> bool:
        """Check whether any job is under way, or has ended unnoticed."""
        return self.under_way or bool(self._done)

    @property
    def under_way(self) -> bool:
        """Check whether any job is under way."""
        return bool(self._jobs)

    def begin(self, job: TransferJob) -> None:
        """Load what is there of a job's chunks."""
        chunks: list[_Chunk] = []
        for name, place in zip(job.keys, job.chunk_ids, strict=True):
            key = self._parts.keys.of(name, job.req_context)
            slot = None if key is None else self._index.find(key)
            if key is not None and slot is not None:
                chunks.append(_Chunk(name, key, slot, self._index.epoch(slot), int(place)))
        state = _Job(job.job_id, len(job.keys), [chunk.slot for chunk in chunks])
        self._index.pin(np.array(state.pinned, dtype=np.int64))
        if chunks:
            self._load(state, chunks)
        else:
            self._end(state)

    def _load(self, state: _Job, chunks: list[_Chunk]) -> None:
        name = f"job {state.number} load {self._names}"
        self._names += 1
        state.loads[name], self._jobs[name] = chunks, state
        self._parts.bytes.load(
            LoadJob(
                name,
                np.array([chunk.slot for chunk in chunks], dtype=np.int64),
                np.array([chunk.epoch for chunk in chunks], dtype=np.int64),
                tuple(chunk.key for chunk in chunks),
                np.array([chunk.place + 1 for chunk in chunks], dtype=np.int64),
            )
        )

    def poll(self) -> None:
        """Take in loads that have ended."""
        for outcome in self._parts.bytes.take_load_outcomes():
            state = self._jobs.pop(outcome.request_id)
            chunks = state.loads.pop(outcome.request_id)
            count_load(self._counters, outcome)
            self.drop(outcome.bad, "read_error")
            failed = {slot for slot, _ in (*outcome.bad, *outcome.unread)}
            if not (outcome.complete or failed):  # for lack of memory, or by an error of ours
                outcome.unread += [(chunk.slot, chunk.epoch) for chunk in chunks]
                failed = {chunk.slot for chunk in chunks}
            if outcome.unread:
                self._own.unread.failed(outcome.unread)
                self._events.look()
            if outcome.complete:
                state.good += [chunk.name for chunk in chunks]
            elif len(chunks) > 1:
                for chunk in chunks:
                    if chunk.slot not in failed:
                        self._load(state, [chunk])
            if not state.loads:
                self._end(state)

    def drop(self, pairs: Pairs, cause: str) -> None:
        """Never find these again: slots with their epochs, -1 for the present one."""
        for slot, epoch in pairs:
            now = self._index.epoch(slot)
            if epoch in (-1, now) and self._index.holds(slot, now):
                self._index.drop(slot)
                self._counters.add("slots_dropped", 1, cause=cause)
                self._parts.forget_free(np.array([slot], dtype=np.int64))
        if pairs:
            self._events.look()

    def _end(self, state: _Job) -> None:
        slots = np.array(state.pinned, dtype=np.int64)
        self._index.unpin(slots)
        self._parts.forget_free(slots)
        whole = len(state.good) == state.wanted
        self._done.append(
            JobResult(
                state.number,
                whole,
                None if whole else tuple(state.good),
                time.monotonic() - state.begun,
                len(state.good) * self._parts.chunk_bytes,
            )
        )

    def take_done(self) -> list[JobResult]:
        """Jobs that have ended since the last call."""
        done, self._done = self._done, []
        return done
