"""Random rows in decode: contexts in blocks that lie scattered, windows, and what is kept of both.

Memory that holds no token is NaN: a kernel that reads what it may not poisons its output.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace

import numpy as np
import torch
from hypothesis import strategies as st
from numpy.typing import NDArray

from vllm_ssdkv import _kernels
from vllm_ssdkv.kernels.operands.block_layout import DTYPES, BlockLayout, PartialState
from vllm_ssdkv.kernels.operands.page_list import PageList
from vllm_ssdkv.kernels.paged import CpuPageKernels
from vllm_ssdkv.profiling.dense_oracle import write_block
from vllm_ssdkv.sparse.protocol import ContextSummaries, Selection

CODE_BITS = 2
"""Bits of a number in the codes that contexts have."""


@dataclass
class Row:
    """Sizes of one row: context blocks, and tokens in the window, at least one."""

    blocks: int
    window: int


class Contexts:
    """K and V of R rows, as tensors and in blocks of ``layout``, with summaries of them."""

    def __init__(
        self,
        layout: BlockLayout,
        group: int,
        rows: Sequence[Row],
        seed: int = 0,
        spread: float = 1.0,
        shuffle: int = 0,
    ) -> None:
        """``shuffle`` moves blocks and their summaries to other places, and nothing else."""
        draw = torch.Generator().manual_seed(seed)
        self.layout = layout
        self.rows = list(rows)
        self.group = group
        self._drawn = seed, spread
        self.scale = layout.head_size**-0.5
        heads = (len(rows), group * layout.kv_heads, layout.head_size)
        self.query = torch.randn(heads, generator=draw) * spread
        tokens = [row.blocks * layout.block_tokens + row.window for row in rows]
        shape = (2, layout.kv_heads, layout.head_size)
        kv = [torch.randn((n, *shape), generator=draw).to(layout.dtype) for n in tokens]
        self.key = [part[:, 0] for part in kv]
        self.value = [part[:, 1] for part in kv]
        windows = [-(-row.window // layout.block_tokens) for row in rows]
        total = sum(row.blocks for row in rows) + sum(windows)
        self.blocks = torch.full((total, layout.block_bytes), 0xFF, dtype=torch.uint8)
        places = torch.randperm(
            total, generator=torch.Generator().manual_seed(seed * 7 + shuffle)
        ).tolist()
        context: list[int] = []
        window: list[int] = []
        for i, row in enumerate(rows):
            for index in range(row.blocks + windows[i]):
                place = places.pop()
                (context if index < row.blocks else window).append(place)
                part = slice(index * layout.block_tokens, (index + 1) * layout.block_tokens)
                have = len(self.key[i][part])
                block = torch.full((2, layout.block_tokens, *shape[1:]), torch.nan)
                block[0, :have], block[1, :have] = self.key[i][part], self.value[i][part]
                write_block(layout, self.blocks[place], block[0], block[1])
        self.kernels = CpuPageKernels(2)
        self.base = self._addresses(context)
        self._kept: list[torch.Tensor] = []
        self._order = torch.randperm(
            len(context), generator=torch.Generator().manual_seed(seed * 3 + shuffle)
        )
        """Where each context block's summaries lie among the others'."""
        item = layout.dtype.itemsize
        bounds = self._targets(len(context), layout.kv_heads * layout.groups * 2 * item)
        channels = self._targets(len(context), layout.kv_heads * layout.block_tokens * item)
        mean_and_variance = self._targets(len(context), layout.kv_heads * layout.groups * 2 * item)
        size = _kernels.code_bytes(layout.shape, CODE_BITS)
        self._codes = torch.full((len(context), layout.kv_heads * size), 0xFF, dtype=torch.uint8)
        codes = self._codes.data_ptr() + self._order.numpy() * self._codes.shape[1]
        self.kernels.encode(self.base, layout, codes.astype(np.uint64), CODE_BITS)
        self.value_sum = torch.full((len(context), *shape[1:]), torch.nan)
        sums = self.value_sum.data_ptr() + np.arange(len(context)) * shape[1] * shape[2] * 4
        self.kernels.summarize(
            self.base,
            layout,
            bounds=bounds,
            spread=mean_and_variance,
            channels=channels,
            value_sum=sums.astype(np.uint64),
        )
        ends = np.cumsum([row.blocks for row in rows], dtype=np.int32)
        window_ends = np.cumsum(windows, dtype=np.int32)
        self.summaries = ContextSummaries(
            layout,
            ends - np.array([row.blocks for row in rows], np.int32),
            ends,
            np.array([row.window for row in rows], np.int32),
            bounds,
            mean_and_variance,
            codes.astype(np.uint64),
            channels,
            window_base=self._addresses(window),
            window_begin=window_ends - np.array(windows, np.int32),
            window_end=window_ends,
        )

    def moved(self) -> Contexts:
        """The same rows with their blocks in other places."""
        seed, spread = self._drawn
        return Contexts(self.layout, self.group, self.rows, seed, spread, shuffle=1)

    def only(self, row: int) -> Contexts:
        """A batch of one of the rows, in the same memory."""
        alone = copy(self)
        alone.rows, alone.query = [self.rows[row]], self.query[row : row + 1]
        alone.key, alone.value = [self.key[row]], [self.value[row]]
        part = {
            name: getattr(self.summaries, name)[row : row + 1]
            for name in ("row_begin", "row_end", "window_tokens", "window_begin", "window_end")
        }
        alone.summaries = replace(self.summaries, **part)
        return alone

    def plant(self, row: int, token: int, key: torch.Tensor) -> None:
        """Replace the key ``[kv_heads, head_size]`` of a context token, summaries included."""
        layout = self.layout
        self.key[row][token] = key.to(layout.dtype)
        index = int(self.summaries.row_begin[row]) + token // layout.block_tokens
        place = int(self.base[index] - self.blocks.data_ptr()) // layout.block_bytes
        part = slice(token // layout.block_tokens * layout.block_tokens, None)
        tokens = slice(0, layout.block_tokens)
        write_block(
            layout, self.blocks[place], self.key[row][part][tokens], self.value[row][part][tokens]
        )
        one = slice(index, index + 1)
        assert self.summaries.bounds_base is not None
        assert self.summaries.spread_base is not None
        assert self.summaries.channel_base is not None
        assert self.summaries.codes_base is not None
        self.kernels.encode(self.base[one], layout, self.summaries.codes_base[one], CODE_BITS)
        self.kernels.summarize(
            self.base[one],
            layout,
            bounds=self.summaries.bounds_base[one],
            spread=self.summaries.spread_base[one],
            channels=self.summaries.channel_base[one],
        )

    def _addresses(self, places: list[int]) -> NDArray[np.uint64]:
        stride = self.layout.block_bytes
        return np.array([self.blocks.data_ptr() + place * stride for place in places], np.uint64)

    def _targets(self, blocks: int, bytes_per_channel: int) -> NDArray[np.uint64]:
        size = bytes_per_channel * self.layout.head_size
        memory = torch.full((blocks, size + 64), 0xFF, dtype=torch.uint8)
        self._kept.append(memory)
        return (memory.data_ptr() + self._order.numpy() * (size + 64)).astype(np.uint64)

    def kept(self, which: int, block: int) -> torch.Tensor:
        """Bounds (0), channels (1) or mean and variance (2) of a context block, flat."""
        return self._kept[which][int(self._order[block]), :-64].view(self.layout.dtype)

    def tokens_of(self, selection: Selection, row: int) -> torch.Tensor:
        """Tokens that a row attends to, window included, bool ``[kv_heads, S]``."""
        layout = self.layout
        chosen = torch.zeros((layout.kv_heads, len(self.key[row])), dtype=torch.bool)
        chosen[:, self.rows[row].blocks * layout.block_tokens :] = True
        for head in range(layout.kv_heads):
            i = row * layout.kv_heads + head
            for at in range(selection.begin[i], selection.begin[i + 1]):
                first = int(selection.pages[at]) * layout.page_tokens
                for t in range(layout.page_tokens):
                    if selection.token_mask is None or selection.token_mask[at, t]:
                        chosen[head, first + t] = True
        return chosen

    def page_list(self, selection: Selection) -> PageList:
        """The selected pages where they lie."""
        layout = self.layout
        lists = np.repeat(np.arange(len(selection.begin) - 1), np.diff(selection.begin))
        row, head = np.divmod(lists, layout.kv_heads)
        block, group = np.divmod(selection.pages, layout.groups)
        page = (head * layout.groups + group) * layout.page_stride_bytes
        at = self.base[self.summaries.row_begin[row] + block] if len(row) else self.base[:0]
        return PageList(
            np.arange(len(self.rows), dtype=np.int32),
            self.last_position(),
            selection.begin[:-1],
            selection.begin[1:],
            at + page.astype(np.uint64),
            selection.pages.astype(np.int64) * layout.page_tokens,
            selection.token_mask,
        )

    def last_position(self) -> NDArray[np.int64]:
        """Position of each row's current token."""
        return np.array([len(key) - 1 for key in self.key], np.int64)

    def attend_window(self, state: PartialState) -> None:
        """Fold the windows into ``state``: a page per page of the window's blocks."""
        layout, context = self.layout, self.summaries
        assert context.window_begin is not None
        assert context.window_base is not None
        pages = [-(-row.window // layout.page_tokens) for row in self.rows]
        number = np.concatenate([np.arange(n) for n in np.repeat(pages, layout.kv_heads)])
        ends = np.cumsum(np.repeat(pages, layout.kv_heads), dtype=np.int32)
        lists = np.repeat(np.arange(len(ends)), np.repeat(pages, layout.kv_heads))
        row, head = np.divmod(lists, layout.kv_heads)
        block, group = np.divmod(number, layout.groups)
        page = (head * layout.groups + group) * layout.page_stride_bytes
        listed = PageList(
            np.arange(len(self.rows), dtype=np.int32),
            self.last_position(),
            np.concatenate([np.zeros(1, np.int32), ends[:-1]]),
            ends,
            context.window_base[context.window_begin[row] + block] + page.astype(np.uint64),
            context.context_tokens[row] + number * layout.page_tokens,
        )
        self.kernels.attend_pages(self.query, state, listed, layout, self.scale)

    def output(self, selection: Selection) -> tuple[torch.Tensor, torch.Tensor]:
        """Output ``[R, q_heads, head_size]`` and log-sum-exp of window and selection.

        Without the compensation that ``alpha`` asks for.
        """
        state = self.state()
        self.attend_window(state)
        listed = self.page_list(selection)
        self.kernels.attend_pages(self.query, state, listed, self.layout, self.scale)
        return state.acc / state.l[..., None], state.m + state.l.log()

    def state(self) -> PartialState:
        """Empty softmax state of the rows' queries."""
        return PartialState.empty(*self.query.shape, torch.device("cpu"))

    def window_lse(self) -> torch.Tensor:
        """Log-sum-exp of each query head over the window."""
        state = self.state()
        self.attend_window(state)
        return state.m + state.l.log()


@st.composite
def contexts(
    draw: st.DrawFn, dtypes: Sequence[torch.dtype] = DTYPES, most_blocks: int = 6
) -> Contexts:
    """Ragged rows with heads, sizes and dtypes at random; some have no context."""
    page_tokens = draw(st.sampled_from([1, 4, 16, 24, 32]))
    plain = BlockLayout.unpadded(
        page_tokens * draw(st.integers(1, 3)),
        page_tokens,
        draw(st.integers(1, 3)),
        8 * draw(st.sampled_from([1, 2, 5, 8, 16])),
        draw(st.sampled_from(dtypes)),
    )
    layout = plain.with_page_stride(plain.page_stride_bytes + 16 * draw(st.integers(0, 2)))
    row = st.builds(Row, st.integers(0, most_blocks), st.integers(1, 40))
    return Contexts(
        layout,
        draw(st.integers(1, 7)),
        draw(st.lists(row, min_size=1, max_size=3)),
        draw(st.integers(0, 2**20)),
        draw(st.sampled_from([0.3, 1.0, 4.0])),
    )
