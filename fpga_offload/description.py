"""The one description of the kernels: arguments, registers, bytes in memory, limits, versions.

Everything that another language has to know is generated from here by
:mod:`vllm_ssdkv.fpga_offload.generate`: the C ABI, the HLS header, the parameters of the RTL, the
metadata of XRT and the tables in ``docs/fpga-tables.md``. All numbers are little endian.

Addresses of arguments are those of the memory that the kernels read: the process's own for
``csim`` and ``rtlsim``, the card's for ``xrt``. Addresses in lists are offsets from the argument
``pages`` (or ``channel_pages``): that is 0 for ``csim`` and ``rtlsim``, a buffer object for
``xrt``.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum, IntFlag
from typing import Any, Literal

import numpy as np

VERSION = 1
"""Version of this interface. A library or xclbin of another version is refused."""

HEAD_SIZES = (64, 128, 256)
GROUPS = (1, 2, 4, 5, 8)
DTYPES = ("float16", "bfloat16")
MAX_GROUP = max(GROUPS)

PAGE_TOKENS = 16
"""Tokens of an entry: K [16, d] at its address, V [16, d] ``v_offset`` bytes behind it."""
BLOCK_TOKENS = 128
"""Tokens that the kernels work on at a time."""
BEAT_BYTES = 64
"""Bytes of a beat of the ports that read pages, and the alignment of every address but those of
channels."""
CHANNEL_BEAT_BYTES = 32
"""Bytes of a beat of the port that reads channels: 16 tokens of one channel, and the alignment of
their blocks."""
SCORE_TOKENS = 16
"""Tokens of one beat of channels."""

MAX_JOB_ENTRIES = 4096
"""Entries of one job of ``attend``: 65,536 tokens, whose logits stay on chip."""
MAX_SPARF_TOKENS = MAX_JOB_ENTRIES * PAGE_TOKENS
"""Tokens of one job of ``sparf``, the window's included; their logits stay on chip."""
MAX_JOBS = 1 << 20
"""Jobs of one call."""

Kind = Literal["address", "u32", "i32"]
Direction = Literal["in", "out"]


class Flag(IntFlag):
    """Bits of the argument ``flags``.

    Attributes:
        BFLOAT16: Queries and pages are bfloat16, not float16.
        MASK: Attend to the tokens of the entries' masks only. Without it masks are not looked at.
        CHECKSUM: Write the xxh3-64 of each entry's K [16, d] and V [16, d] to ``digests``.
        BY_PAGE: ``sparf`` chooses pages of ``page_tokens`` by mass, not tokens by score.
        ATTEND: ``sparf`` attends to what it chose, and writes records.
        WINDOW: It attends to the window as well. With ATTEND only.
        MEAN_VALUE: What is not attended to counts as the mean V. With ATTEND and WINDOW only.
    """

    BFLOAT16 = 1 << 0
    MASK = 1 << 1
    CHECKSUM = 1 << 2
    BY_PAGE = 1 << 3
    ATTEND = 1 << 4
    WINDOW = 1 << 5
    MEAN_VALUE = 1 << 6


class Status(IntEnum):
    """Finding of a kernel; ``index`` of the status record says where.

    After an error nothing of the outputs but the status record is defined.
    """

    OK = 0
    JOB_ENTRIES = 1
    """A job's entries are not within the list. ``index``: of the job."""
    JOB_LENGTH = 2
    """A job has more entries or tokens than the limit. ``index``: of the job."""
    ENTRY_ADDRESS = 3
    """An entry's address, with its base, is 0 or no multiple of 64. ``index``: of the entry."""
    ENTRY_TOKENS = 4
    """An entry has 0 or more than 16 tokens. ``index``: of the entry."""
    CHANNEL_ADDRESS = 5
    """A block of channels, with its base, lies at 0 or no multiple of 32. ``index``: its place."""
    ARGUMENT = 6
    """An argument of the call is out of range. ``index``: its place in the list of arguments."""
    SHAPE = 7
    """The kernel is compiled for another dtype than the flags say."""
    MEMORY = 8
    """Memory answered with an error. ``index``: of the argument whose memory it was."""
    NO_ANSWER = 0xFFFF
    """Written by a simulator, not by a kernel: memory was idle for ``index`` cycles, and no end."""


