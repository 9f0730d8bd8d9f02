"""Estimate of a decode step's attention on a card: flash, memory and kernel cycles.

K and V come in chunks, and a chunk is brought while the kernel attends to the one before. Bringing
takes the time of the flash. Attending takes the longer of the memory's time and the kernel's, and
the start. HILOS (Jang et al., ASPLOS 2026) estimates its accelerator from cycle counts likewise.

The kernel's cycles are a straight line over the beats of its bus, fitted to simulations of the RTL
(``fpga_offload/results.py``), or HILOS' own. **No clock is claimed**: it is a parameter, by default
that of the paper. Not in the estimate: queries and partial states over PCIe, and the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from vllm_ssdkv.base.errors import BenchError
from vllm_ssdkv.fpga_offload.cards import (
    HILOS_BLOCK_CYCLES,
    Card,
    Origin,
)
from vllm_ssdkv.fpga_offload.description import BEAT_BYTES, BLOCK_TOKENS, PAGE_TOKENS
from vllm_ssdkv.fpga_offload.results import Cycles

Bound: TypeAlias = Literal["flash", "memory", "kernel"]

_ELEMENT_BYTES: Final = 2
_HILOS_HEAD: Final = 128
_PASSES: Final = 2
"""Over the kernel's memory for each byte: flash writes it, the kernel reads it."""


@dataclass(frozen=True, slots=True)
class SparfReads:
    """Pages that SparF reads (InstInfer, Algorithm 1), as if channels and tokens were random.

    Chosen tokens bunch in pages more than random ones do, so fewer pages are read than here.

    Attributes:
        channels: Of a head that score (r).
        budget: Share of the tokens that are attended to (k / s).
        page_channels: Channels in a channel page: 2 to 8 in the paper.
        by_page: Whole pages are chosen, and all of each is attended to.
    """

    channels: int
    budget: float
    page_channels: int = 2
    by_page: bool = False

    def share(self, head_size: int) -> float:
        """Share of the bytes of K and V that both steps read together."""
        missed = max(0.0, 1 - self.channels / head_size) ** self.page_channels
        return (1 - missed) / 2 + self.pages

    @property
    def pages(self) -> float:
        """Share of the bytes of K and V that the second step reads."""
        return self.budget if self.by_page else 1 - (1 - self.budget) ** PAGE_TOKENS


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """Attention of one decode step: each row attends to its context in every layer.

    Attributes:
        layers: With attention.
        rows: Requests of the step.
        kv_heads: Of a layer.
        group: Query heads of a KV head.
        head_size: Channels of a head.
        tokens: Of each context.
        sparf: How pages are chosen; None: all are read.

    Example::

        step = DecodeStep(layers=32, rows=4, kv_heads=8, group=4, head_size=128, tokens=32768)
    """

    layers: int
    rows: int
    kv_heads: int
    group: int
    head_size: int
    tokens: int
    sparf: SparfReads | None = None

    @property
    def jobs(self) -> int:
        """Jobs of the kernel: one for each layer, row and KV head."""
        return self.layers * self.rows * self.kv_heads

    @property
    def nbytes(self) -> int:
        """Bytes of K and V, in 16 bit."""
        return self.jobs * self.tokens * self.head_size * 2 * _ELEMENT_BYTES

    @property
    def attended_bytes(self) -> float:
        """Bytes of the pages that are attended to."""
        return self.nbytes * (1.0 if self.sparf is None else self.sparf.pages)

    @property
    def read_bytes(self) -> float:
        """Bytes of pages that the step reads."""
        return self.nbytes * (1.0 if self.sparf is None else self.sparf.share(self.head_size))


@dataclass(frozen=True, slots=True)
class KernelCycles:
    """Cycles of a kernel: so many for a job, and so many for a beat of 64 bytes of pages.

    Attributes:
        name: For people.
        origin: ``simulated``, ``published``, or ``assumed`` to be that of another kernel.
        job: Cycles of a job beside its pages.
        beat: Cycles of a beat.
        error: Largest relative distance of a simulated run from the line.
        token: Cycles of a token of the context, for SparF's first step; then only the second
            step's pages count as beats. 0: all that is read counts.
    """

    name: str
    origin: Origin
    job: float
    beat: float
    error: float = 0.0
    token: float = 0.0

    def cycles(self, jobs: float, nbytes: float, tokens: float = 0.0) -> float:
        """Cycles of so many jobs with so many bytes of pages, and tokens, together."""
        return self.job * jobs + self.beat * nbytes / BEAT_BYTES + self.token * tokens

    def bandwidth(self, clock: float) -> float:
        """Bytes/s of pages in long jobs."""
        return BEAT_BYTES * clock / self.beat


def hilos_cycles(group: int) -> KernelCycles:
    """Cycles that HILOS' Table 3 stands for, with heads of 128 channels.

    Raises:
        BenchError: the table has no kernel for so many query heads.
    """
    if group not in HILOS_BLOCK_CYCLES:
        raise BenchError(f"HILOS publishes no kernel for groups of {group}: {_list(_HILOS_GROUPS)}")
    beats = BLOCK_TOKENS * _HILOS_HEAD * 2 * _ELEMENT_BYTES / BEAT_BYTES
    return KernelCycles("HILOS", "published", 0.0, HILOS_BLOCK_CYCLES[group] / beats)


