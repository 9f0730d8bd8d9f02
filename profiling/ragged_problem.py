"""Ragged rows in decode whose contexts lie anywhere: for checks of kernels on a device.

Memory that holds no token is NaN: a kernel that reads what it may not poisons its output.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_ssdkv import _kernels
from vllm_ssdkv.kernels.dense import wait_for
from vllm_ssdkv.kernels.operands.block_layout import BlockLayout, PartialState
from vllm_ssdkv.kernels.operands.page_list import PageList
from vllm_ssdkv.kernels.paged import PageKernels
from vllm_ssdkv.profiling.dense_oracle import write_block
from vllm_ssdkv.sparse.protocol import ContextSummaries, Selection

CODE_BITS = 2
"""Bits of a number in the codes that problems have."""


@dataclass(frozen=True, slots=True)
class RowSize:
    """Context blocks of a row, and tokens in its window, at least one."""

    blocks: int
    window: int


@dataclass(frozen=True, slots=True)
class BlockSummaries:
    """Summaries of B blocks by ``PageKernels.summarize``, uint8 [B, bytes], in these' memory."""

    bounds: torch.Tensor
    spread: torch.Tensor
    channels: torch.Tensor
    value_sum: torch.Tensor
    codes: torch.Tensor

    @classmethod
    def of(cls, problem: RaggedProblem, kernels: PageKernels) -> BlockSummaries:
        """Made by ``kernels``; bytes that they do not write are 0xFF."""
        layout = problem.layout
        each = layout.kv_heads * layout.head_size
        item = layout.dtype.itemsize
        made = cls(
            problem.memory_like(2 * layout.groups * each * item),
            problem.memory_like(2 * layout.groups * each * item),
            problem.memory_like(layout.block_tokens * each * item),
            problem.memory_like(4 * each),
            problem.memory_like(layout.kv_heads * _kernels.code_bytes(layout.shape, CODE_BITS)),
        )
        source = addresses(problem.context)
        kernels.summarize(
            source,
            layout,
            bounds=addresses(made.bounds),
            spread=addresses(made.spread),
            channels=addresses(made.channels),
            value_sum=addresses(made.value_sum),
        )
        kernels.encode(source, layout, addresses(made.codes), CODE_BITS)
        wait_for(kernels.device)
        return made