@dataclass(frozen=True, slots=True)
class Field:
    """One field of a record in memory; ``count`` of them side by side."""

    name: str
    type: Literal["u32", "u64", "f32"]
    doc: str
    count: int = 1

    @property
    def nbytes(self) -> int:
        """Bytes of all of it."""
        return (8 if self.type == "u64" else 4) * self.count


@dataclass(frozen=True, slots=True)
class Layout:
    """A record in memory: fields back to back.

    Example:
        jobs = np.zeros(3, JOB.dtype)
    """

    name: str
    doc: str
    fields: tuple[Field, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of one record."""
        return sum(field.nbytes for field in self.fields)

    def offsets(self) -> list[tuple[Field, int]]:
        """Fields with the bytes before them."""
        found, at = [], 0
        for field in self.fields:
            found.append((field, at))
            at += field.nbytes
        return found

    @property
    def dtype(self) -> np.dtype[Any]:
        """numpy's dtype of one record."""
        codes = {"u32": "<u4", "u64": "<u8", "f32": "<f4"}
        return np.dtype(
            [
                (field.name, codes[field.type], (field.count,))
                if field.count > 1
                else (field.name, codes[field.type])
                for field in self.fields
            ]
        )


ENTRY = Layout(
    "entry",
    "A page, or 16 tokens of a larger one. Entries come in any order.",
    (
        Field(
            "address",
            "u64",
            "of K [16, d], from `pages` on; a multiple of 64. All 16 tokens may be read",
        ),
        Field("tokens", "u32", "valid ones, the first of the page: 1 to 16"),
        Field("mask", "u32", "bit t: token t is attended to. Looked at with MASK only"),
    ),
)
JOB = Layout(
    "job",
    "G queries, and the entries that they attend to.",
    (
        Field("first", "u32", "of its entries"),
        Field("entries", "u32", "how many; 0 is allowed"),
        Field("query", "u32", "place of its G queries, in units of G x d elements"),
        Field("out", "u32", "place of its partial, in units of partials"),
    ),
)
SPARF_JOB = Layout(
    "sparf_job",
    "G queries, the channels of their context, and its window.",
    (
        Field("query", "u32", "as of a job"),
        Field("out", "u32", "place of its partial and of its choice"),
        Field("first_channels", "u32", "of its blocks of channels, in context order"),
        Field("channel_blocks", "u32", "how many; 0 is allowed"),
        Field(
            "first_entry",
            "u32",
            "of its context's entries and masks, in context order, one for each 16 tokens; "
            "the entries are read with ATTEND only",
        ),
        Field("first_window", "u32", "of the window's entries, in the same list"),
        Field("window_entries", "u32", "how many; at least 1 token in all"),
        Field("keep", "u32", "tokens, or pages with BY_PAGE, to choose, sinks included"),
    ),
)
CHOICE = Layout(
    "choice",
    "What sparf says of one job, beside the masks.",
    (
        Field(
            "alpha", "f32", "per query head: softmax mass of the chosen and the window", MAX_GROUP
        ),
        Field("lse", "f32", "per query head: natural log-sum-exp of all tokens", MAX_GROUP),
        Field("window_mass", "f32", "mean over the query heads: mass of the window"),
        Field("tokens", "u32", "chosen in the context"),
        Field("pages", "u32", "entries of the context with a chosen token"),
        Field("reserved", "u32", "0", 13),
    ),
)
STATUS = Layout(
    "status",
    "Written at the end of a call, errors included.",
    (
        Field("code", "u32", "of Status"),
        Field("index", "u32", "of what is broken"),
        Field("version", "u32", "of the kernel"),
        Field("jobs", "u32", "done"),
        Field("cycles", "u64", "from start to done; 0: not known"),
        Field("beats", "u64", "of 64 bytes read from pages; 0: not known"),
        Field("reserved", "u32", "0", 8),
    ),
)
LAYOUTS = (ENTRY, JOB, SPARF_JOB, CHOICE, STATUS)


def partial_bytes(head_size: int, group: int) -> int:
    """Bytes of one partial: acc fp32 [G, d], then one beat with m fp32 [8] and l fp32 [8].

    ``acc`` and ``l`` are sums of ``2^(x - m)``, where x is a logit in base 2; unnormalised. m is
    whole, or minus infinity (with l = 0 and acc = 0) where nothing was attended to.
    """
    return group * head_size * 4 + BEAT_BYTES


@dataclass(frozen=True, slots=True)
class Argument:
    """An argument of a kernel.

    Attributes:
        name: In every language.
        kind: An address is 64 bits wide. A float travels as the i32 of its bits.
        doc: What it says.
        port: Memory port of an address (XRT's ``m_axi`` bundle).
        direction: Whether the kernel reads or writes there.
    """

    name: str
    kind: Kind
    doc: str
    port: str = ""
    direction: Direction = "in"

    @property
    def nbytes(self) -> int:
        """Bytes of its value."""
        return 8 if self.kind == "address" else 4


@dataclass(frozen=True, slots=True)
class Register:
    """Place of an argument in the AXI-Lite registers, as Vitis HLS lays them out."""

    argument: Argument
    offset: int


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel: control by ``ap_ctrl_hs`` at 0x00, arguments from 0x10.

    Example:
        ATTEND.registers()[0].offset == 0x10
    """

    name: str
    doc: str
    arguments: tuple[Argument, ...]

    def registers(self) -> list[Register]:
        """Arguments with their offsets: each is followed by a reserved word."""
        found, at = [], FIRST_ARGUMENT
        for argument in self.arguments:
            found.append(Register(argument, at))
            at += argument.nbytes + 4
        return found

    def index(self, name: str) -> int:
        """Place of an argument in the list; ``KeyError`` if there is none of the name."""
        for place, argument in enumerate(self.arguments):
            if argument.name == name:
                return place
        raise KeyError(name)


CONTROL = 0x00
"""Bit 0 start, 1 done (cleared by reading), 2 idle, 3 ready."""
GLOBAL_INTERRUPT = 0x04
INTERRUPT_ENABLE = 0x08
INTERRUPT_STATUS = 0x0C
FIRST_ARGUMENT = 0x10

_Q = Argument("q", "address", "queries, 16 bits, [n, G, d]", "gmem_q")
_ENTRIES = Argument("entries", "address", "list of entries", "gmem_list")
_PAGES = Argument("pages", "address", "base of the entries' addresses; 0 is allowed", "gmem_pages")
_OUT = Argument("out", "address", "partials", "gmem_out", "out")
_STATUS = Argument("status", "address", "one status record", "gmem_out", "out")
_JOB_COUNT = Argument("job_count", "u32", f"jobs, at most {MAX_JOBS}")
_ENTRY_COUNT = Argument("entry_count", "u32", "entries in the list")
_V_OFFSET = Argument(
    "v_offset",
    "u32",
    "bytes from K to V of an entry: 32 d where pages have 16 tokens; a multiple of 64",
)
_SCALE_LOG2E = Argument("scale_log2e", "i32", "bits of fp32: scale of the logits x log2 e")
_FLAGS = Argument("flags", "u32", "bits of Flag")

ATTEND = Kernel(
    "attend",
    "Exact attention of any number of jobs.",
    (
        _Q,
        _PAGES,
        _ENTRIES,
        Argument("jobs", "address", "list of jobs", "gmem_list"),
        _OUT,
        Argument("digests", "address", "u64 per entry, with CHECKSUM", "gmem_out", "out"),
        _STATUS,
        _JOB_COUNT,
        _ENTRY_COUNT,
        _V_OFFSET,
        _SCALE_LOG2E,
        _FLAGS,
    ),
)
SPARF = Kernel(
    "sparf",
    "SparF: channel scores, argtopk, row filter, and attention to what was chosen.",
    (
        _Q,
        _PAGES,
        Argument("channel_pages", "address", "base of the channels' addresses", "gmem_channels"),
        _ENTRIES,
        Argument("jobs", "address", "list of sparf jobs", "gmem_list"),
        Argument(
            "channels",
            "address",
            "u64 per block of channels: address of K of one KV head, [d, block_tokens], from "
            "`channel_pages` on",
            "gmem_list",
        ),
        Argument("mean_value", "address", "mean V fp32 [d] by out, with MEAN_VALUE", "gmem_q"),
        _OUT,
        Argument("masks", "address", "u32 per entry: bits of its chosen tokens", "gmem_out", "out"),
        Argument("choices", "address", "choices, by out", "gmem_out", "out"),
        _STATUS,
        _JOB_COUNT,
        _ENTRY_COUNT,
        Argument("channel_count", "u32", "blocks of channels in the list"),
        Argument("block_tokens", "u32", "tokens of a block of channels, a multiple of 16"),
        Argument("page_tokens", "u32", "tokens of a page, a multiple of 16, for BY_PAGE"),
        Argument("keep_channels", "u32", "SparQ's r, 1 to d"),
        Argument("channel_group", "u32", "neighbours chosen together; divides r and d"),
        Argument("sinks", "u32", "tokens, or pages with BY_PAGE, chosen in any case"),
        _V_OFFSET,
        Argument("scale", "i32", "bits of fp32: scale of the logits"),
        _SCALE_LOG2E,
        _FLAGS,
    ),
)
KERNELS = (ATTEND, SPARF)


def layout_fingerprint() -> int:
    """CRC-32 of the registers of all kernels and the fields of all records.

    A library says the one that it was built with, so that one of another layout is never called.
    """
    registers = [
        (kernel.name, one.argument.name, one.argument.kind, one.offset)
        for kernel in KERNELS
        for one in kernel.registers()
    ]
    fields = [
        (layout.name, field.name, field.type, field.count, at)
        for layout in LAYOUTS
        for field, at in layout.offsets()
    ]
    return zlib.crc32(repr((registers, fields)).encode())


@dataclass(frozen=True, slots=True)
class KernelShape:
    """Shape that a kernel is compiled for.

    Raises ``ValueError`` for a shape that no kernel is made for.

    Example:
        KernelShape(head_size=128, group=4, dtype="bfloat16")
    """

    head_size: int
    group: int
    dtype: Literal["float16", "bfloat16"]

    def __post_init__(self) -> None:
        """Check that such kernels exist."""
        problem = shape_problem(self.head_size, self.group, self.dtype)
        if problem:
            raise ValueError(problem)

    @property
    def page_bytes(self) -> int:
        """Bytes of K and V of an entry."""
        return 4 * PAGE_TOKENS * self.head_size

    @property
    def partial_bytes(self) -> int:
        """Bytes of one partial."""
        return partial_bytes(self.head_size, self.group)

    @property
    def flags(self) -> Flag:
        """Flags that the dtype sets."""
        return Flag.BFLOAT16 if self.dtype == "bfloat16" else Flag(0)


def shape_problem(head_size: int, group: int, dtype: str) -> str:
    """Reason for there to be no kernel of this shape; empty if there is one."""
    wanted: Sequence[tuple[str, object, Sequence[object]]] = (
        ("head size", head_size, HEAD_SIZES),
        ("query heads per KV head", group, GROUPS),
        ("KV dtype", dtype, DTYPES),
    )
    for name, value, allowed in wanted:
        if value not in allowed:
            listed = ", ".join(str(one) for one in allowed)
            return f"the FPGA kernels have no {name} {value}, only {listed}"
    return ""
