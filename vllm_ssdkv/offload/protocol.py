"""Devices that attend to contexts where these lie: only queries and partial states travel.

A device is told a layer's queries and pages, and answers later with partial states over the same
queries. States over disjoint pages merge by their log-sum-exps, so any number of devices may hold
parts of one context.

``docs/internals/offload.md`` has who waits for whom, and what becomes of work when a device fails.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_ssdkv.base.errors import WithdrawnError
from vllm_ssdkv.kernels.dense import BlockAttention
from vllm_ssdkv.kernels.operands.block_layout import BlockLayout, PartialState
from vllm_ssdkv.kernels.paged import PageAttention
from vllm_ssdkv.kernels.step_clock import StepClock

if TYPE_CHECKING:
    from vllm_ssdkv.base.metrics import Counters
    from vllm_ssdkv.config.engine import SSDKVConfig
    from vllm_ssdkv.config.offload import OffloadConfig
    from vllm_ssdkv.node.client.node_drives import NodeDrives
    from vllm_ssdkv.sparse.protocol import Selector
    from vllm_ssdkv.sparse.selectors.sparf import SparfSelector
    from vllm_ssdkv.store.integrity.checksum_table import ChecksumTable
    from vllm_ssdkv.store.open_store import OpenStore
    from vllm_ssdkv.store.read.peer_path import ReadPath


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
class ContextKernels:
    """Kernels of one device that attend to pages in memory."""

    dense: BlockAttention
    paged: PageAttention


class Foldable(Protocol):
    """Pages that can be brought into memory, checked, and attended to."""

    def fold_by(
        self,
        kernels: ContextKernels,
        query: torch.Tensor,
        state: PartialState,
        scale: float,
        clock: StepClock,
        lease: AbstractContextManager[None],
    ) -> None:
        """Fold every page into ``state``, as pages arrive. Blocks for I/O, with its deadlines.

        The calling thread uses the store's tables within the ``lease`` only.

        Args:
            kernels: They run on the calling thread.
            query: Where the kernels read it, [T, Hq, D].
            state: Of these queries, beside them.
            scale: Of the logits.
            clock: Gets the time of waiting and attending.
            lease: See :class:`Lease`.

        Raises:
            WithdrawnError: the pages are somebody else's now.
        """
        ...

    def restart(self) -> None:
        """Have :meth:`fold_by` begin anew, after a call that was given up."""
        ...


class ContextPages(Foldable, Protocol):
    """Pages of one layer, with the rows that attend to them.

    A device in this process has them brought by :meth:`fold_by`. Another one resolves
    :attr:`slots` itself.
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


@dataclass(frozen=True, slots=True)
class ContextWork:
    """Work for a device: queries of one layer, and pages that they attend to.

    Attributes:
        query: [T, Hq, D], on the device that computes the model. Nobody writes to it.
        pages: What they attend to; they know the rows.
        scale: Of the logits.
        requests: Name of the request of each row of the step.
    """

    query: torch.Tensor
    pages: ContextPages
    scale: float
    requests: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class DeviceStatistics:
    """Counts of a device since its start, or of one ticket. They add up.

    Attributes:
        tickets: Pieces of work.
        query_bytes, selection_bytes, partial_bytes: To the device, and back.
        wait_s, attend_s: Seconds for which the device waited for pages, and attended.
        late: Pieces of work that took longer than a model of the device allows.
    """

    tickets: int = 0
    query_bytes: int = 0
    selection_bytes: int = 0
    partial_bytes: int = 0
    wait_s: float = 0.0
    attend_s: float = 0.0
    late: int = 0

    def __add__(self, other: DeviceStatistics) -> DeviceStatistics:
        """Counts of both."""
        return DeviceStatistics(
            self.tickets + other.tickets,
            self.query_bytes + other.query_bytes,
            self.selection_bytes + other.selection_bytes,
            self.partial_bytes + other.partial_bytes,
            self.wait_s + other.wait_s,
            self.attend_s + other.attend_s,
            self.late + other.late,
        )


