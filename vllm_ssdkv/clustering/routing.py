"""Clusters for a query: scores by representatives, and the pages of the best clusters.

Swarm keeps medoids in DRAM and scores them against the query. Here any of four representatives
does, each from what is known of pages already. Scores of queries come as one row per query, so a
caller decides what the heads of a group weigh.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from vllm_ssdkv.clustering.clusters import Clusters
from vllm_ssdkv.clustering.co_activation import F32, I32, I64


def medoid_scores(pages: F32, clusters: Clusters) -> F32:
    """Score of each cluster's medoid, [..., clusters], from scores of pages, [..., pages]."""
    return pages[..., clusters.medoid]


def member_scores(pages: F32, clusters: Clusters) -> F32:
    """Mean score of each cluster's members, [..., clusters], from those of pages, [..., pages]."""
    if not len(clusters):
        return pages[..., :0]
    total = np.add.reduceat(pages[..., clusters.member], clusters.begin[:-1], axis=-1)
    mean: F32 = (total / clusters.size).astype(np.float32)
    return mean


def centroids(keys: F32, clusters: Clusters) -> F32:
    """Mean key of each cluster's members, [clusters, size], from one key per page.

    The score of a cluster is the logit of its centroid.
    """
    return np.ascontiguousarray(member_scores(keys.T, clusters).T)


def bounds(least: F32, most: F32, clusters: Clusters) -> tuple[F32, F32]:
    """Smallest and largest channels of each cluster's members, [clusters, size] each.

    From those of pages, [pages, size]. The sum over channels of ``max(q * least, q * most)`` is no
    less than any logit of the cluster.
    """
    if not len(clusters):
        return least[:0], most[:0]
    first = clusters.begin[:-1]
    return (
        np.minimum.reduceat(least[clusters.member], first, axis=0),
        np.maximum.reduceat(most[clusters.member], first, axis=0),
    )


def retrieve(
    scores: NDArray[np.floating],
    clusters: Clusters,
    budget: int,
    first: int = 0,
    *,
    deduplicate: bool = True,
) -> I32:
    """The pages of the best clusters, until ``budget`` pages are full; ascending, none twice.

    Clusters go by their score, equal ones by number, NaN before all others, so that broken data
    shows. Of the last one the first members count, its medoid before all.

    Args:
        scores: Of the clusters, [clusters].
        clusters: Cover all pages.
        budget: Most pages, ``first`` included.
        first: So many first pages of the context are taken before all others.
        deduplicate: A page that a better cluster brought costs nothing. Else each copy costs a
            page of the budget, and the answer has fewer.
    """
    budget = min(budget, clusters.pages) if deduplicate else budget
    first = min(first, budget, clusters.pages)
    order, taken = _by_score(scores), budget
    sinks = np.arange(first, dtype=np.int32)
    wanted = clusters.member[members_of(clusters, order[:taken])]
    if deduplicate:
        wanted = _first_of_each(wanted[wanted >= first], clusters.pages)
    while deduplicate and len(wanted) < budget - first:
        # Copies, and pages that are taken anyway, cost a look at more clusters.
        taken *= 2
        wanted = clusters.member[members_of(clusters, order[:taken])]
        wanted = _first_of_each(wanted[wanted >= first], clusters.pages)
    found: I32 = np.unique(np.concatenate([sinks, wanted[: budget - first]]))
    return found


def in_order(scores: NDArray[np.floating], clusters: Clusters) -> I32:
    """Members of all clusters by the scores of these, copies too, int32 [members]."""
    return clusters.member[members_of(clusters, _by_score(scores))]


def _by_score(scores: NDArray[np.floating]) -> I64:
    return np.argsort(-np.nan_to_num(scores, nan=np.inf), kind="stable")


def _first_of_each(wanted: I32, pages: int) -> I32:
    """The list without what it has had before."""
    number = np.arange(len(wanted))
    place = np.empty(pages, np.int64)
    place[wanted[::-1]] = number[::-1]
    found: I32 = wanted[place[wanted] == number]
    return found


def members_of(clusters: Clusters, which: I64) -> I64:
    """Places in ``Clusters.member`` of these clusters' members, one cluster after the other."""
    size = clusters.size[which]
    end = np.cumsum(size)
    start = np.repeat(clusters.begin[which] - (end - size), size)
    places: I64 = start + np.arange(len(start))
    return places
