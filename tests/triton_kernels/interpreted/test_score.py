"""Bounds for selection against the native kernels, which are tested against the oracles."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.sparse.contexts import Contexts, Row, contexts
from tests.sparse.test_scores import table
from vllm_ssdkv.kernels.operands.block_layout import BlockLayout
from vllm_ssdkv.kernels.scoring import CpuScoringKernels
from vllm_ssdkv.triton_kernels.score import page_logits

KERNELS = CpuScoringKernels(1)


def tensor(values: NDArray[np.generic] | None) -> torch.Tensor:
    assert values is not None
    return torch.from_numpy(values.view(np.int64) if values.dtype == np.uint64 else values)


def compare(got: torch.Tensor, want: list[torch.Tensor]) -> None:
    """Rows side by side; what a row does not have is minus infinity."""
    for row, logits in enumerate(want):
        have = logits.shape[1]
        torch.testing.assert_close(got[row, :, :have], logits, atol=2e-5, rtol=2e-5)
        assert got[row, :, have:].isneginf().all()


def scored(problem: Contexts, records: torch.Tensor, spare: int, *, spread: bool) -> torch.Tensor:
    """Logits of all pages, and of `spare` columns more, from records 48 bytes further on."""
    context = problem.summaries
    shape = *problem.query.shape[:2], int(context.pages.max()) + spare
    logits = torch.full(shape, torch.nan)
    page_logits(
        problem.query,
        tensor(context.row_begin),
        tensor(context.row_end),
        records - 48,
        logits,
        layout=problem.layout,
        scale=problem.scale,
        spread=spread,
        offset=48,
    )
    return logits


@given(problem=contexts(most_blocks=4), spare=st.integers(0, 20))
@settings(max_examples=12, deadline=None)
def test_bounds(problem: Contexts, spare: int) -> None:
    context, heads = problem.summaries, problem.query.shape[1]
    logits, first = KERNELS.bound_logits(problem.query, context, problem.scale)
    got = scored(problem, tensor(context.bounds_base), spare, spread=False)
    compare(got, table(logits, first, heads))


@given(problem=contexts(most_blocks=4), spare=st.integers(0, 20))
@settings(max_examples=12, deadline=None)
def test_mean_and_variance(problem: Contexts, spare: int) -> None:
    context, heads = problem.summaries, problem.query.shape[1]
    logits, first = KERNELS.spread_logits(problem.query, context, problem.scale)
    got = scored(problem, tensor(context.spread_base), spare, spread=True)
    compare(got, table(logits, first, heads))


def test_wrong_shapes_are_refused() -> None:
    layout = BlockLayout.unpadded(8, 4, 2, 16, torch.float32)
    problem = Contexts(layout, 1, [Row(1, 1)])
    context = problem.summaries
    begin, end = tensor(context.row_begin), tensor(context.row_end)
    for query, first in ((problem.query[:, :1], begin), (problem.query, begin.long())):
        with pytest.raises(ValueError, match=r"fit|need"):
            page_logits(
                query,
                first,
                end,
                tensor(context.bounds_base),
                torch.zeros(1, query.shape[1], 2),
                layout=layout,
                scale=1.0,
                spread=False,
            )
