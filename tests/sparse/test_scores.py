"""The kernels of page selection against the oracles, on every instruction set of this machine."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.kernels.test_dense import ISAS, assert_near, using
from tests.oracles import sparse_attention as oracle
from tests.sparse.contexts import Contexts, Row, contexts
from vllm_ssdkv.kernels.operands.block_layout import FLOAT8, BlockLayout
from vllm_ssdkv.kernels.paged import CpuPageKernels
from vllm_ssdkv.kernels.scoring import CpuScoringKernels
from vllm_ssdkv.profiling.dense_oracle import write_block
from vllm_ssdkv.sparse.protocol import ContextSummaries, Selection
from vllm_ssdkv.sparse.scores import Scores
from vllm_ssdkv.sparse.sizes import offsets

KERNELS = CpuScoringKernels(2)
LAYOUT = BlockLayout.unpadded(8, 4, 2, 16, torch.float32)


def table(values: NDArray[np.float32], first: NDArray[np.int64], heads: int) -> list[torch.Tensor]:
    """The rows of a table as tensors ``[heads, columns]``."""
    flat = torch.from_numpy(values)
    return [
        flat[first[r] * heads : first[r + 1] * heads].view(heads, -1)
        if first[r + 1] > first[r]
        else torch.empty((heads, 0))
        for r in range(len(first) - 1)
    ]


@given(problem=contexts(), windowed=st.booleans())
@settings(max_examples=20, deadline=None)
def test_bounds_and_their_weights_are_the_oracles(problem: Contexts, windowed: bool) -> None:
    heads, layout = problem.query.shape[1], problem.layout
    lse = problem.window_lse() if windowed else None
    for isa in ISAS:
        with using(isa):
            logits, first = KERNELS.bound_logits(problem.query, problem.summaries, problem.scale)
            scores = KERNELS.weigh(logits, first, lse, heads, problem.summaries)
            weights = table(scores.score, first, layout.kv_heads)
            for row, got in enumerate(table(logits, first, heads)):
                tokens = problem.rows[row].blocks * layout.block_tokens
                low, high = oracle.page_bounds(problem.key[row][:tokens], layout.page_tokens)
                want = oracle.bound_logits(problem.query[row], low, high, problem.scale)
                assert_near(got, want, 1e-5)
                # No logit of a page is larger, but for the rounding of its own sum.
                keys = problem.key[row][:tokens].repeat_interleave(problem.group, 1).double()
                exact = torch.einsum("hd,thd->ht", problem.query[row].double(), keys)
                top = exact.view(heads, -1, layout.page_tokens).amax(2) * problem.scale
                assert bool((got >= top - 1e-5 * (1 + got.abs())).all())
                mean, window = oracle.page_weights(
                    got,
                    layout.kv_heads,
                    layout.page_tokens,
                    lse[row] if lse is not None else None,
                )
                assert_near(weights[row], mean, 1e-5)
                assert_near(torch.from_numpy(scores.window_mass)[row], window.nan_to_num(0), 1e-5)


@pytest.mark.parametrize("dtype", FLOAT8, ids=str)
def test_bounds_of_8_bits_are_those_of_the_same_numbers(dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(5)
    key = torch.randn((24, 2, 40), generator=draw).to(dtype)
    query = torch.randn((1, 6, 40), generator=draw)
    found = []
    for of in (dtype, torch.float32):
        layout = BlockLayout.unpadded(8, 4, 2, 40, of)
        blocks = torch.full((3, layout.block_bytes), 0xFF, dtype=torch.uint8)
        bounds = torch.full((3, 2 * 2 * 2 * 40 * of.itemsize), 0xFF, dtype=torch.uint8)
        for place, block in enumerate(blocks):
            part = key[8 * place : 8 * place + 8].to(of)
            write_block(layout, block, part, part)
        base, to = (
            np.array([row.data_ptr() for row in rows], np.uint64) for rows in (blocks, bounds)
        )
        CpuPageKernels(2).summarize(base, layout, bounds=to)
        ends = (np.array([n], np.int32) for n in (0, 3, 1))
        summaries = ContextSummaries(layout, *ends, to)
        for isa in ISAS:
            with using(isa):
                found.append(KERNELS.bound_logits(query, summaries, 0.3)[0])
        with (
            pytest.raises(ValueError, match="16 and 32 bits only") if of is dtype else nullcontext()
        ):
            KERNELS.spread_logits(query, replace(summaries, spread_base=to), 0.3)
    for narrow, wide in zip(found, found[len(ISAS) :], strict=False):
        np.testing.assert_array_equal(narrow, wide)


@given(problem=contexts())
@settings(max_examples=20, deadline=None)
def test_logits_from_mean_and_variance_are_the_oracles(problem: Contexts) -> None:
    heads, layout = problem.query.shape[1], problem.layout
    for isa in ISAS:
        with using(isa):
            logits, first = KERNELS.spread_logits(problem.query, problem.summaries, problem.scale)
            for row, got in enumerate(table(logits, first, heads)):
                tokens = problem.rows[row].blocks * layout.block_tokens
                spread = oracle.page_spread(problem.key[row][:tokens], layout.page_tokens)
                want = oracle.spread_logits(problem.query[row], *spread, problem.scale)
                # Of records that may be rounded the other way.
                step = 1e-5 if layout.dtype == torch.float32 else 0.02
                assert_near(got, want, step)


@given(problem=contexts(), share=st.floats(0, 1), windowed=st.booleans(), seed=st.integers(0, 99))
@settings(max_examples=15, deadline=None)
def test_the_mass_of_chosen_pages_and_the_window(
    problem: Contexts, share: float, windowed: bool, seed: int
) -> None:
    """By head, where each token of a page has the page's logit."""
    heads, layout = problem.query.shape[1], problem.layout
    lse = problem.window_lse() if windowed else None
    logits, first = KERNELS.spread_logits(problem.query, problem.summaries, problem.scale)
    scores = KERNELS.weigh(logits, first, lse, heads, problem.summaries)
    assert scores.of_pages is not None
    draw = np.random.default_rng(seed)
    lists = [
        np.flatnonzero(draw.random(pages) < share).astype(np.int32)
        for pages in problem.summaries.pages
        for _ in range(layout.kv_heads)
    ]
    chosen = Selection.of(lists, np.zeros((len(problem.rows), layout.kv_heads), np.float32))
    got = torch.from_numpy(KERNELS.cover_pages(chosen, scores.of_pages, problem.summaries))
    for row, of_row in enumerate(table(logits, first, heads)):
        for head in range(heads):
            tokens = of_row[head].double().repeat_interleave(layout.page_tokens)
            seen = torch.full((1,), -torch.inf, dtype=torch.float64)
            if lse is not None:
                seen[0] = lse[row, head]
            everything = torch.cat([tokens, seen])
            if not everything.isfinite().any():
                continue
            pages = lists[row * layout.kv_heads + head // problem.group]
            mask = torch.zeros(len(of_row[head]), dtype=torch.bool)
            mask[torch.from_numpy(pages).long()] = True
            taken = torch.cat(
                [mask.repeat_interleave(layout.page_tokens), torch.ones(1, dtype=torch.bool)]
            )
            want = everything.softmax(0)[taken].sum()
            assert_near(got[row, head], want, 1e-5)


def test_the_log_of_the_mean_of_exp_of_normal_logits() -> None:
    """What mean and variance stand for, from pages so long that chance plays no part."""
    draw = torch.Generator().manual_seed(3)
    query = torch.randn((2, 32), generator=draw)
    key = 0.3 * torch.randn((1, 8192, 32), generator=draw) + torch.randn((1, 1, 32), generator=draw)
    spread = oracle.page_spread(key.transpose(0, 1), 8192)
    got = oracle.spread_logits(query, *spread, 0.5)
    exact = torch.logsumexp(query @ key[0].T * 0.5, 1) - np.log(8192)
    assert_near(got[:, 0], exact, 0.02)


@given(
    seed=st.integers(0, 999),
    pages=st.integers(1, 9),
    page_tokens=st.sampled_from([1, 3, 16]),
    size=st.integers(1, 40),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
)
@settings(max_examples=20, deadline=None)
def test_no_logit_exceeds_its_bound(
    seed: int, pages: int, page_tokens: int, size: int, dtype: torch.dtype
) -> None:
    """The law itself, without a tolerance: both sides summed in the same order."""
    draw = torch.Generator().manual_seed(seed)
    query = torch.randn((2, size), generator=draw)
    key = torch.randn((pages * page_tokens, 1, size), generator=draw).to(dtype)
    low, high = oracle.page_bounds(key, page_tokens)
    bounds = oracle.bound_logits(query, low, high, 1.0)
    logits = torch.zeros((2, len(key)), dtype=torch.float64)
    for d in range(size):
        logits += query[:, d, None].double() * key[None, :, 0, d].double()
    assert bool((bounds[..., None] >= logits.view(2, pages, page_tokens)).all())


@given(problem=contexts(), share=st.floats(0.01, 1))
@settings(max_examples=20, deadline=None)
def test_channel_logits_are_sparqs(problem: Contexts, share: float) -> None:
    layout, heads = problem.layout, problem.query.shape[1]
    size = layout.head_size
    count = max(1, round(size * share))
    for isa in ISAS:
        with using(isa):
            logits, first = KERNELS.channel_logits(
                problem.query, problem.summaries, problem.scale, count
            )
            for row, got in enumerate(table(logits, first, heads)):
                for head in range(heads):
                    kv_head = head // problem.group
                    group = slice(kv_head * problem.group, (kv_head + 1) * problem.group)
                    total = problem.query[row, group].abs().double().sum(0)
                    channels = total.argsort(descending=True)[:count]
                    q = problem.query[row, head].double()
                    part = q[channels]
                    scale = (size * part.abs().sum() / q.abs().sum()).sqrt()
                    keys = problem.key[row][:, kv_head][:, channels].double()
                    assert_near(got[head], (keys * part).sum(1) / scale, 1e-5)


@given(seed=st.integers(0, 999), count=st.integers(1, 15))
@settings(max_examples=10, deadline=None)
def test_channels_are_chosen_by_their_sum(seed: int, count: int) -> None:
    draw = np.random.default_rng(seed)
    query = draw.standard_normal((2, 6, 16), dtype=np.float32)
    chosen, reduced = np.empty((2, 3, count), np.int32), np.empty((2, 6, count), np.float32)
    KERNELS._native.choose_channels(query, 0.5, 3, chosen, reduced)
    total = np.abs(query.astype(np.float64)).reshape(2, 3, 2, 16).sum(2)
    want = np.sort(np.argsort(-total, axis=2)[..., :count], axis=2)
    np.testing.assert_array_equal(chosen, want)
    part = np.take_along_axis(query.reshape(2, 3, 2, 16), want[:, :, None], axis=3)
    part = part.reshape(reduced.shape)
    scale = 0.5 * np.sqrt(np.abs(query).sum(2) / np.abs(part).sum(2))
    np.testing.assert_allclose(reduced, part * scale[..., None], rtol=1e-5)


@given(problem=contexts(), share=st.floats(0.01, 1))
@settings(max_examples=15, deadline=None)
def test_channels_that_are_brought_give_the_same_bits(problem: Contexts, share: float) -> None:
    """Only the chosen ones, side by side, wherever they come from."""
    layout, summaries = problem.layout, problem.summaries
    count = max(1, round(layout.head_size * share))
    shape = layout.kv_heads, layout.head_size, layout.block_tokens
    brought: list[torch.Tensor] = []

    def bring(channels: NDArray[np.int32]) -> NDArray[np.uint64]:
        assert channels.shape == (len(problem.rows), layout.kv_heads, count)
        heads = torch.arange(layout.kv_heads)[:, None]
        for row, chosen in enumerate(torch.from_numpy(channels).long()):
            for block in range(summaries.row_begin[row], summaries.row_end[row]):
                held = problem.kept(1, block)
                brought.append(held.view(shape)[heads, chosen].contiguous())
        return np.array([part.data_ptr() for part in brought], np.uint64)

    other = replace(summaries, channel_base=None, channel_source=bring)
    for isa in ISAS:
        with using(isa):
            brought.clear()
            want, _ = KERNELS.channel_logits(problem.query, summaries, problem.scale, count)
            got, _ = KERNELS.channel_logits(problem.query, other, problem.scale, count)
            np.testing.assert_array_equal(got, want)


@given(problem=contexts(), tokens=st.booleans())
@settings(max_examples=15, deadline=None)
def test_scores_of_tokens_and_pages(problem: Contexts, tokens: bool) -> None:
    layout, heads = problem.layout, problem.query.shape[1]
    page = 1 if tokens else layout.page_tokens
    logits, first = KERNELS.channel_logits(problem.query, problem.summaries, problem.scale, 4)
    for isa in ISAS:
        with using(isa):
            scores = KERNELS.score_tokens(logits, first, heads, problem.summaries, page)
            assert scores.tokens is not None
            rows = zip(
                table(logits, first, heads),
                table(scores.score, scores.first, layout.kv_heads),
                table(scores.mass, scores.first, layout.kv_heads),
                strict=True,
            )
            for row, (approximate, score, mass) in enumerate(rows):
                grouped = approximate.double().view(layout.kv_heads, problem.group, -1)
                context = problem.rows[row].blocks * layout.block_tokens
                softmax = grouped.softmax(2).mean(1)
                paged = grouped.sum(1)[:, :context].reshape(layout.kv_heads, -1, page)
                paged_mass = softmax[:, :context].reshape(layout.kv_heads, -1, page).sum(2)
                assert_near(score, paged[..., 0] if page == 1 else paged_mass, 1e-5)
                assert_near(mass, paged_mass, 1e-5)
                window = softmax[:, context:].sum(1)
                assert_near(torch.from_numpy(scores.window_mass)[row], window, 1e-5)
                assert_near(
                    torch.from_numpy(scores.tokens.lse)[row],
                    approximate.double().logsumexp(1),
                    1e-5,
                )


@given(
    lists=st.lists(
        st.lists(st.sampled_from([-2.0, -0.0, 0.0, 0.25, 1.0, 3.0]), max_size=20), max_size=4
    ),
    heads=st.integers(1, 2),
    sinks=st.integers(0, 4),
    least=st.integers(-1, 9),
    most=st.integers(-1, 25),
    p=st.sampled_from([0.1, 0.5, 0.9, 1.0]),
    window=st.sampled_from([0.0, 0.3, 0.6]),
)
def test_choice_is_the_oracles(
    lists: list[list[float]],
    heads: int,
    sinks: int,
    least: int,
    most: int,
    p: float,
    window: float,
) -> None:
    """Many equal scores: ties go by number."""
    score = [list(reversed(x)) if head else x for x in lists for head in range(heads)]
    mass = [[(1 - window) / max(1, len(x))] * len(x) for x in score]
    rows = len(lists)
    first = offsets(np.array([len(x) for x in lists], np.int64))
    scores = Scores(
        np.array([x for line in score for x in line], np.float32),
        np.array([x for line in mass for x in line], np.float32),
        np.full((rows, heads), window, np.float32),
        first,
    )
    bounds = (np.full(rows, value, np.int32) for value in (min(least, most), most))
    got = KERNELS.choose(scores, *bounds, sinks, p)
    for i, line in enumerate(score):
        want, covered = oracle.choose(
            line,
            [float(np.float32(x)) for x in mass[i]],
            float(np.float32(window)),
            sinks=sinks,
            least=max(0, min(least, most)),
            most=max(0, most),
            p=p,
        )
        assert got.pages[got.begin[i] : got.begin[i + 1]].tolist() == want
        assert got.mass.flat[i] == pytest.approx(covered, abs=1e-6)
        assert (got.mass.flat[i] == 1) or len(want) < len(line)


def test_broken_scores_are_chosen_first() -> None:
    score = np.array([3.0, np.nan, 2.0, np.inf, np.nan, 1.0], np.float32)
    scores = Scores(
        score, np.zeros(6, np.float32), np.zeros((1, 1), np.float32), offsets(np.array([6]))
    )
    for count, want in ((1, [1]), (2, [1, 3]), (4, [0, 1, 3, 4])):
        most = np.array([count], np.int32)
        assert KERNELS.choose(scores, most, most).pages.tolist() == want


@pytest.mark.parametrize("isa", ISAS)
def test_a_broken_page_is_chosen(isa: str) -> None:
    """From a NaN among the keys to the selection."""
    problem = Contexts(LAYOUT, 3, [Row(6, 2)])
    with using(isa):
        problem.kept(0, 4).view(2, 2, 2, 16)[1, 1, 0, 7] = torch.nan
        logits, first = KERNELS.bound_logits(problem.query, problem.summaries, problem.scale)
        scores = KERNELS.weigh(logits, first, problem.window_lse(), 6, problem.summaries)
        one = np.ones(1, np.int32)
        chosen = KERNELS.choose(scores, one, one)
        assert chosen.pages[1] == 9
        assert not np.isnan(scores.score[: first[1]]).any()  # of the head whose keys are whole


@given(problem=contexts(), masked=st.booleans(), seed=st.integers(0, 99))
@settings(max_examples=15, deadline=None)
def test_coverage_is_the_softmax_of_what_is_chosen(
    problem: Contexts, masked: bool, seed: int
) -> None:
    layout, heads = problem.layout, problem.query.shape[1]
    draw = np.random.default_rng(seed)
    logits, first = KERNELS.channel_logits(problem.query, problem.summaries, problem.scale, 3)
    scores = KERNELS.score_tokens(logits, first, heads, problem.summaries, layout.page_tokens)
    assert scores.tokens is not None
    some = draw.integers(0, problem.summaries.pages + 1).astype(np.int32)
    chosen = KERNELS.choose(scores, some, some)
    if masked:
        mask = draw.integers(0, 2, (len(chosen.pages), layout.page_tokens)).astype(np.uint8)
        chosen = Selection(chosen.pages, chosen.begin, chosen.mass, mask)
    for isa in ISAS:
        with using(isa):
            alpha = torch.from_numpy(KERNELS.cover(chosen, scores.tokens, problem.summaries))
            for row, approximate in enumerate(table(logits, first, heads)):
                taken = problem.tokens_of(chosen, row).repeat_interleave(problem.group, 0)
                want = (approximate.double().softmax(1) * taken).sum(1)
                assert_near(alpha[row], want, 1e-5)


def test_coverage_of_pages_beyond_a_context_is_refused() -> None:
    problem = Contexts(LAYOUT, 2, [Row(2, 3), Row(1, 1)])
    logits, first = KERNELS.channel_logits(problem.query, problem.summaries, problem.scale, 3)
    heads = problem.query.shape[1]
    scores = KERNELS.score_tokens(logits, first, heads, problem.summaries, LAYOUT.page_tokens)
    assert scores.tokens is not None
    one = np.ones(2, dtype=np.int32)
    chosen = KERNELS.choose(scores, one, one)
    for page in (-1, 2 * LAYOUT.block_tokens, 2**31 - 1):
        wrong = replace(chosen, pages=np.full_like(chosen.pages, page))
        with pytest.raises(ValueError, match="outside its row's context"):
            KERNELS.cover(wrong, scores.tokens, problem.summaries)


def test_long_contexts_are_cut_over_threads_to_the_same_bits() -> None:
    layout = BlockLayout.unpadded(16, 16, 1, 64, torch.bfloat16)
    problem = Contexts(layout, 4, [Row(700, 3), Row(2, 1)])
    results = []
    for threads in (1, 3):
        kernels = CpuScoringKernels(threads)
        logits, first = kernels.bound_logits(problem.query, problem.summaries, problem.scale)
        weights = kernels.weigh(logits, first, None, 4, problem.summaries).score
        tokens, begin = kernels.channel_logits(problem.query, problem.summaries, problem.scale, 8)
        scores = kernels.score_tokens(tokens, begin, 4, problem.summaries, 1)
        results.append((logits, weights, tokens, scores.score, scores.mass))
    for one, three in zip(*results, strict=True):
        np.testing.assert_array_equal(one, three)


@pytest.mark.parametrize(
    "call",
    [
        lambda c: KERNELS.bound_logits(c.query[:, :3], c.summaries, 1.0),
        lambda c: KERNELS.bound_logits(c.query[:1], c.summaries, 1.0),
        lambda c: KERNELS.bound_logits(c.query[..., :8], c.summaries, 1.0),
        lambda c: KERNELS.channel_logits(c.query, broken(c, "channel_base"), 1.0, 4),
        lambda c: KERNELS.bound_logits(c.query, broken(c, "bounds_base"), 1.0),
        lambda c: KERNELS.bound_logits(c.query, broken(c, "row_end", np.int32([9, 9])), 1.0),
        lambda c: KERNELS.channel_logits(c.query, broken(c, "row_end", np.int32([2, 9])), 1.0, 4),
        lambda c: KERNELS.channel_logits(
            c.query, broken(c, "window_tokens", np.int32([9, 1])), 1.0, 4
        ),
    ],
)
def test_wrong_arguments_are_refused(call: Callable[[Contexts], object]) -> None:
    """None of these addresses may be followed."""
    with pytest.raises(ValueError, match=r"."):
        call(Contexts(LAYOUT, 2, [Row(2, 3), Row(1, 1)]))


def broken(problem: Contexts, field: str, value: object = None) -> object:
    """The summaries with another value for a field."""
    return replace(problem.summaries, **{field: value})