def simulated_cycles(
    rows: Sequence[Cycles], *, kernel: str, head_size: int, group: int, dtype: str = "float16"
) -> KernelCycles:
    """Line through the simulated runs of one kernel, all runs having the same weight.

    Raises:
        BenchError: fewer than two lengths of it were simulated.
    """
    mine = _runs(rows, kernel, head_size, group, dtype)
    beats = np.array([row.nbytes / BEAT_BYTES for row in mine], np.float64)
    # A bus moves one beat a cycle at best.
    job, beat, error = _line(mine, beats, least=1.0)
    return KernelCycles("RTL", "simulated", job, beat, error)


def simulated_sparf(
    rows: Sequence[Cycles], *, head_size: int, group: int, dtype: str = "float16"
) -> KernelCycles:
    """Both steps of SparF: a line over tokens for the first, one over beats for the second.

    The first step is that of the simulated runs: so many channels were chosen as there.

    Raises:
        BenchError: as :func:`simulated_cycles`.
    """
    shape = {"head_size": head_size, "group": group}
    second = simulated_cycles(rows, kernel="sparf_second", dtype=dtype, **shape)
    mine = _runs(rows, "sparf_first", head_size, group, dtype)
    tokens = np.array([row.tokens for row in mine], np.float64)
    job, token, error = _line(mine, tokens, least=0.0)
    return KernelCycles(
        second.name, "simulated", second.job + job, second.beat, max(error, second.error), token
    )


def _runs(
    rows: Sequence[Cycles], kernel: str, head_size: int, group: int, dtype: str
) -> list[Cycles]:
    """Simulated runs of one kernel, at two lengths or more."""
    mine = [
        row
        for row in rows
        if (row.kernel, row.head_size, row.group, row.dtype, row.stalls)
        == (kernel, head_size, group, dtype, 0)
    ]
    if len({row.tokens for row in mine}) < 2:
        known = sorted({(row.head_size, row.group) for row in rows if row.kernel == kernel})
        raise BenchError(
            f"{kernel} with d = {head_size}, G = {group}, {dtype} was not simulated at two "
            f"lengths; (d, G) simulated: {_list(known)}"
        )
    return mine


def _line(
    rows: Sequence[Cycles], sizes: NDArray[np.float64], *, least: float
) -> tuple[float, float, float]:
    """Cycles of a job and of a unit of its size, and the largest relative error of a run.

    Args:
        rows: Simulated runs.
        sizes: Of each.
        least: That a unit takes.
    """
    cycles = np.array([row.cycles for row in rows], np.float64)
    # Divided by the cycles, each run's error is relative.
    columns = np.stack([1 / cycles, sizes / cycles], axis=1)
    (job, unit), *_ = np.linalg.lstsq(columns, np.ones(len(rows)), rcond=None)
    # No job takes less than none.
    job, unit = max(float(job), 0.0), max(float(unit), least)
    return job, unit, float(np.abs((job + unit * sizes) / cycles - 1).max())


@dataclass(frozen=True, slots=True)
class Estimate:
    """Time of a step's attention on a card, and what each part of it would take alone.

    Attributes:
        flash_s: Bringing all pages, in seconds.
        memory_s: Writing and reading them in the kernel's memory; None: there is none.
        kernel_s: The kernel's cycles.
        start_s: All starts.
        total_s: Chunk after chunk, with overlap.
        chunks: That the pages come in.
    """

    flash_s: float
    memory_s: float | None
    kernel_s: float
    start_s: float
    total_s: float
    chunks: int

    @property
    def bound(self) -> Bound:
        """The slowest part."""
        parts: dict[Bound, float] = {"flash": self.flash_s, "kernel": self.kernel_s}
        if self.memory_s is not None:
            parts["memory"] = self.memory_s
        return max(parts, key=lambda name: parts[name])


def estimate(step: DecodeStep, card: Card, kernel: KernelCycles, cards: int = 1) -> Estimate:
    """Time of the step's attention on ``cards`` cards, each with its share of every context.

    Times go down or stay when a bandwidth or the clock goes up. Every card gets every job: each
    holds a part of each context, and the states are merged.

    Raises:
        ValueError: no card, or a step without a token.
    """
    if cards < 1 or step.nbytes < 1:
        raise ValueError(f"{cards} cards, {step.nbytes} bytes")
    nbytes = step.read_bytes / cards
    flash_s = nbytes / card.flash.value
    memory_s = None if card.memory is None else _PASSES * nbytes / card.memory.value
    kernel_s = _cycles(step, kernel, cards) / card.clock.value
    attend_s = max(kernel_s, memory_s or 0.0)
    whole, rest = divmod(nbytes, card.chunk_bytes)
    chunk, end = card.chunk_bytes / nbytes, rest / nbytes
    # The first chunk is waited for; then one is brought while the one before is attended to.
    if whole:
        total = chunk * flash_s + (whole - 1) * chunk * max(flash_s, attend_s)
        total += max(chunk * attend_s, end * flash_s) + end * attend_s
    else:
        total = flash_s + attend_s
    chunks = int(whole) + bool(rest)
    start_s = card.start.value * chunks
    return Estimate(flash_s, memory_s, kernel_s, start_s, total + start_s, chunks)


def _cycles(step: DecodeStep, kernel: KernelCycles, cards: int) -> float:
    """Cycles of each card."""
    nbytes = step.attended_bytes if kernel.token else step.read_bytes
    return kernel.cycles(step.jobs, nbytes / cards, step.jobs * step.tokens / cards)


def _list(values: Sequence[object]) -> str:
    return ", ".join(map(str, values)) or "none"


_HILOS_GROUPS: Final = tuple(HILOS_BLOCK_CYCLES)
