"""Page mode: whether the store has room for a request's whole context.

All reasons to wait, of requests and of writes, are listed in ``ARCHITECTURE.md``, "Limits and
back-pressure".
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_ssdkv.base.errors import StoreFailedError
from vllm_ssdkv.base.metrics import Counters
from vllm_ssdkv.connector.scheduler.context_recovery import MAX_RECOMPUTATIONS, ContextRecovery
from vllm_ssdkv.connector.scheduler.device_weights import DeviceWeights
from vllm_ssdkv.connector.scheduler.suspension import Suspension
from vllm_ssdkv.store.index.slot_index import SlotIndex
from vllm_ssdkv.store.placement.rebalancer import Rebalancer

if TYPE_CHECKING:
    from vllm.v1.request import Request


class PageAdmission:
    """Decides it when vLLM would run a request. Used by the scheduler's thread; never blocks."""

    def __init__(
        self,
        index: SlotIndex,
        rebalancer: Rebalancer,
        shares: DeviceWeights,
        recomputations: ContextRecovery,
        counters: Counters,
        block_tokens: int,
        max_model_len: int,
        suspension: Suspension,
    ):
        self._index, self._rebalancer, self._shares = index, rebalancer, shares
        self._recomputations, self._counters = recomputations, counters
        self._block, self._max_tokens = block_tokens, max_model_len
        self._suspension = suspension

    def blocks_needed(self, request: Request) -> int:
        """Slots that the request may take, at most."""
        tokens = min(request.num_prompt_tokens + request.max_tokens, self._max_tokens)
        return int(tokens) // self._block + 1

    def admits(self, request: Request, *, soon: bool) -> bool:
        """Whether there are as many; else it has to wait. ``soon``: slots are in use, or being
        written or loaded, that will be free again.

        Raises:
            StoreFailedError: it would wait for ever.
        """
        if self._recomputations.too_often(request.request_id):
            raise StoreFailedError(
                f"the context of request {request.request_id} was lost {MAX_RECOMPUTATIONS} times "
                f"in a row; devices out of use: {self._shares.lost_paths()}"
            )
        needed = self.blocks_needed(request)
        if self._index.available() >= needed:
            return True
        self._rebalancer.step(patient=soon)
        if self._rebalancer.grow_for(needed):
            return False
        if self._index.available() >= needed:  # what was striped anew has come back
            return True
        if not (soon or self._shares.even_out()):
            if self._suspension:
                raise self._suspension.no_room()
            raise StoreFailedError(
                f"request {request.request_id} needs {needed} slots, {self._index.available()} "
                f"can be had; devices out of use: {self._shares.lost_paths()}. Replace them and "
                "restart, or raise their capacity"
            )
        self._counters.add("slot_waits")
        return False
