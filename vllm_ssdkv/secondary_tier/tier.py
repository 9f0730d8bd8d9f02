"""SSDKVTier: the store as a secondary tier of vLLM's own offloading."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Final, Protocol

import numpy as np
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingEvent,
    OffloadingMetricMetadata,
    RequestOffloadingContext,
    ScheduleEndContext,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from vllm_ssdkv.base.log import show_log
from vllm_ssdkv.base.metrics import Counters
from vllm_ssdkv.config.request import NAME
from vllm_ssdkv.config.secondary_tier import tier_options
from vllm_ssdkv.connector.scheduler.kv_hints import RETAIN
from vllm_ssdkv.secondary_tier.chunk_keys import ChunkKeys
from vllm_ssdkv.secondary_tier.identity import request_in_sight
from vllm_ssdkv.secondary_tier.own_chunks import OwnChunks
from vllm_ssdkv.secondary_tier.tier_events import MEDIUM
from vllm_ssdkv.secondary_tier.tier_metrics import TierMetrics, definitions
from vllm_ssdkv.secondary_tier.tier_store import ChunkSpace, chunk_space, open_tier_store

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
        OffloadingConnectorStats,
    )
    from vllm.v1.kv_offload.base import OffloadingSpec, OffloadKey, ReqContext
    from vllm.v1.kv_offload.tiering.backpressure import BackpressureDetector
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)

_LOOK_S: Final = 0.001
"""Time between two looks for the end of a job, where somebody waits for it."""

_DEADLINES: Final = 3
"""Deadlines of I/O (``io.deadline``) after which a job that is waited for is late."""

_ANSWERS: Final = {True: LookupResult.HIT, False: LookupResult.MISS, None: LookupResult.RETRY}


class Chunks(Protocol):
    """A tier's chunks, in a store of this process or in nodes. vLLM's thread calls the methods,
    and none but :meth:`close` waits for a drive or a node.

    Attributes:
        keys: Names chunks.
        counters: Metrics.
        deadline_s: For which a transfer may stand still.
    """

    keys: ChunkKeys
    counters: Counters
    deadline_s: float

    def found(self, key: bytes, name: OffloadKey, context: ReqContext) -> bool | None:
        """Check whether a chunk is stored, by our key and vLLM's; None: that is not known yet."""

    def touch(self, keys: Sequence[bytes]) -> None:
        """Mark chunks, head first, as just used."""

    def store(self, job: TransferJob) -> None:
        """Store chunks of vLLM's pool, in the background."""

    def load(self, job: TransferJob) -> None:
        """Load chunks into vLLM's pool, in the background."""

    @property
    def under_way(self) -> bool:
        """Check whether any job is under way."""

    @property
    def pending(self) -> bool:
        """Check whether any job is under way, or has ended unnoticed."""

    def take_done(self) -> list[JobResult]:
        """Jobs that ended since the last call."""

    def poll(self) -> None:
        """Go on with jobs."""

    def step_ended(self) -> None:
        """A step of vLLM's scheduler has ended."""

    def request_ended(self, request_id: str) -> None:
        """A request has ended."""

    def renewed(self) -> None:
        """Nothing that was stored so far is found any more."""

    def take_events(self) -> list[OffloadingEvent]:
        """KV events since the last call."""

    def update_gauges(self) -> None:
        """Refresh gauges."""

    def close(self) -> None:
        """Close what is open."""


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
        told = offloading_spec.kv_events_config.enable_kv_cache_events
        if tier.enable_kv_events and not told:
            logger.warning(
                "option enable_kv_events has no effect unless vLLM publishes KV events "
                "(--kv-events-config)"
            )
        shape = (-1, self.block_size_bytes)
        rows = np.frombuffer(primary_kv_view, dtype=np.uint8).reshape(shape)
        space = chunk_space(tier, config, offloading_spec, rows)
        self.chunks = self._opened(space, tells_events=tier.enable_kv_events and told)
        self._open = True
        self._told_options = False
        self._metrics = TierMetrics(self.chunks.counters, self.chunks.update_gauges)

    def _opened(self, space: ChunkSpace, *, tells_events: bool) -> Chunks:
        """The chunks, in nodes or in a store of this process."""
        if space.config.nodes:
            from vllm_ssdkv.secondary_tier.node_chunks import open_node_chunks

            return open_node_chunks(space)
        return OwnChunks(open_tier_store(space), self.locality, tells_events=tells_events)

    # ---- requests ----

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """A request has arrived."""
        request = request_in_sight(req_context.req_id)
        self.chunks.keys.arrived(req_context, request)
        if request is not None:
            self._refuse_options(request)
        return RequestOffloadingContext()

    def _refuse_options(self, request: Request) -> None:
        """Say that the options of a request change nothing; vLLM takes no answer from a tier."""
        params, hints = request.kv_transfer_params, request.kv_hints
        asked = isinstance(params, Mapping) and NAME in params
        if not asked and (hints is None or all(a.action_type != RETAIN for a in hints.actions)):
            return
        self.chunks.counters.add("sparse_requests_refused", 1)
        if not self._told_options:
            self._told_options = True
            logger.warning(
                "ssdkv: a tier retains no blocks and serves no options of requests: leave %s out "
                "of kv_transfer_params, and %s out of kv_hints, or use SSDKVConnector",
                NAME,
                RETAIN,
            )

    def on_request_finished(self, req_context: ReqContext) -> None:
        """A request has ended."""
        self.chunks.request_ended(req_context.req_id)

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """Check whether a chunk is stored."""
        named = self.chunks.keys.of(key, req_context)
        return _ANSWERS[False if named is None else self.chunks.found(named, key, req_context)]

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """Mark chunks, head first, as just used."""
        named = [n for key in keys if (n := self.chunks.keys.of(key, req_context)) is not None]
        if named:
            self.chunks.touch(named)

    # ---- jobs ----

    def submit_store(self, job_metadata: TransferJob) -> None:
        """Store chunks of vLLM's pool, in the background."""
        self.chunks.store(job_metadata)

    def submit_load(self, job_metadata: TransferJob) -> None:
        """Load chunks into vLLM's pool, in the background."""
        self.chunks.load(job_metadata)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """Jobs that ended since the last call."""
        self.chunks.poll()
        return self.chunks.take_done()

    def has_pending_work(self) -> bool:
        """Keep stepping while jobs are under way, so that what they wrote gets journalled."""
        return self.chunks.pending

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        """A step has ended."""
        self.chunks.step_ended()

    def drain_jobs(self) -> None:
        """Wait until every job has ended. vLLM asks for this when its cache is reset: from then on
        the weights may be others, and the engine gets another identity.

        There is no limit: a job that has not ended may still write into vLLM's pool, or read what
        vLLM puts there next."""
        while not self._drained():
            logger.warning("ssdkv: jobs of the tier do not end, and a reset waits for them")
        if self._forgets:
            self.chunks.keys.renew()
            self.chunks.renewed()
            logger.warning(
                "ssdkv: vLLM has reset its cache: nothing that was stored before is found any "
                "more, and a later start does not find what is stored from now on (on_reset)"
            )

    def _drained(self) -> bool:
        """Wait until every job has ended, for a few deadlines; whether all have."""
        end = time.monotonic() + _DEADLINES * self.chunks.deadline_s
        while self.chunks.under_way:
            if time.monotonic() > end:
                return False
            self.chunks.poll()
            time.sleep(_LOOK_S)
        return True

    # ---- both ----

    def take_events(self) -> Iterable[OffloadingEvent]:
        """KV events since the last call."""
        return self.chunks.take_events()

    @classmethod
    def build_metric_definitions(
        cls, extra_config: dict[str, Any]
    ) -> dict[str, OffloadingMetricMetadata]:
        """Our metrics on vLLM's ``/metrics``. Wrong options end the start here, in vLLM's first
        process."""
        tier_options(extra_config)
        return definitions()

    def get_stats(self) -> OffloadingConnectorStats | None:
        """Counters and gauges of the store, when it is time to tell."""
        return self._metrics.take(running=self.has_pending_work())

    def shutdown(self) -> None:
        """End of the engine: what is under way is written, the journal is made durable."""
        if not self._open:
            return
        try:
            if not self._drained():
                logger.warning("ssdkv: jobs of the tier do not end: what they store is lost")
        finally:
            self._open = False  # vLLM unmaps its pool next
            self.chunks.close()
