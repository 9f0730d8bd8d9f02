"""Mass that methods recall at equal bytes: single pages, blocks, tokens, clusters, orders.

A result is the share of the true attention mass on the context that what is read has, over all
steps of a head. Layer, head and steps are those of one :class:`Head`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np

from vllm_ssdkv.base.errors import BenchError
from vllm_ssdkv.clustering import routing
from vllm_ssdkv.clustering.clusters import Clusters
from vllm_ssdkv.profiling.clusters import scores, token_order
from vllm_ssdkv.profiling.clusters.page_clusters import VARIANTS, clusters_of
from vllm_ssdkv.profiling.clusters.trace import (
    F32,
    I64,
    PAGE,
    Bools,
    Trace,
    active,
    budget_pages,
    pages_of,
)

_BLOCK_PAGES: Final = 8
"""InfLLM reads blocks of 128 tokens."""
_REPRESENTATIVES: Final = 4
_PQ_PARTS, _PQ_BITS = 2, 6
_KMEANS_ROUNDS: Final = 8


Recall: TypeAlias = tuple[float, str, float]
"""Budget, method, and the share of the mass."""


@dataclass(frozen=True, slots=True)
class Head:
    """One layer and KV head: the knowledge of methods, and the truth about some steps."""

    query: F32
    keys: F32
    mass: F32
    before: F32
    """Mass of the step before each."""
    received: F32
    """Mass that each token of the context has from all prompt queries together."""
    profile: Bools
    """Pages that each prompt query activates."""
    token_profile: Bools
    scale: float

    @classmethod
    def of(cls, trace: Trace, layer: int, head: int, steps: I64) -> Head:
        """Build from a trace."""
        prompt = trace.mass(layer, head, trace.profile_steps)
        return cls(
            trace.queries(layer, head, steps),
            trace.keys(layer, head),
            trace.mass(layer, head, steps),
            trace.mass(layer, head, np.maximum(steps - 1, 0)),
            prompt.sum(0),
            active(pages_of(prompt)),
            active(prompt),
            trace.scale,
        )

    @property
    def pages(self) -> int:
        """Pages of the context."""
        return len(self.keys) // PAGE

    @property
    def total(self) -> float:
        """Mass of the context, all steps."""
        return float(self.mass.sum())


def orders(head: Head) -> dict[str, I64]:
    """Orders of tokens that are compared."""
    tokens = len(head.keys)
    return {
        "position": token_order.by_position(tokens),
        "keys in 128": token_order.by_keys(head.keys, 128),
        "keys in 512": token_order.by_keys(head.keys, 512),
        "co-activation in 128": token_order.by_co_activation(head.token_profile, 128),
        "co-activation in 512": token_order.by_co_activation(head.token_profile, 512),
    }


def page_scores(head: Head, order: I64, logits: F32 | None = None) -> dict[str, F32]:
    """Scores of single pages in an order of tokens, [steps, pages], by selector."""
    keys = head.keys[order]
    logits = scores.channel_logits(head.query, keys, head.scale) if logits is None else logits
    return {
        "oracle": pages_of(head.mass[:, order]),
        "sparf": scores.best_token(logits),
        "sparf, sum of weights": scores.weight_sum(logits),
        "bounds": scores.bounds(head.query, keys, head.scale),
        "spread": scores.spread(head.query, keys, head.scale),
        "page means": scores.mean_key(head.query, keys, head.scale),
    }


def single_pages(head: Head, shares: Sequence[float]) -> Iterator[Recall]:
    """Recalled mass of each selector, in each order."""
    yield from _recalled(
        head, "step before's mass", pages_of(head.before), pages_of(head.mass), shares
    )
    for name, order in orders(head).items():
        mass = pages_of(head.mass[:, order])
        for selector, score in page_scores(head, order).items():
            label = selector if name == "position" else f"{selector}, {name}"
            yield from _recalled(head, label, score, mass, shares)


def infllm(head: Head, shares: Sequence[float]) -> Iterator[Recall]:
    """Blocks of 128 tokens by the mean of the 4 keys that had most mass."""
    blocks = head.pages // _BLOCK_PAGES
    tokens = blocks * _BLOCK_PAGES * PAGE
    keys = head.keys[:tokens].reshape(blocks, -1, head.keys.shape[1])
    received = head.received[:tokens].reshape(blocks, -1)
    best = np.argsort(-received, axis=1)[:, :_REPRESENTATIVES]
    means = np.take_along_axis(keys, best[..., None], axis=1).mean(1)
    score = scores.group_weights(head.query @ means.T, head.scale)
    # Pages behind the last whole block are a block of the lowest score.
    pages = np.arange(head.pages)
    lists = [pages[first : first + _BLOCK_PAGES] for first in range(0, head.pages, _BLOCK_PAGES)]
    clusters = Clusters.of(lists, head.pages)
    score = np.pad(score, ((0, 0), (0, len(clusters) - blocks)), constant_values=-1)
    yield from _clustered(head, "InfLLM blocks", score, clusters, shares)


def swarm(head: Head, shares: Sequence[float]) -> Iterator[Recall]:
    """Recalled mass of Swarm's page clusters: variants and representatives."""
    logits = scores.channel_logits(head.query, head.keys, head.scale)
    weight = scores.weight_sum(logits)
    pages = scores.paged(head.keys)
    means = pages.mean(1)
    for variant in VARIANTS:
        clusters = clusters_of(head.profile, variant)
        ranked = routing.member_scores(weight, clusters)
        yield from _clustered(head, f"{variant.name}: mean weight", ranked, clusters, shares)
        if variant != VARIANTS[0]:
            continue
        least, most = routing.bounds(pages.min(1), pages.max(1), clusters)
        for name, score in (
            (
                "medoid's mean key",
                scores.group_weights(head.query @ means[clusters.medoid].T, head.scale),
            ),
            (
                "centroid",
                scores.group_weights(head.query @ routing.centroids(means, clusters).T, head.scale),
            ),
            ("bounds", scores.within_bounds(head.query, least, most, head.scale)),
        ):
            yield from _clustered(head, f"Swarm: {name}", score, clusters, shares)
        label = "Swarm, no dedup: mean weight"
        yield from _clustered(head, label, ranked, clusters, shares, deduplicate=False)


