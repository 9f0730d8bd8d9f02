"""Twin that fails on purpose."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from vllm_ssdkv.config.offload import OffloadFault
from vllm_ssdkv.kernels.operands.block_layout import PartialState
from vllm_ssdkv.offload.protocol import ContextDevice, ContextWork, Ticket
from vllm_ssdkv.offload.tickets import LocalTicket


class _WrongTicket:
    """Ticket whose answer is an error, or a row too few."""

    def __init__(self, inner: Ticket, *, raises: bool):
        self._inner, self._raises = inner, raises

    @property
    def progress(self) -> int:
        return self._inner.progress

    @property
    def devices(self) -> int:
        return self._inner.devices

    @property
    def seconds(self) -> tuple[float, float]:
        return self._inner.seconds

    def done(self) -> bool:
        return self._inner.done()

    def wait(self, timeout_s: float) -> bool:
        return self._inner.wait(timeout_s)

    def partials(self) -> PartialState:
        state = self._inner.partials()
        if self._raises:
            raise RuntimeError("injected error")
        return PartialState(state.m[:-1], state.l[:-1], state.acc[:-1])

    def withdraw(self, timeout_s: float) -> bool:
        return self._inner.withdraw(timeout_s)


class FaultyDevice:
    """See ``ContextDevice``; wraps any device, which does the work for all but stalled tickets.

    Args:
        inner: Device that attends; closed with this one.
        fault: What happens to work, after so many pieces that are done well.
    """

    def __init__(self, inner: ContextDevice, fault: OffloadFault):
        self._inner, self._fault, self._passed = inner, fault, 0
        self.name = f"faulty({inner.name})"

    def submit(self, work: ContextWork) -> Ticket:
        """See ``ContextDevice``."""
        if self._passed < self._fault.after:
            self._passed += 1
            return self._inner.submit(work)
        if self._fault.kind in {"error", "rows"}:
            return _WrongTicket(self._inner.submit(work), raises=self._fault.kind == "error")
        ticket = LocalTicket(work)  # it never ends
        if self._fault.kind == "hold":
            ticket.lease.__enter__()
        return ticket

    def reclaim(self, slots: NDArray[np.int64]) -> None:
        """See ``ContextDevice``."""
        self._inner.reclaim(slots)

    def statistics(self) -> Mapping[str, float]:
        """See ``ContextDevice``; those of the wrapped device."""
        return self._inner.statistics()

    def close(self, timeout_s: float) -> bool:
        """See ``ContextDevice``."""
        return self._inner.close(timeout_s)
