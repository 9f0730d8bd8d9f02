"""A backend of the FPGA's contract in fp64 numpy: slow, obvious, and the measure of the others.

Pages are read at host addresses, as ``csim`` and ``rtlsim`` read them.
"""

from __future__ import annotations

import ctypes
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_ssdkv.base.checksum import checksum_pages
from vllm_ssdkv.fpga_offload.backend import (
    AttendWork,
    Limits,
    Partials,
    SparfResult,
    SparfWork,
    check_attend,
    check_status,
)
from vllm_ssdkv.fpga_offload.description import (
    ATTEND,
    BEAT_BYTES,
    PAGE_TOKENS,
    VERSION,
    KernelShape,
    Status,
)


class NumpyBackend:
    """See ``Backend``; ``attend`` only."""

    name = "numpy"
    address_space: Literal["host", "device"] = "host"

    def __init__(self, shape: KernelShape, limits: Limits | None = None):
        self.shape = shape
        self.limits = limits or Limits()
        self.calls: list[AttendWork] = []
        self.closed = False

    def attend(self, work: AttendWork) -> Partials:
        check_attend(work, self.shape, self.limits)
        self.calls.append(work)
        for code, index in _faults(work, self.limits):
            check_status(ATTEND, code, index, VERSION)
        group, head_size = self.shape.group, self.shape.head_size
        m = np.full((work.partials, group), -np.inf)
        total = np.zeros((work.partials, group))
        acc = np.zeros((work.partials, group, head_size))
        queries = self._floats(work.queries)
        for job in work.jobs:
            first, count = int(job["first"]), int(job["entries"])
            key, value = self._tokens(work, range(first, first + count))
            if not len(key):
                continue
            logits = queries[job["query"]] @ key.T * work.scale
            top = logits.max(axis=1)
            weights = np.exp(logits - top[:, None])
            m[job["out"]], total[job["out"]] = top, weights.sum(axis=1)
            acc[job["out"]] = weights @ value
        digests = self.digests(work) if work.checksum else None
        return Partials(
            acc.astype(np.float32), m.astype(np.float32), total.astype(np.float32), digests
        )

    def digests(self, work: AttendWork) -> NDArray[np.uint64]:
        if work.v_offset not in (None, self.shape.page_bytes // 2):
            raise ValueError("the oracle knows digests of whole pages only")
        return checksum_pages(np.ascontiguousarray(work.entries["address"]), self.shape.page_bytes)

    def sparf(self, work: SparfWork) -> SparfResult:
        raise NotImplementedError

    def peer_memory(self, nbytes: int) -> NDArray[np.uint8]:
        return np.zeros(nbytes, np.uint8)

    def close(self, timeout_s: float) -> bool:
        del timeout_s
        self.closed = True
        return True

    def _tokens(
        self, work: AttendWork, entries: range
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """K and V of all tokens that a job attends to, [tokens, d] each."""
        size, half = self.shape.head_size, self.shape.page_bytes // 2
        keys, values = [np.zeros((0, size))], [np.zeros((0, size))]
        for i in entries:
            entry = work.entries[i]
            seen = np.arange(PAGE_TOKENS) < entry["tokens"]
            if work.mask:
                seen &= (int(entry["mask"]) >> np.arange(PAGE_TOKENS)) & 1 == 1
            at = int(entry["address"])
            behind = half if work.v_offset is None else work.v_offset
            keys.append(self._read(at)[seen])
            values.append(self._read(at + behind)[seen])
        return np.concatenate(keys), np.concatenate(values)

    def _read(self, address: int) -> NDArray[np.float64]:
        raw = ctypes.string_at(address, self.shape.page_bytes // 2)
        return self._floats(np.frombuffer(raw, np.uint16)).reshape(PAGE_TOKENS, -1)

    def _floats(self, bits: NDArray[np.uint16]) -> NDArray[np.float64]:
        kind = torch.bfloat16 if self.shape.dtype == "bfloat16" else torch.float16
        tensor = torch.from_numpy(bits.astype(np.uint16).view(np.int16)).view(kind)
        found: NDArray[np.float64] = tensor.to(torch.float64).numpy()
        return found


def _faults(work: AttendWork, limits: Limits) -> list[tuple[int, int]]:
    """Status and index of what the kernel refuses."""
    found: list[tuple[int, int]] = []
    for i, job in enumerate(work.jobs):
        if int(job["first"]) + int(job["entries"]) > len(work.entries):
            found.append((Status.JOB_ENTRIES, i))
        if job["entries"] > limits.job_entries:
            found.append((Status.JOB_LENGTH, i))
    for i, entry in enumerate(work.entries):
        if entry["address"] == 0 or entry["address"] % BEAT_BYTES:
            found.append((Status.ENTRY_ADDRESS, i))
        if not 1 <= entry["tokens"] <= PAGE_TOKENS:
            found.append((Status.ENTRY_TOKENS, i))
    return found
