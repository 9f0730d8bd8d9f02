"""Twin that fails on purpose."""

from __future__ import annotations

from vllm_ssdkv.config.offload import OffloadFault
from vllm_ssdkv.kernels.operands.block_layout import PartialState
from vllm_ssdkv.offload.protocol import ContextDevice, ContextWork, Ticket
from vllm_ssdkv.offload.testing.wrapped import WrappedDevice, WrappedTicket
from vllm_ssdkv.offload.tickets import LocalTicket


class _WrongTicket(WrappedTicket):
    """Ticket whose answer is an error, or a row too few."""

    def __init__(self, inner: Ticket, *, raises: bool):
        super().__init__(inner)
        self._raises = raises

    def partials(self) -> list[PartialState]:
        states = self._inner.partials()
        if self._raises:
            raise RuntimeError("injected error")
        return [PartialState(one.m[:-1], one.l[:-1], one.acc[:-1]) for one in states]


class FaultyDevice(WrappedDevice):
    """See ``ContextDevice``; wraps any device, which does the work for all but stalled tickets.

    Args:
        inner: Device that attends; closed with this one.
        fault: What happens to work, after so many pieces that are done well.
    """

    def __init__(self, inner: ContextDevice, fault: OffloadFault):
        super().__init__(inner, f"faulty({inner.name})")
        self._fault, self._passed = fault, 0

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
