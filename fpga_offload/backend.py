"""Protocol of the backends: numpy arrays in and out, one kernel call each.

``csim``, ``rtlsim`` and ``xrt`` implement :class:`Backend`; who drives them is
``vllm_ssdkv.offload.fpga``. A list is checked by the kernel, and what it finds is raised here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from vllm_ssdkv.base.errors import (
    FpgaDeadlineError,
    FpgaError,
    FpgaLimitError,
    FpgaListError,
    FpgaMemoryError,
    FpgaVersionError,
)
from vllm_ssdkv.fpga_offload.description import (
    BEAT_BYTES,
    CHANNEL_BEAT_BYTES,
    MAX_GROUP,
    MAX_JOB_ENTRIES,
    MAX_JOBS,
    MAX_SPARF_TOKENS,
    PAGE_TOKENS,
    VERSION,
    Kernel,
    KernelShape,
    Status,
)

Records = NDArray[np.void]
"""Structured arrays of ``description``'s layouts."""
Floats = NDArray[np.float32]
_LN2 = math.log(2)


@dataclass(frozen=True, slots=True)
class Limits:
    """The most that one call takes.

    Attributes:
        job_entries: Entries of one job of ``attend``; a longer list is cut into several jobs, whose
            partials merge.
        sparf_tokens: Tokens of one job of ``sparf``, which cannot be cut.
        jobs: Of one call.
    """

    job_entries: int = MAX_JOB_ENTRIES
    sparf_tokens: int = MAX_SPARF_TOKENS
    jobs: int = MAX_JOBS


@dataclass(frozen=True, slots=True)
class AttendWork:
    """One call of ``attend``. The caller keeps the pages alive until it returns.

    Attributes:
        queries: Bits of fp16 or bf16, uint16 [n, G, d].
        entries: Of layout ``ENTRY``.
        jobs: Of layout ``JOB``. No two have the same ``out``.
        scale: Of the logits.
        partials: How many there are: every ``out`` is below.
        v_offset: Bytes from K to V; None: right behind K.
        mask: Attend to the tokens of the masks only.
        checksum: Make digests.
    """

    queries: NDArray[np.uint16]
    entries: Records
    jobs: Records
    scale: float
    partials: int
    v_offset: int | None = None
    mask: bool = False
    checksum: bool = False


@dataclass(frozen=True, slots=True)
class Partials:
    """States of an online softmax, as ``PartialState``: natural logits, unnormalised.

    Attributes:
        acc: float32 [n, G, d].
        m: Reference of ``acc`` and ``l``, float32 [n, G]; minus infinity where nothing was seen.
        l: float32 [n, G].
        digests: xxh3-64 of each entry's K and V, uint64 [entries]; None: not asked for.
        cycles: That the kernel took; 0: not known.
        beats: Of 64 bytes that it read from pages; 0: not known.
    """

    acc: Floats
    m: Floats
    l: Floats  # noqa: E741  (the papers' name)
    digests: NDArray[np.uint64] | None = None
    cycles: int = 0
    beats: int = 0


@dataclass(frozen=True, slots=True)
class SparfWork:
    """One call of ``sparf``. The caller keeps pages and channels alive until it returns.

    Attributes:
        queries: As of :class:`AttendWork`.
        entries: Pages of contexts and windows, of layout ``ENTRY``. Without ``attend`` those of
            contexts are places for masks, and not looked at.
        jobs: Of layout ``SPARF_JOB``. No two have the same ``out``.
        channels: Addresses of K of one block and KV head, channel-major, uint64.
        scale: Of the logits.
        partials: How many places for partials and choices there are.
        block_tokens: Tokens of a block of channels.
        page_tokens: Tokens of a page; they are chosen by pages if ``by_page``.
        keep_channels: SparQ's r.
        channel_group: Neighbours that are chosen together.
        sinks: First tokens of the context, or pages if ``by_page``, that are chosen in any case.
        by_page: Choose pages by mass, not tokens by score.
        attend: Attend to what was chosen.
        window: Attend to the window as well.
        mean_value: Mean V of all tokens, float32 [partials, d]: with it what was not chosen counts
            (SparQ's step 5). Needs ``attend`` and ``window``.
        v_offset: As of :class:`AttendWork`.
    """

    queries: NDArray[np.uint16]
    entries: Records
    jobs: Records
    channels: NDArray[np.uint64]
    scale: float
    partials: int
    block_tokens: int
    page_tokens: int
    keep_channels: int
    channel_group: int = 1
    sinks: int = 0
    by_page: bool = False
    attend: bool = False
    window: bool = False
    mean_value: Floats | None = None
    v_offset: int | None = None


