"""Calls of ``attend`` on contexts made for a test, and how far a backend is from fp64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from tests.oracles.fpga_backend import NumpyBackend
from vllm_ssdkv.fpga_offload.backend import AttendWork, Backend, Partials, SparfWork
from vllm_ssdkv.fpga_offload.description import (
    BEAT_BYTES,
    ENTRY,
    JOB,
    PAGE_TOKENS,
    SPARF_JOB,
    KernelShape,
)
from vllm_ssdkv.fpga_offload.trial import aligned_bytes

Floats = NDArray[np.float64]
Fill = Callable[[np.random.Generator, Floats, Floats, Floats], None]
"""Changes queries [n, G, d], K and V [tokens, d] in place."""


@dataclass(frozen=True)
class Call:
    """Work, and the bytes that its entries point into."""

    work: AttendWork
    pages: NDArray[np.uint8]


def bits_of(values: Floats, shape: KernelShape) -> NDArray[np.uint16]:
    """Numbers rounded to the dtype of a shape."""
    if shape.dtype == "float16":
        return values.astype(np.float16).view(np.uint16)
    bits = values.astype(np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def make_call(
    shape: KernelShape,
    lengths: Sequence[int],
    *,
    seed: int = 0,
    fill: Fill | None = None,
    keep: float | None = None,
    v_gap: int = 0,
) -> Call:
    """One job per length, on pages in random order; a partial page stands anywhere in its list.

    Args:
        shape: Of the kernels.
        lengths: Tokens of the jobs.
        seed: Of everything that is random.
        fill: What K, V and queries are, if not normal.
        keep: Share of tokens in the masks; None: no masks.
        v_gap: Bytes between K and V, a multiple of 64.
    """
    rng = np.random.default_rng(seed)
    counts = [-(-length // PAGE_TOKENS) for length in lengths]
    total, size, half = sum(counts), shape.head_size, shape.page_bytes // 2
    queries = rng.standard_normal((len(lengths), shape.group, size))
    keys, values = rng.standard_normal((2, total * PAGE_TOKENS, size))
    if fill is not None:
        fill(rng, queries, keys, values)
    # Beats at odd places: bursts that cross 4 KiB are cut.
    stride = 2 * half + v_gap + BEAT_BYTES
    pages = aligned_bytes(max(1, total) * stride)
    order = rng.permutation(total)
    entries, jobs = np.zeros(total, ENTRY.dtype), np.zeros(len(lengths), JOB.dtype)
    for i, place in enumerate(order):
        at = int(place) * stride
        rows = slice(i * PAGE_TOKENS, (i + 1) * PAGE_TOKENS)
        for part, begin in ((keys, at), (values, at + half + v_gap)):
            raw = bits_of(part[rows], shape).view(np.uint8).ravel()
            pages[begin : begin + half] = raw
        entries["address"][i] = pages.ctypes.data + at
    entries["tokens"] = PAGE_TOKENS
    first = 0
    for i, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        jobs[i] = (first, count, i, len(lengths) - 1 - i)
        if length % PAGE_TOKENS:
            entries["tokens"][first + rng.integers(count)] = length % PAGE_TOKENS
        first += count
    if keep is not None:
        entries["mask"] = (rng.random((total, 32)) < keep) @ (1 << np.arange(32, dtype=np.int64))
    work = AttendWork(
        bits_of(queries, shape),
        entries,
        jobs,
        size**-0.5,
        len(lengths),
        v_offset=half + v_gap if v_gap else None,
        mask=keep is not None,
    )
    return Call(work, pages)


def distance(backend: Backend, call: Call) -> float:
    """Largest distance of outputs and log-sum-exps from fp64, relative to numbers above 1."""
    return far_apart(backend.attend(call.work), NumpyBackend(backend.shape).attend(call.work))


def far_apart(found: Partials, wanted: Partials) -> float:
    """The same of two sets of partials; infinite where one has seen nothing and the other has."""
    empty = wanted.l == 0
    if not np.array_equal(found.l == 0, empty):
        return float("inf")
    if not (np.all(found.m[empty] == -np.inf) and np.all(found.acc[empty] == 0)):
        return float("inf")
    seen = ~empty
    if not seen.any():
        return 0.0
    outputs, references = _outputs(found, seen), _outputs(wanted, seen)
    scale = max(1.0, float(np.abs(references).max()))
    error = float(np.abs(outputs - references).max()) / scale
    sums, exact = _sums(found, seen), _sums(wanted, seen)
    return max(error, float((np.abs(sums - exact) / np.maximum(1, np.abs(exact))).max()))


def merged(parts: Sequence[Partials]) -> Partials:
    """Partials of the same queries as one, by their log-sum-exps."""
    tops = np.max([part.m for part in parts], axis=0)
    acc, total = np.zeros_like(parts[0].acc, np.float64), np.zeros_like(tops, np.float64)
    for part in parts:
        share = np.exp(np.where(part.l > 0, part.m.astype(np.float64) - tops, -np.inf))
        acc += part.acc * share[..., None]
        total += part.l * share
    return Partials(acc.astype(np.float32), tops, total.astype(np.float32))


def only_job(call: Call, first: int, count: int) -> Call:
    """The call with its only job cut to some of its entries."""
    jobs = call.work.jobs.copy()
    jobs["first"], jobs["entries"] = first, count
    return replace(call, work=replace(call.work, jobs=jobs))


def _outputs(partials: Partials, seen: NDArray[np.bool_]) -> Floats:
    outputs: Floats = partials.acc[seen].astype(np.float64) / partials.l[seen][:, None]
    return outputs


def _sums(partials: Partials, seen: NDArray[np.bool_]) -> Floats:
    sums: Floats = partials.m[seen].astype(np.float64) + np.log(partials.l[seen].astype(np.float64))
    return sums


@dataclass(frozen=True)
class SparfCall:
    """Work of ``sparf``, and the bytes that it points into."""

    work: SparfWork
    memory: tuple[NDArray[np.uint8], ...]


def make_sparf(
    shape: KernelShape,
    contexts: Sequence[tuple[int, int, int]],
    block_tokens: int,
    channels: int,
    *,
    seed: int = 0,
    levels: int = 0,
    sinks: int = 0,
    attend: bool = True,
    page_tokens: int = 0,
    together: int = 1,
    mean: bool = False,
) -> SparfCall:
    """One job per (blocks of context, tokens of window, tokens or pages to keep).

    With ``levels`` K and q have so few different numbers that many scores are equal. With
    ``page_tokens`` pages are chosen.
    """
    rng = np.random.default_rng(seed)
    size, half = shape.head_size, shape.page_bytes // 2
    memory: list[NDArray[np.uint8]] = []
    entries: list[tuple[int, int, int]] = []
    blocks: list[int] = []
    jobs = np.zeros(len(contexts), SPARF_JOB.dtype)

    def draw(*sizes: int) -> NDArray[np.uint16]:
        numbers = rng.standard_normal(sizes)
        if levels:
            numbers = rng.integers(-levels, levels + 1, sizes) / 2
        return bits_of(numbers, shape)

    def add_pages(key: NDArray[np.uint16]) -> None:
        count = -(-len(key) // PAGE_TOKENS)
        pages = aligned_bytes(max(1, count) * shape.page_bytes)
        memory.append(pages)
        halves = pages.view(np.uint16).reshape(-1, 2, PAGE_TOKENS, size)
        for i in range(count):
            part = key[i * PAGE_TOKENS : (i + 1) * PAGE_TOKENS]
            halves[i, 0, : len(part)] = part
            halves[i, 1] = draw(PAGE_TOKENS, size)
            entries.append((pages.ctypes.data + 2 * half * i, len(part), 0))

    for i, (count, window, keep) in enumerate(contexts):
        first_channels, first_entry = len(blocks), len(entries)
        key = draw(count * block_tokens, size)
        for block in range(count):
            part = key[block * block_tokens : (block + 1) * block_tokens]
            transposed = aligned_bytes(part.nbytes)
            transposed[:] = np.ascontiguousarray(part.T).view(np.uint8).ravel()
            memory.append(transposed)
            blocks.append(transposed.ctypes.data)
        add_pages(key)
        first_window = len(entries)
        add_pages(draw(window, size))
        held = len(entries) - first_window
        jobs[i] = (i, i, first_channels, count, first_entry, first_window, held, keep)
    work = SparfWork(
        draw(len(contexts), shape.group, size),
        np.array(entries, ENTRY.dtype),
        jobs,
        np.array(blocks, np.uint64),
        size**-0.5,
        len(contexts),
        block_tokens,
        page_tokens or PAGE_TOKENS,
        channels,
        channel_group=together,
        sinks=sinks,
        by_page=page_tokens > 0,
        attend=attend,
        window=attend,
        mean_value=rng.standard_normal((len(contexts), size)).astype(np.float32) if mean else None,
    )
    return SparfCall(work, tuple(memory))