class Ticket(Protocol):
    """Work that was handed to a device. Belongs to the thread that handed it in."""

    @property
    def own(self) -> Foldable | None:
        """Part of the work that the device leaves to that thread from the start."""
        ...

    @property
    def taken(self) -> Foldable:
        """The rest, which the device attends to."""
        ...

    @property
    def progress(self) -> int:
        """Number that grows while the device gets on."""
        ...

    @property
    def statistics(self) -> DeviceStatistics:
        """Counts of this work, once it is done."""
        ...

    def done(self) -> bool:
        """Check whether it has ended, well or not."""
        ...

    def wait(self, timeout_s: float) -> bool:
        """Wait for the end; False: it did not come in this time."""
        ...

    def partials(self) -> Sequence[PartialState]:
        """States on the host of all queries, over disjoint parts of what was :attr:`taken`. Once it
        is done.

        Raises:
            Exception: the device's own, in place of an answer.
        """
        ...

    def left(self) -> Foldable | None:
        """Part of what was :attr:`taken` that the states lack after all. Once it is done."""
        ...

    def withdraw(self, timeout_s: float) -> bool:
        """Take the work back. True: the device does not touch the store for it any more, and what
        it answers is nobody's. It may still read pages."""
        ...


@dataclass(frozen=True, slots=True)
class DeviceCaps:
    """Abilities of a device.

    Attributes:
        elsewhere: It has the bytes of all blocks without a frame, and attends to these; the step's
            thread attends to the others, and no share is measured. False: pages come by the step's
            stream, and a share of all blocks is the device's.
        max_tokens: Query tokens of a piece of work, at most; None: any number.
        chooses: It chooses pages by channels of K, see :meth:`ContextDevice.selector`.
        silent_s: Seconds beyond those of slow drives for which it may show no progress.
    """

    elsewhere: bool = False
    max_tokens: int | None = None
    chooses: bool = False
    silent_s: float = 0.0


@dataclass(frozen=True, slots=True)
class DeviceSetup:
    """Surroundings of a device that is opened.

    Attributes:
        config: The options.
        options: Of these, the group ``offload``.
        counters: Of the rank.
        rank: Of the worker.
        workers: Of the engine, which share the machine.
        layout: Of a block of a context, as the store has it.
        query_heads: Of the rank.
        opened: Files and memory of the rank.
        checksums: Digests of the pages in them.
        drives: Nodes that have the slots; None: the rank's own files have them.
    """

    config: SSDKVConfig
    options: OffloadConfig
    counters: Counters
    rank: int
    workers: int
    layout: BlockLayout
    query_heads: int
    opened: OpenStore
    checksums: ChecksumTable
    drives: NodeDrives | None


class ContextDevice(Protocol):
    """A device that attends. Any number of tickets may be in flight.

    Attributes:
        name: For the log.
        caps: Abilities, which never change.
        peer: Path of pages into the device's memory; None: they come through the host's.
    """

    name: str
    caps: DeviceCaps = DeviceCaps()
    peer: ReadPath | None = None

    @property
    def in_use(self) -> int:
        """Devices that can be had now; 0: steps do without."""
        return 1

    def submit(self, work: ContextWork) -> Ticket:
        """Hand in work. Does not wait for it."""
        ...

    def selector(self, inner: SparfSelector) -> Selector:
        """The device as who chooses in the place of ``inner``, with the same result, if its caps
        say that it can."""
        return inner

    def reclaim(self, slots: NDArray[np.int64]) -> None:
        """These slots get other bytes: what the device keeps of them is void."""
        del slots

    def end_step(self) -> None:
        """A step with contexts has ended."""
        return

    def statistics(self) -> DeviceStatistics:
        """Counts since the start."""
        ...

    def close(self, timeout_s: float) -> bool:
        """End its threads. False: one still runs, and may read pages."""
        ...


class ContextDeviceClass(ContextDevice, Protocol):
    """Class of a device that ``offload.kind`` can name: registered, or as ``module:Class``."""

    @classmethod
    def open(cls, setup: DeviceSetup) -> ContextDevice:
        """Open the device.

        Raises:
            SSDKVError: there is none here, or it does not work; the text says why.
        """
        ...

    @classmethod
    def problem(cls, head_size: int, dtype: torch.dtype) -> str:
        """Reason for the device not to serve such heads; empty if it does. Asked before the engine
        starts."""
        del head_size, dtype
        return ""
