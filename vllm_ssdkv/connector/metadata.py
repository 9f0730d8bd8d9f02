"""Messages between scheduler and workers in vLLM's types: it pickles them into shared memory."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from vllm_ssdkv.connector.messages import RankReport, StepPlan


@dataclass
class SSDKVMetadata(StepPlan, KVConnectorMetadata):
    """Scheduler to worker, every step."""


@dataclass
class SSDKVWorkerMetadata(KVConnectorWorkerMetadata):
    """Worker to scheduler: the reports of all ranks that had something to say."""

    reports: list[tuple[int, RankReport]] = field(default_factory=list)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> SSDKVWorkerMetadata:
        """Join the reports of several ranks of one step."""
        if not isinstance(other, SSDKVWorkerMetadata):
            raise TypeError(f"cannot join {type(other).__name__} with SSDKVWorkerMetadata")
        return SSDKVWorkerMetadata(self.reports + other.reports)
