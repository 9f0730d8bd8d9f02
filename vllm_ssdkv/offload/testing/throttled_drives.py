"""Twin of drives that attend side by side: each to its part of the pages, in its own time.

Block i of a context lies on drive i mod n, as slots that are taken in turn lie on lanes, and there
on the channels that the flash's address map names. The wrapped device brings every page once and
attends to it for the drive that has it, into that drive's own state; the states are merged at the
end. Work is done at once; only the report waits for the drive that its :class:`DriveTiming` makes
the last one. Slots that get other bytes are erased while their drive is idle.
"""

from __future__ import annotations

import dataclasses
import math
import threading
import time
from collections.abc import Callable
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
from vllm_ssdkv.offload.testing.flash import IdleErasure
from vllm_ssdkv.offload.testing.throttled import ThrottledTicket
from vllm_ssdkv.offload.testing.wrapped import WrappedDevice
from vllm_ssdkv.offload.tickets import empty_state


class _Drives:
    """States of one piece of work on every drive, and pages of flash that it read there.

    Attributes:
        states: Of each drive.
        pages: Pages of flash, [drives, channels].
    """

    def __init__(self, query: torch.Tensor, drives: int, timing: DriveTiming):
        self.states = [empty_state(query) for _ in range(drives)]
        self.pages = np.zeros((drives, timing.flash.channels), np.int64)
        self._timing = timing

    def shares(self, position: IntArray, layout: BlockLayout) -> list[NDArray[np.bool_]]:
        """Masks, by drive, of the positions in a request whose blocks it has."""
        block = on_host(position, np.int64) // layout.block_tokens
        return [block % len(self.states) == drive for drive in range(len(self.states))]

    def count(self, drive: int, position: IntArray, head: IntArray, layout: BlockLayout) -> None:
        """Count pages of KV, [P], on the channels that have them."""
        block, within = np.divmod(on_host(position, np.int64), layout.block_tokens)
        group = block // len(self.states) * layout.groups + within // layout.page_tokens
        # K and V are pages of flash of their own, and so are parts of longer ones.
        each = self._timing.flash_pages(layout.page_payload_bytes)
        stream = on_host(head, np.int64)[:, None] * each + np.arange(each)
        channel = self._timing.flash.channel(group[:, None], stream)
        self.pages[drive] += np.bincount(channel.ravel(), minlength=self.pages.shape[1])


def _kept(begin: IntArray, end: IntArray, mine: NDArray[np.bool_]) -> tuple[IntArray, IntArray]:
    """Begin and end of ranges among those entries only that are ``mine``."""
    edges = np.concatenate([[0], np.cumsum(mine)]).astype(np.int32)
    return edges[on_host(begin, np.int32)], edges[on_host(end, np.int32)]


def _once(address: IntArray) -> NDArray[np.int64]:
    """Index of each distinct address: rows that share a page have it read once."""
    return np.unique(on_host(address, np.uint64), return_index=True)[1].astype(np.int64)


def _pages_of_blocks(
    blocks: BlockSource, layout: BlockLayout
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Position and KV head of every page of whole blocks."""
    head, group = np.divmod(np.arange(layout.kv_heads * layout.groups), layout.groups)
    first = on_host(blocks.position, np.int64)[_once(blocks.base), None]
    position = first + group * layout.page_tokens
    return position.ravel(), np.broadcast_to(head, position.shape).ravel()


def _heads_of_pages(pages: PageList, layout: BlockLayout) -> NDArray[np.int64]:
    """KV head of each page: lists are by row and head."""
    _, _, begin, end, _ = pages.on_host()
    head = np.zeros(len(pages.address), np.int64)
    for number, (first, last) in enumerate(zip(begin, end, strict=True)):
        head[first:last] = number % layout.kv_heads
    return head


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
            self._drives.count(drive, *_pages_of_blocks(here, layout), layout)


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
        head = _heads_of_pages(pages, layout)
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
            once = _once(part.address)
            self._drives.count(drive, position[mine][once], head[mine][once], layout)


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
        slot_bytes: Bytes of a slot, which are erased when it gets other bytes.

    Attributes:
        timing, drives: As given.
        erasures: Blocks of each drive that wait to be erased.

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
        slot_bytes: int = 0,
    ):
        super().__init__(inner, f"{drives} drives({inner.name})")
        self.timing, self.drives = timing, drives
        self.erasures = [IdleErasure(timing.flash) for _ in range(drives)]
        self._dilation = dilation
        self._clock = clock
        self._slot_bytes = slot_bytes
        self._free_at = [-math.inf] * drives
        self._lock = threading.Lock()
        self._late = 0

    def submit(self, work: ContextWork) -> ThrottledTicket:
        """See ``ContextDevice``."""
        pages = _SpreadPages(work.pages, self, self._clock())
        ticket = self._inner.submit(ContextWork(work.query, pages, work.scale))
        held = max(1, min(self.drives, len(work.pages.slots)))
        return ThrottledTicket(ticket, work.pages, lambda: pages.due, self._clock, held)

    def occupy(self, begun: float, pages: NDArray[np.int64]) -> float:
        """Have drives attend to pages of flash, [drives, channels], from then on: when all of them
        have."""
        with self._lock:
            due = begun
            for drive, by_channel in enumerate(pages):
                if by_channel.any():
                    busy = self._dilation * self.timing.attend_pages_s(by_channel)
                    self._free_at[drive] = self._ready(drive, begun) + busy
                    ended = self._free_at[drive] + self._dilation * self.timing.latency_s
                    due = max(due, ended)
            self._late += self._clock() > due
        return due

    def write(self, pages: int) -> None:
        """Have drives write so many pages of flash, dealt to all of them, before what comes."""
        busy = self._dilation * self.timing.write_s(-(-pages // self.drives))
        with self._lock:
            now = self._clock()
            self._free_at = [self._ready(drive, now) + busy for drive in range(self.drives)]

    def reclaim(self, slots: NDArray[np.int64]) -> None:
        """See ``ContextDevice``. Whole slots are erased, in idle time that begins now."""
        super().reclaim(slots)
        with self._lock:
            now = self._clock()
            for drive, erasure in enumerate(self.erasures):
                self._free_at[drive] = self._ready(drive, now)
                erasure.drop(len(slots) * self._slot_bytes / self.drives)

    def _ready(self, drive: int, begun: float) -> float:
        """Time at which a drive can begin. It erased while it was idle, and ends the last erase."""
        free, erasure = self._free_at[drive], self.erasures[drive]
        if erasure.stale >= 1 and begun > free:
            free += self._dilation * erasure.idle((begun - free) / self._dilation)
        return max(begun, free)

    def statistics(self) -> DeviceStatistics:
        """See ``ContextDevice``; ``late`` where the wrapped device took longer than the model."""
        return dataclasses.replace(self._inner.statistics(), late=self._late)
