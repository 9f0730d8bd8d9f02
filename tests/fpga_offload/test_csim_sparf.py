"""The HLS kernel of SparF, by its C simulation: what is chosen, and what is attended to."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fpga_offload.sparf_problems import Call, problems, same_as_sparq, same_choice, tied
from tests.oracles import sparse_attention as oracle
from tests.sparse.contexts import Contexts, Row
from vllm_ssdkv.base.errors import FpgaLimitError, FpgaListError
from vllm_ssdkv.fpga_offload.description import (
    MAX_JOB_ENTRIES,
    PAGE_TOKENS,
)
from vllm_ssdkv.kernels.operands.block_layout import BlockLayout
from vllm_ssdkv.kernels.scoring import CpuScoringKernels
from vllm_ssdkv.sparse.protocol import Budget
from vllm_ssdkv.sparse.selectors.sparf import SparfSelector


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


@settings(deadline=None, max_examples=12)
@given(problem=problems(), share=st.floats(0.05, 1), channels=st.floats(0.05, 1))
def test_sparf_is_sparq(problem: Contexts, share: float, channels: float) -> None:
    same_as_sparq(problem, share, channels)


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