class RaggedProblem:
    """R rows of one query each; blocks of contexts and of windows lie in random order.

    Attributes:
        layout: Of the blocks.
        rows: Their sizes.
        query: [R, Hq, D], on the device that attends.
        context, window: Blocks, uint8 [B, block_bytes], in the device's memory or in pinned memory
            of the host.
    """

    def __init__(
        self,
        layout: BlockLayout,
        rows: Sequence[RowSize],
        query: torch.Tensor,
        context: torch.Tensor,
        window: torch.Tensor,
    ):
        self.layout = layout
        self.rows = list(rows)
        self.query = query
        self.context = context
        self.window = window
        self.scale = layout.head_size**-0.5
        self._picked: list[torch.Tensor] = []

    @classmethod
    def draw(
        cls, layout: BlockLayout, group: int, rows: Sequence[RowSize], seed: int
    ) -> RaggedProblem:
        """A random problem on the CPU with ``group`` query heads per KV head."""
        random = torch.Generator().manual_seed(seed)
        shape = (len(rows), group * layout.kv_heads, layout.head_size)
        query = torch.randn(shape, generator=random).to(layout.dtype)
        windows = [-(-row.window // layout.block_tokens) for row in rows]
        memory = [
            torch.full((count, layout.block_bytes), 0xFF, dtype=torch.uint8)
            for count in (sum(row.blocks for row in rows), sum(windows))
        ]
        sizes = (2, layout.block_tokens, layout.kv_heads, layout.head_size)
        for block in memory[0]:
            write_block(layout, block, *torch.randn(sizes, generator=random).to(layout.dtype))
        at = 0
        for row, blocks in zip(rows, windows, strict=True):
            for index in range(blocks):
                key, value = torch.randn(sizes, generator=random).to(layout.dtype)
                have = row.window - index * layout.block_tokens
                key[have:] = value[have:] = torch.nan
                write_block(layout, memory[1][at + index], key, value)
            at += blocks
        return cls(layout, rows, query, *memory)

    def moved(self, device: torch.device, *, pinned: bool) -> RaggedProblem:
        """The same on ``device``, with the blocks in its memory or ``pinned`` in the host's."""
        blocks = [
            _pinned(part, device) if pinned else part.to(device)
            for part in (self.context, self.window)
        ]
        return RaggedProblem(self.layout, self.rows, self.query.to(device), *blocks)

    def memory_like(self, nbytes: int) -> torch.Tensor:
        """Memory of so many bytes of 0xFF for each context block, where these lie."""
        made = torch.full((len(self.context), nbytes), 0xFF, dtype=torch.uint8)
        if self.context.is_pinned():
            return made.pin_memory()
        return made.to(self.context.device)

    def summaries(self, held: BlockSummaries) -> ContextSummaries:
        """Summaries for selectors, with channels as they are."""
        ends = np.cumsum([row.blocks for row in self.rows], dtype=np.int32)
        windows = np.array([row.window for row in self.rows], np.int32)
        window_ends = np.cumsum(-(-windows // self.layout.block_tokens), dtype=np.int32)
        return ContextSummaries(
            self.layout,
            ends - np.array([row.blocks for row in self.rows], np.int32),
            ends,
            windows,
            addresses(held.bounds),
            addresses(held.spread),
            addresses(held.codes),
            channel_base=addresses(held.channels),
            window_base=addresses(self.window),
            window_begin=np.concatenate([np.zeros(1, np.int32), window_ends[:-1]]),
            window_end=window_ends,
        )

    def asked(self, held: BlockSummaries) -> ContextSummaries:
        """The same with channels that have to be asked for."""
        context, layout = self.summaries(held), self.layout
        shape = layout.kv_heads, layout.head_size, layout.block_tokens

        def source(channels: NDArray[np.int32]) -> NDArray[np.uint64]:
            parts = [np.zeros(0, np.uint64)]
            for row, chosen in enumerate(channels):
                blocks = slice(context.row_begin[row], context.row_end[row])
                every = held.channels[blocks].view(layout.dtype).view(-1, *shape)
                index = torch.from_numpy(chosen.astype(np.int64)).to(every.device)
                wide = index[None, :, :, None].expand(len(every), -1, -1, shape[2])
                picked = every.gather(2, wide).contiguous()
                if not len(picked):
                    continue
                picked = picked.pin_memory() if held.channels.is_pinned() else picked
                self._picked.append(picked)
                parts.append(addresses(picked.flatten(1)))
            wait_for(self.query.device)
            return np.concatenate(parts)

        return replace(context, channel_base=None, channel_source=source)

    def random_selection(self, share: float, *, masked: bool, seed: int) -> Selection:
        """``share`` of the pages of every row and KV head, and any tokens of them if masked."""
        draw = np.random.default_rng(seed)
        layout = self.layout
        lists = [
            np.flatnonzero(draw.random(row.blocks * layout.groups) < share).astype(np.int32)
            for row in self.rows
            for _ in range(layout.kv_heads)
        ]
        begin = np.concatenate([[0], np.cumsum([len(pages) for pages in lists])]).astype(np.int32)
        shape = int(begin[-1]), layout.page_tokens
        mask = (draw.random(shape) < 0.5).astype(np.uint8) if masked else None
        mass = np.ones((len(self.rows), layout.kv_heads), np.float32)
        return Selection(np.concatenate([np.zeros(0, np.int32), *lists]), begin, mass, mask)

    def page_list(self, selection: Selection) -> PageList:
        """The selected pages of the contexts, where they lie."""
        row, head = self._lists(selection.begin)
        first = np.cumsum([0, *(size.blocks for size in self.rows)])
        block, group = np.divmod(selection.pages.astype(np.int64), self.layout.groups)
        page = (head * self.layout.groups + group) * self.layout.page_stride_bytes
        base = addresses(self.context)[first[row] + block] if len(row) else np.zeros(0, np.uint64)
        return PageList(
            np.arange(len(self.rows), dtype=np.int32),
            self._last(),
            selection.begin[:-1],
            selection.begin[1:],
            base + page.astype(np.uint64),
            selection.pages.astype(np.int64) * self.layout.page_tokens,
            selection.token_mask,
        )

    def window_list(self) -> PageList:
        """All pages of the windows that hold a token."""
        layout = self.layout
        windows = np.array([row.window for row in self.rows])
        counts = np.repeat(-(-windows // layout.page_tokens), layout.kv_heads)
        begin = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        row, head = self._lists(begin)
        number = np.concatenate([np.arange(count) for count in counts])
        first = np.concatenate([[0], np.cumsum(-(-windows // layout.block_tokens))])
        block, group = np.divmod(number, layout.groups)
        page = (head * layout.groups + group) * layout.page_stride_bytes
        context = np.array([size.blocks for size in self.rows]) * layout.block_tokens
        return PageList(
            np.arange(len(self.rows), dtype=np.int32),
            self._last(),
            begin[:-1],
            begin[1:],
            addresses(self.window)[first[row] + block] + page.astype(np.uint64),
            (context[row] + number * layout.page_tokens).astype(np.int64),
        )

    def state(self) -> PartialState:
        """A state that has seen nothing."""
        tokens, heads, size = self.query.shape
        return PartialState.empty(tokens, heads, size, self.query.device)

    def _lists(self, begin: NDArray[np.int32]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Row and head of each entry of lists with these edges."""
        counts = np.diff(begin).astype(np.int64)
        lists = np.repeat(np.arange(len(counts)), counts)
        row, head = np.divmod(lists, self.layout.kv_heads)
        return row, head

    def _last(self) -> NDArray[np.int64]:
        tokens = self.layout.block_tokens
        return np.array([row.blocks * tokens + row.window - 1 for row in self.rows], np.int64)


def addresses(memory: torch.Tensor) -> NDArray[np.uint64]:
    """Absolute address of each row of ``memory [n, ...]``, uint64 [n]."""
    step = memory.stride(0) * memory.itemsize
    return memory.data_ptr() + np.arange(len(memory), dtype=np.uint64) * np.uint64(step)


def _pinned(memory: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy that ``device`` reaches; a CPU reaches everything."""
    return memory.pin_memory() if device.type == "cuda" else memory.clone()
