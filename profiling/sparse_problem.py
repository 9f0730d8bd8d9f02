"""Rows in decode with summaries of their contexts, on any device: for checks and benchmarks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_ssdkv.kernels.operands.block_layout import BlockLayout, block_stride
from vllm_ssdkv.kernels.operands.page_list import PageList
from vllm_ssdkv.kernels.paged import PageKernels
from vllm_ssdkv.sparse.protocol import ContextSummaries, Selection


@dataclass(frozen=True, slots=True)
class SparseProblem:
    """R rows, each with as many blocks of ``cache`` in a row; the last is its window.

    Attributes:
        layout: Of the blocks.
        query: [R, Hq, D].
        cache: [R * blocks, ...].
        bounds, channels, value_sum: What ``PageKernels.summarize`` writes of the context blocks.
        summaries: Of the contexts, for selectors.
        scale: Of the logits.
    """

    layout: BlockLayout
    query: torch.Tensor
    cache: torch.Tensor
    bounds: torch.Tensor
    channels: torch.Tensor
    value_sum: torch.Tensor
    summaries: ContextSummaries
    scale: float

    @classmethod
    def of(
        cls, layout: BlockLayout, query: torch.Tensor, cache: torch.Tensor, kernels: PageKernels
    ) -> SparseProblem:
        """Summarise ``cache`` by ``kernels``, whose device it is on; windows are half full."""
        rows = len(query)
        ids = np.arange(len(cache)).reshape(rows, -1)
        blocks = _addresses(cache)
        context = blocks[ids[:, :-1].ravel()]
        shape = layout.kv_heads, layout.head_size
        bounds = torch.zeros(
            (len(context), layout.kv_heads, layout.groups, 2, layout.head_size),
            dtype=layout.dtype,
            device=cache.device,
        )
        channels = torch.zeros(
            (len(context), *shape, layout.block_tokens), dtype=layout.dtype, device=cache.device
        )
        value_sum = torch.zeros((len(context), *shape), device=cache.device)
        kernels.summarize(
            context,
            layout,
            bounds=_addresses(bounds),
            channels=_addresses(channels),
            value_sum=_addresses(value_sum),
        )
        each = ids.shape[1] - 1
        begin = np.arange(rows, dtype=np.int32)
        summaries = ContextSummaries(
            layout,
            begin * each,
            (begin + 1) * each,
            np.full(rows, layout.block_tokens // 2 + 1, np.int32),
            _addresses(bounds),
            channel_base=_addresses(channels),
            window_base=blocks[ids[:, -1]],
            window_begin=begin,
            window_end=begin + 1,
        )
        scale = layout.head_size**-0.5
        return cls(layout, query, cache, bounds, channels, value_sum, summaries, scale)

    def random_selection(self, share: float, seed: int) -> Selection:
        """``share`` of the pages of every row and head."""
        draw = np.random.default_rng(seed)
        lists = len(self.query) * self.layout.kv_heads
        pages = int(self.summaries.pages[0])
        count = int(pages * share)
        chosen = np.argsort(draw.random((lists, pages)), axis=1)[:, :count]
        begin = np.arange(lists + 1, dtype=np.int32) * count
        mass = np.full((len(self.query), self.layout.kv_heads), np.nan, np.float32)
        return Selection(np.sort(chosen, axis=1).ravel().astype(np.int32), begin, mass)

    def page_list(self, selection: Selection, memory: torch.Tensor) -> PageList:
        """The chosen pages in ``memory``, which is ``cache`` or a copy of it."""
        layout, context = self.layout, self.summaries
        lists = np.repeat(np.arange(len(selection.begin) - 1), np.diff(selection.begin))
        row, head = np.divmod(lists, layout.kv_heads)
        block, group = np.divmod(selection.pages.astype(np.int64), layout.groups)
        at = row * (len(memory) // len(self.query)) + block
        page = (head * layout.groups + group) * layout.page_stride_bytes
        last = context.context_tokens + context.window_tokens - 1
        return PageList(
            np.arange(len(self.query), dtype=np.int32),
            last,
            selection.begin[:-1],
            selection.begin[1:],
            _addresses(memory)[at] + page.astype(np.uint64),
            selection.pages.astype(np.int64) * layout.page_tokens,
            selection.token_mask,
        )


def _addresses(rows: torch.Tensor) -> NDArray[np.uint64]:
    """Absolute address of each row, [n]."""
    step = np.uint64(block_stride(rows) * rows.itemsize)
    return np.uint64(rows.data_ptr()) + np.arange(len(rows), dtype=np.uint64) * step
