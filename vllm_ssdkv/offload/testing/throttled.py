"""Twin that slows a device down to a model of bandwidth and latency.

Work is done at once; only the report waits for the model, as with the throttled I/O engine. Pieces
of work occupy the model one after the other.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from vllm_ssdkv.kernels.operands.block_layout import PartialState
from vllm_ssdkv.offload.protocol import ContextDevice, ContextWork, Ticket


class ThrottledTicket:
    """See ``Ticket``; ends when the model has, and the work.

    Args:
        inner: Of the device that does the work.
        due: Answers, once the work is done, when the model ends.
        clock: Monotonic seconds.
        devices: See ``Ticket``.
    """

    def __init__(
        self,
        inner: Ticket,
        due: Callable[[], float],
        clock: Callable[[], float],
        devices: int = 1,
    ):
        self._inner, self._due, self._clock = inner, due, clock
        self._begin = clock()
        self.devices = devices

    @property
    def progress(self) -> int:
        """See ``Ticket``."""
        return self._inner.progress

    @property
    def seconds(self) -> tuple[float, float]:
        """By the model, which waits where the work was done earlier."""
        wait_s, attend_s = self._inner.seconds
        return max(wait_s, self._due() - self._begin - attend_s), attend_s

    def done(self) -> bool:
        """See ``Ticket``."""
        return self._inner.done() and self._clock() >= self._due()

    def wait(self, timeout_s: float) -> bool:
        """See ``Ticket``."""
        deadline = self._clock() + max(timeout_s, 0.0)
        if not self._inner.wait(timeout_s):
            return False
        pause = min(deadline, self._due()) - self._clock()
        if pause > 0:
            time.sleep(pause)
        return self.done()

    def partials(self) -> PartialState:
        """See ``Ticket``."""
        return self._inner.partials()

    def withdraw(self, timeout_s: float) -> bool:
        """See ``Ticket``."""
        return self._inner.withdraw(timeout_s)


class ThrottledDevice:
    """See ``ContextDevice``; wraps any device.

    Args:
        inner: Device that attends; closed with this one.
        bandwidth: Bytes of K and V per second that it attends to; None is no limit.
        latency_s: Seconds from then to the answer.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        inner: ContextDevice,
        bandwidth: float | None,
        latency_s: float,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._inner = inner
        self._per_byte = 0.0 if bandwidth is None else 1 / bandwidth
        self._latency_s = latency_s
        self._clock = clock
        self._free_at = -math.inf
        self.name = f"throttled({inner.name})"

    def submit(self, work: ContextWork) -> Ticket:
        """See ``ContextDevice``."""
        cost = work.pages.nbytes * self._per_byte
        self._free_at = max(self._clock(), self._free_at) + cost
        due = self._free_at + self._latency_s
        inner = self._inner.submit(work)
        return ThrottledTicket(inner, lambda: due, self._clock, inner.devices)

    def reclaim(self, slots: NDArray[np.int64]) -> None:
        """See ``ContextDevice``."""
        self._inner.reclaim(slots)

    def statistics(self) -> Mapping[str, float]:
        """See ``ContextDevice``; those of the wrapped device."""
        return self._inner.statistics()

    def close(self, timeout_s: float) -> bool:
        """See ``ContextDevice``."""
        return self._inner.close(timeout_s)
