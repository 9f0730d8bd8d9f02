"""Scores of clusters and the pages that they bring."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.clustering.strategies import clusterings, seeds
from vllm_ssdkv.clustering.clusters import Clusters, singletons
from vllm_ssdkv.clustering.routing import (
    bounds,
    centroids,
    in_order,
    medoid_scores,
    member_scores,
    retrieve,
)


@given(clusterings(), st.integers(0, 50), st.integers(0, 3), seeds)
def test_no_page_twice_and_the_budget_is_full(
    clusters: Clusters, budget: int, first: int, seed: int
) -> None:
    scores = np.random.default_rng(seed).normal(size=len(clusters))
    pages = retrieve(scores, clusters, budget, first)
    assert np.all(np.diff(pages) > 0)
    assert len(pages) == min(budget, clusters.pages)
    sinks = min(first, budget, clusters.pages)
    assert pages[:sinks].tolist() == list(range(sinks))
    # Clusters in order: each page before the last one is there.
    wanted = [page for page in dict.fromkeys(in_order(scores, clusters).tolist()) if page >= first]
    assert set(pages.tolist()) == {*range(sinks), *wanted[: len(pages) - sinks]}


@given(clusterings(), st.integers(0, 50), seeds)
def test_copies_cost_a_page_without_deduplication(
    clusters: Clusters, budget: int, seed: int
) -> None:
    scores = np.random.default_rng(seed).normal(size=len(clusters))
    pages = retrieve(scores, clusters, budget, deduplicate=False)
    assert set(pages.tolist()) == set(in_order(scores, clusters)[:budget].tolist())
    assert set(pages.tolist()) <= set(retrieve(scores, clusters, budget).tolist())


@given(st.integers(1, 30), st.integers(0, 30), seeds)
def test_single_pages_go_by_their_scores(pages: int, budget: int, seed: int) -> None:
    scores = np.random.default_rng(seed).normal(size=pages)
    best = np.sort(np.argsort(-scores)[:budget])
    assert np.array_equal(retrieve(scores, singletons(pages), budget), best)


def test_broken_scores_go_first() -> None:
    scores = np.array([2, np.nan, 3.0])
    assert retrieve(scores, singletons(3), 1).tolist() == [1]


@given(clusterings(), seeds)
def test_representatives(clusters: Clusters, seed: int) -> None:
    random = np.random.default_rng(seed)
    pages = random.normal(size=(2, clusters.pages)).astype(np.float32)
    keys = random.normal(size=(clusters.pages, 3)).astype(np.float32)
    query = random.normal(size=3).astype(np.float32)
    least, most = bounds(keys - 0.1, keys + 0.1, clusters)
    lists = clusters.lists()
    assert np.allclose(medoid_scores(pages, clusters), pages[:, [one[0] for one in lists]])
    mean = np.stack([pages[:, one].mean(axis=1) for one in lists], axis=1)
    assert np.allclose(member_scores(pages, clusters), mean, atol=1e-5)
    assert np.allclose(centroids(keys, clusters), [keys[one].mean(0) for one in lists], atol=1e-5)
    upper = np.maximum(query * least, query * most).sum(axis=1)
    assert all(np.all(keys[one] @ query <= upper[i] + 1e-5) for i, one in enumerate(lists))
