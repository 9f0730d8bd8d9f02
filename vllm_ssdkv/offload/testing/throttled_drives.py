"""Twin of drives that attend side by side: each to its part of the pages, in its own time.

Block i of a context lies on drive i mod n, as slots that are taken in turn lie on lanes. The
wrapped device brings every page once and attends to it for the drive that has it, into that drive's
own state; the states are merged at the end. Work is done at once; only the report waits for the
drive that its :class:`DriveTiming` makes the last one.
"""

from __future__ import annotations

import dataclasses
import math
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_ssdkv.kernels.dense import BlockAttention, select_kernels
from vllm_ssdkv.kernels.operands.block_layout import (
    BlockLayout,
    BlockSource,
    IntArray,
    PartialState,
    Rows,
    on_host,
)
from vllm_ssdkv.kernels.operands.page_list import PageList
from vllm_ssdkv.kernels.paged import PageAttention
from vllm_ssdkv.kernels.step_clock import StepClock
from vllm_ssdkv.offload.protocol import (
    ContextDevice,
    ContextKernels,
    ContextPages,
    ContextWork,
    DeviceStatistics,
)
from vllm_ssdkv.offload.testing.drive_timing import DriveTiming
from vllm_ssdkv.offload.testing.throttled import ThrottledTicket
from vllm_ssdkv.offload.testing.wrapped import WrappedDevice
from vllm_ssdkv.offload.tickets import empty_state


class _Drives:
    """States of one piece of work on every drive, and pages of flash that it read there.

    Attributes:
        states: Of each drive.
        pages: Of flash, by drive.
    """

    def __init__(self, query: torch.Tensor, drives: int, timing: DriveTiming):
        self.states = [empty_state(query) for _ in range(drives)]
        self.pages = [0] * drives
        self._timing = timing

    def shares(self, position: IntArray, layout: BlockLayout) -> list[NDArray[np.bool_]]:
        """Masks, by drive, of the positions in a request whose blocks it has."""
        block = on_host(position, np.int64) // layout.block_tokens
        return [block % len(self.states) == drive for drive in range(len(self.states))]

    def count(self, drive: int, address: IntArray, pages: int, layout: BlockLayout) -> None:
        """Count what lies at some addresses, each distinct one once: ``pages`` of KV."""
        each = pages * self._timing.flash_pages(layout.page_payload_bytes)
        self.pages[drive] += len(np.unique(on_host(address, np.uint64))) * each


def _kept(begin: IntArray, end: IntArray, mine: NDArray[np.bool_]) -> tuple[IntArray, IntArray]:
    """Begin and end of ranges among those entries only that are ``mine``."""
    edges = np.concatenate([[0], np.cumsum(mine)]).astype(np.int32)
    return edges[on_host(begin, np.int32)], edges[on_host(end, np.int32)]


class _DenseKernels:
    """Kernels that attend to each block for the drive that has it."""

    def __init__(self, inner: BlockAttention, drives: _Drives):
        self._inner, self._drives = inner, drives

    def attend(
        self,
        query: torch.Tensor,
        state: PartialState,
        rows: Rows,
        source: BlockSource,
        layout: BlockLayout,
        scale: float,
        sliding_window: int | None = None,
    ) -> None:
        """See ``BlockAttention``; ``state`` stays as it is, the drives' states change."""
        del state
        shares = self._drives.shares(source.position, layout)
        base, position = on_host(source.base, np.uint64), on_host(source.position, np.int64)
        for drive, mine in enumerate(shares):
            begin, end = _kept(rows.block_begin, rows.block_end, mine)
            part = Rows(
                rows.query_begin,
                rows.query_count,
                rows.first_position,
                begin,
                end,
                rows.max_queries,
                rows.max_blocks,
            )
            here = BlockSource(source.tensor, base[mine], position[mine])
            self._inner.attend(
                query, self._drives.states[drive], part, here, layout, scale, sliding_window
            )
            self._drives.count(drive, here.base, layout.kv_heads * layout.groups, layout)


