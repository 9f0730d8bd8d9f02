"""Sparse attention over page lists and summaries of blocks, against the oracles."""

import dataclasses
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.test_dense import ISAS, assert_near, using
from tests.oracles.sparse_attention import (
    attend_chosen,
    page_bounds,
    page_spread,
)
from tests.sparse.contexts import Contexts, Row, contexts
from vllm_ssdkv.base.errors import UnsupportedError
from vllm_ssdkv.kernels.operands.block_layout import FLOAT8, BlockLayout
from vllm_ssdkv.kernels.operands.page_list import SPLIT_PAGES, PageList
from vllm_ssdkv.kernels.paged import (
    CpuPageKernels,
    TritonPageKernels,
    select_page_kernels,
)
from vllm_ssdkv.kernels.scoring import (
    CpuScoringKernels,
    TritonScoringKernels,
    select_scoring_kernels,
)
from vllm_ssdkv.sparse.protocol import Selection

LAYOUT = BlockLayout.unpadded(8, 4, 2, 16, torch.float32)


def random_selection(problem: Contexts, share: float, masked: bool, seed: int) -> Selection:
    """Any pages of every row and head, and any tokens of them if ``masked``."""
    draw = np.random.default_rng(seed)
    heads = problem.layout.kv_heads
    lists = [
        np.flatnonzero(draw.random(pages) < share).astype(np.int32)
        for pages in problem.summaries.pages
        for _ in range(heads)
    ]
    begin = np.concatenate([[0], np.cumsum([len(pages) for pages in lists])]).astype(np.int32)
    mask = None
    if masked:
        shape = (begin[-1], problem.layout.page_tokens)
        mask = (draw.random(shape) < draw.random()).astype(np.uint8)
    mass = np.ones((len(problem.rows), heads), np.float32)
    return Selection(np.concatenate([np.empty(0, np.int32), *lists]), begin, mass, mask)


@given(
    problem=contexts(),
    share=st.sampled_from([0.0, 0.3, 1.0]),
    masked=st.booleans(),
    seed=st.integers(0, 999),
)
@settings(max_examples=25, deadline=None)
def test_any_pages_and_tokens_give_the_oracle(
    problem: Contexts, share: float, masked: bool, seed: int
) -> None:
    selection = random_selection(problem, share, masked, seed)
    want = [
        attend_chosen(
            problem.query[row],
            problem.key[row],
            problem.value[row],
            problem.tokens_of(selection, row),
            problem.scale,
        )
        for row in range(len(problem.rows))
    ]
    for isa in ISAS:
        with using(isa):
            out, lse = problem.output(selection)
            assert_near(out, torch.stack([part[0] for part in want]), 2e-5)
            assert_near(lse, torch.stack([part[1] for part in want]), 2e-5)


@given(problem=contexts(), cut=st.floats(0, 1), seed=st.integers(0, 999))
@settings(max_examples=20, deadline=None)
def test_pages_may_come_in_any_parts(problem: Contexts, cut: float, seed: int) -> None:
    listed = problem.page_list(random_selection(problem, 0.6, True, seed))
    begin, end = np.asarray(listed.begin), np.asarray(listed.end)
    middle = (begin + (end - begin) * cut).astype(np.int32)
    parts = [(middle, end), (begin, middle)]  # the later ones first
    whole, pieces = problem.state(), problem.state()
    kernels = problem.kernels
    kernels.attend_pages(problem.query, whole, listed, problem.layout, problem.scale)
    for first, last in parts:
        part = PageList(
            listed.query_token,
            listed.query_position,
            first,
            last,
            listed.address,
            listed.position,
            listed.token_mask,
        )
        kernels.attend_pages(problem.query, pieces, part, problem.layout, problem.scale)
    assert_near(pieces.m, whole.m)
    seen = whole.l > 0
    assert torch.equal(seen, pieces.l > 0)
    merged, at_once = (s.acc[seen] / s.l[seen][:, None] for s in (pieces, whole))
    assert_near(merged, at_once, 1e-5)


def parts_of(listed: PageList, cuts: set[int]) -> list[PageList]:
    """The lists in pieces, cut behind so many times ``SPLIT_PAGES`` pages of each."""
    begin, end = np.asarray(listed.begin), np.asarray(listed.end)
    edges = [0, *(SPLIT_PAGES * cut for cut in sorted(cuts)), len(listed.address)]
    return [
        dataclasses.replace(
            listed, begin=np.minimum(begin + low, end), end=np.minimum(begin + high, end)
        )
        for low, high in pairwise(edges)
    ]


