"""The device that attends to nothing: every piece of work ends at once, with empty states.

It measures what everything around a device costs. Its answers are wrong, so no option names it.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from vllm_ssdkv.offload.protocol import ContextWork
from vllm_ssdkv.offload.tickets import LocalTicket, empty_state


class NoopDevice:
    """See ``ContextDevice``."""

    name = "noop"

    def __init__(self) -> None:
        self._tickets = 0

    def submit(self, work: ContextWork) -> LocalTicket:
        """See ``ContextDevice``."""
        ticket = LocalTicket(work)
        self._tickets += 1
        ticket.answer(empty_state(work.query))
        return ticket

    def reclaim(self, slots: NDArray[np.int64]) -> None:
        """See ``ContextDevice``: it keeps nothing."""

    def statistics(self) -> Mapping[str, float]:
        """See ``ContextDevice``."""
        return {"tickets": float(self._tickets), "wait_seconds": 0.0, "attend_seconds": 0.0}

    def close(self, timeout_s: float) -> bool:
        """See ``ContextDevice``; it has no threads."""
        del timeout_s
        return True
