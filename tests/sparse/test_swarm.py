"""Laws of the selection by clusters, which come with the summaries."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.test_dense import assert_near
from tests.sparse.contexts import Contexts, Row, contexts
from tests.sparse.test_laws import ALL, KERNELS, budgets, dense, output, select
from vllm_ssdkv.clustering.clusters import Clusters, singletons
from vllm_ssdkv.kernels.operands.block_layout import BlockLayout
from vllm_ssdkv.sparse.protocol import Budget, Selector, page_budget
from vllm_ssdkv.sparse.selectors.bounds import BoundsSelector
from vllm_ssdkv.sparse.selectors.sparf import SparfSelector
from vllm_ssdkv.sparse.selectors.swarm import Route, SwarmSelector

Scoring = Literal["bounds", "sparf"]

scorings = st.sampled_from(["bounds", "sparf"])


def scorer(name: Scoring, budget: Budget, sinks: int) -> BoundsSelector | SparfSelector:
    if name == "bounds":
        return BoundsSelector(budget, sinks, KERNELS)
    return SparfSelector(budget, 5, "page", sinks, KERNELS)


def swarm(name: Scoring, budget: Budget, sinks: int, route: Route = "members") -> SwarmSelector:
    return SwarmSelector(scorer(name, budget, sinks), budget, sinks, KERNELS, route)


def random_clusters(pages: int, random: np.random.Generator) -> Clusters:
    lists = [
        random.choice(pages, random.integers(1, min(pages, 6) + 1), replace=False)
        for _ in range(pages // 2)
    ]
    return Clusters.of(lists, pages)


def clustered(problem: Contexts, seed: int) -> Contexts:
    """The problem with clusters of each row's pages for each KV head."""
    random = np.random.default_rng(seed)
    clusters = [
        tuple(random_clusters(pages, random) for _ in range(problem.layout.kv_heads))
        for pages in problem.summaries.pages.tolist()
    ]
    problem.summaries = replace(problem.summaries, clusters=clusters)
    return problem


@given(problem=contexts(), name=scorings, budget=budgets, sinks=st.integers(0, 40))
@settings(max_examples=20, deadline=None)
def test_single_pages_are_chosen_as_the_scorer_does(
    problem: Contexts, name: Scoring, budget: Budget, sinks: int
) -> None:
    selector: Selector = scorer(name, budget, sinks)
    want = select(selector, problem)
    alone = [(singletons(n),) * problem.layout.kv_heads for n in problem.summaries.pages]
    for clusters in (None, alone):
        problem.summaries = replace(problem.summaries, clusters=clusters)
        found = select(swarm(name, budget, sinks), problem)
        np.testing.assert_array_equal(found.pages, want.pages)
        np.testing.assert_array_equal(found.begin, want.begin)
        np.testing.assert_array_equal(found.mass, want.mass)
        np.testing.assert_array_equal(found.alpha, want.alpha)


@given(
    problem=contexts(),
    name=scorings,
    budget=budgets,
    sinks=st.integers(0, 40),
    route=st.sampled_from(["members", "medoid"]),
    seed=st.integers(0, 999),
)
@settings(max_examples=30, deadline=None)
def test_the_budget_is_used_and_no_page_chosen_twice(
    problem: Contexts, name: Scoring, budget: Budget, sinks: int, route: Route, seed: int
) -> None:
    found = select(swarm(name, budget, sinks, route), clustered(problem, seed))
    heads, most = problem.layout.kv_heads, page_budget(budget, problem.summaries)
    for i, pages in enumerate(np.split(found.pages, found.begin[1:-1])):
        row = i // heads
        assert np.all(np.diff(pages) > 0)
        assert len(pages) == min(most[row], problem.summaries.pages[row])
        first = min(len(pages), -(-sinks // problem.layout.page_tokens))
        assert pages[:first].tolist() == list(range(first))
        if len(pages) == problem.summaries.pages[row]:
            assert found.mass[row, i % heads] == pytest.approx(1, abs=1e-5)
    assert found.begin[-1] == len(found.pages)
    assert np.all((found.mass >= 0) & (found.mass <= 1 + 1e-6))


@given(problem=contexts(), name=scorings, budget=budgets, seed=st.integers(0, 999))
@settings(max_examples=15, deadline=None)
def test_selection_does_not_depend_on_place_or_batch(
    problem: Contexts, name: Scoring, budget: Budget, seed: int
) -> None:
    selector = swarm(name, budget, 2)
    moved = clustered(problem.moved(), seed)
    found, other = select(selector, clustered(problem, seed)), select(selector, moved)
    np.testing.assert_array_equal(found.pages, other.pages)
    np.testing.assert_array_equal(found.begin, other.begin)
    np.testing.assert_array_equal(found.mass, other.mass)
    assert torch.equal(output(selector, problem), output(selector, moved))
    alone = problem.only(len(problem.rows) - 1)
    assert problem.summaries.clusters is not None
    alone.summaries = replace(alone.summaries, clusters=problem.summaries.clusters[-1:])
    single = select(selector, alone)
    last = found.begin[-1 - problem.layout.kv_heads]
    np.testing.assert_array_equal(single.pages, found.pages[last:])


@given(problem=contexts(), name=scorings, seed=st.integers(0, 999))
@settings(max_examples=10, deadline=None)
def test_everything_selected_is_dense(problem: Contexts, name: Scoring, seed: int) -> None:
    selector = swarm(name, ALL, 3)
    want = dense(problem)
    assert_near(output(selector, clustered(problem, seed)), want, 1e-5)


def test_the_best_clusters_are_taken() -> None:
    """A page like the query brings its cluster; the mean of members or the medoid decides."""
    layout = BlockLayout.unpadded(16, 16, 1, 64, torch.float32)
    problem = Contexts(layout, 1, [Row(16, 3)], seed=1, spread=3.0)
    problem.plant(0, 5 * 16 + 3, problem.query[0].view(1, 64) * 4)
    clusters = Clusters.of([[5, 9, 11], [2, 5], [3, 4]], 16)
    problem.summaries = replace(problem.summaries, clusters=[(clusters,)])
    for route, members in (("members", [2, 5]), ("medoid", [5, 9, 11])):
        selector = swarm("bounds", Budget(tokens=2 + len(members) * 16), 0, route)  # type: ignore[arg-type]  # literals
        assert select(selector, problem).pages.tolist() == members
