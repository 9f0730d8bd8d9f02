"""Attention by the kernels of an FPGA, or by a simulation of them.

Pages come into memory of the host by the step's own stream, which has checked and decrypted them.
Blocks and chosen pages are cut into lists of the kernel's pages, the kernel answers with partial
states, and these merge into the state by their log-sum-exps. Any model's groups of query heads fit:
the rest of a kernel's group is filled up with zeros.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Iterator
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_ssdkv.base.errors import FpgaDeadlineError, FpgaError, StoreError, WrongPagesError
from vllm_ssdkv.base.metrics import Counters
from vllm_ssdkv.config.offload import OffloadConfig
from vllm_ssdkv.fpga_offload.backend import (
    AttendWork,
    Backend,
    Limits,
    Partials,
    SparfResult,
    SparfWork,
)
from vllm_ssdkv.fpga_offload.description import (
    DTYPES,
    ENTRY,
    GROUPS,
    HEAD_SIZES,
    JOB,
    MAX_GROUP,
    KernelShape,
)
from vllm_ssdkv.kernels.dense import select_kernels
from vllm_ssdkv.kernels.operands.block_layout import BlockLayout, BlockSource, PartialState, Rows
from vllm_ssdkv.kernels.operands.page_list import PageList
from vllm_ssdkv.offload.fpga_lists import (
    JobLists,
    jobs_of_blocks,
    jobs_of_pages,
    query_units,
    v_offset,
)
from vllm_ssdkv.offload.kernel_device import KernelDevice
from vllm_ssdkv.offload.protocol import ContextKernels, DeviceCaps, DeviceSetup
from vllm_ssdkv.sparse.selectors.fpga_sparf import FpgaChoice, FpgaSparfSelector
from vllm_ssdkv.sparse.selectors.sparf import SparfSelector
from vllm_ssdkv.store.io.engines.open import open_engine
from vllm_ssdkv.store.io.engines.protocol import IoEngine
from vllm_ssdkv.store.memory.arena import BorrowedArena
from vllm_ssdkv.store.read.peer_path import ReadPath

logger = logging.getLogger(__name__)


_LISTED = " and ".join(DTYPES)


def kernel_shape(
    query_heads: int, kv_heads: int, head_size: int, dtype: torch.dtype
) -> KernelShape:
    """Kernels for a model's heads: the smallest group that has room for a KV head's, or several of
    the largest.

    Raises:
        ValueError: see :meth:`FpgaDevice.problem`.
    """
    each = query_heads // kv_heads
    group = next((one for one in GROUPS if one >= each), MAX_GROUP)
    name: Literal["float16", "bfloat16"]
    name = "bfloat16" if dtype == torch.bfloat16 else "float16"
    problem = FpgaDevice.problem(head_size, dtype)
    if problem:
        raise ValueError(problem)
    return KernelShape(head_size, group, name)


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class SharedBackend:
    """A backend for several threads, one call at a time. See ``Backend``.

    Example:
        backend = SharedBackend(CsimBackend(shape), deadline_s=60)
    """

    def __init__(self, inner: Backend, deadline_s: float):
        """``deadline_s``: seconds that a call waits for those before it."""
        self.name, self.shape, self.limits = inner.name, inner.shape, inner.limits
        self.address_space = inner.address_space
        self._inner = inner
        self._deadline_s = deadline_s
        self._lock = threading.Lock()

    def attend(self, work: AttendWork) -> Partials:
        """See ``Backend``.

        Raises:
            FpgaDeadlineError: the call before it does not end.
        """
        self._enter()
        try:
            return self._inner.attend(work)
        finally:
            self._lock.release()

    def sparf(self, work: SparfWork) -> SparfResult:
        """As :meth:`attend`."""
        self._enter()
        try:
            return self._inner.sparf(work)
        finally:
            self._lock.release()

    def peer_memory(self, nbytes: int) -> NDArray[np.uint8]:
        """See ``Backend``."""
        return self._inner.peer_memory(nbytes)

    def close(self, timeout_s: float) -> bool:
        """See ``Backend``."""
        return self._inner.close(timeout_s)

    def _enter(self) -> None:
        if not self._lock.acquire(timeout=self._deadline_s):
            raise FpgaDeadlineError(
                f"{self.name}: a call of a kernel has not ended in {self._deadline_s:g} s "
                "(offload.kernel_deadline)"
            )


class FpgaKernels:
    """Kernels of a backend, for pages in memory of the host. See ``BlockAttention`` and
    ``PageAttention``. A call that fails has left the state as it was.

    Example:
        kernels = FpgaKernels(backend, Counters())
        kernels.attend(query, state, rows, source, layout, scale)
    """

    def __init__(self, backend: Backend, counters: Counters):
        """``counters``: of the rank."""
        self._backend = backend
        self._counters = counters
        self._merge = select_kernels(torch.device("cpu")).merge

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
        """See ``BlockAttention``; blocks at absolute addresses.

        Raises:
            FpgaError: the backend's, whose text names what is broken.
            WrongPagesError: the blocks have digests, and the kernel found others.
        """
        if sliding_window is not None:
            raise ValueError("layers with a sliding window have no context for an FPGA")
        self._check(query, state, layout)
        self._fold(query, state, jobs_of_blocks(rows, source, layout), layout, scale)

    def attend_pages(
        self,
        query: torch.Tensor,
        state: PartialState,
        pages: PageList,
        layout: BlockLayout,
        scale: float,
    ) -> None:
        """See ``PageAttention``; tokens that are not attended to are the kernel's masks.

        Raises:
            FpgaError: the backend's, whose text names what is broken.
        """
        self._check(query, state, layout)
        self._fold(query, state, jobs_of_pages(pages, layout), layout, scale)

    def _check(self, query: torch.Tensor, state: PartialState, layout: BlockLayout) -> None:
        state.check(tuple(query.shape), query.device)
        shape = self._backend.shape
        kinds = {str(one.dtype).removeprefix("torch.") for one in (query, layout)}
        if kinds != {shape.dtype} or layout.head_size != shape.head_size or not query.is_cpu:
            raise ValueError(f"a query of {query.dtype} and {layout} do not fit kernels of {shape}")

    def _fold(
        self,
        query: torch.Tensor,
        state: PartialState,
        lists: JobLists,
        layout: BlockLayout,
        scale: float,
    ) -> None:
        backend = self._backend
        units = query_units(query, layout.kv_heads, backend.shape.group)
        queries, entries = units.reshape(-1, *units.shape[3:]), packed_entries(lists)
        wanted = lists.entries.digest
        parts: list[PartialState] = []
        for jobs in calls_of(lists, layout.kv_heads, units.shape[2], backend.limits):
            partials = backend.attend(
                AttendWork(
                    queries,
                    entries,
                    jobs,
                    scale,
                    partials=len(jobs),
                    v_offset=v_offset(layout),
                    mask=lists.masked,
                    checksum=wanted is not None,
                )
            )
            self._counters.add("offload_kernel_calls", kernel="attend")
            if wanted is not None:
                self._compare(wanted, partials, jobs)
            parts.append(part_of(partials, jobs, query.shape, units.shape, layout.kv_heads))
        for part in parts:
            self._merge(state, part)

    def _compare(
        self, wanted: NDArray[np.uint64], partials: Partials, jobs: NDArray[np.void]
    ) -> None:
        """Compare the digests that the kernel made of what these jobs read.

        Raises:
            WrongPagesError: a page is another one.
        """
        if partials.digests is None:
            raise FpgaError(f"{self._backend.name}: the kernel has made no digests")
        read = np.zeros(len(wanted), np.bool_)
        for first, count in zip(jobs["first"].tolist(), jobs["entries"].tolist(), strict=True):
            read[first : first + count] = True
        wrong = int(np.count_nonzero(read & (partials.digests != wanted)))
        self._counters.add("offload_peer_pages", int(np.count_nonzero(read)) - wrong, found="right")
        if wrong:
            self._counters.add("offload_peer_pages", wrong, found="wrong")
            raise WrongPagesError(f"{wrong} of {len(wanted)} pages are not what the store wrote")


def packed_entries(lists: JobLists) -> NDArray[np.void]:
    """Entries as the kernel reads them."""
    packed = np.zeros(len(lists.entries.address), ENTRY.dtype)
    packed["address"] = lists.entries.address
    packed["tokens"] = lists.entries.tokens
    packed["mask"] = lists.entries.mask
    return packed


def calls_of(
    lists: JobLists, kv_heads: int, units: int, limits: Limits
) -> Iterator[NDArray[np.void]]:
    """Jobs of each call: lists longer than the limit are cut, and the parts of one come in
    different calls, so that no call has two jobs of the same queries."""
    longest = int((lists.end - lists.begin).max(initial=0))
    for first in range(0, longest, limits.job_entries):
        begin = lists.begin + first
        count = np.minimum(lists.end - begin, limits.job_entries)
        left = np.flatnonzero(count > 0)
        query = (lists.token[left] * kv_heads + lists.head[left]) * units
        jobs = np.zeros(len(left) * units, JOB.dtype)
        jobs["first"] = np.repeat(begin[left], units)
        jobs["entries"] = np.repeat(count[left], units)
        jobs["query"] = (query[:, None] + np.arange(units)).ravel()
        for start in range(0, len(jobs), limits.jobs):
            call = jobs[start : start + limits.jobs].copy()
            call["out"] = np.arange(len(call))
            yield call


def part_of(
    partials: Partials,
    jobs: NDArray[np.void],
    shape: torch.Size,
    units: tuple[int, ...],
    kv_heads: int,
) -> PartialState:
    """State of all queries over what the jobs attended to. ``units`` [T, kv_heads, units, G, D]."""
    tokens, heads, head_size = shape
    each = heads // kv_heads
    m = np.full((tokens * kv_heads * units[2], units[3]), -np.inf, np.float32)
    total = np.zeros_like(m)
    acc = np.zeros((*m.shape, head_size), np.float32)
    place = jobs["query"].astype(np.int64)
    m[place], total[place], acc[place] = partials.m, partials.l, partials.acc

    def of_heads(values: NDArray[np.float32]) -> torch.Tensor:
        behind = values.shape[2:]
        by_head = values.reshape(tokens, kv_heads, -1, *behind)[:, :, :each]
        return torch.from_numpy(by_head.reshape(tokens, heads, *behind).copy())

    return PartialState(of_heads(m), of_heads(total), of_heads(acc))


class FpgaDevice(KernelDevice):
    """See ``ContextDevice``: a thread that brings pages, and kernels of an FPGA that attend.

    Example:
        device = FpgaDevice(backend, Counters())
        ticket = device.submit(ContextWork(query, pages, scale))
    """

    def __init__(self, backend: Backend, counters: Counters, kernel_deadline_s: float = 0.0):
        """``backend`` is closed with the device; ``kernel_deadline_s``: of a call of a kernel."""
        self.backend = backend
        self.caps = DeviceCaps(chooses=True, silent_s=kernel_deadline_s)
        count = functools.partial(counters.add, "offload_kernel_calls", kernel="sparf")
        self.choice = FpgaChoice(backend, count)
        self._engine: IoEngine | None = None
        """Reads into the memory of the FPGA."""
        kernels = FpgaKernels(backend, counters)
        super().__init__(f"fpga({backend.name})", ContextKernels(kernels, kernels))

    @classmethod
    def open(cls, setup: DeviceSetup) -> FpgaDevice:
        """See ``ContextDeviceClass``.

        Raises:
            FpgaError: there is no such backend here, or its kernels do not load; the text says why.
        """
        options, layout = setup.options, setup.layout
        if setup.config.encryption is not None:
            logger.info(
                "ssdkv: offload: the store is encrypted: pages are decrypted in memory of the host "
                "before the FPGA gets them"
            )
        shape = kernel_shape(setup.query_heads, layout.kv_heads, layout.head_size, layout.dtype)
        backend = open_backend(options, shape, setup.rank)
        device = cls(backend, setup.counters, options.kernel_deadline)
        if options.peer:
            device.peer = device._peer_path(setup)
        return device

    @classmethod
    def problem(cls, head_size: int, dtype: torch.dtype) -> str:
        """See ``ContextDeviceClass``. Any group of query heads fits."""
        if head_size not in HEAD_SIZES:
            sizes = ", ".join(map(str, HEAD_SIZES))
            return f"the model's heads have {head_size} channels, and the FPGA kernels have {sizes}"
        if _dtype_name(dtype) not in DTYPES:
            return f"the model computes in {_dtype_name(dtype)}, the FPGA kernels in {_LISTED}"
        return ""

    def selector(self, inner: SparfSelector) -> FpgaSparfSelector:
        """See ``ContextDevice``."""
        return FpgaSparfSelector(inner, self.choice)

    def close(self, timeout_s: float) -> bool:
        """See ``ContextDevice``. Reads into the memory of the FPGA end before it is given back."""
        ended = self._engine is None or self._engine.close(timeout_s)
        return ended and super().close(timeout_s) and self.backend.close(timeout_s)

    def _peer_path(self, setup: DeviceSetup) -> ReadPath | None:
        """The way of pages into the FPGA's memory; None where the drives cannot write there."""
        opened, options = setup.opened, setup.config.io.engine_options()
        pieces = opened.plan.staging_pieces
        try:
            nbytes = pieces * opened.files.geometry.layer_bytes
            memory = BorrowedArena(self.backend.peer_memory(nbytes))
            fds, paths = [one.fd for one in opened.devices], opened.files.health.paths
            engine = self._engine = open_engine(options, fds, paths[: len(fds)], memory)
            return ReadPath.to_device(opened.files, engine, len(fds), memory, pieces)
        except (FpgaError, StoreError, ValueError) as error:
            logger.warning(
                "ssdkv: offload: drives cannot write into the memory of %s: %s; pages come through "
                "the host's memory",
                self.backend.name,
                error,
            )
            return None


def open_backend(options: OffloadConfig, shape: KernelShape, rank: int) -> SharedBackend:
    """Open the backend that the options ask for; none stands in for another.

    Args:
        options: Of kind "fpga".
        shape: Of the model's kernels.
        rank: Of the worker: each has its own card.

    Raises:
        FpgaError: there is no such backend here, or its kernels do not load; the text says why.
    """
    backend: Backend
    if options.backend == "csim":
        from vllm_ssdkv.fpga_offload.csim import CsimBackend

        backend = CsimBackend(shape)
    elif options.backend == "rtlsim":
        from vllm_ssdkv.fpga_offload.rtlsim import RtlsimBackend

        backend = RtlsimBackend(shape)
    else:
        from vllm_ssdkv.fpga_offload.xrt.backend import XrtBackend

        if options.xclbin is None:
            raise ValueError("the options have checked that there is an xclbin")
        deadline_s = options.kernel_deadline
        backend = XrtBackend.open(options.xclbin, options.card + rank, shape, deadline_s)
    logger.info("ssdkv: offload: the FPGA is %s, kernels of %s", backend.name, shape)
    return SharedBackend(backend, options.kernel_deadline)
