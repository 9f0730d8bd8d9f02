"""Tickets of devices whose threads are in this process."""

from __future__ import annotations

import threading

import numpy as np
import torch

from vllm_ssdkv.kernels.operands.block_layout import PartialState
from vllm_ssdkv.offload.protocol import ContextPages, ContextWork, DeviceStatistics, Lease


class LocalTicket:
    """See ``Ticket``. One thread of the device ends it, by :meth:`answer` or :meth:`fail`.

    Attributes:
        work: What to do.
        lease: Under which the device uses the store.
        seconds: For which the device waited for pages, and attended; set before the end.
        own: See ``Ticket``.
    """

    __slots__ = ("_ended", "_error", "_state", "lease", "seconds", "work")

    own = None

    def __init__(self, work: ContextWork):
        self.work = work
        self.lease = Lease()
        self.seconds = (0.0, 0.0)
        self._ended = threading.Lock()
        """Held until the end: a wait for it costs a microsecond, one for an event ten."""
        self._ended.acquire()
        self._state: PartialState | None = None
        self._error: Exception | None = None

    @property
    def progress(self) -> int:
        """See ``Ticket``."""
        return self.lease.turns

    @property
    def taken(self) -> ContextPages:
        """See ``Ticket``."""
        return self.work.pages

    @property
    def statistics(self) -> DeviceStatistics:
        """See ``Ticket``."""
        query, pages = self.work.query, self.work.pages
        tokens, heads, head_size = query.shape
        partial_bytes = 4 * tokens * heads * (head_size + 2)
        sent = query.nbytes, pages.selection_bytes
        return DeviceStatistics(1, *sent, partial_bytes, *self.seconds)

    def done(self) -> bool:
        """See ``Ticket``."""
        return not self._ended.locked()

    def wait(self, timeout_s: float) -> bool:
        """See ``Ticket``."""
        if not self._ended.acquire(timeout=max(timeout_s, 0.0)):
            return False
        self._ended.release()
        return True

    def partials(self) -> list[PartialState]:
        """See ``Ticket``."""
        if self._error is not None:
            raise self._error
        if self._state is None:
            raise RuntimeError("the device has not answered yet")
        return [self._state]

    def left(self) -> None:
        """See ``Ticket``."""

    def withdraw(self, timeout_s: float) -> bool:
        """See ``Ticket``."""
        return self.lease.withdraw(timeout_s)

    def answer(self, state: PartialState) -> None:
        """End it well."""
        self._state = state
        self._ended.release()

    def fail(self, error: Exception) -> None:
        """End it with an error."""
        self._error = error
        self._ended.release()


class PinnedQuery:
    """A query on its way from an accelerator to pinned memory, [T, Hq, D]."""

    def __init__(self, query: torch.Tensor):
        """Start to copy it; does not block."""
        self._query = torch.empty(query.shape, dtype=query.dtype, pin_memory=True)
        self._query.copy_(query, non_blocking=True)
        self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._copied.record(torch.cuda.current_stream(query.device))

    def wait(self) -> torch.Tensor:
        """The query on the host, once it is there."""
        self._copied.synchronize()
        return self._query


def empty_state(query: torch.Tensor) -> PartialState:
    """State on the host of queries that have seen no key. Made without torch, which would fill it
    by a team of its own."""
    tokens, heads, head_size = query.shape
    m = torch.from_numpy(np.full((tokens, heads), -np.inf, dtype=np.float32))
    acc = np.zeros((tokens, heads, head_size), dtype=np.float32)
    return PartialState(m, torch.from_numpy(np.zeros_like(m)), torch.from_numpy(acc))
