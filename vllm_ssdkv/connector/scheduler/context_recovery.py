"""Requests whose context cannot be read: vLLM preempts them, and they compute what is missing."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from vllm.v1.request import RequestStatus

from vllm_ssdkv.base.metrics import Counters
from vllm_ssdkv.connector.kv_cache_spec import TieredManager
from vllm_ssdkv.connector.scheduler.request_state import RequestState

MAX_RECOMPUTATIONS: Final = 8
"""A request whose context was lost this often, and that got no further between, is not helped by
one more try, unless that was within :data:`LOST_S`."""

LOST_S = 30.0
"""Seconds for which contexts may be lost: a device whose reads fail is out of use by then."""


class ContextRecovery:
    """Sends requests back, and counts how often. Used by the scheduler's thread.

    Attributes:
        manager: The part of vLLM's block manager that refuses blocks to requests, so that vLLM
            preempts them; None in reuse mode, where nothing is sent back.
    """

    def __init__(self, counters: Counters, clock: Callable[[], float] = time.monotonic):
        """``clock``: monotonic seconds."""
        self._clock = clock
        self.manager: TieredManager | None = None
        self._counters = counters
        # How often a request's context was lost in a row, since when, and how far it had got.
        self._lost: dict[str, tuple[int, float, int]] = {}

    def force_preempt(self, state: RequestState) -> None:
        """Have vLLM preempt a request, so that it starts again from what the store still has."""
        preempted = state.request.status == RequestStatus.PREEMPTED
        if self.manager is None or not state.running or preempted:
            return
        if state.request_id not in self.manager.send_back:
            tries, since, furthest = self._lost.get(state.request_id, (0, 0.0, 0))
            reached = state.request.num_tokens + len(state.slots)
            if reached > furthest:
                tries, since, furthest = 0, self._clock(), reached
            self._lost[state.request_id] = (tries + 1, since, furthest)
            self._counters.add("recomputed_requests", 1, cause="context")
        self.manager.send_back[state.request_id] = state.request

    def too_often(self, request_id: str) -> bool:
        """Check whether one more try is no help; see :data:`MAX_RECOMPUTATIONS`."""
        tries, since, _ = self._lost.get(request_id, (0, 0.0, 0))
        return tries > MAX_RECOMPUTATIONS and self._clock() - since >= LOST_S

    def wait(self, request_id: str, *, waits: bool) -> None:
        """Note that vLLM was told to have a request wait, or not: it asks again before it runs one.

        vLLM does not listen where a request reads no prefix cache (``prompt_logprobs``).
        """
        if self.manager is not None:
            (self.manager.waits.add if waits else self.manager.waits.discard)(request_id)

    def forget(self, request_id: str) -> None:
        """The request has ended."""
        self._lost.pop(request_id, None)
        self.wait(request_id, waits=False)
