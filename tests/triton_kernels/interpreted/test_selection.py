"""Selection on the device against the native kernels, which are tested against the oracles."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.kernels.test_paged import random_selection
from tests.sparse.contexts import Contexts, Row, contexts
from tests.sparse.test_scores import table
from vllm_ssdkv.kernels.operands.block_layout import BlockLayout
from vllm_ssdkv.kernels.scoring import CpuScoringKernels, TritonScoringKernels
from vllm_ssdkv.sparse.protocol import Budget, ContextSummaries
from vllm_ssdkv.sparse.scores import Offsets, Scores, Table
from vllm_ssdkv.sparse.selectors.bounds import BoundsSelector
from vllm_ssdkv.triton_kernels import tokens

NATIVE, TRITON = CpuScoringKernels(1), TritonScoringKernels(torch.device("cpu"))


def compare(got: Table, want: Table, first: Offsets, heads: int) -> None:
    """Rows side by side; the device's are padded."""
    assert isinstance(got, torch.Tensor)
    for row, lines in enumerate(table(want, first, heads)):
        torch.testing.assert_close(got[row, :, : lines.shape[1]], lines, atol=3e-5, rtol=3e-5)


def on_device(scores: Scores, heads: int) -> Scores:
    """The native kernels' scores as the device's: both choose from the same numbers then."""
    width = int(np.diff(scores.first).max())
    score = torch.full((len(scores.first) - 1, heads, width), torch.nan)
    mass = score.clone()
    for padded, ragged in ((score, scores.score), (mass, scores.mass)):
        for row, lines in enumerate(table(ragged, scores.first, heads)):
            padded[row, :, : lines.shape[1]] = lines
    return Scores(score, mass, torch.as_tensor(scores.window_mass), scores.first)


def picked(problem: Contexts) -> ContextSummaries:
    """The same context, whose channels have to be asked for."""
    layout, context = problem.layout, problem.summaries
    kept: list[torch.Tensor] = []

    def source(channels: NDArray[np.int32]) -> NDArray[np.uint64]:
        for row in range(len(context)):
            for block in range(context.row_begin[row], context.row_end[row]):
                shape = layout.kv_heads, layout.head_size, layout.block_tokens
                index = torch.from_numpy(channels[row].astype(np.int64))[..., None]
                held = problem.kept(1, block).view(shape)
                kept.append(held.gather(1, index.expand(-1, -1, layout.block_tokens)))
        return np.array([part.data_ptr() for part in kept], np.uint64)

    return replace(context, channel_base=None, channel_source=source)


@given(
    problem=contexts(most_blocks=3),
    channels=st.integers(1, 20),
    asked=st.booleans(),
    by_token=st.booleans(),
    tile=st.sampled_from([32, 1024]),
    share=st.sampled_from([0.0, 0.4, 1.0]),
    masked=st.booleans(),
    seed=st.integers(0, 99),
)
@settings(max_examples=10, deadline=None)
def test_scores_of_tokens_and_what_they_cover(
    problem: Contexts,
    channels: int,
    asked: bool,
    by_token: bool,
    tile: int,
    share: float,
    masked: bool,
    seed: int,
) -> None:
    """SparQ's steps 1 to 4, all of them on the device."""
    heads, kv_heads = problem.query.shape[1], problem.layout.kv_heads
    page_tokens = 1 if by_token else problem.layout.page_tokens
    selection = random_selection(problem, share, masked, seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokens, "TILE", tile)
        made = []
        for kernels in (TRITON, NATIVE):
            context = picked(problem) if asked else problem.summaries
            logits, first = kernels.channel_logits(problem.query, context, problem.scale, channels)
            scores = kernels.score_tokens(logits, first, heads, context, page_tokens)
            assert scores.tokens is not None
            made.append((logits, scores, kernels.cover(selection, scores.tokens, context)))
    (logits, scores, alpha), (want_logits, want, want_alpha) = made
    assert want.tokens is not None
    compare(logits, want_logits, first, heads)
    compare(scores.score, want.score, want.first, kv_heads)
    compare(scores.mass, want.mass, want.first, kv_heads)
    np.testing.assert_allclose(scores.window_mass, want.window_mass, atol=1e-5)
    np.testing.assert_allclose(scores.tokens.lse, want.tokens.lse, atol=3e-5, rtol=1e-5)
    np.testing.assert_allclose(alpha, want_alpha, atol=1e-5)


