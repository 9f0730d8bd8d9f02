"""Jobs of vLLM's that store chunks, from their slots until all of them are written."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from vllm.v1.kv_offload.tiering.base import JobResult, TransferJob

from vllm_ssdkv.secondary_tier.chunk_writer import ChunkWrite
from vllm_ssdkv.secondary_tier.tier_events import TierEvents
from vllm_ssdkv.secondary_tier.tier_store import TierStore
from vllm_ssdkv.store.devices.health import WriteState
from vllm_ssdkv.store.own_store import owned
from vllm_ssdkv.store.tier import Pairs

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import OffloadKey


@dataclass(slots=True)
class _Job:
    """Chunks of one job, head first."""

    number: int
    slots: list[int]
    lasting: bool
    """True if a later start is to find them."""
    left: int
    written: int = 0
    begun: float = field(default_factory=time.monotonic)


@dataclass(frozen=True, slots=True)
class _Write:
    """A chunk on its way."""

    job: _Job
    epoch: int
    key: bytes
    name: OffloadKey


class StoreJobs:
    """Slots of chunks that vLLM wants stored. Used by the scheduler's thread.

    A chunk is findable when it is written, and not before: its bytes are read from the drives.
    """

    def __init__(self, parts: TierStore, events: TierEvents):
        self._parts, self._events = parts, events
        self._own, self._policy = owned(parts.store.own), parts.store.write_policy
        self._index = owned(self._own.alone)
        self._writes: dict[int, _Write] = {}
        """Chunks on their way, by slot."""
        self._keys: set[bytes] = set()
        """Their keys."""
        self._done: list[JobResult] = []

    def __bool__(self) -> bool:
        """Check whether any job is under way, or has ended unnoticed."""
        return self.under_way or bool(self._done)

    @property
    def under_way(self) -> bool:
        """Check whether any job is under way."""
        return bool(self._writes)

    def begin(self, job: TransferJob) -> None:
        """Store those chunks of a job that are not stored, and are worth a write."""
        wanted = self._wanted(job)
        count = min(len(wanted), self._index.available())
        if count < len(wanted):
            self._policy.skip(len(wanted) - count, "store_full")
        slots = self._index.allocate(count)
        self._events.reused(slots.tolist())
        state = _Job(job.job_id, slots.tolist(), self._parts.keys.lasting, count)
        epochs = self._index.epochs(slots).tolist()
        orders = []
        for slot, epoch, (name, key, chunk) in zip(state.slots, epochs, wanted, strict=False):
            self._writes[slot] = _Write(state, epoch, key, name)
            self._keys.add(key)
            orders.append(ChunkWrite(slot, epoch, key, chunk))
        if orders:
            self._parts.writer.write(orders)
        else:
            self._end(state)

    def _wanted(self, job: TransferJob) -> list[tuple[OffloadKey, bytes, int]]:
        """vLLM's key, ours and the pool's number of each chunk to be written."""
        if self._parts.store.suspension:
            return []
        keys = self._parts.keys
        found = {
            key: (name, key, int(chunk))
            for name, chunk in zip(job.keys, job.chunk_ids, strict=True)
            if (key := keys.of(name, job.req_context)) is not None
        }
        if len(found) < len(job.keys):
            self._policy.skip(len(job.keys) - len(found), "unknown")
        self._policy.record_access(list(found))
        admitted = dict(zip(found, self._policy.admitted(list(found)).tolist(), strict=True))
        wanted: list[tuple[OffloadKey, bytes, int]] = []
        stored = {key: slot for key in found if (slot := self._index.find(key)) is not None}
        for key, slot in stored.items():
            self._events.found(slot, found[key][0])
        touched = np.array(list(stored.values()), dtype=np.int64)
        self._index.touch(touched)  # they were computed again: in use
        for key, chunk in found.items():
            if key in self._keys or key in stored:
                continue
            if not admitted[key]:
                self._policy.skip(1, "admission")
            elif self._policy.used_up(len(self._writes) + len(wanted)):
                self._policy.skip(1, "budget")
            elif not self._takes_writes(len(wanted)):
                self._policy.skip(1, "writes_paused")
            else:
                wanted.append(chunk)
        return wanted

    def _takes_writes(self, wanted: int) -> bool:
        """Check whether the drives take one chunk more than these: while writes are on trial, only
        one at a time."""
        state = self._own.pauses.state
        if state is WriteState.TRIAL:
            return not (wanted or self._writes)
        return state is WriteState.OPEN

    def poll(self) -> None:
        """Take in what was written, and what failed."""
        durable, failed = self._parts.bytes.take_write_results()
        failed = [*failed, *self._parts.writer.take_failed()]
        lasting: list[int] = []
        ended: list[_Job] = []
        for slot, write in self._ended(durable, ended):
            write.job.written += 1
            if self._index.publish(slot, write.key):
                self._events.stored(slot, write.epoch, write.name)
                if write.job.lasting:
                    lasting.append(slot)
        if lasting:  # one write into the journal for all of them
            self._index.durable(np.array(lasting, dtype=np.int64))
        lost = len(self._ended(failed, ended))
        if lost:
            self._parts.store.counters.add("slots_dropped", lost, cause="write_error")
        for job in ended:
            self._end(job)

    def _ended(self, pairs: Pairs, jobs: list[_Job]) -> list[tuple[int, _Write]]:
        """Slots and chunks whose writes have ended; ``jobs`` gets those that have none left."""
        found = []
        for slot, epoch in pairs:
            write = self._writes.get(slot)
            if write is None or write.epoch != epoch:
                continue
            del self._writes[slot]
            self._keys.discard(write.key)
            write.job.left -= 1
            if not write.job.left:
                jobs.append(write.job)
            found.append((slot, write))
        return found

    def _end(self, job: _Job) -> None:
        slots = np.array(job.slots, dtype=np.int64)
        self._index.unpin(slots)
        self._parts.forget_free(slots)
        self._done.append(
            JobResult(
                job.number,
                job.written == len(job.slots),
                transfer_time=time.monotonic() - job.begun,
                transfer_bytes=job.written * self._parts.chunk_bytes,
            )
        )

    def take_done(self) -> list[JobResult]:
        """Jobs that have ended since the last call."""
        done, self._done = self._done, []
        return done
