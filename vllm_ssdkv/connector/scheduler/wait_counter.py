"""Counts of requests that begin to wait."""

from __future__ import annotations

from vllm_ssdkv.base.metrics import Counters
from vllm_ssdkv.base.wait_reason import WaitReason
from vllm_ssdkv.connector.scheduler.match import Match, Wait


class WaitCounter:
    """Counts a wait when it begins; vLLM asks again in every step. Used by the scheduler's thread.

    Example:
        >>> counter = WaitCounter(counters := Counters())
        >>> for _ in range(3):
        ...     counter.answered("request", Wait(WaitReason.SLOTS))
        >>> counters.total("waits", reason="slots")
        1.0
    """

    def __init__(self, counters: Counters):
        self._counters = counters
        self._reasons: dict[str, WaitReason] = {}

    def __len__(self) -> int:
        """Requests that wait."""
        return len(self._reasons)

    def answered(self, request_id: str, match: Match) -> None:
        """A request has got this answer."""
        if not isinstance(match, Wait):
            self.forget(request_id)
        elif self._reasons.get(request_id) is not match.reason:
            self._reasons[request_id] = match.reason
            self._counters.add("waits", reason=match.reason.label)

    def forget(self, request_id: str) -> None:
        """The request does not wait any more, or has ended."""
        self._reasons.pop(request_id, None)
