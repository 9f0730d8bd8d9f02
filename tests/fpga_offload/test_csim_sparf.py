"""The HLS kernel of SparF, by its C simulation: what is chosen, and what is attended to."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.oracles import sparse_attention as oracle
from tests.sparse.contexts import Contexts, Row
from vllm_ssdkv.base.errors import FpgaLimitError, FpgaListError
from vllm_ssdkv.fpga_offload.backend import SparfResult, SparfWork
from vllm_ssdkv.fpga_offload.csim import CsimBackend
from vllm_ssdkv.fpga_offload.description import (
    ENTRY,
    GROUPS,
    HEAD_SIZES,
    MAX_JOB_ENTRIES,
    PAGE_TOKENS,
    SPARF_JOB,
    KernelShape,
)
from vllm_ssdkv.kernels.operands.block_layout import BlockLayout
from vllm_ssdkv.kernels.scoring import CpuScoringKernels
from vllm_ssdkv.offload.fpga import kernel_shape
from vllm_ssdkv.sparse.protocol import Budget
from vllm_ssdkv.sparse.selectors.fpga_sparf import FpgaChoice, FpgaSparfSelector
from vllm_ssdkv.sparse.selectors.sparf import SparfSelector

DTYPES = (torch.float16, torch.bfloat16)


@st.composite
def problems(draw: st.DrawFn, most_blocks: int = 4) -> Contexts:
    """Ragged rows in layouts that the kernels take; some have no context."""
    page = PAGE_TOKENS * draw(st.integers(1, 2))
    layout = BlockLayout.unpadded(
        page * draw(st.integers(1, 4)),
        page,
        draw(st.integers(1, 2)),
        draw(st.sampled_from(HEAD_SIZES)),
        draw(st.sampled_from(DTYPES)),
    )
    row = st.builds(Row, st.integers(0, most_blocks), st.integers(1, 80))
    group = draw(st.sampled_from(GROUPS))
    made = Contexts(
        layout,
        group,
        draw(st.lists(row, min_size=1, max_size=3)),
        draw(st.integers(0, 2**20)),
        draw(st.sampled_from([0.3, 1.0, 4.0])),
    )
    made.query = made.query.to(layout.dtype).float()
    return made


def same_choice(problem: Contexts, selector: SparfSelector) -> None:
    """Page by page, token by token, with the same mass."""
    layout = problem.layout
    shape = kernel_shape(
        problem.group * layout.kv_heads, layout.kv_heads, layout.head_size, layout.dtype
    )
    query = problem.query.to(layout.dtype)
    calls: list[int] = []
    with closing_backend(shape) as backend:
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
        np.testing.assert_allclose(found.alpha, wanted.alpha, rtol=1e-5, atol=1e-6)


class _Closing(closing[CsimBackend]):
    def __exit__(self, *_: object) -> None:
        assert self.thing.close(10)


def closing_backend(shape: KernelShape) -> _Closing:
    return _Closing(CsimBackend(shape))


@settings(deadline=None, max_examples=15)
@given(
    problem=problems(),
    granularity=st.sampled_from(["token", "page"]),
    share=st.floats(0.01, 1),
    channels=st.integers(1, 256),
    together=st.sampled_from([1, 1, 2, 8]),
    sinks=st.integers(0, 40),
    rest=st.booleans(),
)
def test_the_choice_is_the_selectors(
    problem: Contexts,
    granularity: str,
    share: float,
    channels: int,
    together: int,
    sinks: int,
    rest: bool,
) -> None:
    budget = Budget(share=share)
    kernels = CpuScoringKernels(1)
    kind = "page" if granularity == "page" else "token"
    selector = SparfSelector(budget, channels, kind, sinks, kernels, together, estimate_rest=rest)
    same_choice(problem, selector)


@pytest.mark.parametrize("values", [1, 2, 3])
def test_ties_of_tokens_go_as_the_selectors(values: int) -> None:
    """K has few different numbers, so most scores are equal to many others."""
    problem = tied(np.random.default_rng(values).integers(0, values, 9 * 64))
    for tokens in (10, 33, 100, 200):
        budget = Budget(tokens=tokens)
        same_choice(problem, SparfSelector(budget, 8, "token", 0, CpuScoringKernels(1)))


@pytest.mark.parametrize("values", [1, 2, 3])
def test_ties_of_pages_go_as_the_selectors(values: int) -> None:
    """Pages are copies of few. (Those of equal tokens in another order may differ in rounding.)"""
    draw = np.random.default_rng(values)
    pages = draw.integers(0, 5, (values, PAGE_TOKENS))[draw.integers(0, values, 9 * 4)]
    problem = tied(pages.ravel())
    for tokens in (40, 100, 200):
        budget = Budget(tokens=tokens)
        same_choice(problem, SparfSelector(budget, 8, "page", 0, CpuScoringKernels(1)))


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

    def run(self) -> SparfResult:
        with closing_backend(self.shape) as backend:
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


@settings(deadline=None, max_examples=12)
@given(problem=problems(), share=st.floats(0.05, 1), channels=st.floats(0.05, 1))
def test_sparf_is_sparq(problem: Contexts, share: float, channels: float) -> None:
    """As published, in fp64. Rounding may swap tokens whose scores are almost equal."""
    r = max(1, round(problem.layout.head_size * channels))
    windows = [row.window for row in problem.rows]
    k = [
        max(round((len(key) - 1) * share), window - 1)
        for key, window in zip(problem.key, windows, strict=True)
    ]
    keep = [one - window + 1 for one, window in zip(k, windows, strict=True)]
    call = Call.of(problem, keep, r)
    result = call.run()
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


def test_without_a_mean_it_is_attention_to_what_was_chosen() -> None:
    layout = BlockLayout.unpadded(32, 16, 2, 128, torch.bfloat16)
    problem = Contexts(layout, 4, [Row(9, 33), Row(0, 2)], seed=8)
    problem.query = problem.query.to(layout.dtype).float()
    call = Call.of(problem, [70, 5], 16, rest=False)
    for work, window in ((call.work, True), (replace(call.work, window=False), False)):
        result = replace(call, work=work).run()
        assert result.partials is not None
        for job in range(4):
            row, head = divmod(job, 2)
            chosen = torch.from_numpy(call.chosen(result, job))
            if not window:
                chosen[problem.rows[row].blocks * layout.block_tokens :] = False
            both = torch.zeros((2, len(chosen)), dtype=torch.bool)
            both[head] = chosen
            out, lse = oracle.attend_chosen(
                problem.query[row], problem.key[row], problem.value[row], both, problem.scale
            )
            mine = slice(head * 4, head * 4 + 4)
            if not chosen.any():
                assert (result.partials.m[job] == -np.inf).all()
                continue
            found = result.partials.acc[job] / result.partials.l[job][:, None]
            found_lse = result.partials.m[job] + np.log(result.partials.l[job])
            assert np.abs(found - out[mine].numpy()).max() < 1e-5 * float(out.abs().max())
            assert np.abs(found_lse - lse[mine].numpy()).max() < 1e-5


def _small() -> Call:
    layout = BlockLayout.unpadded(32, 16, 1, 64, torch.float16)
    return Call.of(Contexts(layout, 1, [Row(3, 5), Row(2, 20)], seed=1), [16, 16], 8)


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("first_entry", 12, "job 1 has entries beyond"),
        ("first_window", 2**31, "job 1 has entries beyond"),
        ("first_channels", 4, "job 1 has entries beyond"),
        ("channel_blocks", 2**32 - 1, "job 1 has entries beyond"),
        ("query", 2, "job 1 has query 2"),
    ],
)
def test_a_broken_job_is_named(field: str, value: int, text: str) -> None:
    call = _small()
    jobs = call.work.jobs.copy()
    jobs[field][1] = value
    with pytest.raises(FpgaListError, match=text):
        replace(call, work=replace(call.work, jobs=jobs)).run()


def test_broken_pages_and_channels_are_named() -> None:
    call = _small()
    channels = call.work.channels.copy()
    channels[4] += np.uint64(2)
    with pytest.raises(FpgaListError, match="channel block 4 has an address"):
        replace(call, work=replace(call.work, channels=channels)).run()
    for entry, tokens in ((2, 15), (6, 17)):
        entries = call.work.entries.copy()
        entries["tokens"][entry] = tokens
        with pytest.raises(FpgaListError, match=f"entry {entry} has not 1 to 16"):
            replace(call, work=replace(call.work, entries=entries)).run()
    entries = call.work.entries.copy()
    entries["address"][7] = 0
    with pytest.raises(FpgaListError, match="entry 7 has an address that is 0"):
        replace(call, work=replace(call.work, entries=entries)).run()


@pytest.mark.parametrize(
    ("name", "value", "argument"),
    [
        ("keep_channels", 0, "keep_channels"),
        ("keep_channels", 65, "keep_channels"),
        ("channel_group", 3, "channel_group"),
        ("block_tokens", 24, "block_tokens"),
    ],
)
def test_a_number_out_of_range_is_named(name: str, value: int, argument: str) -> None:
    call = _small()
    with pytest.raises(FpgaListError, match=f"argument {argument} is out of range"):
        replace(call, work=replace(call.work, **{name: value})).run()  # type: ignore[arg-type]


def test_a_mean_needs_all_that_is_attended_to() -> None:
    call = _small()
    with pytest.raises(ValueError, match="mean_value needs attend and window"):
        replace(call, work=replace(call.work, window=False)).run()


def test_a_context_at_and_above_the_limit() -> None:
    """The same block again and again: 65,536 tokens with the window."""
    layout = BlockLayout.unpadded(64, 16, 1, 64, torch.float16)
    call = Call.of(Contexts(layout, 1, [Row(1, 5)], seed=1), [4000], 8, rest=False)
    blocks = MAX_JOB_ENTRIES // 4 - 1
    entries = np.concatenate([np.tile(call.work.entries[:4], blocks + 1), call.work.entries[4:]])
    jobs = call.work.jobs.copy()
    work = replace(
        call.work, entries=entries, jobs=jobs, channels=np.repeat(call.work.channels, blocks + 1)
    )
    jobs["channel_blocks"], jobs["first_window"] = blocks, 4 * (blocks + 1)
    result = replace(call, work=work).run()
    assert result.tokens[0] == 4000
    jobs["channel_blocks"] = blocks + 1
    with pytest.raises(FpgaLimitError, match=r"job 0 is longer .* 65536 tokens"):
        replace(call, work=work).run()
