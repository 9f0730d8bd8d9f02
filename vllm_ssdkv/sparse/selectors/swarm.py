"""Pages by clusters of co-activated pages (Swarm), over the pages and summaries that exist.

A cluster is a list of pages, each of which stays where it lies; copies of pages are the store's. A
cluster's score is the mean score of its members, or its medoid's, from a scorer of pages. The best
clusters are taken, a page of several of them once, until the budget is full. Where pages are not
clustered, the choice is the scorer's own by page.

Clusters are given with the summaries (``ContextSummaries.clusters``), so that this is a pure
function as every selector is; :mod:`vllm_ssdkv.sparse.context_clusters` makes and keeps them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import numpy as np
import torch

from vllm_ssdkv.clustering.clusters import Clusters
from vllm_ssdkv.clustering.routing import medoid_scores, member_scores, retrieve
from vllm_ssdkv.sparse.protocol import Budget, ContextSummaries, Selection, page_budget
from vllm_ssdkv.sparse.scores import Scorer, Scores, ScoringKernels
from vllm_ssdkv.sparse.selector_parts import SelectorParts

Route = Literal["members", "medoid"]


class SwarmSelector:
    """Chooses the pages of the best clusters. See ``protocol.Selector``."""

    name = "swarm"

    def __init__(
        self,
        scorer: Scorer,
        budget: Budget,
        sink_tokens: int,
        kernels: ScoringKernels,
        route: Route = "members",
    ) -> None:
        """Choose ``budget`` by the scores of ``scorer``, whose kernels are ``kernels``.

        ``sink_tokens``: first tokens of the context, always chosen, rounded up to pages.
        ``route``: score of a cluster.
        """
        self.scorer = scorer
        self.needs = replace(scorer.needs, clusters=True)
        self.budget = budget
        self.sink_tokens = sink_tokens
        self.kernels = kernels
        self.route = route

    @classmethod
    def of(cls, parts: SelectorParts) -> SwarmSelector:
        """As the options say."""
        options = parts.options
        return cls(
            parts.scorer(),
            parts.budget,
            options.sink_tokens,
            parts.kernels(),
            options.cluster_score,
        )

    def select(
        self,
        query: torch.Tensor,
        context: ContextSummaries,
        scale: float,
        window_lse: torch.Tensor | None = None,
    ) -> Selection:
        """Sinks, then pages by cluster, and what they cover."""
        scores = self.scorer.score(query, context, scale, window_lse)
        most = page_budget(self.budget, context)
        sinks = -(-self.sink_tokens // context.layout.page_tokens)
        by_page = self.kernels.choose(scores, most, most, sinks)
        found = by_page
        if context.clusters is not None and any(map(_clustered, context.clusters)):
            found = self._by_cluster(scores, context, most.tolist(), sinks, by_page)
        return self.scorer.complete(found, scores, context)

    def _by_cluster(
        self,
        scores: Scores,
        context: ContextSummaries,
        most: list[int],
        sinks: int,
        by_page: Selection,
    ) -> Selection:
        """The selection of all rows; heads without clusters keep that by page."""
        heads = context.layout.kv_heads
        tables = self.kernels.on_host(scores, context)
        lists, mass = np.split(by_page.pages, by_page.begin[1:-1]), by_page.mass.copy()
        for row, clusters in enumerate(context.clusters or ()):
            score, share = tables.score[row], tables.mass[row]
            for head in np.flatnonzero([_joined(one) for one in clusters]).tolist():
                by = medoid_scores if self.route == "medoid" else member_scores
                ranked = by(score[head], clusters[head])
                pages = retrieve(ranked, clusters[head], most[row], sinks)
                lists[row * heads + head] = pages
                covered = share[head, pages].sum() + tables.window_mass[row, head]
                mass[row, head] = 1 if len(pages) == len(share[head]) else min(covered, 1)
        return replace(Selection.of(lists, mass), ranked=by_page.ranked)


def _joined(clusters: Clusters) -> bool:
    """Check whether any cluster has more than one page."""
    return len(clusters) != len(clusters.member)


def _clustered(row: tuple[Clusters, ...]) -> bool:
    return any(map(_joined, row))
