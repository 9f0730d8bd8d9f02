"""Page mode: whether the store has room for a request's whole context.

The reasons for which a request waits are in ``base/wait_reason.py``; ``ARCHITECTURE.md`` has the
limits beside it ("Limits and back-pressure").
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from vllm_ssdkv.base.errors import StoreError, StoreFailedError
from vllm_ssdkv.base.wait_reason import WaitReason
from vllm_ssdkv.connector.scheduler.context_recovery import MAX_RECOMPUTATIONS, ContextRecovery
from vllm_ssdkv.connector.scheduler.scheduler_parts import EngineFacts, SchedulerStore
from vllm_ssdkv.store.devices.health import WriteState
from vllm_ssdkv.store.own_store import owned

if TYPE_CHECKING:
    from vllm.v1.request import Request

NEW_SLOTS_DEADLINE_S = 60.0
"""Time that a request waits for slots of new segments while nothing else runs: their manifest is
saved in milliseconds, or its file system is full, read-only, or does not answer."""

WRITES_DEADLINE_S = 60.0
"""Time for which requests wait for writes to go on while nothing runs."""

_ASKED_S = 5.0
"""A pause between two questions in which nobody waits, in seconds."""


class PageAdmission:
    """Decision on each request that vLLM would run. For the scheduler's thread; never blocks."""

    def __init__(
        self,
        store: SchedulerStore,
        engine: EngineFacts,
        recovery: ContextRecovery,
        clock: Callable[[], float] = time.monotonic,
    ):
        """``clock``: monotonic seconds."""
        own, self._clock = owned(store.own), clock
        self._index, self._rebalancer = own.index, own.rebalancer
        self._weights, self._pauses, self._unread = own.weights, own.pauses, own.unread
        self._recovery = recovery
        self._stands_since = self._asked_at = -math.inf
        self._counters, self._suspension = store.counters, store.suspension
        self._block, self._max_tokens = engine.block_tokens, engine.max_model_len

    def blocks_needed(self, request: Request) -> int:
        """Blocks that the request may have, at most."""
        tokens = min(request.num_prompt_tokens + request.max_tokens, self._max_tokens)
        return int(tokens) // self._block + 1

    @property
    def stands(self) -> bool:
        """Check whether nothing has run for :data:`WRITES_DEADLINE_S` because writes are paused."""
        return self._asked_at - self._stands_since >= WRITES_DEADLINE_S

    def awaits_writes(self, *, running: bool) -> bool:
        """Check whether no request can be admitted before writes go on. ``running``: whether any
        request runs."""
        now, paused = self._clock(), self._pauses.state is WriteState.PAUSED
        if running or not paused or now - self._asked_at > _ASKED_S:
            self._stands_since = now
        self._asked_at = now
        return paused

    def admit(self, request: Request, needed: int, *, soon: bool) -> WaitReason | None:
        """Reason for the request to wait; None: there are the slots ``needed``. ``soon``: slots are
        in use, or being written or loaded, that will be free again.

        Raises:
            StoreFailedError: it would wait for ever.
        """
        if self._recovery.too_often(request.request_id):
            raise StoreFailedError(
                f"the context of request {request.request_id} was lost {MAX_RECOMPUTATIONS} times "
                f"in a row; devices out of use: {self._weights.lost_paths()}"
            )
        if self._index.available() >= needed:
            return None
        self._rebalancer.step(patient=soon, wanted=needed)
        if self._rebalancer.grow_for(needed):
            if not soon:
                self._check_progress()
            return WaitReason.NEW_SLOTS
        if self._index.available() < needed:
            self._unread.give_up()
        if self._index.available() >= needed:  # what was striped anew has come back
            return None
        if not (soon or self._weights.reset()):
            if self._suspension:
                raise self._suspension.no_room()
            if self._weights.may_return:
                self._counters.add("slot_waits")
                return WaitReason.SLOTS
            raise StoreFailedError(
                f"request {request.request_id} needs {needed} slots, {self._index.available()} "
                f"can be had; devices out of use: {self._weights.lost_paths()}. Replace them and "
                "restart, or raise their capacity"
            )
        self._counters.add("slot_waits")
        return WaitReason.SLOTS

    def _check_progress(self) -> None:
        """Check that slots that are to come do; for a time when nothing runs.

        Raises:
            StoreFailedError: they do not.
        """
        try:
            self._rebalancer.check_progress(NEW_SLOTS_DEADLINE_S)
        except StoreError as error:
            raise StoreFailedError(str(error)) from error
