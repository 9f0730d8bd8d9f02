"""The interface between the scheduler's core and the mode of the engine."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Protocol

from vllm_ssdkv.base.wait_reason import WaitReason
from vllm_ssdkv.connector.metadata import SSDKVMetadata
from vllm_ssdkv.connector.scheduler.kv_groups import GroupLoad
from vllm_ssdkv.connector.scheduler.request_state import RequestState

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

    from vllm_ssdkv.offload.xcache.x_rule import XRates


class ModePolicy(Protocol):
    """Everything that the modes do differently. Used by the scheduler's thread; never blocks.

    Attributes:
        whole_hits: Whether requests need all blocks of a hit, also those without a place in HBM.
    """

    whole_hits: bool

    def bind(self, hbm: KVCacheManager) -> None:
        """vLLM's block manager exists now."""

    # ---- admission ----

    def admit(self, request: Request) -> WaitReason | None:
        """Reason for a request to wait before the store is asked for it; None: it need not.

        Raises:
            StoreFailedError: it can never be served any more.
        """

    def admit_hit(self, request: Request, first: int, end: int) -> WaitReason | None:
        """Reason for blocks ``first`` to ``end`` of a request to wait; None: they can be loaded."""

    def answered(self, request_id: str, *, waits: bool) -> None:
        """Note vLLM's answer: ``waits`` if the request was told to wait."""

    def may_find(self, request_id: str) -> bool:
        """Check whether a request that was admitted just now may begin with stored blocks."""

    def allocated(self, state: RequestState, *, found: bool) -> None:
        """A request has been admitted; its load follows if anything was ``found``."""

    def load_begins(self, state: RequestState, load: GroupLoad, blocks: int) -> None:
        """A request's hit of ``blocks`` blocks is to be loaded."""

    def load_ended(self, request_id: str) -> None:
        """Its load has ended well."""

    # ---- steps ----

    def measured_x(self, rates: XRates) -> None:
        """A worker has measured what X takes, by these rates."""

    def begin_step(self) -> None:
        """vLLM has asked for whom it wanted, and scheduled a step."""

    def schedule(
        self,
        plan: SSDKVMetadata,
        state: RequestState,
        computed: int,
        count: int,
        output: SchedulerOutput,
    ) -> None:
        """Plan what is stored of a request in a step that computes ``count`` tokens after the first
        ``computed``."""

    def end_step(self) -> None:
        """All requests of the step have been scheduled."""

    # ---- the end of a request ----

    def finished(self, state: RequestState) -> None:
        """An admitted request has ended; it was released."""

    def forget(self, request_id: str) -> None:
        """A request has ended, admitted or not."""

    def release(self, state: RequestState) -> None:
        """A request has lost its HBM blocks: it was preempted, or has ended."""

    # ---- what goes wrong ----

    def context_slots(self) -> Collection[int]:
        """Slots that running requests read in every step."""

    def slot_write_failed(self, slot: int) -> None:
        """An allocated slot could not be written."""

    def slot_never_filled(self, slot: int, epoch: int) -> None:
        """A slot got no bytes: whoever reads it has a hole in its context."""

    def context_unreadable(self, state: RequestState) -> None:
        """A step of this request attended to bytes that could not be read."""

    def compute_anew(self, state: RequestState, *, told: bool) -> None:
        """A request runs with stored blocks that are not to be trusted: have vLLM compute them, as
        far as it can. ``told``: a worker has told vLLM of an invalid block already."""

    def remembers(self) -> dict[str, int]:
        """Number of things remembered of requests, by name."""
