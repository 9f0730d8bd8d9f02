"""The attention kernel against the definition, over random shapes."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_ssdkv.kernels.operands.block_layout import (
    FLOAT8,
    BlockLayout,
    PartialState,
    Rows,
    Softmax,
)
from vllm_ssdkv.profiling.attention_problem import AttentionProblem, RowShape, attention_problem
from vllm_ssdkv.triton_kernels.attend import attend
from vllm_ssdkv.triton_kernels.launch import INTERPRETED

TOLERANCE = {torch.float32: 2e-5, torch.float16: 3e-3, torch.bfloat16: 2e-5}
"""Weights are rounded to float16; bfloat16 is multiplied as float32 in the interpreter."""


def run(problem: AttentionProblem, rows: Rows, state: PartialState, splits: int | None) -> None:
    source = problem.source()
    attend(
        problem.query,
        state,
        rows,
        cache=problem.cache,
        block_offset=source.base,
        block_position=source.position,
        layout=problem.layout,
        scale=problem.scale,
        sliding_window=problem.sliding_window,
        splits=splits,
    )


def check(problem: AttentionProblem, state: PartialState, dtype: torch.dtype) -> None:
    out, lse = problem.expected()
    seen = ~torch.isinf(lse)
    assert torch.equal(state.l > 0, seen)
    torch.testing.assert_close(
        (state.m + state.l.log())[seen].double(), lse[seen], atol=2e-5, rtol=2e-5
    )
    got = (state.acc / state.l[..., None])[seen].double()
    torch.testing.assert_close(got, out[seen], atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@st.composite
def layouts(draw: st.DrawFn) -> BlockLayout:
    page_tokens = draw(st.sampled_from([1, 4, 16]))
    layout = BlockLayout.unpadded(
        block_tokens=page_tokens * draw(st.integers(1, 3)),
        page_tokens=page_tokens,
        kv_heads=draw(st.integers(1, 3)),
        head_size=draw(st.sampled_from([3, 8, 16, 40, 64])),
        dtype=draw(st.sampled_from([*TOLERANCE, *FLOAT8])),
    )
    padding = draw(st.sampled_from([0, 4, 4096]))
    return layout.with_page_stride(layout.page_stride_bytes + padding)


@st.composite
def row_shapes(draw: st.DrawFn) -> RowShape:
    queries = draw(st.integers(0, 20))
    context = draw(st.integers(0, 60))
    begin = draw(st.integers(0, context + queries))
    return RowShape(queries, context, begin, draw(st.integers(0, context + queries - begin)))


@st.composite
def drawn_problems(draw: st.DrawFn) -> AttentionProblem:
    layout, group = draw(layouts()), draw(st.integers(1, 5))
    heads = group * layout.kv_heads
    slopes = st.lists(st.floats(2.0**-9, 1.0, width=32), min_size=heads, max_size=heads)
    return attention_problem(
        layout,
        group,
        draw(st.lists(row_shapes(), min_size=1, max_size=3)),
        draw(st.integers(0, 2**31)),
        query_dtype=draw(st.sampled_from([None, torch.float32])),
        idle_tokens=draw(st.integers(0, 1)),
        sliding_window=draw(st.none() | st.integers(1, 40)),
        softmax=Softmax(
            soft_cap=draw(st.sampled_from([0.0, 0.5, 30.0])),
            slopes=draw(st.none() | slopes.map(torch.tensor)),
        ),
    )


problems = drawn_problems()


def mixed(problem: AttentionProblem) -> torch.dtype:
    """The dtype that decides the rounding of weights."""
    same = problem.query.dtype == problem.layout.dtype
    return problem.layout.dtype if same else torch.float32


def test_this_process_interprets() -> None:
    assert INTERPRETED


@settings(max_examples=30, deadline=None)
@given(problems, st.sampled_from([1, 2, 5]))
def test_equals_the_definition(problem: AttentionProblem, splits: int) -> None:
    state = problem.state()
    run(problem, problem.rows.to(state.m.device), state, splits)
    check(problem, state, mixed(problem))


@settings(max_examples=15, deadline=None)
@given(problems, st.data())
def test_any_partition_of_the_blocks_gives_the_same(
    problem: AttentionProblem, data: st.DataObject
) -> None:
    """Every row's blocks are cut in two at a random place; the second part goes first."""
    state = problem.state()
    low, high = (torch.as_tensor(x) for x in (problem.rows.block_begin, problem.rows.block_end))
    share = data.draw(st.floats(0, 1))
    cut = low + ((high - low) * share).int()
    for begin, end in ((cut, high), (low, cut)):
        rows = Rows.build(
            problem.rows.query_begin,
            problem.rows.query_count,
            problem.rows.first_position,
            begin,
            end,
        )
        run(problem, rows.to(state.m.device), state, data.draw(st.sampled_from([1, 3])))
    check(problem, state, mixed(problem))


