"""SSDKVTier: the store as a secondary tier of vLLM's own offloading."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Any, ClassVar, Final

import numpy as np
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingEvent,
    OffloadingMetricMetadata,
    RequestOffloadingContext,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from vllm_ssdkv.base.log import show_log
from vllm_ssdkv.config.secondary_tier import tier_options
from vllm_ssdkv.connector.messages import RankReport
from vllm_ssdkv.secondary_tier.identity import request_in_sight
from vllm_ssdkv.secondary_tier.load_jobs import LoadJobs
from vllm_ssdkv.secondary_tier.store_jobs import StoreJobs
from vllm_ssdkv.secondary_tier.tier_events import MEDIUM, TierEvents
from vllm_ssdkv.secondary_tier.tier_metrics import TierMetrics, definitions
from vllm_ssdkv.secondary_tier.tier_store import TierStore, open_tier_store
from vllm_ssdkv.store.own_store import owned

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
        OffloadingConnectorStats,
    )
    from vllm.v1.kv_offload.base import OffloadingSpec, OffloadKey, ReqContext
    from vllm.v1.kv_offload.tiering.backpressure import BackpressureDetector

logger = logging.getLogger(__name__)

_LOOK_S: Final = 0.001
"""Time between two looks for the end of a job, where somebody waits for it."""

_DEADLINES: Final = 3
"""Deadlines of I/O (``io.deadline``) after which a job that is waited for is late."""

_OF_VLLM: Final = frozenset({"type", "module_path", "backpressure"})
"""Fields of an entry of ``secondary_tiers`` that vLLM takes out itself."""


class SSDKVTier(SecondaryTierManager):
    """KV on SSDs behind vLLM's OffloadingConnector. Options: ``docs/tier.md``.

    All of it is in the scheduler's process. vLLM's thread calls the methods; bytes move in other
    threads.
    """

    medium: ClassVar[Medium] = MEDIUM

    def __init__(
        self,
        offloading_spec: OffloadingSpec,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: BackpressureDetector | None = None,
        **options: Any,  # noqa: ANN401 - as the user gave them
    ):
        """Open the store.

        Raises:
            SSDKVError: a bad option, an unsupported setting, an unusable directory; the text names
                the way out.
        """
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        show_log()
        tier, config = tier_options(options)
        self.locality = None if tier.locality is None else Locality(tier.locality)
        self._forgets = tier.weights_id is None and tier.on_reset == "new_identity"
        shape = (-1, self.block_size_bytes)
        rows = np.frombuffer(primary_kv_view, dtype=np.uint8).reshape(shape)
        self._parts: TierStore = open_tier_store(tier, config, offloading_spec, rows)
        self._rows: NDArray[np.uint8] | None = rows
        self._own = owned(self._parts.store.own)
        told = offloading_spec.kv_events_config.enable_kv_cache_events
        if tier.enable_kv_events and not told:
            logger.warning(
                "option enable_kv_events has no effect unless vLLM publishes KV events "
                "(--kv-events-config)"
            )
        wanted = tier.enable_kv_events and told
        self._events = TierEvents(self._own.index, self.locality, wanted=wanted)
        self._stores = StoreJobs(self._parts, self._events)
        self._loads = LoadJobs(self._parts, self._events)
        self._metrics = TierMetrics(self._parts.store, self._parts.access)

    # ---- requests ----

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """A request has arrived."""
        self._parts.keys.arrived(req_context, request_in_sight(req_context.req_id))
        return RequestOffloadingContext()

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """Check whether a chunk is stored; touches memory only."""
        return LookupResult.MISS if self._find(key, req_context) is None else LookupResult.HIT

    def _find(self, key: OffloadKey, context: ReqContext) -> int | None:
        if self._parts.store.suspension:
            return None
        named = self._parts.keys.of(key, context)
        return None if named is None else self._own.index.find(named)

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """Mark chunks, head first, as just used."""
        found = [slot for key in keys if (slot := self._find(key, req_context)) is not None]
        if found:
            self._own.index.touch(np.array(found, dtype=np.int64))

    # ---- jobs ----

    def submit_store(self, job_metadata: TransferJob) -> None:
        """Store chunks of vLLM's pool, in the background."""
        self._stores.begin(job_metadata)

    def submit_load(self, job_metadata: TransferJob) -> None:
        """Load chunks into vLLM's pool, in the background."""
        self._loads.begin(job_metadata)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """Jobs that ended since the last call."""
        self._poll()
        return [*self._stores.take_done(), *self._loads.take_done()]

    def has_pending_work(self) -> bool:
        """Keep stepping while jobs are under way, so that what they wrote gets journalled."""
        return bool(self._stores or self._loads)

    def _poll(self) -> None:
        self._step()
        self._stores.poll()
        self._loads.poll()

    def _step(self) -> None:
        """Placement of slots, and what drives and scrub have told."""
        own, access, policy = self._own, self._parts.access, self._parts.store.write_policy
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

    def drain_jobs(self) -> None:
        """Wait until every job has ended. vLLM asks for this when its cache is reset: from then on
        the weights may be others, and the engine gets another identity.

        There is no limit: a job that has not ended may still write into vLLM's pool, or read what
        vLLM puts there next."""
        while not self._drained():
            logger.warning("ssdkv: jobs of the tier do not end, and a reset waits for them")
        if self._forgets:
            self._parts.keys.renew()
            self._events.renewed()
            logger.warning(
                "ssdkv: vLLM has reset its cache: nothing that was stored before is found any "
                "more, and a later start does not find what is stored from now on (on_reset)"
            )

    def _drained(self) -> bool:
        """Wait until every job has ended, for a few deadlines; whether all have."""
        end = time.monotonic() + _DEADLINES * self._parts.access.opened.files.deadline_s
        while self._stores.under_way or self._loads.under_way:
            if time.monotonic() > end:
                return False
            self._poll()
            time.sleep(_LOOK_S)
        return True

    # ---- both ----

    def take_events(self) -> Iterable[OffloadingEvent]:
        """KV events since the last call."""
        return self._events.take()

    @classmethod
    def build_metric_definitions(
        cls, extra_config: dict[str, Any]
    ) -> dict[str, OffloadingMetricMetadata]:
        """Our metrics on vLLM's ``/metrics``. Wrong options end the start here, in vLLM's first
        process."""
        tier_options({k: v for k, v in extra_config.items() if k not in _OF_VLLM})
        return definitions()

    def get_stats(self) -> OffloadingConnectorStats | None:
        """Counters and gauges of the store, when it is time to tell."""
        return self._metrics.take(running=self.has_pending_work())

    def shutdown(self) -> None:
        """End of the engine: what is under way is written, the journal is made durable."""
        if self._rows is None:
            return
        try:
            if not self._drained():
                logger.warning("ssdkv: jobs of the tier do not end: what they store is lost")
        finally:
            self._rows = None  # vLLM unmaps its pool next
            self._parts.close()