@dataclass(frozen=True, slots=True)
class SparfResult:
    """Choice that ``sparf`` made.

    Attributes:
        masks: Bits of the chosen tokens of each entry, uint32 [entries]; 0: the page is not needed.
            Entries of no job's context are 0.
        alpha: Softmax mass of the chosen tokens and the window, float32 [partials, G].
        lse: Log-sum-exp of the approximate logits of all tokens, float32 [partials, G].
        window_mass: Mean over the query heads of the window's mass, float32 [partials].
        tokens: Chosen in the context, int64 [partials].
        pages: Entries of the context with a chosen token, int64 [partials].
        partials: Where it attended.
        cycles: That the kernel took; 0: not known.
        beats: Of 64 bytes that it read from pages and channel pages; 0: not known.
    """

    masks: NDArray[np.uint32]
    alpha: Floats
    lse: Floats
    window_mass: Floats
    tokens: NDArray[np.int64]
    pages: NDArray[np.int64]
    partials: Partials | None = None
    cycles: int = 0
    beats: int = 0


class Backend(Protocol):
    """Kernels of one shape, somewhere. One thread at a time unless a backend says otherwise.

    Attributes:
        name: As in the option.
        shape: What its kernels are compiled for.
        limits: The most that one call takes.
        address_space: ``host``: entries hold addresses of this process. ``device``: of the card.

    Example:
        partials = backend.attend(AttendWork(queries, entries, jobs, 128**-0.5, partials=3))
    """

    name: str
    shape: KernelShape
    limits: Limits
    address_space: Literal["host", "device"]

    def attend(self, work: AttendWork) -> Partials:
        """Run ``attend``; blocks until it is done, the GIL free.

        Raises:
            FpgaListError: a job or entry is broken; the text names it.
            FpgaLimitError: a job is longer than ``limits``; likewise.
            FpgaMemoryError: memory answered with an error; the text names whose.
            FpgaDeadlineError: the kernel does not answer.
            FpgaError: the device is closed, or failed.
            ValueError: arrays do not fit the shape.
        """
        ...

    def sparf(self, work: SparfWork) -> SparfResult:
        """Run ``sparf``; as :meth:`attend`."""
        ...

    def peer_memory(self, nbytes: int) -> NDArray[np.uint8]:
        """Memory that drives write to and kernels read, uint8, for pages of ``attend``; made once.

        Raises:
            FpgaError: the device has none.
        """
        ...

    def close(self, timeout_s: float) -> bool:
        """Give the device back. False: a call still runs on it, and may read pages."""
        ...


def check_status(kernel: Kernel, code: int, index: int, version: int) -> None:
    """Raise the typed error of a status record."""
    if version == 0 and code == Status.OK:
        raise FpgaError(f"{kernel.name}: the kernel ended and has written no status record")
    if version != VERSION:
        raise FpgaVersionError(
            f"the kernels are of version {version}, and version {VERSION} is needed; build them "
            "again from this package's sources"
        )
    if code == Status.OK:
        return
    if code == Status.JOB_ENTRIES:
        raise FpgaListError(f"{kernel.name}: job {index} has entries beyond the end of the list")
    if code == Status.JOB_LENGTH:
        raise FpgaLimitError(
            f"{kernel.name}: job {index} is longer than the kernel's limit of "
            + (
                f"{MAX_JOB_ENTRIES} entries; cut it into several jobs"
                if kernel.name == "attend"
                else f"{MAX_SPARF_TOKENS} tokens; set selector: exact for such contexts"
            )
        )
    if code == Status.ENTRY_ADDRESS:
        raise FpgaListError(
            f"{kernel.name}: entry {index} has an address that is 0 or no multiple of {BEAT_BYTES}"
        )
    if code == Status.ENTRY_TOKENS:
        raise FpgaListError(f"{kernel.name}: entry {index} has not 1 to {PAGE_TOKENS} tokens")
    if code == Status.CHANNEL_ADDRESS:
        raise FpgaListError(
            f"{kernel.name}: channel block {index} has an address that is 0 or no multiple of "
            f"{CHANNEL_BEAT_BYTES}"
        )
    if code == Status.ARGUMENT and index < len(kernel.arguments):
        raise FpgaListError(
            f"{kernel.name}: argument {kernel.arguments[index].name} is out of range"
        )
    if code == Status.MEMORY and index < len(kernel.arguments):
        argument = kernel.arguments[index]
        done = "a read of" if argument.direction == "in" else "a write to"
        raise FpgaMemoryError(
            f"{kernel.name}: memory answered {done} {argument.name} ({argument.doc}) with an error"
        )
    if code == Status.NO_ANSWER:
        raise FpgaDeadlineError(
            f"{kernel.name}: the kernel does not answer: its memory was idle for {index} cycles"
        )
    if code == Status.SHAPE:
        raise FpgaError(f"{kernel.name}: the kernel is compiled for another dtype")
    raise FpgaError(f"{kernel.name}: the kernel answers with an unknown status {code}")


