"""Clusters of pages around medoids, and how they are made from co-activation.

Swarm, section 5.1: the page with the most neighbours that no cluster holds yet becomes a medoid;
its neighbours join in order of their distance, while their mean distance to the members so far is
below the threshold. A page may join several clusters: its copies. What no cluster takes is a
cluster of its own, so each page is in at least one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from vllm_ssdkv.clustering.co_activation import F32, I32, I64, Affinity


@dataclass(frozen=True, slots=True)
class Clusters:
    """Lists of pages, one per cluster, its medoid first. Immutable.

    Attributes:
        begin: Where each cluster begins in ``member``, and the end of the last, int64
            [clusters + 1]. None is empty.
        member: Page numbers, int32, no page twice in a cluster.
        pages: Number of pages; each is in at least one cluster.
    """

    begin: I64
    member: I32
    pages: int

    @classmethod
    def of(cls, lists: Iterable[Sequence[int] | I32 | I64], pages: int) -> Clusters:
        """Clusters of these lists, medoids first, and one of each page that they lack."""
        held = [np.asarray(one, np.int32) for one in lists]
        alone = np.ones(pages, np.bool_)
        for one in held:
            alone[one] = False
        rest = np.flatnonzero(alone).astype(np.int32)
        sizes = np.array([*(len(one) for one in held), *np.ones(len(rest), np.int64)], np.int64)
        begin = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        return cls(begin, np.concatenate([np.empty(0, np.int32), *held, rest]), pages)

    def __len__(self) -> int:
        """Number of clusters."""
        return len(self.begin) - 1

    def __getitem__(self, cluster: int) -> I32:
        """Members of a cluster."""
        return self.member[self.begin[cluster] : self.begin[cluster + 1]]

    @property
    def medoid(self) -> I32:
        """First member of each cluster, int32 [clusters]."""
        return self.member[self.begin[:-1]]

    @property
    def size(self) -> I64:
        """Members of each cluster, int64 [clusters]."""
        return np.diff(self.begin)

    @property
    def nbytes(self) -> int:
        """Memory in bytes."""
        return self.begin.nbytes + self.member.nbytes

    def copies(self) -> I64:
        """Clusters that each page is in, at least 1, int64 [pages]."""
        return np.bincount(self.member, minlength=self.pages)

    def grown(self, pages: int) -> Clusters:
        """These clusters of a context of so many pages, at least as many as now; new ones alone."""
        new = np.arange(self.pages, pages, dtype=np.int32)
        begin = np.concatenate([self.begin, self.begin[-1] + 1 + np.arange(len(new))])
        return Clusters(begin, np.concatenate([self.member, new]), pages)

    def lists(self) -> list[I32]:
        """Members by cluster."""
        return np.split(self.member, self.begin[1:-1]) if len(self) else []


def singletons(pages: int) -> Clusters:
    """One cluster of each page: no clustering."""
    return Clusters(np.arange(pages + 1), np.arange(pages, dtype=np.int32), pages)


def cluster(
    affinity: Affinity,
    threshold: float,
    largest: int,
    *,
    copies: bool = True,
    expand: Literal["mean", "medoid"] = "mean",
    seed: int = 0,
) -> Clusters:
    """Clusters of all pages by Swarm's greedy expansion.

    Affinities that are not listed count as 0, so ``affinity`` needs more partners than ``largest``
    for clusters that are as tight as counts of all pairs would make them.

    Args:
        affinity: Of all pages, with densities at this ``threshold``.
        threshold: Distance ``1 - P`` below which a page joins: tau.
        largest: Most members of a cluster, at least 1. With it members are at most ``largest``
            times the pages.
        copies: Whether a page that a cluster holds may join others.
        expand: Distance that counts for joining: the mean to all members so far, or to the medoid.
        seed: Order of equally dense pages: the same seed gives the same clusters.
    """
    pages = len(affinity)
    order = np.random.default_rng(seed).permutation(pages)
    order = order[np.argsort(-affinity.density[order], kind="stable")]
    covered = np.zeros(pages, np.bool_)
    place = np.full(pages + 1, -1, np.int64)
    made: list[I64] = []
    for medoid in order.tolist():
        if affinity.density[medoid] == 0:
            break
        if covered[medoid]:
            continue
        near = 1 - affinity.weight[medoid] < threshold
        near &= affinity.partner[medoid] >= 0
        if not copies:
            near &= ~covered[affinity.partner[medoid]]
        candidates = affinity.partner[medoid][near].astype(np.int64)
        if expand == "mean":
            start = affinity.weight[medoid][near]
            taken = _expand(_between(affinity, candidates, place), start, threshold, largest - 1)
        else:
            taken = np.arange(min(len(candidates), largest - 1))
        members = np.concatenate([[medoid], candidates[taken]])
        covered[members] = True
        made.append(members)
    return Clusters.of(made, pages)


def _between(affinity: Affinity, pages: I64, place: I64) -> F32:
    """Affinities of these pages to each other, float32 [n, n], by the lists of either.

    ``place``, int64 [all pages + 1], is all -1 and left so.
    """
    place[pages] = np.arange(len(pages))
    # The last entry of ``place`` stands for no partner; partners beside these share a last column.
    column = place[affinity.partner[pages]]
    between = np.zeros((len(pages), len(pages) + 1), np.float32)
    np.put_along_axis(between, column, affinity.weight[pages], axis=1)
    place[pages] = -1
    square = between[:, :-1]
    return np.maximum(square, square.T)


def _expand(between: F32, start: F32, threshold: float, most: int) -> I64:
    """Candidates that join, in order, by their mean distance to the members that came before."""
    distance = 1 - start.astype(np.float64)
    members = 1
    taken: list[int] = []
    for i in range(len(start)):
        if len(taken) >= most:
            break
        if distance[i] / members < threshold:
            distance += 1 - between[:, i]
            members += 1
            taken.append(i)
    return np.array(taken, np.int64)
