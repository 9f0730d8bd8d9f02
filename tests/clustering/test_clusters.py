"""Laws of clusters."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.clustering.strategies import FORMS, clusterings, seeds, windows
from vllm_ssdkv.clustering.clusters import Clusters, cluster, singletons
from vllm_ssdkv.clustering.co_activation import ActivationWindow, Form


@given(clusterings())
def test_each_page_is_in_a_cluster_and_none_twice_in_one(clusters: Clusters) -> None:
    assert np.all(clusters.copies() >= 1)
    assert len(clusters.copies()) == clusters.pages
    for members in clusters.lists():
        assert len(members) >= 1
        assert len(set(members.tolist())) == len(members)


@given(windows(), st.sampled_from(FORMS), st.integers(1, 8), st.booleans(), seeds)
def test_the_same_seed_gives_the_same_clusters(
    window: ActivationWindow, form: Form, largest: int, copies: bool, seed: int
) -> None:
    made = [
        cluster(window.affinity(form, 0.6, 16), 0.6, largest, copies=copies, seed=seed)
        for _ in range(2)
    ]
    assert np.array_equal(made[0].begin, made[1].begin)
    assert np.array_equal(made[0].member, made[1].member)


@given(windows(), st.integers(1, 8), seeds)
def test_sizes_and_copies_keep_their_limits(
    window: ActivationWindow, largest: int, seed: int
) -> None:
    affinity = window.affinity("conditional", 0.5, 16)
    clusters = cluster(affinity, 0.5, largest, seed=seed)
    assert clusters.size.max() <= largest
    assert len(clusters.member) <= largest * clusters.pages
    single = cluster(affinity, 0.5, largest, copies=False, seed=seed)
    assert np.all(single.copies() == 1)


@given(windows(), st.sampled_from([0.3, 0.5, 0.8]), st.integers(2, 10), seeds)
def test_members_are_near(
    window: ActivationWindow, threshold: float, largest: int, seed: int
) -> None:
    """With all partners listed: a member's mean distance to those before it is below tau."""
    pages = np.arange(len(window))
    both = window.together(pages, pages)
    alone = np.diag(both)
    with np.errstate(invalid="ignore"):
        distance = 1 - np.nan_to_num(both / (alone[:, None] + alone - both))
    affinity = window.affinity("jaccard", threshold, len(window))
    for members in cluster(affinity, threshold, largest, seed=seed).lists():
        for i in range(1, len(members)):
            assert distance[members[i], members[:i]].mean() < threshold + 1e-5
            assert distance[members[i], members[0]] < threshold + 1e-5


def test_the_densest_page_is_the_first_medoid() -> None:
    window = ActivationWindow(8, 64)
    for pages in ([0, 1, 2, 3], [0, 1, 2], [0, 3, 2], [0, 1, 3], [5, 6], [5, 6]):
        window.record(np.array(pages))
    clusters = cluster(window.affinity("conditional", 0.5, 8), 0.5, 8)
    assert sorted(map(sorted, (one.tolist() for one in clusters.lists()))) == [
        [0, 1, 2, 3],
        [4],
        [5, 6],
        [7],
    ]
    assert len(clusters[0]) == 4


def window_of(*pages: set[int]) -> ActivationWindow:
    """A window in which each page was chosen by these of the queries 0 to 9."""
    window = ActivationWindow(len(pages), 10)
    for query in range(10):
        window.record(np.array([page for page, by in enumerate(pages) if query in by], np.int64))
    return window


def test_a_page_at_the_threshold_stays_outside() -> None:
    """Distances of exactly 1/2 are not below a threshold of 1/2."""
    # Pages 0 and 1 have the same queries; 2 shares 2 of 4 queries with either.
    window = window_of({1, 2, 3}, {1, 2, 3}, {2, 3, 4})
    affinity = window.affinity("jaccard", 0.5, 4)
    assert affinity.density.tolist() == [1, 1, 0]
    for expand in ("medoid", "mean"):
        found = cluster(affinity, 0.5, 8, expand=expand)
        assert sorted(sorted(one.tolist()) for one in found.lists()) == [[0, 1], [2]]
    # Of page 2 the distance to the medoid 0 is 1/4, to 1 it is 3/4: 1/2 on the mean.
    window = window_of({0, 1, 2, 3, 4, 5, 6, 7}, {0, 1, 2, 3}, {3, 4, 5, 8})
    affinity = window.affinity("conditional", 0.5, 4)
    assert affinity.weight[0].tolist() == [1, 0.75, 0, 0]
    mean, medoid = (
        cluster(affinity, 0.5, 8, expand=expand).lists() for expand in ("mean", "medoid")
    )
    assert [one.tolist() for one in mean] == [[0, 1], [2, 0]]  # 0 is copied, at 1/4
    assert [one.tolist() for one in medoid] == [[0, 1, 2]]


def test_without_counts_each_page_is_alone() -> None:
    clusters = cluster(ActivationWindow(5, 64).affinity("jaccard", 0.5, 4), 0.5, 8)
    alone = singletons(5)
    assert clusters.lists() == alone.lists()
    assert len(singletons(0)) == 0
