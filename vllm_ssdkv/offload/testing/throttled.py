"""Twin that slows a device down to a model of bandwidth and latency.

Work is done at once; only the report waits for the model, as with the throttled I/O engine. Pieces
of work occupy the model one after the other.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable

from vllm_ssdkv.offload.protocol import (
    ContextDevice,
    ContextPages,
    ContextWork,
    DeviceStatistics,
    Ticket,
)
from vllm_ssdkv.offload.testing.wrapped import WrappedDevice, WrappedTicket


class ThrottledTicket(WrappedTicket):
    """See ``Ticket``; ends when the model has, and the work.

    Args:
        inner: Of the device that does the work.
        pages: Of the work.
        due: Answers, once the work is done, when the model ends.
        clock: Monotonic seconds.
        devices: Devices of the model that hold pages of the work: each gets the queries, and sends
            a state.
    """

    def __init__(
        self,
        inner: Ticket,
        pages: ContextPages,
        due: Callable[[], float],
        clock: Callable[[], float],
        devices: int = 1,
    ):
        super().__init__(inner)
        self._pages, self._due, self._clock = pages, due, clock
        self._begin = clock()
        self._devices = devices

    @property
    def taken(self) -> ContextPages:
        """See ``Ticket``."""
        return self._pages

    @property
    def statistics(self) -> DeviceStatistics:
        """Statistics by the model, which waits where the work was done earlier."""
        counts = self._inner.statistics
        return dataclasses.replace(
            counts,
            query_bytes=counts.query_bytes * self._devices,
            partial_bytes=counts.partial_bytes * self._devices,
            wait_s=max(counts.wait_s, self._due() - self._begin - counts.attend_s),
        )

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


class ThrottledDevice(WrappedDevice):
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
        super().__init__(inner, f"throttled({inner.name})")
        self._per_byte = 0.0 if bandwidth is None else 1 / bandwidth
        self._latency_s = latency_s
        self._clock = clock
        self._free_at = -math.inf

    def submit(self, work: ContextWork) -> Ticket:
        """See ``ContextDevice``."""
        cost = work.pages.nbytes * self._per_byte
        self._free_at = max(self._clock(), self._free_at) + cost
        due = self._free_at + self._latency_s
        return ThrottledTicket(self._inner.submit(work), work.pages, lambda: due, self._clock)