@given(seed=st.integers(0, 999), cuts=st.sets(st.integers(0, 9), max_size=4), masked=st.booleans())
@settings(max_examples=8, deadline=None)
def test_no_bit_depends_on_calls_or_threads(seed: int, cuts: set[int], *, masked: bool) -> None:
    """Lists in any number of calls that have whole parts of them, on any number of threads."""
    layout = BlockLayout.unpadded(16, 16, 2, 64, torch.bfloat16)
    problem = Contexts(layout, 4, [Row(160, 3), Row(21, 1), Row(0, 2)], seed)
    listed = problem.page_list(random_selection(problem, 0.9, masked, seed))
    one, several = CpuPageKernels(1), CpuPageKernels(2 + seed % 3)
    for isa in ISAS:
        with using(isa):
            whole, pieces = problem.state(), problem.state()
            one.attend_pages(problem.query, whole, listed, layout, problem.scale)
            for part in parts_of(listed, cuts):
                several.attend_pages(problem.query, pieces, part, layout, problem.scale)
        for name in ("m", "l", "acc"):
            assert torch.equal(getattr(pieces, name), getattr(whole, name)), (isa, name)


def test_a_page_after_the_query_is_not_seen() -> None:
    problem = Contexts(LAYOUT, 2, [Row(2, 1)])
    listed = problem.page_list(random_selection(problem, 1.0, False, 0))
    early = PageList(
        listed.query_token,
        np.array([5]),
        listed.begin,
        listed.end,
        listed.address,
        listed.position,
    )
    state = problem.state()
    problem.kernels.attend_pages(problem.query, state, early, LAYOUT, problem.scale)
    chosen = torch.zeros((2, 17), dtype=torch.bool)
    chosen[:, :6] = True
    want, _ = attend_chosen(
        problem.query[0], problem.key[0], problem.value[0], chosen, problem.scale
    )
    assert_near((state.acc / state.l[..., None])[0], want, 1e-5)


def assert_one_step(got: torch.Tensor, want: torch.Tensor) -> None:
    """Numbers that may have been rounded the other way."""
    step = torch.finfo(want.dtype).eps
    torch.testing.assert_close(got, want, rtol=max(step, 1e-5), atol=1e-6, equal_nan=True)


@given(problem=contexts())
@settings(max_examples=15, deadline=None)
def test_summaries_are_exact(problem: Contexts) -> None:
    layout = problem.layout
    for isa in ISAS:
        with using(isa):
            again = Contexts(layout, 1, problem.rows, seed=5)
            index = 0
            for i, row in enumerate(problem.rows):
                for block in range(row.blocks):
                    part = slice(block * layout.block_tokens, (block + 1) * layout.block_tokens)
                    key, value = again.key[i][part], again.value[i][part]
                    low, high = page_bounds(key, layout.page_tokens)
                    want = torch.stack([low, high], 1).permute(2, 0, 1, 3)
                    assert torch.equal(again.kept(0, index), want.flatten())
                    spread = torch.stack(page_spread(key, layout.page_tokens), 1)
                    assert_one_step(again.kept(2, index), spread.permute(2, 0, 1, 3).flatten())
                    assert torch.equal(again.kept(1, index), key.permute(1, 2, 0).flatten())
                    assert_near(again.value_sum[index], value.double().sum(0), 1e-5)
                    index += 1


@pytest.mark.parametrize("dtype", FLOAT8, ids=str)
def test_numbers_of_8_bits_have_bounds_alone(dtype: torch.dtype) -> None:
    layout = BlockLayout.unpadded(32, 16, 3, 40, dtype)
    block = torch.randint(0, 256, (3, 2, 2, 16, 40), dtype=torch.uint8)
    block[(block & 0x7C) == 0x7C] = 0  # not a number, or infinite
    keys = block[:, :, 0].view(dtype).float()
    wanted = torch.stack([keys.amin(2), keys.amax(2)], 2)
    for isa in ISAS:
        with using(isa):
            bounds = torch.zeros((3, 2, 2, 40), dtype=dtype)
            source, to = (np.array([part.data_ptr()], np.uint64) for part in (block, bounds))
            CpuPageKernels(1).summarize(source, layout, bounds=to)
            assert torch.equal(bounds.float(), wanted)
    with pytest.raises(ValueError, match="16 and 32 bits"):
        CpuPageKernels(1).summarize(source, layout, spread=to)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, *FLOAT8], ids=str)
