"""Problems of attention for the FPGA's kernels, with answers in fp64.

The error of an output is the largest difference over the jobs' heads and channels, relative to the
largest magnitude in the answer of the job. Pages lie scattered in one piece of memory; what is no
valid token there is NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from vllm_ssdkv.fpga_offload.backend import AttendWork, Partials
from vllm_ssdkv.fpga_offload.description import BEAT_BYTES, ENTRY, JOB, PAGE_TOKENS, KernelShape

Doubles = NDArray[np.float64]
Bits = NDArray[np.uint16]
Tokens = Callable[[np.random.Generator, int, int], NDArray[np.float64]]
"""K or V, [tokens, head size], of one job."""


def to_bits(values: NDArray[np.floating], dtype: str) -> Bits:
    """Bits of fp16 or bf16, rounded to nearest even."""
    if dtype == "float16":
        return values.astype(np.float16).view(np.uint16)
    bits = values.astype(np.float32).view(np.uint32)
    rounded = bits + 0x7FFF + ((bits >> 16) & 1)
    return (np.where(np.isnan(values), 0x7FC00000, rounded) >> 16).astype(np.uint16)


def from_bits(bits: Bits, dtype: str) -> Doubles:
    if dtype == "float16":
        return bits.view(np.float16).astype(np.float64)
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def normal(draw: np.random.Generator, tokens: int, size: int) -> Doubles:
    return draw.standard_normal((tokens, size))


def aligned(nbytes: int) -> NDArray[np.uint8]:
    """Memory for pages; it lives as long as what is made of it."""
    raw = np.zeros(nbytes + BEAT_BYTES, np.uint8)
    begin = -raw.ctypes.data % BEAT_BYTES
    return raw[begin : begin + nbytes]


@dataclass
class Job:
    """Valid tokens of its pages, and their masks if there are any."""

    tokens: Sequence[int]
    masks: Sequence[int] = ()


@dataclass
class Problem:
    """Jobs over scattered pages. ``key`` and ``value`` make a job's numbers."""

    shape: KernelShape
    jobs: Sequence[Job]
    seed: int = 0
    scale: float = 0.0
    key: Tokens = normal
    value: Tokens = normal
    query: Tokens = normal
    page_tokens: int = PAGE_TOKENS
    work: AttendWork = field(init=False)
    memory: NDArray[np.uint8] = field(init=False)

    def __post_init__(self) -> None:
        shape, draw = self.shape, np.random.default_rng(self.seed)
        size, half = shape.head_size, shape.page_bytes // 2
        parts = self.page_tokens // PAGE_TOKENS
        self.scale = self.scale or size**-0.5
        count = sum(len(job.tokens) for job in self.jobs)
        pages = -(-count // parts)
        self.memory = aligned(pages * parts * shape.page_bytes)
        places = draw.permutation(pages * parts)
        entries, jobs = np.zeros(count, ENTRY.dtype), np.zeros(len(self.jobs), JOB.dtype)
        self._kv: list[tuple[Doubles, Doubles]] = []
        outs = draw.permutation(len(self.jobs))
        queries = to_bits(
            self.query(draw, len(jobs) * shape.group, size).reshape(-1, shape.group, size),
            shape.dtype,
        )
        at = 0
        for i, job in enumerate(self.jobs):
            held = len(job.tokens)
            jobs[i] = (at, held, (i * 7 + 3) % len(jobs), outs[i])
            key = to_bits(self.key(draw, held * PAGE_TOKENS, size), shape.dtype)
            value = to_bits(self.value(draw, held * PAGE_TOKENS, size), shape.dtype)
            live = np.zeros(held * PAGE_TOKENS, np.bool_)
            for page, tokens in enumerate(job.tokens):
                mine = slice(page * PAGE_TOKENS, (page + 1) * PAGE_TOKENS)
                mask = job.masks[page] if job.masks else 0xFFFF
                one = np.arange(PAGE_TOKENS)
                live[mine] = (one < tokens) & ((mask >> one) & 1 == 1)
                whole, part = divmod(int(places[at]), parts)
                address = whole * parts * shape.page_bytes + part * half
                garbage = np.where(one < tokens, 0, 0x7FFF).astype(np.uint16)[:, None]
                for numbers, offset in ((key, 0), (value, parts * half)):
                    to = self.memory[address + offset : address + offset + half]
                    to[:] = (numbers[mine] | garbage).reshape(-1).view(np.uint8)
                entries[at] = (self.memory.ctypes.data + address, tokens, mask)
                at += 1
            self._kv.append(
                (from_bits(key[live], shape.dtype), from_bits(value[live], shape.dtype))
            )
        self.work = AttendWork(
            queries,
            entries,
            jobs,
            self.scale,
            partials=len(jobs),
            v_offset=None if parts == 1 else parts * half,
            mask=any(job.masks for job in self.jobs),
        )

    def answer(self, job: int) -> tuple[Doubles, Doubles]:
        """Output [G, d] and log-sum-exp [G] of a job with tokens; zeros and -inf without."""
        key, value = self._kv[job]
        query = from_bits(
            np.ascontiguousarray(self.work.queries[self.work.jobs["query"][job]]), self.shape.dtype
        )
        if not len(key):
            return np.zeros_like(query), np.full(len(query), -np.inf)
        logits = query @ key.T * float(np.float64(self.scale))
        top = logits.max(axis=1)
        weights = np.exp(logits - top[:, None])
        return weights @ value / weights.sum(axis=1)[:, None], top + np.log(weights.sum(axis=1))

    def errors(self, partials: Partials) -> tuple[float, float]:
        """Largest error of the outputs, and of the log-sum-exps relative to 1 or their size."""
        worst = worst_lse = 0.0
        for job in range(len(self.jobs)):
            output, lse = self.answer(job)
            at = int(self.work.jobs["out"][job])
            found, found_lse = finished(partials, at)
            if not np.isfinite(lse).all():
                assert (partials.m[at] == -np.inf).all()
                assert not partials.l[at].any()
                assert not partials.acc[at].any()
                continue
            worst = max(worst, float(np.abs(found - output).max() / np.abs(output).max()))
            off = np.abs(found_lse - lse) / np.maximum(1, np.abs(lse))
            worst_lse = max(worst_lse, float(off.max()))
        return worst, worst_lse


def finished(partials: Partials, at: int) -> tuple[Doubles, Doubles]:
    """Output and log-sum-exp of one partial."""
    total = partials.l[at].astype(np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        output = partials.acc[at] / total[:, None]
        return output, partials.m[at] + np.log(total)


def merged(partials: Partials, places: Sequence[int]) -> tuple[Doubles, Doubles]:
    """Output and log-sum-exp of several partials of the same queries, by their log-sum-exps."""
    m = partials.m[places].astype(np.float64)
    top = m.max(axis=0)
    share = np.where(m == -np.inf, 0, np.exp(m - np.where(top == -np.inf, 0, top)))
    total = (share * partials.l[places]).sum(axis=0)
    acc = (share[..., None] * partials.acc[places]).sum(axis=0)
    with np.errstate(divide="ignore", invalid="ignore"):
        return acc / total[:, None], top + np.log(total)
