"""Entries and jobs of an FPGA's kernel, from blocks that rows attend over and from chosen pages.

The kernel knows pages of 16 tokens, and jobs: one list of such pages for one KV head's queries of
one token. Causal attention is in the lists: a page ends with the last token that its query sees.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_ssdkv.fpga_offload.description import PAGE_TOKENS
from vllm_ssdkv.kernels.operands.block_layout import BlockLayout, BlockSource, Rows, on_host
from vllm_ssdkv.kernels.operands.page_list import PageList

_ALL_TOKENS: Final = (1 << PAGE_TOKENS) - 1
_BITS: Final = np.left_shift(np.uint32(1), np.arange(PAGE_TOKENS, dtype=np.uint32))
"""Bit of each token of an entry's mask."""


@dataclass(frozen=True, slots=True)
class Entries:
    """Pages of 16 tokens, in memory that the kernel reads. All arrays [E].

    Attributes:
        address: Of K's first token, uint64.
        tokens: From the first on, 1 to 16, uint32.
        mask: Bit t: token t is attended to, uint32.
        digest: Of K and V, uint64, where the host has not checked them; else None.
    """

    address: NDArray[np.uint64]
    tokens: NDArray[np.uint32]
    mask: NDArray[np.uint32]
    digest: NDArray[np.uint64] | None = None


@dataclass(frozen=True, slots=True)
class JobLists:
    """Jobs of one layer: job j attends to ``entries[begin[j]:end[j]]``. All arrays [J].

    Attributes:
        entries: Of all jobs, which may share them.
        begin, end: Range of each job, int64, end exclusive.
        token: Its query token, int64.
        head: Its KV head, int64.
        masked: Whether a mask is anything but all tokens.
    """

    entries: Entries
    begin: NDArray[np.int64]
    end: NDArray[np.int64]
    token: NDArray[np.int64]
    head: NDArray[np.int64]
    masked: bool

    def __len__(self) -> int:
        """Number of jobs."""
        return len(self.begin)


def v_offset(layout: BlockLayout) -> int:
    """Bytes from a token's K to its V."""
    return layout.page_tokens * layout.head_size * layout.dtype.itemsize


