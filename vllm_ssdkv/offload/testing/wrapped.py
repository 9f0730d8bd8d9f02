"""Common part of the twins: a device, and a ticket, that pass everything on to another one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from vllm_ssdkv.kernels.operands.block_layout import PartialState
from vllm_ssdkv.offload.protocol import (
    ContextDevice,
    ContextWork,
    DeviceStatistics,
    Foldable,
    Ticket,
)
from vllm_ssdkv.sparse.protocol import Selector
from vllm_ssdkv.sparse.selectors.sparf import SparfSelector


class WrappedTicket:
    """See ``Ticket``."""

    def __init__(self, inner: Ticket):
        self._inner = inner

    @property
    def own(self) -> Foldable | None:
        """See ``Ticket``."""
        return self._inner.own

    @property
    def taken(self) -> Foldable:
        """See ``Ticket``."""
        return self._inner.taken

    @property
    def progress(self) -> int:
        """See ``Ticket``."""
        return self._inner.progress

    @property
    def statistics(self) -> DeviceStatistics:
        """See ``Ticket``."""
        return self._inner.statistics

    def done(self) -> bool:
        """See ``Ticket``."""
        return self._inner.done()

    def wait(self, timeout_s: float) -> bool:
        """See ``Ticket``."""
        return self._inner.wait(timeout_s)

    def partials(self) -> Sequence[PartialState]:
        """See ``Ticket``."""
        return self._inner.partials()

    def left(self) -> Foldable | None:
        """See ``Ticket``."""
        return self._inner.left()

    def withdraw(self, timeout_s: float) -> bool:
        """See ``Ticket``."""
        return self._inner.withdraw(timeout_s)


class WrappedDevice:
    """See ``ContextDevice``."""

    def __init__(self, inner: ContextDevice, name: str):
        """``inner`` is closed with this one."""
        self._inner, self.name = inner, name
        self.caps, self.peer = inner.caps, inner.peer

    @property
    def in_use(self) -> int:
        """See ``ContextDevice``."""
        return self._inner.in_use

    def submit(self, work: ContextWork) -> Ticket:
        """See ``ContextDevice``."""
        return self._inner.submit(work)

    def selector(self, inner: SparfSelector) -> Selector:
        """See ``ContextDevice``."""
        return self._inner.selector(inner)

    def reclaim(self, slots: NDArray[np.int64]) -> None:
        """See ``ContextDevice``."""
        self._inner.reclaim(slots)

    def end_step(self) -> None:
        """See ``ContextDevice``."""
        self._inner.end_step()

    def statistics(self) -> DeviceStatistics:
        """See ``ContextDevice``."""
        return self._inner.statistics()

    def close(self, timeout_s: float) -> bool:
        """See ``ContextDevice``."""
        return self._inner.close(timeout_s)
