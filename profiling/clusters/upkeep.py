"""Swarm's Table 5: how close new pages are to the medoids of the clusters that they join."""

from __future__ import annotations

from typing import Final

import numpy as np

from vllm_ssdkv.clustering import maintenance
from vllm_ssdkv.clustering.clusters import Clusters
from vllm_ssdkv.clustering.co_activation import ActivationWindow
from vllm_ssdkv.profiling.clusters.page_clusters import THRESHOLD, VARIANTS, clusters_of
from vllm_ssdkv.profiling.clusters.scores import paged
from vllm_ssdkv.profiling.clusters.trace import (
    F32,
    PAGE,
    WINDOW,
    Bools,
    Trace,
    budget_pages,
    pages_of,
    top,
)

NEW_PAGES: Final = 32
RULES: Final = ("rule (9), corrected", "Min-Diff", "Min-Size")


def distances(trace: Trace, layer: int, head: int) -> dict[str, float] | None:
    """Mean distance of members to their medoid after new pages joined, over that before, by rule.

    Clusters are of the first 2 of 5 parts of the queries, the next part is the window in which new
    pages are watched, and the rest judges. None: no cluster has two pages.
    """
    queries = trace.query.shape[2]
    watched, judged = 2 * queries // 5, 3 * queries // 5
    weights = trace.weights(layer, head, np.arange(queries))
    weights[:, :PAGE] = 0
    mass = pages_of(weights[:, : weights.shape[1] // PAGE * PAGE])
    end = (int(trace.position[0]) + watched) // PAGE
    old = min(end - NEW_PAGES, (int(trace.position[0]) + watched - WINDOW) // PAGE)
    new = np.arange(end - NEW_PAGES, end)
    chosen = top(np.where(mass > 0, mass, -1), budget_pages(0.1, old)) & (mass > 0)
    clusters = clusters_of(chosen[:watched, :old], VARIANTS[0])
    if (clusters.size < 2).all():
        return None
    keys = paged(trace.key[layer, head, : end * PAGE].astype(np.float32)).mean(1)
    grouped = _grouped_only(clusters)
    watching = chosen[watched:judged, :end]
    window = ActivationWindow(end, len(watching))
    for row in watching:
        window.record(np.flatnonzero(row))
    pairs = {
        RULES[0]: maintenance.co_activated_clusters(window, new, grouped, THRESHOLD),
        RULES[1]: maintenance.nearest_medoids(keys, new, grouped),
        RULES[2]: maintenance.smallest_clusters(new, grouped),
    }
    apart = _apart(chosen[judged:, :end])
    found = {name: _growth(apart, grouped, joined) for name, joined in pairs.items()}
    return {name: value for name, value in found.items() if value is not None}


def _grouped_only(clusters: Clusters) -> Clusters:
    """The clusters of two pages and more, in a table of its own: others have no distance."""
    kept = [one for one in clusters.lists() if len(one) > 1]
    begin = np.concatenate([[0], np.cumsum([len(one) for one in kept])]).astype(np.int64)
    return Clusters(begin, np.concatenate(kept), clusters.pages)


def _apart(chosen: Bools) -> F32:
    """Distance of all pages by these queries, ``1 - f_ij / min(f_i, f_j)``."""
    matrix = chosen.astype(np.float32)
    both = matrix.T @ matrix
    alone = np.diag(both)
    distance: F32 = 1 - both / np.maximum(np.minimum(alone[:, None], alone[None]), 1)
    return distance


def _growth(apart: F32, clusters: Clusters, pairs: maintenance.Pairs) -> float | None:
    """Mean distance to the medoid with the new pages, over that without, of what took some."""
    before: list[float] = []
    after: list[float] = []
    for number in np.unique(pairs[:, 1]).tolist():
        members = clusters[number]
        old = apart[members[1:], members[0]].tolist()
        new = pairs[pairs[:, 1] == number, 0]
        before += old
        after += [*old, *apart[new, members[0]].tolist()]
    if not before or not np.mean(before):
        return None
    return float(np.mean(after) / np.mean(before))
