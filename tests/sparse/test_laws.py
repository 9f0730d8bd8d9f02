"""Laws of selectors, whatever the context, each a property."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.test_dense import assert_near
from tests.oracles import sparse_attention as oracle
from tests.sparse.contexts import CODE_BITS, Contexts, Row, contexts
from vllm_ssdkv.attention.compensate import compensate
from vllm_ssdkv.kernels.operands.block_layout import BlockLayout
from vllm_ssdkv.kernels.scoring import CpuScoringKernels
from vllm_ssdkv.profiling.dense_oracle import dense_attention, merge
from vllm_ssdkv.sparse.protocol import Budget, Selection, Selector
from vllm_ssdkv.sparse.selectors.adaptive import AdaptiveSelector
from vllm_ssdkv.sparse.selectors.bounds import BoundsSelector
from vllm_ssdkv.sparse.selectors.codes import CodesSelector
from vllm_ssdkv.sparse.selectors.sparf import SparfSelector
from vllm_ssdkv.sparse.selectors.spread import SpreadSelector
from vllm_ssdkv.sparse.selectors.swarm import SwarmSelector
from vllm_ssdkv.sparse.selectors.window import WindowSelector

KERNELS = CpuScoringKernels(2)
ALL = Budget(share=1.0)

budgets = st.builds(lambda share: Budget(share=share), st.floats(0.01, 1)) | st.builds(
    lambda tokens: Budget(tokens=tokens), st.integers(0, 300)
)

Make = Callable[[Budget, int], Selector]
PAGED: dict[str, Make] = {
    "window": WindowSelector,
    "bounds": lambda budget, sinks: BoundsSelector(budget, sinks, KERNELS),
    "spread": lambda budget, sinks: SpreadSelector(budget, sinks, KERNELS),
    "spread, rest": lambda budget, sinks: SpreadSelector(
        budget, sinks, KERNELS, estimate_rest=True
    ),
    "codes": lambda budget, sinks: CodesSelector(budget, sinks, KERNELS, CODE_BITS),
    "sparf": lambda budget, sinks: SparfSelector(budget, 5, "page", sinks, KERNELS),
    "adaptive bounds": lambda budget, sinks: AdaptiveSelector(
        BoundsSelector(budget, sinks, KERNELS), 0.7, 0.0, budget, sinks, KERNELS
    ),
    "adaptive spread": lambda budget, sinks: AdaptiveSelector(
        SpreadSelector(budget, sinks, KERNELS), 0.7, 0.0, budget, sinks, KERNELS
    ),
    "adaptive codes": lambda budget, sinks: AdaptiveSelector(
        CodesSelector(budget, sinks, KERNELS, CODE_BITS), 0.7, 1.0, budget, sinks, KERNELS
    ),
    "swarm bounds": lambda budget, sinks: SwarmSelector(
        BoundsSelector(budget, sinks, KERNELS), budget, sinks, KERNELS
    ),
    "swarm sparf": lambda budget, sinks: SwarmSelector(
        SparfSelector(budget, 5, "page", sinks, KERNELS), budget, sinks, KERNELS
    ),
    "adaptive sparf": lambda budget, sinks: AdaptiveSelector(
        SparfSelector(budget, 5, "page", sinks, KERNELS), 0.7, 1.0, budget, sinks, KERNELS
    ),
}
"""Selectors that choose pages, by budget and sink tokens."""


def mean_values(problem: Contexts) -> torch.Tensor:
    return torch.stack([value.float().mean(0) for value in problem.value])


def select(selector: Selector, problem: Contexts) -> Selection:
    return selector.select(problem.query, problem.summaries, problem.scale, problem.window_lse())


def output(selector: Selector, problem: Contexts) -> torch.Tensor:
    """What the engine would return: window and selection, compensated."""
    selection = select(selector, problem)
    state = problem.state()
    problem.attend_window(state)
    listed = problem.page_list(selection)
    problem.kernels.attend_pages(problem.query, state, listed, problem.layout, problem.scale)
    if selection.alpha is not None:
        rows = torch.arange(len(problem.rows))
        compensate(state, rows, torch.from_numpy(selection.alpha), mean_values(problem))
    return state.acc / state.l[..., None]


def dense(problem: Contexts) -> torch.Tensor:
    return torch.stack(
        [
            dense_attention(
                problem.query[row : row + 1],
                problem.key[row],
                problem.value[row],
                scale=problem.scale,
                first_position=len(problem.key[row]) - 1,
            )[0][0]
            for row in range(len(problem.rows))
        ]
    )


@given(problem=contexts(), granularity=st.sampled_from(["token", "page"]))
@settings(max_examples=20, deadline=None)
def test_everything_selected_is_dense(
    problem: Contexts, granularity: Literal["token", "page"]
) -> None:
    """Exact; r = d and k = s of SparF; p = 1 of adaptive; any selector with the whole budget."""
    size = problem.layout.head_size
    bounds = BoundsSelector(ALL, 0, KERNELS)
    sparf = SparfSelector(ALL, size, granularity, 0, KERNELS, estimate_rest=True)
    want = dense(problem)
    for selector in (
        bounds,
        SpreadSelector(ALL, 0, KERNELS, estimate_rest=True),
        CodesSelector(ALL, 0, KERNELS, CODE_BITS),
        sparf,
        WindowSelector(ALL, 5),
        AdaptiveSelector(bounds, 1.0, 0.0, ALL, 3, KERNELS),
        AdaptiveSelector(sparf, 1.0, 0.0, ALL, 0, KERNELS),
    ):
        selection = select(selector, problem)
        assert selection.mass.min() == pytest.approx(1, abs=1e-5)
        assert_near(output(selector, problem), want, 1e-5)


def sparf_as_engine_runs_it(
    problem: Contexts, channels: int, tokens: int
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    selector = SparfSelector(
        Budget(tokens=tokens), channels, "token", 0, KERNELS, estimate_rest=True
    )
    selection = select(selector, problem)
    chosen = [problem.tokens_of(selection, row) for row in range(len(problem.rows))]
    return output(selector, problem), chosen


@given(
    pages=st.lists(st.sampled_from([1, 2, 4, 8, 12, 24, 48, 96]), min_size=2, max_size=3),
    channels=st.integers(1, 16),
    tokens=st.integers(0, 210),
    group=st.integers(1, 5),
    kv_heads=st.integers(1, 2),
    window=st.integers(1, 30),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    seed=st.integers(0, 9999),
)
@settings(max_examples=20, deadline=None)
def test_page_sizes_do_not_change_what_sparf_chooses(
    pages: list[int],
    channels: int,
    tokens: int,
    group: int,
    kv_heads: int,
    window: int,
    dtype: torch.dtype,
    seed: int,
) -> None:
    """The native kernels, the same tokens cut into pages and blocks of any size. Attention is
    folded by pages, which shows in the output's last bits."""
    results = []
    for page_tokens in pages:
        block_tokens = page_tokens * (2 if page_tokens < 96 and seed % 2 else 1)
        layout = BlockLayout.unpadded(block_tokens, page_tokens, kv_heads, 16, dtype)
        problem = Contexts(layout, group, [Row(192 // block_tokens, window)], seed)
        results.append(sparf_as_engine_runs_it(problem, channels, tokens))
    for out, chosen in results[1:]:
        assert torch.equal(chosen[0], results[0][1][0])
        assert_near(out, results[0][0], 1e-5)


@given(
    page_tokens=st.sampled_from([1, 3, 16, 40]),
    channel_shape=st.tuples(st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 16, 64])),
    tokens=st.integers(1, 70),
    r=st.integers(1, 16),
    share=st.floats(0, 1),
    local=st.floats(0, 1),
    group=st.integers(1, 4),
    kv_heads=st.integers(1, 3),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    seed=st.integers(0, 9999),
)
@settings(max_examples=20, deadline=None)
def test_sparf_is_sparq_to_the_bit(
    page_tokens: int,
    channel_shape: tuple[int, int],
    tokens: int,
    r: int,
    share: float,
    local: float,
    group: int,
    kv_heads: int,
    dtype: torch.dtype,
    seed: int,
) -> None:
    """The oracles: SparQ as published on whole tensors, SparF that fetches pages and filters."""
    draw = torch.Generator().manual_seed(seed)
    query = torch.randn((kv_heads * group, 16), generator=draw)
    key, value = torch.randn((2, tokens, kv_heads, 16), generator=draw)
    k = round(share * (tokens - 1))
    newest = round(local * k)
    want, chosen = oracle.sparq_attention(query, key, value, r=r, k=k, local=newest, dtype=dtype)
    got, same, counts = oracle.sparf_attention(
        query,
        key,
        value,
        r=r,
        k=k,
        local=newest,
        page_tokens=page_tokens,
        channel_shape=channel_shape,
        dtype=dtype,
    )
    assert torch.equal(got, want)
    assert torch.equal(chosen, same)
    # Pages change the counters only.
    assert counts.tokens == kv_heads * (k + 1)
    assert counts.token_pages <= counts.tokens
    assert counts.token_pages * page_tokens >= counts.tokens
    pages = kv_heads * -(-tokens // channel_shape[1])
    assert -(-r // channel_shape[0]) * pages <= counts.channel_pages <= r * pages
    if r == 16 and k == tokens - 1:
        exact, _ = dense_attention(query[None], key, value, scale=0.25, first_position=tokens - 1)
        assert_near(want, exact[0], 1e-5)


@given(
    problem=contexts(),
    share=st.floats(0.05, 1),
    channels=st.floats(0.05, 1),
)
@settings(max_examples=20, deadline=None)
def test_the_sparf_selector_is_sparq(problem: Contexts, share: float, channels: float) -> None:
    """The native kernels against the published algorithm. Rounding may swap equal scores."""
    size = problem.layout.head_size
    r = max(1, round(size * channels))
    for row, sizes in enumerate(problem.rows):
        total = len(problem.key[row]) - 1
        k = max(round(total * share), sizes.window - 1)
        out, chosen = sparf_as_engine_runs_it(problem, r, k)
        want, tokens = oracle.sparq_attention(
            problem.query[row],
            problem.key[row],
            problem.value[row],
            r=r,
            k=k,
            local=sizes.window - 1,
        )
        if torch.equal(chosen[row], tokens):
            assert_near(out[row], want, 3e-5)
        else:
            assert torch.equal(chosen[row].sum(1), tokens.sum(1))
            assert int((chosen[row] ^ tokens).sum()) <= 2


def test_what_is_not_read_counts_as_mean_v() -> None:
    """Where attention is spread evenly, and a sixth of it is read: most of the error goes."""
    layout = BlockLayout.unpadded(16, 16, 2, 64, torch.float32)
    problem = Contexts(layout, 3, [Row(32, 9), Row(20, 16)], seed=4)
    problem.query *= 0.2
    for value in problem.value:
        assert value.mean(0).abs().max() < 0.3
    want, errors = dense(problem), []
    sixth = Budget(share=1 / 6)
    for rest in (False, True):
        for selector in (
            SpreadSelector(sixth, 0, KERNELS, estimate_rest=rest),
            SparfSelector(sixth, 16, "page", 0, KERNELS, estimate_rest=rest),
        ):
            assert (select(selector, problem).alpha is not None) == rest
            errors.append(float((output(selector, problem) - want).norm() / want.norm()))
    assert errors[2] < 0.6 * errors[0], errors
    assert errors[3] < 0.6 * errors[1], errors


@given(problem=contexts(), granularity=st.sampled_from(["token", "page"]), share=st.floats(0.01, 1))
@settings(max_examples=12, deadline=None)
def test_the_mass_of_sparf_is_its_mean_alpha(
    problem: Contexts, granularity: Literal["token", "page"], share: float
) -> None:
    """So it is known without alpha, which only the rest's estimate needs."""
    selector = SparfSelector(Budget(share=share), 5, granularity, 0, KERNELS, estimate_rest=True)
    selection = select(selector, problem)
    assert selection.alpha is not None
    alpha = selection.alpha.reshape(*selection.mass.shape, -1).mean(2)
    np.testing.assert_allclose(selection.mass, alpha, atol=1e-5)


def test_sparf_takes_the_page_of_most_mass() -> None:
    """Five tokens that are a little worse than the best one, which lies elsewhere alone."""
    problem = Contexts(BlockLayout.unpadded(16, 16, 1, 8, torch.float32), 1, [Row(8, 1)], seed=2)
    problem.query[0] = torch.eye(8)[0] * 8
    for token in range(128):
        best, good = token == 20, 80 <= token < 85
        problem.plant(0, token, torch.eye(8)[:1] * (1.0 if best else 0.9 if good else 0.0))
    selector = SparfSelector(Budget(tokens=16), 8, "page", 0, KERNELS)
    assert select(selector, problem).pages.tolist() == [80 // 16]


@pytest.mark.parametrize("name", PAGED)
@given(problem=contexts(), budget=budgets, sinks=st.integers(0, 50))
@settings(max_examples=12, deadline=None)
def test_a_page_budget_is_never_exceeded(
    name: str, problem: Contexts, budget: Budget, sinks: int
) -> None:
    layout = problem.layout
    selection = select(PAGED[name](budget, sinks), problem)
    for row, sizes in enumerate(problem.rows):
        earlier = len(problem.key[row]) - 1
        allowed = budget.tokens if budget.tokens is not None else earlier * (budget.share or 0)
        have = sizes.blocks * layout.groups
        for head in range(layout.kv_heads):
            i = row * layout.kv_heads + head
            pages = selection.pages[selection.begin[i] : selection.begin[i + 1]]
            assert np.all(np.diff(pages) > 0)
            assert np.all((pages >= 0) & (pages < have))
            held = sizes.window - 1
            assert len(pages) == 0 or held + len(pages) * layout.page_tokens <= allowed
            if "adaptive" not in name:
                # All of it is used, too.
                rest = held + (len(pages) + 1) * layout.page_tokens
                assert len(pages) == have or rest > allowed
            first = min(len(pages), -(-sinks // layout.page_tokens))
            assert pages[:first].tolist() == list(range(first))
    assert selection.begin[0] == 0
    assert selection.begin[-1] == len(selection.pages)
    assert np.all(np.isnan(selection.mass) | ((selection.mass >= 0) & (selection.mass <= 1)))


@pytest.mark.parametrize("name", [*PAGED, "sparf by token"])
@given(problem=contexts(), budget=budgets)
@settings(max_examples=8, deadline=None)
def test_selection_does_not_depend_on_place_threads_or_batch(
    name: str, problem: Contexts, budget: Budget
) -> None:
    make = PAGED.get(name, lambda b, s: SparfSelector(b, 5, "token", s, KERNELS))
    selector = make(budget, 2)
    selection = select(selector, problem)
    moved = problem.moved()
    other = select(selector, moved)
    for mine, theirs in (
        (selection.pages, other.pages),
        (selection.begin, other.begin),
        (selection.mass, other.mass),
        (selection.alpha, other.alpha),
        (selection.token_mask, other.token_mask),
    ):
        np.testing.assert_array_equal(mine, theirs)  # type: ignore[arg-type]  # None equals None
    assert torch.equal(output(selector, problem), output(selector, moved))
    alone = problem.only(len(problem.rows) - 1)
    single = select(selector, alone)
    heads = problem.layout.kv_heads
    last = selection.begin[-1 - heads]
    np.testing.assert_array_equal(single.pages, selection.pages[last:])
    np.testing.assert_array_equal(single.mass[0], selection.mass[-1])


@given(problem=contexts(), p=st.floats(0.05, 0.99), floor=st.floats(0, 0.7))
@settings(max_examples=20, deadline=None)
def test_adaptive_stops_as_soon_as_it_has_enough(problem: Contexts, p: float, floor: float) -> None:
    """Its floor is a share of the context, whatever the window holds."""
    selector = AdaptiveSelector(BoundsSelector(ALL, 0, KERNELS), p, floor, ALL, 0, KERNELS)
    scores = selector.scorer.score(
        problem.query, problem.summaries, problem.scale, problem.window_lse()
    )
    selection = select(selector, problem)
    tokens = np.floor(problem.summaries.context_tokens * floor)
    least = tokens // problem.layout.page_tokens
    assert selection.wanted == p
    heads = problem.layout.kv_heads
    for i in range(len(problem.rows) * heads):
        row, head = divmod(i, heads)
        pages = selection.pages[selection.begin[i] : selection.begin[i + 1]]
        have = int(problem.summaries.pages[row])
        at = scores.first[row] * heads + head * have
        mass = scores.mass[at : at + have].astype(np.float64)
        covered = float(scores.window_mass[row, head]) + mass[pages].sum()
        assert len(pages) >= min(least[row], have)
        assert covered >= p - 1e-5 or len(pages) == have
        if len(pages) > least[row]:
            assert covered - mass[pages].min() < p + 1e-5


@given(problem=contexts(), parts=st.integers(1, 4), seed=st.integers(0, 99))
@settings(max_examples=12, deadline=None)
def test_merging_any_partition_equals_the_whole(problem: Contexts, parts: int, seed: int) -> None:
    """Pages dealt out at random, attended to apart, merged by log-sum-exp, window apart too."""
    everything = BoundsSelector(ALL, 0, KERNELS).select(
        problem.query, problem.summaries, problem.scale
    )
    owner = np.random.default_rng(seed).integers(0, parts, len(everything.pages))
    lists = np.repeat(np.arange(len(everything.begin) - 1), np.diff(everything.begin))
    states = [problem.state() for _ in range(parts + 1)]
    problem.attend_window(states[-1])
    for part, state in enumerate(states[:-1]):
        mine = owner == part
        begin = np.searchsorted(lists[mine], np.arange(len(everything.begin))).astype(np.int32)
        some = Selection(everything.pages[mine], begin, everything.mass)
        listed = problem.page_list(some)
        problem.kernels.attend_pages(problem.query, state, listed, problem.layout, problem.scale)
    outs = torch.stack([state.acc / state.l[..., None] for state in states])
    lses = torch.stack([state.m + state.l.log() for state in states])
    out, _ = merge(outs, lses)
    assert_near(out, dense(problem), 1e-5)


@pytest.mark.parametrize(
    ("budget", "context", "window", "want"),
    [
        (Budget(share=0.125), 16000, 1025, 2128 - 1024),
        (Budget(share=0.125), 2048, 1025, 0),
        (Budget(share=1.0), 2048, 1025, 2048),
        (Budget(tokens=100), 80, 31, 70),
        (Budget(tokens=100), 40, 31, 40),
        (Budget(tokens=0), 80, 1, 0),
    ],
)
def test_budgets_by_hand(budget: Budget, context: int, window: int, want: int) -> None:
    """Of the earlier tokens; the window's are paid for first; the current token is free."""
    got = budget.context_tokens(np.array([context]), np.array([window]))
    assert got.tolist() == [want]


@pytest.mark.parametrize(
    "wrong", [{}, {"share": 0.5, "tokens": 3}, {"share": 0.0}, {"share": 1.1}, {"tokens": -1}]
)
def test_wrong_budgets_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="budget"):
        Budget(**wrong)  # type: ignore[arg-type]  # refused


def test_wrong_options_are_refused() -> None:
    with pytest.raises(ValueError, match="channels"):
        SparfSelector(ALL, 0, "page", 0, KERNELS)
    for p in (0.0, 1.5):
        with pytest.raises(ValueError, match="p must be"):
            AdaptiveSelector(BoundsSelector(ALL, 0, KERNELS), p, 1.0, ALL, 0, KERNELS)
    with pytest.raises(ValueError, match="belong together"):
        compensate(
            Contexts(BlockLayout.unpadded(8, 4, 2, 16, torch.float32), 2, [Row(0, 1)]).state(),
            torch.zeros(1).long(),
            torch.ones(2, 4),
            torch.ones(1, 2, 16),
        )


def test_the_needle_is_found_by_all_but_the_window() -> None:
    """A key like the query in the middle of noise: what tells selectors apart, in small."""
    layout = BlockLayout.unpadded(16, 16, 2, 64, torch.bfloat16)
    problem = Contexts(layout, 4, [Row(64, 9)], seed=1)
    needle = problem.query[0].view(2, 4, 64).mean(1) * 6
    problem.plant(0, 500, needle)
    budget = Budget(tokens=8 + 6 * 16)
    for name, make in PAGED.items():
        pages = select(make(budget, 4), problem)
        for head in range(2):
            found = 500 // 16 in pages.pages[pages.begin[head] : pages.begin[head + 1]]
            assert found == (name != "window"), name