def tokens(head: Head, shares: Sequence[float]) -> Iterator[Recall]:
    """Recalled mass where entries are single tokens, and of k-means clusters of them.

    Needs the extra ``clusters``.
    """
    yield from _recalled(head, "tokens: oracle", head.mass, head.mass, shares)
    weight = scores.group_weights(_quantised_products(head), head.scale)
    yield from _recalled(head, "tokens: PQ (PQCache)", weight, head.mass, shares)
    groups, centre = _kmeans(head)
    score = scores.group_weights(head.query @ centre.T, head.scale)
    for share in shares:
        whole = _kmeans_recall(head, score, groups, share, 1)
        yield share, "k-means, tokens (RetroInfer)", whole
        yield share, "k-means, whole pages", _kmeans_recall(head, score, groups, share, PAGE)


def require_libraries() -> None:
    """Raise BenchError unless the optional libraries are installed."""
    for name in ("faiss", "sklearn"):
        if importlib.util.find_spec(name) is None:
            raise BenchError(
                f"{name} is not installed: pip install 'vllm-ssdkv[clusters]' (in a checkout: "
                "pip install '.[clusters]'), or leave out what needs it with --no-tokens"
            )


def _recalled(
    head: Head, name: str, score: F32, mass: F32, shares: Sequence[float]
) -> Iterator[Recall]:
    """Mass of the best entries, single pages or tokens; those of the first page are not chosen."""
    per_page = score.shape[1] // head.pages
    ranked = score.copy()
    ranked[:, :per_page] = -np.inf
    order = np.argsort(-ranked, axis=1, kind="stable")
    gained = np.cumsum(np.take_along_axis(mass, order, axis=1).sum(0, dtype=np.float64))
    for share in shares:
        count = budget_pages(share, head.pages) * per_page
        yield share, name, float(gained[count - 1]) / max(head.total, 1e-9)


def _clustered(
    head: Head,
    name: str,
    score: F32,
    clusters: Clusters,
    shares: Sequence[float],
    *,
    deduplicate: bool = True,
) -> Iterator[Recall]:
    """Mass of the pages of the best clusters, at the budget of so many pages."""
    mass = pages_of(head.mass)
    for share in shares:
        budget = budget_pages(share, head.pages) + 1
        got = 0.0
        for step, row in enumerate(score):
            found = routing.retrieve(row, clusters, budget, 1, deduplicate=deduplicate)
            got += float(mass[step, found].sum())
        yield share, name, got / max(head.total, 1e-9)


def _quantised_products(head: Head) -> F32:
    """Products of queries with product-quantised keys, [group, steps, tokens]."""
    import faiss

    size = head.keys.shape[1]
    quantiser: Any = faiss.ProductQuantizer(size, _PQ_PARTS, _PQ_BITS)
    keys = np.ascontiguousarray(head.keys)
    quantiser.train(keys)
    decoded: F32 = quantiser.decode(quantiser.compute_codes(keys))
    products: F32 = head.query @ decoded.T
    return products


def _kmeans(head: Head) -> tuple[list[I64], F32]:
    """Clusters of tokens by centred, normalised keys, 16 a cluster on average; their mean keys."""
    from sklearn.cluster import KMeans

    keys = head.keys - head.keys.mean(0)
    keys /= np.linalg.norm(keys, axis=1, keepdims=True) + np.float32(1e-9)
    rounds = KMeans(head.pages, init="random", n_init=1, max_iter=_KMEANS_ROUNDS, random_state=1)
    label = rounds.fit_predict(keys)
    groups = [np.flatnonzero(label == i) for i in range(head.pages)]
    groups = [group for group in groups if len(group)]
    return groups, np.stack([head.keys[group].mean(0) for group in groups])


def _kmeans_recall(head: Head, score: F32, groups: list[I64], share: float, entry: int) -> float:
    """Mass of the best clusters that fit into the budget, stored in whole entries of tokens."""
    budget = budget_pages(share, head.pages) * PAGE
    cost = np.array([-(-len(group) // entry) * entry for group in groups])
    got = 0.0
    for step, row in enumerate(score):
        left = budget
        for number in np.argsort(-row, kind="stable").tolist():
            if cost[number] > left:
                if entry > 1:
                    continue
                got += float(head.mass[step, groups[number][:left]].sum())
                break
            left -= int(cost[number])
            got += float(head.mass[step, groups[number]].sum())
            if left <= 0:
                break
    return got / max(head.total, 1e-9)
