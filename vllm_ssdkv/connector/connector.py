"""SSDKVConnector: what vLLM talks to. Thin: one object per role, everything is delegated."""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING, Any, cast

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
    PromMetric,
    PromMetricT,
)

from vllm_ssdkv.base.log import show_log
from vllm_ssdkv.config.engine import SSDKVConfig
from vllm_ssdkv.connector import active_worker, startup
from vllm_ssdkv.connector.attention_backend import captures_steps
from vllm_ssdkv.connector.metadata import SSDKVMetadata, SSDKVWorkerMetadata
from vllm_ssdkv.connector.metrics.stats import Payload, SSDKVPromMetrics, SSDKVStats
from vllm_ssdkv.connector.scheduler.match import Hit, Miss, Wait
from vllm_ssdkv.connector.scheduler.scheduler import SSDKVScheduler
from vllm_ssdkv.connector.worker.worker import SSDKVWorker

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)


class SSDKVConnector(KVConnectorBase_V1, SupportsHMA):
    """KV on DRAM and SSDs. Options: ``kv_connector_extra_config``, see ``docs/options.md``."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ):
        """Open the store for this role.

        Raises:
            SSDKVError: a bad option, an unsupported model or setting, an unusable directory; the
                text names the way out.
        """
        super().__init__(vllm_config, role, kv_cache_config)
        show_log()
        self.config = SSDKVConfig.from_extra_config(
            vllm_config.kv_transfer_config.kv_connector_extra_config
        )
        self._scheduler: SSDKVScheduler | None = None
        self._worker: SSDKVWorker | None = None
        self._ended: SSDKVMetadata | None = None
        self._handled: BaseException | None = None
        if role is KVConnectorRole.SCHEDULER:
            startup.tell_what_has_no_effect(self.config)
            self._scheduler = startup.open_scheduler(self.config, vllm_config, kv_cache_config)
        else:
            self._worker = startup.open_worker(self.config, vllm_config, kv_cache_config)
            active_worker.set_worker(self._worker if self.config.mode == "page" else None)

    @property
    def scheduler(self) -> SSDKVScheduler:
        """The scheduler's half; only in the scheduler's process."""
        if self._scheduler is None:
            raise RuntimeError("this is the worker's connector")
        return self._scheduler

    @property
    def worker(self) -> SSDKVWorker:
        """The worker's half; only in a worker's process."""
        if self._worker is None:
            raise RuntimeError("this is the scheduler's connector")
        return self._worker

    @property
    def requires_kv_delivery(self) -> bool:
        """Output of a preempted request's steps in flight is dropped (page mode).

        A request is preempted because its context could not be read: what it sampled meanwhile
        is worthless.
        """
        return self.config.mode == "page"

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Full CUDA graphs cannot hold what some options of page mode do between layers. What
        depends on the model, too, ``PagedMetadataBuilder.get_cudagraph_support`` says later."""
        config = SSDKVConfig.from_extra_config(extra_config)
        if config.mode != "page":
            return False
        from vllm_ssdkv.connector.graphs import config_reason, tell

        if reason := config_reason(config):
            tell(reason)
        return bool(reason)

    # ---- scheduler ----

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        """vLLM's block manager exists now."""
        super().bind_kv_cache_manager(kv_cache_manager)
        self.scheduler.bind_hbm(kv_cache_manager)

    def on_new_request(self, request: Request) -> None:
        """A request has arrived; it may choose its selector."""
        self.scheduler.arrived(request)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Tokens the store holds beyond those in HBM, and whether they are loaded beside steps;
        None has vLLM ask again."""
        match self.scheduler.matched_tokens(request, num_computed_tokens):
            case Wait():
                return None, False
            case Miss():
                return 0, False
            case Hit(tokens):
                return tokens, True

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """HBM blocks are allocated; plan the load."""
        self.scheduler.allocated(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """The plan of the step just scheduled."""
        return self.scheduler.plan(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Results of a step."""
        meta = connector_output.kv_connector_worker_meta
        reports = meta.reports if isinstance(meta, SSDKVWorkerMetadata) else []
        self.scheduler.load_failed(connector_output.failed_recving or ())
        self.scheduler.reported(reports, connector_output.finished_recving or ())

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """The request ended; its blocks were copied already, so vLLM may free them."""
        self.scheduler.finished(request)
        return False, self.scheduler.asked.ended(request.request_id)

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """As :meth:`request_finished`."""
        self.scheduler.finished(request)
        return False, self.scheduler.asked.ended(request.request_id)

    def take_events(self) -> Sequence[KVCacheEvent]:
        """KV events of stored blocks, which vLLM publishes."""
        return () if self._scheduler is None else self._scheduler.take_events()

    def has_pending_push_work(self) -> bool:
        """Keep stepping while workers owe reports, so that what they wrote gets journalled."""
        return self._scheduler is not None and self._scheduler.unfinished()

    def reset_cache(self) -> bool | None:
        """Somebody resets the cache: whose weights are in memory is to be seen again."""
        return None if self._scheduler is None else self._scheduler.reset()

    # ---- worker ----

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """HBM is allocated, the model is loaded.

        Raises:
            UnsupportedError: the cache cannot be stored, or failed loads would end requests.
        """
        try:
            startup.check_failure_policy(self._vllm_config)
            self.worker.register(kv_caches)
            if self.worker.paged is not None and captures_steps(self._vllm_config):
                from vllm_ssdkv.connector.graphs import attach

                attach(self._vllm_config, self.worker, list(kv_caches.values()))
        except BaseException:
            self.shutdown()  # vLLM does not, of an engine that never was
            raise

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """A step begins; in page mode its reads begin now, before the forward pass."""
        super().bind_connector_metadata(connector_metadata)
        self._handled = sys.exc_info()[1]
        self.worker.begin(self._plan())

    def _plan(self) -> SSDKVMetadata:
        plan = self._get_connector_metadata()
        if not isinstance(plan, SSDKVMetadata):
            raise TypeError(f"vLLM handed {type(plan).__name__} to SSDKVConnector")
        return plan

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:  # noqa: ANN401
        """Nothing: loads are asynchronous and start in :meth:`wait_for_save`."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: what a layer needs is awaited by the attention backend."""

    def save_kv_layer(
        self,
        layer_name: str,
        kv_layer: torch.Tensor,
        attn_metadata: AttentionMetadata,
        **kwargs: Any,  # noqa: ANN401 - vLLM's own signature
    ) -> None:
        """A layer has its attention: its part of the step's blocks is copied beside the next."""
        worker = self.worker
        projector = None if worker.paged is None else worker.paged.projector
        if projector is not None and projector.projecting:
            return  # the layer is called within itself, to project stored X; its own end comes
        if worker.layers is not None:
            worker.layers.computed(layer_name)

    def wait_for_save(self) -> None:
        """The forward pass is over: what is left of completed blocks is copied to DRAM, I/O is
        started."""
        self._end_step()

    def _end_step(self) -> None:
        plan = self._plan()
        if plan is self._ended:
            return
        self._ended = plan
        if sys.exc_info()[1] is not self._handled:
            # vLLM ends steps in a ``finally``. What a step that failed has not computed must not
            # be written under its keys: a journal that is made anew from headers would have it.
            self.worker.give_up()
        else:
            self.worker.end(plan)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Loads that ended."""
        if self.config.mode == "page":
            # Where there are drafts vLLM asks for results before :meth:`wait_for_save`, which comes
            # after the drafter. Page mode serves none that has KV, and whose context could not be
            # read must be told before vLLM takes what the step has sampled.
            self._end_step()
        self.worker.collect(idle=self._plan().idle)
        finished, failed = self.worker.take_loads()
        return KVConnectorTransferResults(finished_recving=finished, failed_recving=failed)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks of requests whose context could not be read in this step."""
        return self.worker.take_invalid_blocks()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """Report for the scheduler."""
        report = self.worker.take_report()
        return None if report is None else SSDKVWorkerMetadata([(self.worker.rank, report)])

    # ---- both ----

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """Counters and gauges of the whole engine; the workers' come with their reports."""
        return None if self._scheduler is None else self._scheduler.take_stats()

    @classmethod
    def build_kv_connector_stats(
        cls, data: dict[str, Any] | None = None
    ) -> KVConnectorStats | None:
        """Stats from their serialised form."""
        return SSDKVStats() if data is None else SSDKVStats(data=cast("Payload", data))

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[type[PromMetric], type[PromMetricT]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics:
        """Our metrics on vLLM's own ``/metrics``."""
        return SSDKVPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        """End of the engine: what is committed is written, the journal is made durable."""
        if self._worker is not None:
            active_worker.set_worker(None)
            self._worker.close()
            self._worker = None
        if self._scheduler is not None:
            self._scheduler.close()
            self._scheduler = None
