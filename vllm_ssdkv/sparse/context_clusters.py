"""Clusters of running requests' pages, by layer and KV head, and the counts that they come from.

A context's own queries tell which of its pages go together; those of other texts do not. So counts
begin with the last queries of the request's prompt, as far as they are computed here, and go on
with those of decode. A query counts for the pages that it would choose one by one: those that
clusters bring beside would confirm themselves.

- The last :data:`QUERIES` queries of the prompt are kept until the first token is decoded; then
  they are scored, and clusters are made. Where all but a few prompt tokens were found in the store,
  those few count. Where none do, each page is a cluster, and what is chosen is what the scorer
  chooses by page.
- Every :data:`QUERIES` decoded tokens pages that are new since then join clusters by Swarm's rule
  (9), or, where there were no counts, clusters are made.

Memory per layer and KV head: 8 bytes a page for the counts, and 4 bytes for each member, of which
there are ``largest`` times the pages at most. It is dropped with the request, on preemption and
when its context is lost, and made again from what comes. What is chosen so depends on the queries
that were computed here: behind a prefix that was found, it may be another choice than behind the
same prefix computed. Where pages lie changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_ssdkv.clustering.clusters import Clusters, cluster, singletons
from vllm_ssdkv.clustering.co_activation import WORD, ActivationWindow, Form
from vllm_ssdkv.clustering.maintenance import co_activated_clusters, join
from vllm_ssdkv.sparse.protocol import ContextSummaries, Selection, Selector, page_budget
from vllm_ssdkv.sparse.sizes import ContextSizes

QUERIES: Final = WORD
"""Queries whose choices count, and decoded tokens between two updates."""

_ACTIVE: Final = 256
"""Pages that one query counts for at most: the time of clustering grows with their square."""

_SCORED: Final = 1 << 24
"""Logits that are made at a time from queries of the prompt: 64 MiB."""


@dataclass(frozen=True, slots=True)
class ClusterOptions:
    """Options of clusters.

    Attributes:
        threshold: Distance below which pages are together: tau.
        largest: Most pages of a cluster.
        form: Of the affinity, see ``clustering.co_activation``.
        sinks: First pages of a context, which do not count: they would be in every query's choice.
        seed: Order of equally dense pages.
    """

    threshold: float
    largest: int
    form: Form
    sinks: int = 0
    seed: int = 0


@dataclass(slots=True)
class ClusterTotals:
    """Totals over the clusters of running requests: clusters, their members, different pages."""

    clusters: int = 0
    members: int = 0
    pages: int = 0

    def add(self, heads: Sequence[Clusters], sign: int) -> None:
        """Count these clusters in (1) or out (-1)."""
        self.clusters += sign * sum(len(one) for one in heads)
        self.members += sign * sum(len(one.member) for one in heads)
        self.pages += sign * sum(one.pages for one in heads)


@dataclass(slots=True)
class _Context:
    """State of a request in a layer, by KV head.

    Attributes:
        windows: Counts.
        clusters: Of all its pages.
        made: Whether clusters were made from counts.
        pages: Of the context when they were made or got new pages.
        waited: Decoded tokens since then.
    """

    windows: list[ActivationWindow]
    clusters: tuple[Clusters, ...]
    made: bool = False
    pages: int = 0
    waited: int = 0


@dataclass(slots=True)
class _Layer:
    """State of a layer by request."""

    prompts: dict[str, torch.Tensor] = field(default_factory=dict)
    contexts: dict[str, _Context] = field(default_factory=dict)


class ContextClusters:
    """Clusters of running requests. Used by the thread of the forward pass."""

    def __init__(self, layers: int, kv_heads: int, options: ClusterOptions) -> None:
        """Clusters for ``kv_heads`` of each of ``layers``."""
        self._kv_heads = kv_heads
        self._options = options
        self._layers = [_Layer() for _ in range(layers)]
        self.totals = ClusterTotals()

    def __len__(self) -> int:
        """Requests that are known."""
        return len({name for one in self._layers for name in (*one.prompts, *one.contexts)})

    def drop(self, request_id: str) -> None:
        """The request does not run any more, or begins anew."""
        for layer in self._layers:
            layer.prompts.pop(request_id, None)
            gone = layer.contexts.pop(request_id, None)
            if gone is not None:
                self.totals.add(gone.clusters, -1)

    def note_prompt(self, layer: int, request_id: str, query: torch.Tensor) -> None:
        """Keep the last queries of a prompt, of which ``query`` [T, q_heads, head_size] come next.

        They are copied, and stay on their device.
        """
        prompts = self._layers[layer].prompts
        before = prompts.get(request_id)
        if before is None or len(query) >= QUERIES:
            prompts[request_id] = query[-QUERIES:].clone()
        else:
            prompts[request_id] = torch.cat([before, query])[-QUERIES:]

    def select(
        self,
        selector: Selector,
        layer: int,
        requests: Sequence[str],
        query: torch.Tensor,
        context: ContextSummaries,
        scale: float,
        window_lse: torch.Tensor | None = None,
    ) -> Selection:
        """The selection of R rows with their clusters; their queries then count.

        Args:
            selector: Needs clusters.
            layer: From 0.
            requests: Names of the rows, [R].
            query, context, scale, window_lse: As of ``Selector.select``.
        """
        states = []
        for row, name in enumerate(requests):
            state = self._state(layer, name, int(context.pages[row]))
            prompt = self._layers[layer].prompts.pop(name, None)
            if prompt is not None and context.channel_source is None:
                self._profile(selector, state, prompt, context, row, scale)
            states.append(state)
        clusters = [state.clusters for state in states]
        given = replace(context, clusters=clusters, known_sizes=context.sizes)
        selection = selector.select(query, given, scale, window_lse)
        active = self._activated(selector, given, selection)
        for row, state in enumerate(states):
            self._record(state, active[row * self._kv_heads : (row + 1) * self._kv_heads])
            state.waited += 1
            if state.waited >= QUERIES:
                self._update(state)
        return selection

    def _state(self, layer: int, request_id: str, pages: int) -> _Context:
        """State of a request whose context has so many pages; new ones are alone."""
        contexts = self._layers[layer].contexts
        state = contexts.get(request_id)
        if state is not None and state.clusters[0].pages > pages:
            # It goes on from an earlier token.
            self.totals.add(state.clusters, -1)
            state = None
        if state is None:
            state = contexts[request_id] = _Context(
                [ActivationWindow(pages, QUERIES) for _ in range(self._kv_heads)],
                (singletons(pages),) * self._kv_heads,
                pages=pages,
            )
            self.totals.add(state.clusters, 1)
        elif state.clusters[0].pages < pages:
            for window in state.windows:
                window.grow(pages)
            self._replace(state, [one.grown(pages) for one in state.clusters])
        return state

    def _profile(
        self,
        selector: Selector,
        state: _Context,
        prompt: torch.Tensor,
        context: ContextSummaries,
        row: int,
        scale: float,
    ) -> None:
        """Count the queries of a row's prompt, and make clusters.

        Each is scored as a row of its own with this row's context. The newest of its pages may lie
        behind a query; those are a few at most, since the window is about as long as the queries.
        """
        tokens = int(context.context_tokens[row] + context.window_tokens[row])
        height = max(1, _SCORED // max(1, tokens * prompt.shape[1]))
        for first in range(0, len(prompt), height):
            part = prompt[first : first + height]
            alike = _repeated(context, row, len(part))
            active = self._activated(selector, alike, selector.select(part, alike, scale))
            for query in range(len(part)):
                lists = active[query * self._kv_heads : (query + 1) * self._kv_heads]
                self._record(state, lists)
        self._update(state)

    def _activated(
        self, selector: Selector, context: ContextSummaries, selection: Selection
    ) -> list[NDArray[np.int32]]:
        """The pages that each row and KV head chooses one by one, as many as its budget has."""
        ranked = selection.ranked
        if ranked is None:
            raise ValueError(f"selector {selector.name} does not score pages")
        sinks = self._options.sinks
        most = np.minimum(page_budget(selector.budget, context), sinks + _ACTIVE).astype(np.int32)
        chosen = ranked.kernels.choose(ranked.scores, most, most, sinks)
        # Sinks were chosen first, and ascend, so they begin each list.
        lists = np.split(chosen.pages, chosen.begin[1:-1])
        return [pages[np.searchsorted(pages, sinks) :] for pages in lists]

    def _record(self, state: _Context, active: Sequence[NDArray[np.int32]]) -> None:
        for window, pages in zip(state.windows, active, strict=True):
            window.record(pages)

    def _update(self, state: _Context) -> None:
        """Make clusters, or have new pages join those that there are."""
        options = self._options
        pages = state.clusters[0].pages
        clusters = []
        for window, before in zip(state.windows, state.clusters, strict=True):
            if state.made:
                new = np.arange(state.pages, pages)
                pairs = co_activated_clusters(window, new, before, options.threshold)
                clusters.append(join(before, pairs, pages, options.largest))
            else:
                affinity = window.affinity(options.form, options.threshold, 2 * options.largest)
                clusters.append(
                    cluster(affinity, options.threshold, options.largest, seed=options.seed)
                )
        self._replace(state, clusters)
        state.made, state.pages, state.waited = True, pages, 0

    def _replace(self, state: _Context, clusters: Sequence[Clusters]) -> None:
        self.totals.add(state.clusters, -1)
        state.clusters = tuple(clusters)
        self.totals.add(state.clusters, 1)


def _repeated(context: ContextSummaries, row: int, count: int) -> ContextSummaries:
    """The context of one row, ``count`` times."""
    rows = np.full(count, row)
    sizes = ContextSizes(
        context.layout, context.row_begin[rows], context.row_end[rows], context.window_tokens[rows]
    )
    return replace(
        context,
        row_begin=sizes.row_begin,
        row_end=sizes.row_end,
        window_tokens=sizes.window_tokens,
        window_begin=None if context.window_begin is None else context.window_begin[rows],
        window_end=None if context.window_end is None else context.window_end[rows],
        clusters=None,
        known_sizes=sizes,
    )