@given(
    problem=contexts(most_blocks=3),
    windowed=st.booleans(),
    least=st.integers(0, 5),
    most=st.integers(0, 12),
    sinks=st.integers(0, 2),
    p=st.sampled_from([0.3, 0.9, 1.0]),
)
@settings(max_examples=8, deadline=None)
def test_the_same_pages_are_chosen(
    problem: Contexts, windowed: bool, least: int, most: int, sinks: int, p: float
) -> None:
    context, heads = problem.summaries, problem.query.shape[1]
    lse = problem.window_lse() if windowed else None
    scores = []
    for kernels in (TRITON, NATIVE):
        logits, first = kernels.bound_logits(problem.query, context, problem.scale)
        scores.append(kernels.weigh(logits, first, lse, heads, context))
    compare(scores[0].score, scores[1].score, first, problem.layout.kv_heads)
    np.testing.assert_allclose(scores[0].window_mass, scores[1].window_mass, atol=1e-5)
    high = np.minimum(context.pages, most).astype(np.int32)
    low = np.minimum(high, least)
    want = NATIVE.choose(scores[1], low, high, sinks, p)
    same = on_device(scores[1], problem.layout.kv_heads)
    got = TRITON.choose(same, low, high, sinks, p)
    assert got.pages.dtype == got.begin.dtype == np.int32
    np.testing.assert_array_equal(got.pages, want.pages)
    np.testing.assert_array_equal(got.begin, want.begin)
    np.testing.assert_allclose(got.mass, want.mass, atol=1e-6)


def test_broken_logits_show_in_scores() -> None:
    layout = BlockLayout.unpadded(8, 4, 1, 8, torch.float32)
    problem = Contexts(layout, 2, [Row(3, 2)])
    problem.plant(0, 9, torch.full((1, 8), torch.nan))
    logits, first = TRITON.channel_logits(problem.query, problem.summaries, 1.0, 4)
    scores = TRITON.score_tokens(logits, first, 2, problem.summaries, 4)
    assert isinstance(scores.score, torch.Tensor)
    assert scores.score[0, 0].isnan().tolist() == [False, False, True, False, False, False]


def test_a_row_without_context_chooses_nothing() -> None:
    problem = Contexts(BlockLayout.unpadded(8, 4, 2, 8, torch.float32), 2, [Row(0, 3)])
    selector = BoundsSelector(Budget(share=1.0), 0, TRITON)
    selection = selector.select(problem.query, problem.summaries, 1.0)
    assert (selection.pages.tolist(), selection.begin.tolist()) == ([], [0, 0, 0])


def test_missing_summaries_are_named() -> None:
    problem = Contexts(BlockLayout.unpadded(8, 4, 2, 8, torch.float32), 2, [Row(1, 3)])
    without = replace(problem.summaries, bounds_base=None, channel_base=None)
    with pytest.raises(ValueError, match="bounds"):
        TRITON.bound_logits(problem.query, without, 1.0)
    with pytest.raises(ValueError, match="channel-major"):
        TRITON.channel_logits(problem.query, without, 1.0, 2)


def test_wrong_shapes_are_refused() -> None:
    logits, one = torch.zeros(1, 4, 8), torch.ones(1, dtype=torch.int32)
    with pytest.raises(ValueError, match="KV heads"):
        tokens.score_tokens(logits, one, kv_heads=3, page_tokens=1, max_columns=1)
    with pytest.raises(ValueError, match="rows need"):
        tokens.score_tokens(logits, one.long(), kv_heads=2, page_tokens=1, max_columns=1)
    with pytest.raises(ValueError, match="are not in"):
        tokens.score_tokens(logits, one, kv_heads=2, page_tokens=4, max_columns=3)
    begin = torch.zeros(3, dtype=torch.int32)
    with pytest.raises(ValueError, match="does not fit"):
        tokens.cover(logits, torch.zeros(1, 3), one, one, one, begin, None, page_tokens=1)