@pytest.mark.parametrize(
    ("dtype", "sliding_window"),
    [*((dtype, None) for dtype in TOLERANCE), (torch.float32, 33), (torch.float16, 1)],
)
@pytest.mark.parametrize("group", [1, 6, 20])
def test_long_rows(dtype: torch.dtype, group: int, sliding_window: int | None) -> None:
    """Several tiles of queries, so that blocks which only some tiles may see are skipped."""
    layout = BlockLayout.unpadded(16, 16, 1, 32, dtype)
    long = 150 // group + 20
    shapes = [RowShape(long, 30, 0, long + 30), RowShape(1, 170, 0, 171), RowShape(9, 0, 0, 9)]
    problem = attention_problem(layout, group, shapes, group, sliding_window=sliding_window)
    state = problem.state()
    run(problem, problem.rows.to(state.m.device), state, None)
    check(problem, state, dtype)


@pytest.mark.parametrize("splits", [2, 3, 7])
@pytest.mark.parametrize(
    ("dtype", "sliding_window"),
    [*((dtype, None) for dtype in TOLERANCE), (torch.float32, 100)],
)
def test_long_contexts_split_over_programs(
    dtype: torch.dtype, splits: int, sliding_window: int | None
) -> None:
    """Rows of different lengths: some splits of the short ones have no keys at all."""
    layout = BlockLayout.unpadded(32, 16, 2, 16, dtype).with_page_stride(4096)
    shapes = [RowShape(1, 460, 0, 461), RowShape(2, 150, 32, 120), RowShape(1, 5, 0, 6)]
    problem = attention_problem(
        layout, 2, shapes, splits, idle_tokens=1, sliding_window=sliding_window
    )
    state = problem.state()
    run(problem, problem.rows.to(state.m.device), state, splits)
    check(problem, state, dtype)


@pytest.mark.parametrize("splits", [1, 3])
def test_queries_without_keys_keep_their_state(splits: int) -> None:
    layout = BlockLayout.unpadded(8, 4, 2, 16, torch.float32)
    # No blocks; keys that are all later than the queries; and tokens of no row before each.
    shapes = [RowShape(2, 5, 0, 0), RowShape(2, 3, 5, 0), RowShape(1, 30, 0, 31)]
    problem = attention_problem(layout, 2, shapes, seed=1, idle_tokens=1)
    future = Rows.build([1, 4, 7], [2, 2, 1], [5, -10, 30], [0, 0, 0], [0, 4, 4])
    state = PartialState(
        torch.rand(problem.query.shape[:2]),
        torch.rand(problem.query.shape[:2]),
        torch.rand(problem.query.shape),
    )
    before = [part.clone() for part in (state.m, state.l, state.acc)]
    run(problem, future.to(state.m.device), state, splits)
    changed = torch.tensor([7])
    kept = torch.tensor([0, 1, 2, 3, 4, 5, 6])
    for part, old in zip((state.m, state.l, state.acc), before, strict=True):
        assert torch.equal(part[kept], old[kept])
        assert not torch.equal(part[changed], old[changed])


def test_query_may_be_a_slice_of_a_wider_tensor() -> None:
    layout = BlockLayout.unpadded(8, 8, 2, 16, torch.float32)
    problem = attention_problem(layout, 2, [RowShape(5, 9, 0, 14)], seed=2)
    wide = torch.full((5, 8, 16), torch.nan)
    wide[:, 2:6] = problem.query
    state = problem.state()
    source = problem.source()
    attend(
        wide[:, 2:6],
        state,
        problem.rows.to(state.m.device),
        cache=problem.cache,
        block_offset=source.base,
        block_position=source.position,
        layout=layout,
        scale=problem.scale,
    )
    check(problem, state, torch.float32)


def test_large_scores_do_not_overflow() -> None:
    layout = BlockLayout.unpadded(8, 8, 1, 16, torch.float32)
    problem = attention_problem(layout, 1, [RowShape(3, 20, 0, 23)], seed=3)
    problem.query.mul_(1e4)
    state = problem.state()
    run(problem, problem.rows.to(state.m.device), state, 2)
    out, _ = problem.expected()
    assert math.isfinite(float(state.acc.sum()))
    torch.testing.assert_close((state.acc / state.l[..., None]).double(), out, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query": torch.zeros(3, 4, 15)}, "does not fit"),
        ({"query": torch.zeros(3, 3, 16)}, "does not fit"),
        ({"query": torch.zeros(3, 4, 16, dtype=torch.float64)}, "query dtype"),
        ({"query": torch.zeros(3, 4, 32)[:, :, ::2]}, "does not fit"),
        ({"cache": torch.zeros(64, dtype=torch.float16)}, "the cache must be"),
        ({"block_offset": torch.zeros(3, dtype=torch.int32)}, "block_offset must be"),
        ({"block_position": torch.zeros(2, dtype=torch.int64)}, "one offset and one position"),
        ({"splits": 0}, "splits must be"),
        ({"state": PartialState.empty(2, 4, 16, torch.device("cpu"))}, "m must be"),
    ],
)
def test_wrong_arguments_are_refused(change: dict[str, object], message: str) -> None:
    layout = BlockLayout.unpadded(8, 8, 2, 16, torch.float32)
    problem = attention_problem(layout, 2, [RowShape(3, 20, 0, 23)], seed=4)
    source = problem.source()
    arguments = {
        "query": problem.query,
        "state": problem.state(),
        "rows": problem.rows.to(torch.device("cpu")),
        "cache": problem.cache,
        "block_offset": source.base,
        "block_position": source.position,
        "layout": layout,
        "scale": 1.0,
    } | change
    with pytest.raises(ValueError, match=message):
        attend(**arguments)
