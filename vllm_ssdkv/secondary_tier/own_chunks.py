"""Chunks in a store of this process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from vllm.v1.kv_offload.base import Locality, OffloadingEvent
from vllm.v1.kv_offload.tiering.base import JobResult, TransferJob

from vllm_ssdkv.connector.messages import RankReport
from vllm_ssdkv.secondary_tier.load_jobs import LoadJobs
from vllm_ssdkv.secondary_tier.store_jobs import StoreJobs
from vllm_ssdkv.secondary_tier.tier_events import TierEvents
from vllm_ssdkv.secondary_tier.tier_store import TierStore
from vllm_ssdkv.store.index_metrics import IndexMetrics
from vllm_ssdkv.store.own_store import owned

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import OffloadKey, ReqContext


class OwnChunks:
    """See :class:`~vllm_ssdkv.secondary_tier.tier.Chunks`. All state is of vLLM's thread; bytes
    move in other threads."""

    def __init__(self, parts: TierStore, locality: Locality | None, *, tells_events: bool):
        self.parts = parts
        self.own = owned(parts.store.own)
        self.counters, self.keys = parts.store.counters, parts.keys
        self.deadline_s = parts.access.opened.files.deadline_s
        self._index = IndexMetrics(self.own.index, self.own.rebalancer, self.counters)
        self._events = TierEvents(owned(self.own.alone), locality, wanted=tells_events)
        self._stores = StoreJobs(parts, self._events)
        self._loads = LoadJobs(parts, self._events)

    def found(self, key: bytes, name: OffloadKey, context: ReqContext) -> bool:
        """Check whether a chunk is stored; touches memory only."""
        slot = self._find(key)
        if slot is None:
            return False
        self._events.found(slot, name)
        return True

    def _find(self, key: bytes) -> int | None:
        return None if self.parts.store.suspension else self.own.index.find(key)

    def touch(self, keys: Sequence[bytes]) -> None:
        """Mark chunks, head first, as just used."""
        found = [slot for key in keys if (slot := self._find(key)) is not None]
        if found:
            owned(self.own.alone).touch(np.array(found, dtype=np.int64))

    def store(self, job: TransferJob) -> None:
        """Store chunks of vLLM's pool, in the background."""
        self._stores.begin(job)

    def load(self, job: TransferJob) -> None:
        """Load chunks into vLLM's pool, in the background."""
        self._loads.begin(job)

    @property
    def under_way(self) -> bool:
        """Check whether any job is under way."""
        return self._stores.under_way or self._loads.under_way

    @property
    def pending(self) -> bool:
        """Check whether any job is under way, or has ended unnoticed."""
        return bool(self._stores or self._loads)

    def take_done(self) -> list[JobResult]:
        """Jobs that ended since the last call."""
        return [*self._stores.take_done(), *self._loads.take_done()]

    def poll(self) -> None:
        """Go on with the placement of slots, and take in what drives, scrub and jobs have told."""
        own, access, policy = self.own, self.parts.access, self.parts.store.write_policy
        own.rebalancer.step()
        found_again = own.unread.step()
        segments = own.rebalancer.take_segments()
        if segments is not None:
            access.change_segments(segments)
        report = RankReport()
        access.report(report)
        for device in report.lost_devices:
            own.weights.mark_lost(device)
        for device in report.returned_devices:
            own.weights.mark_returned(device, 0)
        own.pauses.told(0, report.writing)
        own.weights.update(0, report.speeds)
        policy.wrote(report.written)
        told = [pair for pair in (*report.bad, *report.mended) if own.index.holds(*pair)]
        access.settle(None, told)
        self._loads.drop(report.bad, "read_error")
        if found_again or report.lost_devices or report.returned_devices:
            self._events.look()
        self._stores.poll()
        self._loads.poll()

    def step_ended(self) -> None:
        """Nothing: look-ups are answered at once."""

    def request_ended(self, request_id: str) -> None:
        """Nothing is kept of a request."""

    def renewed(self) -> None:
        """Nothing that was stored so far is found any more."""
        self._events.renewed()

    def take_events(self) -> list[OffloadingEvent]:
        """KV events since the last call."""
        return self._events.take()

    def update_gauges(self) -> None:
        """Refresh the gauges of index, devices and memory."""
        paths, weights = self.own.weights.paths, self.own.rebalancer.weights
        for path, weight in zip(paths, weights, strict=True):
            share = weight / sum(weights) if weight else 0.0
            self.counters.set("device_share", share, device=path)
        self.parts.store.write_policy.update_gauges(paths)
        self._index.update()
        self.parts.access.update_gauges()

    def close(self) -> None:
        """Write what is committed, and make journal and manifest durable."""
        self.parts.close()
