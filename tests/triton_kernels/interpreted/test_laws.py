"""The laws of selection with every kernel from Triton, against the oracles themselves.

The other files of this folder compare kernel by kernel, most of them with the native ones. Shapes
are small: the interpreter is slow.
"""

from collections.abc import Iterator
from typing import Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.test_dense import assert_near
from tests.oracles import sparse_attention as oracle
from tests.sparse import contexts as problems
from tests.sparse import test_laws as native
from tests.sparse.contexts import Contexts, Row
from vllm_ssdkv.kernels.operands.block_layout import DTYPES, BlockLayout
from vllm_ssdkv.kernels.paged import TritonPageKernels
from vllm_ssdkv.kernels.scoring import TritonScoringKernels
from vllm_ssdkv.sparse.protocol import Budget
from vllm_ssdkv.sparse.selectors.adaptive import AdaptiveSelector
from vllm_ssdkv.sparse.selectors.bounds import BoundsSelector
from vllm_ssdkv.sparse.selectors.codes import CodesSelector
from vllm_ssdkv.sparse.selectors.sparf import SparfSelector
from vllm_ssdkv.sparse.selectors.spread import SpreadSelector

CPU = torch.device("cpu")
TRITON = TritonScoringKernels(CPU)
ALL = Budget(share=1.0)


@pytest.fixture(scope="module", autouse=True)
def _triton() -> Iterator[None]:
    """Summaries, scores, choice and attention as a CUDA device gets them, on CPU tensors."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "KERNELS", TRITON)
        patch.setattr(problems, "CpuPageKernels", lambda _threads: TritonPageKernels(CPU))
        yield


@st.composite
def small(draw: st.DrawFn) -> Contexts:
    page_tokens = draw(st.sampled_from([1, 4, 6]))
    layout = BlockLayout.unpadded(
        page_tokens * draw(st.integers(1, 2)),
        page_tokens,
        draw(st.integers(1, 2)),
        draw(st.sampled_from([8, 16])),
        draw(st.sampled_from(DTYPES)),
    )
    row = st.builds(Row, st.integers(0, 3), st.integers(1, 7))
    rows = draw(st.lists(row, min_size=1, max_size=2))
    return Contexts(layout, draw(st.integers(1, 3)), rows, draw(st.integers(0, 2**20)))


@given(problem=small(), granularity=st.sampled_from(["token", "page"]))
@settings(max_examples=3, deadline=None)
def test_everything_selected_is_dense(
    problem: Contexts, granularity: Literal["token", "page"]
) -> None:
    """r = d and k = s of SparF; p = 1 of adaptive."""
    bounds = BoundsSelector(ALL, 0, TRITON)
    want = native.dense(problem)
    for selector in (
        SparfSelector(ALL, problem.layout.head_size, granularity, 0, TRITON),
        AdaptiveSelector(bounds, 1.0, 0.0, ALL, 3, TRITON),
        SpreadSelector(ALL, 0, TRITON, estimate_rest=True),
        CodesSelector(ALL, 0, TRITON, problems.CODE_BITS),
    ):
        assert_near(native.output(selector, problem), want, 1e-5)


@given(problem=small(), share=st.floats(0.05, 1), channels=st.floats(0.05, 1))
@settings(max_examples=3, deadline=None)
def test_the_sparf_selector_is_sparq(problem: Contexts, share: float, channels: float) -> None:
    native.test_the_sparf_selector_is_sparq.hypothesis.inner_test(problem, share, channels)


@given(problem=small(), parts=st.integers(1, 3), seed=st.integers(0, 99))
@settings(max_examples=3, deadline=None)
def test_merging_any_partition_equals_the_whole(problem: Contexts, parts: int, seed: int) -> None:
    native.test_merging_any_partition_equals_the_whole.hypothesis.inner_test(problem, parts, seed)


@given(problem=small())
@settings(max_examples=3, deadline=None)
def test_bounds_are_the_oracles_and_above_every_logit(problem: Contexts) -> None:
    layout, heads = problem.layout, problem.query.shape[1]
    logits, _ = TRITON.bound_logits(problem.query, problem.summaries, problem.scale)
    for row, sizes in enumerate(problem.rows):
        key = problem.key[row][: sizes.blocks * layout.block_tokens]
        low, high = oracle.page_bounds(key, layout.page_tokens)
        got = logits[row, :, : len(low)]
        assert_near(got, oracle.bound_logits(problem.query[row], low, high, problem.scale), 1e-5)
        keys = key.repeat_interleave(problem.group, 1).double()
        exact = torch.einsum("hd,thd->ht", problem.query[row].double(), keys) * problem.scale
        top = exact.view(heads, -1, layout.page_tokens).amax(2)
        assert bool((got >= top - 1e-5 * (1 + got.abs())).all())
