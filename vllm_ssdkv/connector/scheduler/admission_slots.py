"""Requests that hold HBM blocks for a hit and wait for a seat."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import SchedulerConfig


class AdmissionSlots:
    """Requests that wait for a seat, and the limit on their number. Used by the scheduler's thread;
    O(1) per call.

    vLLM gives the next seats to these requests before it looks at anybody else, whatever the
    priority. As many as there are seats are enough, so no more may wait where it schedules by
    priority. In order of arrival they are first anyway, and any number may.
    """

    def __init__(self, config: SchedulerConfig):
        self._most = int(config.max_num_seqs) if config.policy == "priority" else None
        self._waiting: set[str] = set()

    def __len__(self) -> int:
        """Number of waiting requests."""
        return len(self._waiting)

    @property
    def enough_wait(self) -> bool:
        """Check whether no more hits are to be loaded now."""
        return self._most is not None and len(self._waiting) >= self._most

    def wait(self, request_id: str) -> None:
        """The request has got HBM blocks."""
        self._waiting.add(request_id)

    def leave(self, request_id: str) -> None:
        """It runs, or has lost them."""
        self._waiting.discard(request_id)
