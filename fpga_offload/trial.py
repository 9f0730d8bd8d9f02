"""Trial of a backend: random contexts through its kernels, against attention in float64."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vllm_ssdkv.base.checksum import checksum_pages
from vllm_ssdkv.fpga_offload.backend import AttendWork, Backend, Partials
from vllm_ssdkv.fpga_offload.description import BEAT_BYTES, ENTRY, JOB, PAGE_TOKENS, KernelShape
from vllm_ssdkv.fpga_offload.results import Cycles


@dataclass(frozen=True, slots=True)
class Problem:
    """One job on a random context, and what it should answer.

    Attributes:
        shape: Of the kernels.
        tokens: Of the context; the last page may be partial.
        pages: Bytes of K and V, uint8 [pages, bytes], in random order; entries point into it.
        work: For ``Backend.attend``.
        exact: Outputs in float64, [G, d].

    Example::

        found = run_problem(backend, random_problem(backend.shape, 4096, seed=1))
    """

    shape: KernelShape
    tokens: int
    pages: NDArray[np.uint8]
    work: AttendWork
    exact: NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Found:
    """Result of a backend on a problem.

    Attributes:
        error: Largest distance from float64, over the largest output.
        cycles: As the kernel counted them; None: it does not count.
        wrong_digests: Pages whose digest is not their xxh3-64; None: none were asked for.
    """

    error: float
    cycles: Cycles | None
    wrong_digests: int | None


def random_problem(
    shape: KernelShape, tokens: int, *, seed: int = 0, checksum: bool = False
) -> Problem:
    """A context of standard normal K and V, for queries with logits of unit variance."""
    rng = np.random.default_rng(seed)
    count = -(-tokens // PAGE_TOKENS)
    query = rng.standard_normal((1, shape.group, shape.head_size))
    kv = rng.standard_normal((2, count * PAGE_TOKENS, shape.head_size))
    query_bits, kv_bits = _bits(query, shape), _bits(kv, shape)
    # Pages lie in another order than their tokens, as those of a store do.
    order = rng.permutation(count)
    pages = aligned_bytes(count * shape.page_bytes).reshape(count, shape.page_bytes)
    halves = pages.view(np.uint16).reshape(count, 2, PAGE_TOKENS, shape.head_size)
    paged = kv_bits.reshape(2, count, PAGE_TOKENS, shape.head_size)
    halves[order] = paged.transpose(1, 0, 2, 3)
    entries = np.zeros(count, ENTRY.dtype)
    entries["address"] = pages.ctypes.data + order * shape.page_bytes
    entries["tokens"] = PAGE_TOKENS
    entries["tokens"][-1] = tokens - (count - 1) * PAGE_TOKENS
    jobs = np.zeros(1, JOB.dtype)
    jobs["entries"] = count
    scale = shape.head_size**-0.5
    keys, values = _numbers(kv_bits, shape)[:, :tokens]
    logits = _numbers(query_bits, shape)[0] @ keys.T * scale
    weights = np.exp(logits - logits.max(axis=1, keepdims=True))
    exact = weights @ values / weights.sum(axis=1, keepdims=True)
    work = AttendWork(query_bits, entries, jobs, scale, partials=1, checksum=checksum)
    return Problem(shape, tokens, pages, work, exact)


def run_problem(backend: Backend, problem: Problem) -> Found:
    """Run one problem.

    Raises:
        FpgaError: the backend fails.
    """
    partials = backend.attend(problem.work)
    outputs = _outputs(partials)
    error = np.abs(outputs - problem.exact).max() / np.abs(problem.exact).max()
    shape = problem.shape
    wrong, cycles = None, None
    if partials.digests is not None:
        addresses = np.ascontiguousarray(problem.work.entries["address"])
        wanted = checksum_pages(addresses, shape.page_bytes)
        wrong = int(np.count_nonzero(partials.digests != wanted))
    if partials.cycles:
        pages = len(problem.work.entries)
        nbytes = pages * shape.page_bytes if not partials.beats else partials.beats * BEAT_BYTES
        sizes = (shape.head_size, shape.group, shape.dtype, problem.tokens)
        cycles = Cycles("attend", *sizes, nbytes, partials.cycles)
    return Found(float(error), cycles, wrong)


def aligned_bytes(count: int) -> NDArray[np.uint8]:
    """Zeros at an address that is a multiple of 64."""
    room = np.zeros(count + BEAT_BYTES, np.uint8)
    start = -room.ctypes.data % BEAT_BYTES
    return room[start : start + count]


def _outputs(partials: Partials) -> NDArray[np.float64]:
    """Attention of the only job, [G, d]."""
    acc, total = partials.acc[0].astype(np.float64), partials.l[0].astype(np.float64)
    outputs: NDArray[np.float64] = acc / total[:, None]
    return outputs


def _bits(values: NDArray[np.float64], shape: KernelShape) -> NDArray[np.uint16]:
    """Values rounded to the shape's type, as bits."""
    if shape.dtype == "float16":
        return values.astype(np.float16).view(np.uint16)
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def _numbers(bits: NDArray[np.uint16], shape: KernelShape) -> NDArray[np.float64]:
    """Values of bits of the shape's type."""
    if shape.dtype == "float16":
        return bits.view(np.float16).astype(np.float64)
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