def test_broken_keys_show_in_bounds(dtype: torch.dtype) -> None:
    layout = BlockLayout.unpadded(4, 4, 1, 8, dtype)
    for isa in ISAS:
        with using(isa):
            for token in range(4):
                block = torch.ones((2, 4, 8))
                block[0, token, 3] = torch.nan
                block = block.to(dtype)
                bounds = torch.zeros((2, 8), dtype=dtype)
                CpuPageKernels(1).summarize(
                    np.array([block.data_ptr()], np.uint64),
                    layout,
                    bounds=np.array([bounds.data_ptr()], np.uint64),
                )
                assert bounds.float().isnan().tolist() == [[d == 3 for d in range(8)]] * 2


def spread_of(key: torch.Tensor) -> torch.Tensor:
    """Mean and variance ``[2, d]`` of one page of one head."""
    tokens, size = key.shape
    page = torch.stack([key, torch.full_like(key, torch.nan)]).contiguous()
    spread = torch.full((2, size), -1.0, dtype=key.dtype)
    CpuPageKernels(1).summarize(
        np.array([page.data_ptr()], np.uint64),
        BlockLayout.unpadded(tokens, tokens, 1, size, key.dtype),
        spread=np.array([spread.data_ptr()], np.uint64),
    )
    return spread


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_mean_and_variance_at_the_edges(dtype: torch.dtype) -> None:
    """Equal numbers do not vary; what is too large is the largest; what is broken shows."""
    large = 60000.0 if dtype == torch.float16 else 1e20
    for isa in ISAS:
        with using(isa):
            for token in range(16):
                key = torch.full((16, 8), 0.1).to(dtype)
                key[token, 3:7] = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.5]).to(dtype)
                key[:, 1] = torch.tensor([large, -large]).repeat(8).to(dtype)
                key[:, 2] = 7e4 if dtype != torch.float16 else 6e4
                mean, variance = spread_of(key)
                assert mean[0] == key[0, 0]
                assert variance[[0, 2, 7]].tolist() == [0, 0, 0]
                assert mean[1] == 0
                assert variance[1] == torch.finfo(dtype).max
                assert mean[2] == key[0, 2]
                assert mean[3:6].isnan().all()
                assert variance[3:6].isnan().all()
                assert variance[6] > 0


def test_the_variance_of_large_numbers_keeps_its_digits() -> None:
    """From the mean, in two passes: the square of the mean would be a million times larger."""
    draw = torch.Generator().manual_seed(1)
    key = 1000.0 + torch.randn((16, 8), generator=draw)
    for isa in ISAS:
        with using(isa):
            _, variance = spread_of(key)
            torch.testing.assert_close(
                variance, key.double().var(0, correction=0).float(), rtol=1e-4, atol=0
            )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"begin": np.array([0, 3])}, "beyond"),
        ({"end": np.array([-1, 2])}, "beyond"),
        ({"query_token": np.array([1])}, "outside"),
        ({"token_mask": np.ones((2, 3), np.uint8)}, "token_mask"),
    ],
)
def test_wrong_lists_are_refused(change: dict[str, object], message: str) -> None:
    """None of these addresses may be followed."""
    arguments: dict[str, object] = {
        "query_token": np.array([0]),
        "query_position": np.array([9]),
        "begin": np.array([0, 1]),
        "end": np.array([1, 2]),
        "address": np.zeros(2, np.uint64),
        "position": np.zeros(2, np.int64),
        "token_mask": None,
    }
    problem = Contexts(LAYOUT, 1, [Row(0, 1)])
    with pytest.raises(ValueError, match=message):
        problem.kernels.attend_pages(
            problem.query,
            problem.state(),
            PageList(**(arguments | change)),  # type: ignore[arg-type]  # wrong ones
            LAYOUT,
            1.0,
        )


def test_shapes_that_do_not_belong_together_are_refused() -> None:
    one, two = np.zeros(1), np.zeros(2)
    for arguments in (
        (one, two, one, one, one, one),
        (two, two, one, one, one, one),
        (one, one, one, two, one, one),
        (one, one, one, one, one, two),
        (one, one, one, one, one, one, np.zeros((2, 4))),
    ):
        with pytest.raises(ValueError, match=r"needs|must be"):
            PageList(*arguments)


def test_kernels_are_selected_by_device() -> None:
    for select, native, triton in (
        (select_page_kernels, CpuPageKernels, TritonPageKernels),
        (select_scoring_kernels, CpuScoringKernels, TritonScoringKernels),
    ):
        assert isinstance(select(torch.device("cpu")), native)
        assert isinstance(select(torch.device("cuda:0")), triton)
        with pytest.raises(UnsupportedError, match="meta"):
            select(torch.device("meta"))
