"""Selectors as the options say, ready for use, and which rows choose by which of them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_ssdkv.attention.mean_value import RunningMeanV
from vllm_ssdkv.config.engine import SSDKVConfig
from vllm_ssdkv.config.request import RequestOptions
from vllm_ssdkv.connector.kv_layout import KVLayout, block_layout
from vllm_ssdkv.connector.messages import Row
from vllm_ssdkv.kernels.scoring import select_scoring_kernels
from vllm_ssdkv.sparse.context_clusters import ClusterOptions, ContextClusters
from vllm_ssdkv.sparse.protocol import Budget, Selector
from vllm_ssdkv.sparse.selection_reuse import SelectionReuse
from vllm_ssdkv.sparse.selectors.adaptive import AdaptiveSelector
from vllm_ssdkv.sparse.selectors.bounds import BoundsSelector
from vllm_ssdkv.sparse.selectors.fpga_sparf import FpgaChoice, FpgaSparfSelector
from vllm_ssdkv.sparse.selectors.sparf import SparfSelector
from vllm_ssdkv.sparse.selectors.spread import SpreadSelector
from vllm_ssdkv.sparse.selectors.swarm import SwarmSelector
from vllm_ssdkv.sparse.selectors.window import WindowSelector

MAX_KNOWN: Final = 256
"""Different choices of requests that are kept ready. Clients may ask for any number."""


@dataclass(frozen=True, slots=True)
class SelectorGroup:
    """Selector of the rows that choose alike.

    Attributes:
        exact_below: Requests of fewer tokens do not choose.
    """

    selector: Selector
    exact_below: int

    @classmethod
    def of(
        cls,
        config: SSDKVConfig,
        layout: KVLayout,
        device: torch.device,
        fpga: FpgaChoice | None = None,
    ) -> SelectorGroup | None:
        """As the options say, for queries on ``device``; None: by attending to everything. An
        ``fpga`` chooses where the selector is `sparf`.

        Raises:
            UnsupportedError: the device's kernels do not load.
        """
        if config.selector == "exact":
            return None
        sparse = config.sparse
        budget = Budget(share=sparse.budget)
        if sparse.budget_tokens is not None:
            budget = Budget(tokens=sparse.budget_tokens)
        sinks = sparse.sink_tokens
        selector: Selector
        if config.selector == "window":
            selector = WindowSelector(budget, sinks)
        else:
            kernels = select_scoring_kernels(device)
            scorer: BoundsSelector | SpreadSelector | SparfSelector
            if config.scorer == "bounds":
                scorer = BoundsSelector(budget, sinks, kernels)
            elif config.scorer == "spread":
                scorer = SpreadSelector(budget, sinks, kernels, estimate_rest=sparse.estimate_rest)
            else:
                channels = sparse.channels or max(1, layout.head_size // 8)
                scorer = SparfSelector(
                    budget,
                    channels,
                    sparse.granularity,
                    sinks,
                    kernels,
                    sparse.channel_group,
                    estimate_rest=sparse.estimate_rest,
                )
            selector = scorer
            if fpga is not None and config.selector == "sparf":
                if not isinstance(scorer, SparfSelector):
                    raise TypeError(f"sparf scores by channels, not by {scorer.name}")
                selector = FpgaSparfSelector(scorer, fpga)
            if config.selector == "swarm":
                selector = SwarmSelector(scorer, budget, sinks, kernels, sparse.cluster_score)
            if config.selector == "adaptive":
                floor = Budget(share=sparse.floor)
                selector = AdaptiveSelector(scorer, sparse.mass, floor, budget, sinks, kernels)
        return cls(selector, config.exact_below)


class SelectorRegistry:
    """The engine's choice, and those that requests ask for in its place.

    Attributes:
        page_tokens: Tokens of a page.
        dense_layers: First of the layers with contexts, in which nobody chooses.
        means: Mean V of the requests that are decoded, where their selectors need it.
        kept: What they chose, where it is kept for more than a token.
        clusters: Of their pages, where their selectors need them.
    """

    def __init__(
        self,
        config: SSDKVConfig,
        layout: KVLayout,
        device: torch.device,
        fpga: FpgaChoice | None = None,
    ):
        """For queries on ``device``; see :meth:`SelectorGroup.of`.

        Raises:
            UnsupportedError: the device's kernels do not load.
        """
        self._fpga = fpga
        self._config = config
        self._layout = layout
        self._device = device
        self.page_tokens = config.page_tokens
        self.dense_layers = config.sparse.dense_layers
        layers, blocks = len(layout.layer_names), block_layout(layout, config.page_tokens)
        self.means = RunningMeanV(layers, blocks)
        self.kept: SelectionReuse | None = None
        if config.sparse.reuse_steps > 1:
            steps, similarity = config.sparse.reuse_steps, config.sparse.reuse_similarity
            self.kept = SelectionReuse(layers, blocks, steps, similarity)
        sparse = config.sparse
        sinks = -(-sparse.sink_tokens // config.page_tokens)
        self.clusters = ContextClusters(
            layers,
            layout.kv_heads,
            ClusterOptions(
                sparse.cluster_threshold, sparse.cluster_size, sparse.cluster_affinity, sinks
            ),
        )
        self._own = SelectorGroup.of(config, layout, device, fpga)
        self._asked: OrderedDict[RequestOptions, SelectorGroup | None] = OrderedDict()

    @classmethod
    def of(
        cls,
        config: SSDKVConfig,
        layout: KVLayout,
        device: torch.device,
        fpga: FpgaChoice | None = None,
    ) -> SelectorRegistry | None:
        """As the options say; None: everybody attends to everything, whatever requests ask for.

        Raises:
            UnsupportedError: the device's kernels do not load.
        """
        return None if config.selector == "exact" else cls(config, layout, device, fpga)

    def drop(self, request_id: str) -> None:
        """The request does not run any more, or what it computed last is not to be trusted."""
        self.means.drop(request_id)
        self.clusters.drop(request_id)
        if self.kept is not None:
            self.kept.drop(request_id)

    def gauges(self) -> dict[str, int]:
        """Sizes of what is kept for running requests, by metric."""
        totals = self.clusters.totals
        return {
            "sparse_clusters": totals.clusters,
            "sparse_cluster_members": totals.members,
            "sparse_clustered_pages": totals.pages,
        }

    def _of(self, asked: RequestOptions | None) -> SelectorGroup | None:
        if asked is None:
            return self._own
        if asked not in self._asked:
            applied = asked.applied(self._config)
            self._asked[asked] = SelectorGroup.of(applied, self._layout, self._device, self._fpga)
            if len(self._asked) > MAX_KNOWN:
                self._asked.popitem(last=False)
        return self._asked[asked]

    def of_rows(
        self, rows: Sequence[Row], contexts: Sequence[NDArray[np.int64]]
    ) -> dict[int, Selector]:
        """The selectors of those of a step's rows that choose, by number, ascending: their query
        is a single token that was sampled. Rows that ask for the same have the same selector."""
        found: dict[int, Selector] = {}
        for i, row in enumerate(rows):
            if not row.may_choose or not len(contexts[i]):
                continue
            choice = self._of(row.asked)
            if choice is not None and row.first_position + 1 >= choice.exact_below:
                found[i] = choice.selector
        return found

    def later(self, rows: Sequence[Row]) -> list[int]:
        """Numbers of those of a step's rows whose prompts are long enough to choose from."""
        found: list[int] = []
        for i, row in enumerate(rows):
            choice = self._of(row.asked) if row.of_prompt else None
            if choice is not None and row.first_position + row.tokens >= choice.exact_below:
                found.append(i)
        return found

    def clustered(self, rows: Sequence[Row], later: Sequence[int]) -> set[int]:
        """Rows that will choose by clusters, of those that :meth:`later` named."""
        choices = {i: self._of(rows[i].asked) for i in later}
        return {i for i, one in choices.items() if one is not None and one.selector.needs.clusters}