def _parts(
    address: NDArray[np.uint64], position: NDArray[np.int64], layout: BlockLayout
) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
    """Address and position of the parts of 16 tokens of n pages, [n * parts]."""
    parts = np.arange(layout.page_tokens // PAGE_TOKENS)
    nbytes = PAGE_TOKENS * layout.head_size * layout.dtype.itemsize
    at = address[:, None] + (parts * nbytes).astype(np.uint64)[None, :]
    return at.ravel(), (position[:, None] + parts * PAGE_TOKENS).ravel()


def _seen(position: NDArray[np.int64], query: int) -> NDArray[np.int64]:
    """Tokens of pages at these positions that a query at its own sees, 0 to 16."""
    return np.clip(query + 1 - position, 0, PAGE_TOKENS)


def jobs_of_blocks(rows: Rows, source: BlockSource, layout: BlockLayout) -> JobLists:
    """Jobs of rows over whole blocks at absolute addresses, see ``AttentionKernels.attend``.

    Queries of a row that see all of its blocks share their entries.

    Raises:
        ValueError: the blocks lie in a tensor, or have digests and pages of more than 16 tokens.
    """
    if source.tensor is not None:
        raise ValueError("blocks for an FPGA are told by absolute addresses")
    if source.digests is not None and layout.page_tokens != PAGE_TOKENS:
        raise ValueError(f"the kernel makes digests of pages of {PAGE_TOKENS} tokens only")
    base = on_host(source.base, np.uint64)
    start = on_host(source.position, np.int64)
    made = _Lists()
    heads, groups = np.arange(layout.kv_heads), np.arange(layout.groups)
    place = (heads[:, None] * layout.groups + groups[None, :]) * layout.page_stride_bytes
    columns = (
        on_host(rows.query_begin, np.int64),
        on_host(rows.query_count, np.int64),
        on_host(rows.first_position, np.int64),
        on_host(rows.block_begin, np.int64),
        on_host(rows.block_end, np.int64),
    )
    for first, count, begins_at, low, high in zip(*(c.tolist() for c in columns), strict=True):
        if low == high or not count:
            continue
        blocks = base[low:high]
        pages = (start[low:high, None] + groups * layout.page_tokens).ravel()
        last = int(start[low:high].max()) + layout.block_tokens
        shared = last <= begins_at + 1
        for head in range(layout.kv_heads):
            address = (blocks[:, None] + place[head].astype(np.uint64)[None, :]).ravel()
            at, position = _parts(address, pages, layout)
            digest = None
            if source.digests is not None:
                mine = slice(head * layout.groups, (head + 1) * layout.groups)
                digest = source.digests[low:high, mine].ravel()
            if shared:
                made.add(at, _seen(position, begins_at), digest=digest)
                made.jobs(range(first, first + count), head)
                continue
            for i in range(count):
                made.add(at, _seen(position, begins_at + i), digest=digest)
                made.jobs((first + i,), head)
    return made.lists()


def jobs_of_pages(pages: PageList, layout: BlockLayout) -> JobLists:
    """Jobs of rows over chosen pages, see ``PageKernels.attend_pages``."""
    address, position = _parts(
        on_host(pages.address, np.uint64), on_host(pages.position, np.int64), layout
    )
    per_page = layout.page_tokens // PAGE_TOKENS
    mask = None
    if pages.token_mask is not None:
        bits = np.asarray(pages.token_mask, np.uint32).reshape(-1, PAGE_TOKENS)
        mask = (bits * _BITS).sum(axis=1, dtype=np.uint32)
    made = _Lists()
    begin = on_host(pages.begin, np.int64) * per_page
    end = on_host(pages.end, np.int64) * per_page
    tokens = on_host(pages.query_token, np.int64).tolist()
    positions = on_host(pages.query_position, np.int64).tolist()
    for row, (token, at) in enumerate(zip(tokens, positions, strict=True)):
        for head in range(layout.kv_heads):
            place = row * layout.kv_heads + head
            part = slice(int(begin[place]), int(end[place]))
            made.add(address[part], _seen(position[part], at), None if mask is None else mask[part])
            made.jobs((token,), head)
    return made.lists()


class _Lists:
    """Job lists that grow."""

    def __init__(self) -> None:
        self._address: list[NDArray[np.uint64]] = []
        self._tokens: list[NDArray[np.int64]] = []
        self._mask: list[NDArray[np.uint32]] = []
        self._digest: list[NDArray[np.uint64]] = []
        self._jobs: list[tuple[int, int, int, int]] = []
        self._begin = self._end = 0
        self._masked = False

    def add(
        self,
        address: NDArray[np.uint64],
        tokens: NDArray[np.int64],
        mask: NDArray[np.uint32] | None = None,
        digest: NDArray[np.uint64] | None = None,
    ) -> None:
        """Begin a list with the pages that are seen at all. All lists have digests, or none."""
        kept = tokens > 0
        if mask is not None:
            mask = mask & ((np.uint64(1) << tokens.astype(np.uint64)) - np.uint64(1))
            kept &= mask != 0
            mask = mask[kept].astype(np.uint32)
            self._masked = True
        if digest is not None:
            self._digest.append(digest[kept])
        count = int(kept.sum())
        self._address.append(address[kept])
        self._tokens.append(tokens[kept])
        self._mask.append(np.full(count, _ALL_TOKENS, np.uint32) if mask is None else mask)
        self._begin, self._end = self._end, self._end + count

    def jobs(self, tokens: range | tuple[int, ...], head: int) -> None:
        """Have these query tokens attend to the latest list, if there is anything in it."""
        if self._begin < self._end:
            self._jobs += [(self._begin, self._end, token, head) for token in tokens]

    def lists(self) -> JobLists:
        """All of it."""
        table = np.array(self._jobs, np.int64).reshape(-1, 4)
        entries = Entries(
            np.concatenate([*self._address, np.zeros(0, np.uint64)]),
            np.concatenate([*self._tokens, np.zeros(0, np.int64)]).astype(np.uint32),
            np.concatenate([*self._mask, np.zeros(0, np.uint32)]),
            np.concatenate(self._digest) if self._digest else None,
        )
        begin, end, token, head = table.T
        return JobLists(entries, begin, end, token, head, self._masked)


def query_units(query: torch.Tensor, kv_heads: int, group: int) -> NDArray[np.uint16]:
    """Queries as the kernel reads them: uint16 [T, kv_heads, units, group, D], those that fill up
    the last unit of a KV head are zero. ``query`` [T, Hq, D] of 16 bit, on the host."""
    tokens, heads, head_size = query.shape
    each = heads // kv_heads
    units = -(-each // group)
    given = query.contiguous().view(torch.int16).numpy().view(np.uint16)
    given = given.reshape(tokens, kv_heads, each, head_size)
    if each == units * group:
        return given.reshape(tokens, kv_heads, units, group, head_size)
    filled = np.zeros((tokens, kv_heads, units * group, head_size), np.uint16)
    filled[:, :, :each] = given
    return filled.reshape(tokens, kv_heads, units, group, head_size)
