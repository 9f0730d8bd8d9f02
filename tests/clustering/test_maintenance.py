"""New pages and the clusters that they join."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.clustering.strategies import clusterings, seeds
from vllm_ssdkv.clustering.clusters import Clusters, singletons
from vllm_ssdkv.clustering.co_activation import ActivationWindow
from vllm_ssdkv.clustering.maintenance import (
    co_activated_clusters,
    join,
    nearest_medoids,
    smallest_clusters,
)


@given(clusterings(), st.integers(0, 6), st.integers(1, 12), seeds)
def test_each_page_is_in_a_cluster_afterwards(
    clusters: Clusters, more: int, largest: int, seed: int
) -> None:
    random = np.random.default_rng(seed)
    pages = clusters.pages + more
    window = ActivationWindow(pages, 32)
    for _ in range(20):
        window.record(np.flatnonzero(random.random(pages) < 0.3))
    new = np.arange(clusters.pages, pages)
    pairs = co_activated_clusters(window, new, clusters, 0.7)
    joined = join(clusters, pairs, pages, largest)
    assert joined.pages == pages
    assert np.all(joined.copies() >= 1)
    before = clusters.size.max(initial=0)
    assert joined.size.max(initial=0) <= max(largest, before)
    for members in joined.lists():
        assert len(set(members.tolist())) == len(members)


def test_rule_nine_takes_every_near_cluster_closest_first() -> None:
    clusters = Clusters.of([[0, 1], [2, 3], [4, 5]], 6)
    window = ActivationWindow(8, 64)
    for chosen in ([0, 6], [0, 2, 6], [0, 2, 6], [4, 6], [7]):
        window.record(np.array(chosen))
    pairs = co_activated_clusters(window, np.array([6, 7]), clusters, 0.6)
    assert pairs.tolist() == [[6, 0], [6, 1]]  # at 1/4 and 1/2; 4 is at 3/4
    at_the_threshold = co_activated_clusters(window, np.array([6, 7]), clusters, 0.5)
    assert at_the_threshold.tolist() == [[6, 0]]
    joined = join(clusters, pairs, 8, 8)
    assert [one.tolist() for one in joined.lists()] == [[0, 1, 6], [2, 3, 6], [4, 5], [7]]


def test_a_full_cluster_takes_no_more() -> None:
    clusters = Clusters.of([[0, 1], [2]], 3)
    joined = join(clusters, [(3, 0), (4, 1), (3, 1)], 5, 2)
    assert [one.tolist() for one in joined.lists()] == [[0, 1], [2, 4], [3]]


def test_a_page_that_joins_is_not_kept_alone() -> None:
    joined = join(singletons(3), [(2, 0)], 3, 8)
    assert [one.tolist() for one in joined.lists()] == [[0, 2], [1]]


def test_baselines() -> None:
    clusters = Clusters.of([[0, 1, 2], [3]], 4)
    keys = np.array([[1, 0], [9, 9], [9, 9], [0, 1], [3, 1], [0.1, 2]], np.float32)
    new = np.array([4, 5])
    assert nearest_medoids(keys, new, clusters).tolist() == [[4, 0], [5, 1]]
    assert smallest_clusters(new, clusters).tolist() == [[4, 1], [5, 1]]
    assert smallest_clusters(np.arange(4, 9), clusters)[:, 1].tolist() == [1, 1, 0, 1, 0]
