"""Devices that attend to contexts where these lie: only queries and partial states travel.

A device is told a layer's queries and pages, and answers later with partial states over the same
queries. States over disjoint pages merge by their log-sum-exps, so any number of devices may hold
parts of one context.

``docs/internals/offload.md`` has who waits for whom, and what becomes of work when a device fails.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_ssdkv.base.errors import WithdrawnError
from vllm_ssdkv.kernels.dense import BlockAttention
from vllm_ssdkv.kernels.operands.block_layout import PartialState
from vllm_ssdkv.kernels.paged import PageAttention
from vllm_ssdkv.kernels.step_clock import StepClock


class Lease:
    """Right to use the store's tables on a ticket's account: one thread at a time, until the ticket
    is withdrawn. Any thread may call.

    Streams, fetchers and their caches have no locks of their own. Who attends enters the lease to
    get the next pages, and leaves it to attend to them.

    Attributes:
        turns: How often it was left: signs of progress.
    """

    __slots__ = ("_lock", "_withdrawn", "turns")

    def __init__(self) -> None:
        self.turns = 0
        self._lock = threading.Lock()
        self._withdrawn = False

    def __enter__(self) -> None:
        """Begin to use the tables.

        Raises:
            WithdrawnError: they are somebody else's now.
        """
        self._lock.acquire()
        if self._withdrawn:
            self._lock.release()
            raise WithdrawnError

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Leave the tables."""
        self.turns += 1
        self._lock.release()

    def withdraw(self, timeout_s: float) -> bool:
        """Let nobody enter any more. False: somebody is inside, and was for all of this time."""
        if not self._lock.acquire(timeout=timeout_s):
            return False
        self._withdrawn = True
        self._lock.release()
        return True


@dataclass(frozen=True, slots=True)
class HostKernels:
    """Kernels that read pages in memory of the host."""

    dense: BlockAttention
    paged: PageAttention


class ContextPages(Protocol):
    """Pages of one layer, with the rows that attend to them.

    A device in this process has them brought into memory, and checked, by :meth:`fold`. Another one
    resolves :attr:`slots` itself.
    """

    @property
    def slots(self) -> NDArray[np.int64]:
        """Slots of all blocks that have such pages. A slot may repeat."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes of K and V to attend to."""
        ...

    @property
    def selection_bytes(self) -> int:
        """Bytes that name the pages: one bit for each there is, if some were chosen."""
        ...

    def fold_on_host(
        self,
        kernels: HostKernels,
        query: torch.Tensor,
        state: PartialState,
        scale: float,
        clock: StepClock,
        lease: AbstractContextManager[None],
    ) -> None:
        """Fold every page into ``state``, as pages arrive. Blocks for I/O, with its deadlines.

        The calling thread uses the store's tables within the ``lease`` only. A second call, after
        one that was given up, begins anew.

        Args:
            kernels: They run on the calling thread.
            query: On the host, [T, Hq, D].
            state: Of these queries, on the host.
            scale: Of the logits.
            clock: Gets the time of waiting and attending.
            lease: See :class:`Lease`.

        Raises:
            WithdrawnError: the pages are somebody else's now.
        """
        ...


@dataclass(frozen=True, slots=True)
class ContextWork:
    """Work for a device: queries of one layer, and pages that they attend to.

    Attributes:
        query: [T, Hq, D], on the device that computes the model. Nobody writes to it.
        pages: What they attend to; they know the rows.
        scale: Of the logits.
    """

    query: torch.Tensor
    pages: ContextPages
    scale: float


class Ticket(Protocol):
    """Work that was handed to a device. Belongs to the thread that handed it in."""

    @property
    def progress(self) -> int:
        """Number that grows while the device gets on."""
        ...

    @property
    def devices(self) -> int:
        """Devices that hold pages of the work: each gets the queries, and sends its own states."""
        ...

    @property
    def seconds(self) -> tuple[float, float]:
        """Seconds for which the device waited for pages, and attended. Of work that is done."""
        ...

    def done(self) -> bool:
        """Check whether it has ended, well or not."""
        ...

    def wait(self, timeout_s: float) -> bool:
        """Wait for the end; False: it did not come in this time."""
        ...

    def partials(self) -> PartialState:
        """States of all queries, over the pages of this work only, on the host. Once it is done.

        Raises:
            Exception: the device's own, in place of an answer.
        """
        ...

    def withdraw(self, timeout_s: float) -> bool:
        """Take the work back. True: the device does not touch the store for it any more, and what
        it answers is nobody's. It may still read pages."""
        ...


class ContextDevice(Protocol):
    """A device that attends. Any thread may call; any number of tickets may be in flight."""

    name: str

    def submit(self, work: ContextWork) -> Ticket:
        """Hand in work. Never blocks."""
        ...

    def reclaim(self, slots: NDArray[np.int64]) -> None:
        """These slots get other bytes: what the device keeps of them is void."""
        ...

    def statistics(self) -> Mapping[str, float]:
        """Counts since the start: ``tickets``, ``wait_seconds``, ``attend_seconds``."""
        ...

    def close(self, timeout_s: float) -> bool:
        """End its threads. False: one still runs, and may read pages."""
        ...
