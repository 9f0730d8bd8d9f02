"""New pages of a growing context: the clusters that they join, after a window of queries.

Swarm's rule (9), corrected: the distance of a new page e to a cluster is
``1 - f(e, medoid) / f(e)`` over the queries of the window, conditional as in equation (2), and e
joins *every* cluster below the threshold. As printed, f is divided by all activations in the
window, a share that nearly no pair reaches. Baselines of the paper's Table 5 are
:func:`nearest_medoids` and :func:`smallest_clusters`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from vllm_ssdkv.clustering.clusters import Clusters
from vllm_ssdkv.clustering.co_activation import F32, I32, I64, ActivationWindow

Pairs: TypeAlias = NDArray[np.int64]
"""Page and cluster that it joins, [n, 2], the cluster closest to a page before its others."""


def co_activated_clusters(
    window: ActivationWindow, new: I32 | I64, clusters: Clusters, threshold: float
) -> Pairs:
    """Clusters that the pages ``new`` join by rule (9); none for pages that no query chose."""
    medoid = clusters.medoid
    # A medoid may be new itself: a page is no company to itself.
    alone: F32 = window.frequency()[new].astype(np.float32)
    distance = 1 - window.together(new, medoid) / np.maximum(alone, 1)[:, None]
    distance[new[:, None] == medoid[None]] = np.inf
    page, cluster = np.nonzero(distance < threshold)
    order = np.lexsort((distance[page, cluster], page))
    pairs: Pairs = np.stack([new[page], cluster], axis=1)[order].astype(np.int64)
    return pairs


def nearest_medoids(keys: NDArray[np.floating], new: I32 | I64, clusters: Clusters) -> Pairs:
    """Cluster whose medoid has the nearest mean key, for each page: Min-Diff.

    ``keys``: one vector per page, [pages, size].
    """
    medoid = keys[clusters.medoid].astype(np.float64)
    mine = keys[new].astype(np.float64)
    # The square of a page's own length is the same for all medoids.
    distance = (medoid**2).sum(axis=1)[None] - 2 * mine @ medoid.T
    return np.stack([new, distance.argmin(axis=1)], axis=1).astype(np.int64)


def smallest_clusters(new: I32 | I64, clusters: Clusters) -> Pairs:
    """Cluster with the fewest members, counted with those that joined before: Min-Size."""
    size = clusters.size.copy()
    pairs = np.empty((len(new), 2), np.int64)
    for i, page in enumerate(new.tolist()):
        least = int(size.argmin())
        pairs[i] = page, least
        size[least] += 1
    return pairs


def join(
    clusters: Clusters, pairs: Pairs | Iterable[tuple[int, int]], pages: int, largest: int
) -> Clusters:
    """The clusters with these pages added, of a context of ``pages`` pages.

    A cluster of ``largest`` members takes no more, the first pairs win. New pages that no cluster
    takes are clusters of their own, as are all pages between; a page that was alone in a cluster
    and joins another is not kept alone.
    """
    lists = [one.tolist() for one in clusters.lists()]
    joined: set[int] = set()
    for page, cluster in np.asarray(list(pairs), np.int64).reshape(-1, 2).tolist():
        members = lists[cluster]
        if page not in members and len(members) < largest:
            members.append(page)
            joined.add(page)
    kept = [one for one in lists if len(one) > 1 or one[0] not in joined]
    return Clusters.of(kept, pages)
