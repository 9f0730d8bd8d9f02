"""A card that computes: a runtime of XRT whose runs are those of the oracle of the contract.

``sparf`` is that of the HLS kernels. Everything goes through the inner runtime first, buffers and
runs too; XRT's no-op device computes nothing, so what the kernel would write is written here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.oracles.fpga_backend import NumpyBackend
from vllm_ssdkv.base.errors import FpgaListError
from vllm_ssdkv.fpga_offload.backend import AttendWork, Partials, SparfWork
from vllm_ssdkv.fpga_offload.csim import CsimBackend
from vllm_ssdkv.fpga_offload.description import (
    ATTEND,
    CHOICE,
    ENTRY,
    JOB,
    SPARF,
    SPARF_JOB,
    STATUS,
    VERSION,
    Flag,
    KernelShape,
    Status,
)
from vllm_ssdkv.fpga_offload.xrt.runtime import Argument, CardBuffer, Runtime


class ComputingCard:
    """See ``Runtime``.

    Attributes:
        version: That its kernels answer with.
        flips: Bits of page memory that are flipped before each run: byte and mask.
        runs: How many there were.
    """

    def __init__(self, inner: Runtime, shape: KernelShape, version: int = VERSION):
        self.inner, self.shape, self.version = inner, shape, version
        self.flips: list[tuple[int, int]] = []
        self.runs = 0

    def name(self) -> str:
        return self.inner.name()

    def buffer(self, kernel: str, argument: int, nbytes: int, *, peer: bool) -> CardBuffer:
        return self.inner.buffer(kernel, argument, nbytes, peer=peer)

    def release(self, buffer: CardBuffer) -> None:
        self.inner.release(buffer)

    def sync(self, buffer: CardBuffer, nbytes: int, *, to_card: bool) -> None:
        self.inner.sync(buffer, nbytes, to_card=to_card)

    def close(self) -> None:
        self.inner.close()

    def run(self, kernel: str, arguments: Sequence[Argument], timeout_s: float) -> int:
        state = self.inner.run(kernel, arguments, timeout_s)
        self.runs += 1
        described = ATTEND if kernel == ATTEND.name else SPARF
        named = dict(zip((one.name for one in described.arguments), arguments, strict=True))
        status = np.zeros(1, STATUS.dtype)
        status["version"] = self.version
        try:
            if described is ATTEND:
                self._attend(named)
            else:
                self._sparf(named)
        except FpgaListError:
            status["code"] = Status.JOB_ENTRIES
        _bytes(named, "status")[: STATUS.nbytes] = status.view(np.uint8)
        return state

    def _attend(self, named: dict[str, Argument]) -> None:
        pages = _bytes(named, "pages")
        for at, mask in self.flips:
            pages[at] ^= mask
        room = _aligned(pages)
        entries = _records(named, "entries", ENTRY.dtype, _number(named, "entry_count"))
        entries["address"] += np.uint64(room.ctypes.data)
        jobs = _records(named, "jobs", JOB.dtype, _number(named, "job_count"))
        flags = Flag(_number(named, "flags"))
        log2e = np.array(_number(named, "scale_log2e"), np.uint32).view(np.float32)
        work = AttendWork(
            self._queries(named, jobs),
            entries,
            jobs,
            float(log2e) * np.log(2),
            partials=int(jobs["out"].max()) + 1,
            v_offset=_number(named, "v_offset"),
            mask=Flag.MASK in flags,
            checksum=Flag.CHECKSUM in flags,
        )
        self._write(named, jobs, NumpyBackend(self.shape).attend(work))

    def _sparf(self, named: dict[str, Argument]) -> None:
        pages, channel_pages = (_aligned(_bytes(named, one)) for one in ("pages", "channel_pages"))
        entries = _records(named, "entries", ENTRY.dtype, _number(named, "entry_count"))
        entries["address"] += np.uint64(pages.ctypes.data)
        jobs = _records(named, "jobs", SPARF_JOB.dtype, _number(named, "job_count"))
        channels = _records(named, "channels", np.dtype(np.uint64), _number(named, "channel_count"))
        flags = Flag(_number(named, "flags"))
        partials = int(jobs["out"].max()) + 1
        size = self.shape.head_size
        means = _records(named, "mean_value", np.dtype(np.float32), partials * size)
        work = SparfWork(
            self._queries(named, jobs),
            entries,
            jobs,
            channels + np.uint64(channel_pages.ctypes.data),
            float(np.array(_number(named, "scale"), np.uint32).view(np.float32)),
            partials,
            _number(named, "block_tokens"),
            _number(named, "page_tokens"),
            _number(named, "keep_channels"),
            channel_group=_number(named, "channel_group"),
            sinks=_number(named, "sinks"),
            by_page=Flag.BY_PAGE in flags,
            attend=Flag.ATTEND in flags,
            window=Flag.WINDOW in flags,
            mean_value=means.reshape(partials, size) if Flag.MEAN_VALUE in flags else None,
            v_offset=_number(named, "v_offset"),
        )
        backend = CsimBackend(self.shape)
        found = backend.sparf(work)
        assert backend.close(10)
        choices = np.zeros(partials, CHOICE.dtype)
        choices["alpha"][:, : self.shape.group] = found.alpha
        choices["lse"][:, : self.shape.group] = found.lse
        for field in ("window_mass", "tokens", "pages"):
            choices[field] = getattr(found, field)
        _bytes(named, "masks")[: found.masks.nbytes] = found.masks.view(np.uint8)
        _bytes(named, "choices")[: choices.nbytes] = choices.view(np.uint8)
        if found.partials is not None:
            self._write(named, jobs, found.partials)

    def _queries(self, named: dict[str, Argument], jobs: NDArray[Any]) -> NDArray[np.uint16]:
        """All that the jobs name, [n, G, d]."""
        group, size = self.shape.group, self.shape.head_size
        count = int(jobs["query"].max()) + 1
        found = _records(named, "q", np.dtype(np.uint16), count * group * size)
        return found.reshape(count, group, size)

    def _write(self, named: dict[str, Argument], jobs: NDArray[Any], found: Partials) -> None:
        out, size = _bytes(named, "out"), self.shape.partial_bytes
        m = np.ceil(found.m / np.log(2))
        with np.errstate(invalid="ignore"):
            factor = np.nan_to_num(np.exp(found.m - m * np.log(2)))
        for job in jobs["out"].tolist():
            record = np.zeros(size // 4, np.float32)
            each = self.shape.group * self.shape.head_size
            record[:each] = (found.acc[job] * factor[job][:, None]).ravel()
            record[each : each + self.shape.group] = m[job]
            record[each + 8 : each + 8 + self.shape.group] = found.l[job] * factor[job]
            out[job * size : (job + 1) * size] = record.view(np.uint8)
        if found.digests is not None:
            _bytes(named, "digests")[: found.digests.nbytes] = found.digests.view(np.uint8)


def _aligned(source: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """A copy as pages must lie: the no-op device's memory is not aligned."""
    room = np.zeros(len(source) + 64, np.uint8)
    begin = -room.ctypes.data % 64
    room[begin : begin + len(source)] = source
    return room[begin : begin + len(source)]


def _bytes(named: dict[str, Argument], name: str) -> NDArray[np.uint8]:
    argument = named[name]
    assert isinstance(argument, CardBuffer)
    return argument.mapped


def _number(named: dict[str, Argument], name: str) -> int:
    argument = named[name]
    assert isinstance(argument, tuple)
    return argument[0]


def _records(
    named: dict[str, Argument], name: str, dtype: np.dtype[Any], count: int
) -> NDArray[Any]:
    return _bytes(named, name)[: count * dtype.itemsize].copy().view(dtype)
