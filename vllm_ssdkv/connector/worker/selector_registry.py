"""Selectors as the options say, ready for use, and which rows choose by which of them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_ssdkv.attention.mean_value import RunningMeanV
from vllm_ssdkv.attention.sparse import SparseDecode
from vllm_ssdkv.base.errors import ConfigError
from vllm_ssdkv.config.engine import SSDKVConfig
from vllm_ssdkv.config.request import RequestOptions, servable
from vllm_ssdkv.config.selectors import EXACT, SELECTORS
from vllm_ssdkv.connector.kv_layout import KVLayout, block_layout
from vllm_ssdkv.connector.messages import Row
from vllm_ssdkv.kernels.scoring import select_scoring_kernels
from vllm_ssdkv.sparse.context_clusters import ClusterOptions, ContextClusters
from vllm_ssdkv.sparse.protocol import Budget, Selector
from vllm_ssdkv.sparse.selection_reuse import SelectionReuse
from vllm_ssdkv.sparse.selector_parts import SelectorParts
from vllm_ssdkv.sparse.selectors.sparf import SparfSelector

MAX_KNOWN: Final = 256
"""Different choices of requests that are kept ready. Clients may ask for any number."""


NearSelector = Callable[[SparfSelector], Selector]
"""Has the device that attends choose in the place of a selector."""


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
        near: NearSelector | None = None,
    ) -> SelectorGroup | None:
        """As the options say, for queries on ``device``; None: by attending to everything. A
        device that is ``near`` chooses where the selector is `sparf`.

        Raises:
            ConfigError: a guest needs summaries that the store does not have.
            UnsupportedError: the device's kernels do not load.
        """
        if config.selector == "exact":
            return None
        sparse = config.sparse
        budget = Budget(share=sparse.budget)
        if sparse.budget_tokens is not None:
            budget = Budget(tokens=sparse.budget_tokens)
        parts = SelectorParts(
            sparse,
            budget,
            layout.head_size,
            config.scorer,
            partial(select_scoring_kernels, device),
        )
        selector: Selector = SELECTORS.resolve(config.selector).of(parts)
        if near is not None and config.selector == "sparf":
            selector = near(SparfSelector.of(parts))
        if SELECTORS.is_guest(config.selector):
            _check_needs(config.selector, selector, parts)
        return cls(selector, config.exact_below)


def _check_needs(name: str, guest: Selector, parts: SelectorParts) -> None:
    """Check that slots hold the summaries that a guest reads.

    Raises:
        ConfigError: they do not.
    """
    needs, held = guest.needs, parts.scorer().needs
    bounds = needs.bounds and not held.bounds
    spread = needs.spread and not held.spread
    codes = needs.codes not in (0, held.codes)
    if bounds or spread or codes or needs.channels > held.channels:
        raise ConfigError(
            f'sparse.scorer: {name} needs {needs}, and slots hold what "{parts.scorer_name}" '
            f'needs, {held}; set sparse.scorer to "spread" for spread, "bounds" for bounds, '
            '"codes" for codes, else to "sparf". If a plugin registers it and nobody asks for it, '
            "leave the plugin out of VLLM_PLUGINS"
        )


class SelectorRegistry:
    """The engine's choice, and those that requests ask for in its place.

    Attributes:
        page_tokens: Tokens of a page.
        dense_layers: First of the layers with contexts, in which nobody chooses.
        means: Mean V of the requests that are decoded, where their selectors need it.
        kept: What they chose, where it is kept for more than a token.
        clusters: Of their pages, where their selectors need them.
        own: The engine's choice.
        latest: Rows that chose in the latest step in which any did.
    """

    def __init__(
        self,
        config: SSDKVConfig,
        layout: KVLayout,
        device: torch.device,
        near: NearSelector | None = None,
    ):
        """Selectors for queries on ``device``; see :meth:`SelectorGroup.of`.

        Raises:
            UnsupportedError: the device's kernels do not load.
        """
        self._near = near
        self._config = config
        self._layout = layout
        self._device = device
        self.page_tokens = config.page_tokens
        self.dense_layers = config.sparse.dense_layers
        layers, blocks = len(layout.layer_names), block_layout(layout, config.page_tokens)
        self.means = RunningMeanV(layers, blocks)
        self.latest: SparseDecode | None = None
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
        self.own = SelectorGroup.of(config, layout, device, near)
        self._asked: OrderedDict[RequestOptions, SelectorGroup | None] = OrderedDict()
        for name in servable(config):
            if name != EXACT and SELECTORS.is_guest(name):
                self._of(RequestOptions(selector=name))  # one that does not fit ends the start

    @classmethod
    def of(
        cls,
        config: SSDKVConfig,
        layout: KVLayout,
        device: torch.device,
        near: NearSelector | None = None,
    ) -> SelectorRegistry | None:
        """As the options say; None: everybody attends to everything, whatever requests ask for.

        Raises:
            UnsupportedError: the device's kernels do not load.
        """
        return None if config.selector == "exact" else cls(config, layout, device, near)

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
            return self.own
        if asked not in self._asked:
            applied = asked.applied(self._config)
            self._asked[asked] = SelectorGroup.of(applied, self._layout, self._device, self._near)
            if len(self._asked) > MAX_KNOWN:
                self._asked.popitem(last=False)
        return self._asked[asked]

    def of_rows(
        self, rows: Sequence[Row], contexts: Sequence[NDArray[np.int64]]
    ) -> dict[int, Selector]:
        """The selectors of those of a step's rows that choose, by number, ascending: their query
        is a single token that was sampled. Rows that ask for the same have the same selector."""
        found: dict[int, Selector] = {}
        asked, choice = None, self.own
        for i, row in enumerate(rows):
            if not row.may_choose or not len(contexts[i]):
                continue
            if row.asked is not asked:  # rows mostly ask for the same, and hashing that takes long
                asked, choice = row.asked, self._of(row.asked)
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