def scale_log2e_bits(scale: float) -> int:
    """Argument ``scale_log2e`` of a scale of the logits, rounded once."""
    return float_bits(scale / _LN2)


def float_bits(value: float) -> int:
    """Bits of a number as fp32, as a signed integer."""
    return int(np.array(value, np.float32).view(np.int32))


def partials_of(
    raw: NDArray[np.uint8], shape: KernelShape, count: int
) -> tuple[Floats, Floats, Floats]:
    """``acc``, ``m`` and ``l`` of partials as the kernels write them, in natural units."""
    floats = raw.view(np.float32).reshape(count, shape.partial_bytes // 4)
    size = shape.group * shape.head_size
    acc = floats[:, :size].reshape(count, shape.group, shape.head_size)
    base2 = floats[:, size : size + shape.group].astype(np.float64)
    sums = floats[:, size + MAX_GROUP : size + MAX_GROUP + shape.group]
    exact = base2 * _LN2
    m = exact.astype(np.float32)
    # What rounding m takes away is given to its sums: they keep one reference.
    seen = np.isfinite(m)
    rest = np.ones_like(exact)
    rest[seen] = np.exp(exact[seen] - m[seen])
    return (
        (acc * rest[..., None]).astype(np.float32),
        m,
        (sums * rest).astype(np.float32),
    )


def check_attend(work: AttendWork, shape: KernelShape, limits: Limits) -> None:
    """Raise ``ValueError`` or ``FpgaLimitError`` for what a kernel cannot see for itself."""
    _check_queries(work.queries, shape)
    _check_jobs(work.jobs, work.queries, work.partials, limits)
    _check_v_offset(work.v_offset, shape)


def check_sparf(work: SparfWork, shape: KernelShape, limits: Limits) -> None:
    """As :func:`check_attend`."""
    _check_queries(work.queries, shape)
    _check_jobs(work.jobs, work.queries, work.partials, limits)
    _check_v_offset(work.v_offset, shape)
    if work.mean_value is None:
        return
    if not (work.attend and work.window):
        raise ValueError("mean_value needs attend and window")
    if work.mean_value.shape != (work.partials, shape.head_size):
        raise ValueError(f"mean_value {work.mean_value.shape} is not [partials, head size]")


def _check_queries(queries: NDArray[np.uint16], shape: KernelShape) -> None:
    want = (shape.group, shape.head_size)
    if queries.dtype != np.uint16 or queries.ndim != 3 or queries.shape[1:] != want:
        raise ValueError(f"queries {queries.dtype} {queries.shape} are not uint16 [n, {want}]")


def _check_jobs(jobs: Records, queries: NDArray[np.uint16], partials: int, limits: Limits) -> None:
    if len(jobs) > limits.jobs:
        raise FpgaLimitError(f"a call has {len(jobs)} jobs, and the limit is {limits.jobs}")
    for name, end in (("query", len(queries)), ("out", partials)):
        beyond: NDArray[Any] = np.flatnonzero(jobs[name] >= end)
        if len(beyond):
            raise FpgaListError(
                f"job {beyond[0]} has {name} {jobs[name][beyond[0]]}, and there are {end}"
            )


def _check_v_offset(v_offset: int | None, shape: KernelShape) -> None:
    least = shape.page_bytes // 2
    if v_offset is not None and (v_offset < least or v_offset % BEAT_BYTES):
        raise ValueError(f"v_offset {v_offset} is below {least} or no multiple of {BEAT_BYTES}")