class _PageKernels:
    """The same for pages."""

    def __init__(self, inner: PageAttention, drives: _Drives):
        self._inner, self._drives = inner, drives

    def attend_pages(
        self,
        query: torch.Tensor,
        state: PartialState,
        pages: PageList,
        layout: BlockLayout,
        scale: float,
    ) -> None:
        """See ``PageAttention``; ``state`` stays as it is, the drives' states change."""
        del state
        shares = self._drives.shares(pages.position, layout)
        address, position = on_host(pages.address, np.uint64), on_host(pages.position, np.int64)
        for drive, mine in enumerate(shares):
            begin, end = _kept(pages.begin, pages.end, mine)
            mask = pages.token_mask
            part = PageList(
                pages.query_token,
                pages.query_position,
                begin,
                end,
                address[mine],
                position[mine],
                None if mask is None else on_host(mask, np.uint8)[mine],
            )
            self._inner.attend_pages(query, self._drives.states[drive], part, layout, scale)
            self._drives.count(drive, part.address, 1, layout)


class _SpreadPages:
    """Pages of a piece of work, spread over the drives. See ``ContextPages``.

    Attributes:
        due: When the last drive has attended, by the model; long ago before the work is done.
    """

    def __init__(self, pages: ContextPages, device: ThrottledDrives, begun: float):
        self._pages, self._device, self._begun = pages, device, begun
        self.due = -math.inf

    @property
    def slots(self) -> NDArray[np.int64]:
        """See ``ContextPages``."""
        return self._pages.slots

    @property
    def nbytes(self) -> int:
        """See ``ContextPages``."""
        return self._pages.nbytes

    @property
    def selection_bytes(self) -> int:
        """See ``ContextPages``."""
        return self._pages.selection_bytes

    def fold_by(
        self,
        kernels: ContextKernels,
        query: torch.Tensor,
        state: PartialState,
        scale: float,
        clock: StepClock,
        lease: AbstractContextManager[None],
    ) -> None:
        """See ``ContextPages``."""
        drives = _Drives(query, self._device.drives, self._device.timing)
        spread = ContextKernels(
            _DenseKernels(kernels.dense, drives), _PageKernels(kernels.paged, drives)
        )
        self._pages.fold_by(spread, query, state, scale, clock, lease)
        merge = select_kernels(state.acc.device).merge
        for one in drives.states:
            merge(state, one)
        self.due = self._device.occupy(self._begun, drives.pages)

    def restart(self) -> None:
        """See ``ContextPages``."""
        self._pages.restart()


class ThrottledDrives(WrappedDevice):
    """See ``ContextDevice``; wraps a device of this process, which attends by its kernels.

    Args:
        inner: Device that attends; closed with this one.
        timing: Of each drive.
        drives: Number of them.
        dilation: Factor by which they are slower than that.
        clock: Monotonic seconds.

    Attributes:
        timing, drives: As given.

    Example:
        device = ThrottledDrives(HostDevice(1), DRIVES["instinfer"], drives=4, dilation=16)
    """

    def __init__(
        self,
        inner: ContextDevice,
        timing: DriveTiming,
        drives: int,
        dilation: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ):
        super().__init__(inner, f"{drives} drives({inner.name})")
        self.timing, self.drives = timing, drives
        self._dilation = dilation
        self._clock = clock
        self._free_at = [-math.inf] * drives
        self._lock = threading.Lock()
        self._late = 0

    def submit(self, work: ContextWork) -> ThrottledTicket:
        """See ``ContextDevice``."""
        pages = _SpreadPages(work.pages, self, self._clock())
        ticket = self._inner.submit(ContextWork(work.query, pages, work.scale))
        held = max(1, min(self.drives, len(work.pages.slots)))
        return ThrottledTicket(ticket, work.pages, lambda: pages.due, self._clock, held)

    def occupy(self, begun: float, pages: Sequence[int]) -> float:
        """Have drives attend to pages of flash, [drives], from then on: when all of them have."""
        with self._lock:
            due = begun
            for drive, count in enumerate(pages):
                if count:
                    busy = self._dilation * self.timing.attend_s(count)
                    self._free_at[drive] = max(begun, self._free_at[drive]) + busy
                    ended = self._free_at[drive] + self._dilation * self.timing.latency_s
                    due = max(due, ended)
            self._late += self._clock() > due
        return due

    def write(self, pages: int) -> None:
        """Have drives write so many pages of flash, dealt to all of them, before what comes."""
        busy = self._dilation * self.timing.write_s(-(-pages // self.drives))
        with self._lock:
            now = self._clock()
            self._free_at = [max(now, free) + busy for free in self._free_at]

    def statistics(self) -> DeviceStatistics:
        """See ``ContextDevice``; ``late`` where the wrapped device took longer than the model."""
        return dataclasses.replace(self._inner.statistics(), late=self._late)
