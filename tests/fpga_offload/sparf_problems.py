"""Calls of ``sparf``, and what they should answer: the selector's choice, and SparQ in fp64."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.oracles import sparse_attention as oracle
from tests.sparse.contexts import Contexts, Row
from vllm_ssdkv.fpga_offload.backend import Backend, SparfResult, SparfWork
from vllm_ssdkv.fpga_offload.csim import CsimBackend
from vllm_ssdkv.fpga_offload.description import (
    ENTRY,
    GROUPS,
    HEAD_SIZES,
    PAGE_TOKENS,
    SPARF_JOB,
    KernelShape,
)
from vllm_ssdkv.kernels.operands.block_layout import BlockLayout
from vllm_ssdkv.offload.fpga import kernel_shape
from vllm_ssdkv.sparse.selectors.fpga_sparf import FpgaChoice, FpgaSparfSelector
from vllm_ssdkv.sparse.selectors.sparf import SparfSelector

DTYPES = (torch.float16, torch.bfloat16)


Opened = Callable[[KernelShape], AbstractContextManager[Backend]]
"""Opens the kernels of a shape."""


@contextmanager
def csim(shape: KernelShape) -> Iterator[Backend]:
    backend = CsimBackend(shape)
    yield backend
    assert backend.close(10)


@st.composite
def problems(
    draw: st.DrawFn,
    most_blocks: int = 4,
    head_sizes: Sequence[int] = HEAD_SIZES,
    groups: Sequence[int] = GROUPS,
) -> Contexts:
    """Ragged rows in layouts that the kernels take; some have no context."""
    page = PAGE_TOKENS * draw(st.integers(1, 2))
    layout = BlockLayout.unpadded(
        page * draw(st.integers(1, 4)),
        page,
        draw(st.integers(1, 2)),
        draw(st.sampled_from(head_sizes)),
        draw(st.sampled_from(DTYPES)),
    )
    row = st.builds(Row, st.integers(0, most_blocks), st.integers(1, 80))
    group = draw(st.sampled_from(groups))
    made = Contexts(
        layout,
        group,
        draw(st.lists(row, min_size=1, max_size=3)),
        draw(st.integers(0, 2**20)),
        draw(st.sampled_from([0.3, 1.0, 4.0])),
    )
    made.query = made.query.to(layout.dtype).float()
    return made


def same_choice(problem: Contexts, selector: SparfSelector, opened: Opened = csim) -> None:
    """Page by page, token by token, with the same mass."""
    layout = problem.layout
    shape = kernel_shape(
        problem.group * layout.kv_heads, layout.kv_heads, layout.head_size, layout.dtype
    )
    query = problem.query.to(layout.dtype)
    calls: list[int] = []
    with opened(shape) as backend:
        choice = FpgaChoice(backend, lambda: calls.append(1))
        found = FpgaSparfSelector(selector, choice).select(query, problem.summaries, problem.scale)
        assert choice.in_use
    assert calls
    wanted = selector.select(query, problem.summaries, problem.scale)
    np.testing.assert_array_equal(found.begin, wanted.begin)
    np.testing.assert_array_equal(found.pages, wanted.pages)
    assert (found.token_mask is None) == (wanted.token_mask is None)
    if wanted.token_mask is not None:
        np.testing.assert_array_equal(found.token_mask, wanted.token_mask)
    np.testing.assert_allclose(found.mass, wanted.mass, rtol=1e-5, atol=1e-6)
    if wanted.alpha is not None:
        assert found.alpha is not None
        np.testing.assert_allclose(found.alpha, wanted.alpha, rtol=1e-5, atol=1e-6)


def tied(numbers: NDArray[np.int64]) -> Contexts:
    """Nine blocks whose tokens' keys are these quarters, for queries of ones."""
    layout = BlockLayout.unpadded(64, 16, 2, 64, torch.float16)
    problem = Contexts(layout, 2, [Row(6, 9), Row(3, 30)], seed=3)
    problem.query = torch.ones_like(problem.query)
    left = iter(numbers.tolist())
    for row, size in enumerate(problem.rows):
        for token in range(size.blocks * layout.block_tokens):
            problem.plant(row, token, torch.full((2, 64), next(left) / 4))
    return problem


