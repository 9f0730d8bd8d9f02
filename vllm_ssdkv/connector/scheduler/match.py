"""The answer to vLLM's question how much of a request the store holds, and a count of waits."""

from __future__ import annotations

from dataclasses import dataclass

from vllm_ssdkv.base.metrics import Counters
from vllm_ssdkv.base.wait_reason import WaitReason


@dataclass(frozen=True, slots=True)
class Wait:
    """The request cannot run yet: vLLM asks again."""

    reason: WaitReason


@dataclass(frozen=True, slots=True)
class Miss:
    """Nothing is loaded; the request may run."""


@dataclass(frozen=True, slots=True)
class Hit:
    """So many ``tokens``, at least one block, are loaded before the request runs."""

    tokens: int


Match = Wait | Miss | Hit
"""One of the three. ``connector.py`` translates it into vLLM's protocol."""


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