@dataclass
class Call:
    """All rows and KV heads of a problem as one call of the kernel, a job for each."""

    problem: Contexts
    shape: KernelShape
    work: SparfWork

    @classmethod
    def of(
        cls, problem: Contexts, keep: Sequence[int], channels: int, *, rest: bool = True
    ) -> Call:
        """``keep``: tokens of each row's context."""
        layout, summaries = problem.layout, problem.summaries
        size, heads = layout.head_size, layout.kv_heads
        shape = kernel_shape(problem.group * heads, heads, size, layout.dtype)
        jobs = np.zeros(len(problem.rows) * heads, SPARF_JOB.dtype)
        entries: list[tuple[int, int, int]] = []
        blocks: list[int] = []
        means = []
        assert summaries.channel_base is not None
        assert summaries.window_base is not None
        window_base = [int(one) for one in summaries.window_base]
        for i in range(len(jobs)):
            row, head = divmod(i, heads)
            sizes = problem.rows[row]
            low, high = int(summaries.row_begin[row]), int(summaries.row_end[row])
            first_channels, first_entry = len(blocks), len(entries)
            step = size * layout.block_tokens * layout.dtype.itemsize
            blocks += [int(one) + head * step for one in summaries.channel_base[low:high]]
            for block in problem.base[low:high]:
                entries += _entries(int(block), head, layout, layout.block_tokens)
            first_window = len(entries)
            assert summaries.window_begin is not None
            at, left = int(summaries.window_begin[row]), sizes.window
            while left:
                here = min(left, layout.block_tokens)
                entries += _entries(window_base[at], head, layout, here)
                at, left = at + 1, left - here
            jobs[i] = (
                i,
                i,
                first_channels,
                high - low,
                first_entry,
                first_window,
                len(entries) - first_window,
                keep[row],
            )
            means.append(problem.value[row][:, head].double().mean(0).float().numpy())
        query = problem.query.to(layout.dtype).contiguous().view(torch.int16).numpy()
        work = SparfWork(
            query.view(np.uint16).reshape(len(jobs), problem.group, size),
            np.array(entries, ENTRY.dtype),
            jobs,
            np.array(blocks, np.uint64),
            problem.scale,
            len(jobs),
            layout.block_tokens,
            layout.page_tokens,
            channels,
            attend=True,
            window=True,
            mean_value=np.stack(means) if rest else None,
            v_offset=layout.page_tokens * size * layout.dtype.itemsize,
        )
        return cls(problem, shape, work)

    def run(self, opened: Opened = csim) -> SparfResult:
        """Result of a backend."""
        with opened(self.shape) as backend:
            return backend.sparf(self.work)

    def chosen(self, result: SparfResult, job: int) -> NDArray[np.bool_]:
        """Tokens of a job's context and window."""
        row = self.problem.rows[job // self.problem.layout.kv_heads]
        tokens = row.blocks * self.problem.layout.block_tokens
        first = int(self.work.jobs["first_entry"][job])
        masks = result.masks[first : first + tokens // PAGE_TOKENS]
        bits = (masks[:, None] >> np.arange(PAGE_TOKENS, dtype=np.uint32)) & 1
        return np.concatenate([bits.ravel() == 1, np.ones(row.window, np.bool_)])


def _entries(block: int, head: int, layout: BlockLayout, tokens: int) -> list[tuple[int, int, int]]:
    found = []
    for first in range(0, tokens, PAGE_TOKENS):
        page, token = divmod(first, layout.page_tokens)
        at = (head * layout.groups + page) * layout.page_stride_bytes
        at += token * layout.head_size * layout.dtype.itemsize
        found.append((block + at, min(PAGE_TOKENS, tokens - first), 0))
    return found


def same_as_sparq(problem: Contexts, share: float, channels: float, opened: Opened = csim) -> None:
    """SparQ as published, in fp64. Rounding may swap tokens whose scores are almost equal."""
    r = max(1, round(problem.layout.head_size * channels))
    windows = [row.window for row in problem.rows]
    k = [
        max(round((len(key) - 1) * share), window - 1)
        for key, window in zip(problem.key, windows, strict=True)
    ]
    keep = [one - window + 1 for one, window in zip(k, windows, strict=True)]
    call = Call.of(problem, keep, r)
    result = call.run(opened)
    assert result.partials is not None
    heads = problem.layout.kv_heads
    for row in range(len(problem.rows)):
        want, tokens = oracle.sparq_attention(
            problem.query[row],
            problem.key[row],
            problem.value[row],
            r=r,
            k=k[row],
            local=windows[row] - 1,
        )
        for head in range(heads):
            job = row * heads + head
            chosen = call.chosen(result, job)
            apart = chosen ^ tokens[head].numpy()
            assert chosen.sum() == tokens[head].sum()
            assert apart.sum() <= 2
            assert result.tokens[job] == chosen.sum() - windows[row]
            found = result.partials.acc[job] / result.partials.l[job][:, None]
            wanted = want[head * problem.group : (head + 1) * problem.group].numpy()
            if not apart.any():
                assert np.abs(found - wanted).max() < 1e-5 * np.abs(wanted).max()
