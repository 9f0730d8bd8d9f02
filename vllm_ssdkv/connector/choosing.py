"""The selector of the options, ready for use, and which rows it chooses for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vllm_ssdkv.config import SSDKVConfig
from vllm_ssdkv.connector.messages import Row
from vllm_ssdkv.selection.adaptive import AdaptiveSelector
from vllm_ssdkv.selection.bounds import BoundsSelector
from vllm_ssdkv.selection.protocol import Budget, Selector
from vllm_ssdkv.selection.scores import ScoringKernels
from vllm_ssdkv.selection.window import WindowSelector


@dataclass(frozen=True, slots=True)
class Choice:
    """How rows that are decoded choose their pages.

    Attributes:
        exact_below: Requests of fewer tokens do not choose.
        dense_layers: First layers in which nobody does.
    """

    selector: Selector
    page_tokens: int
    exact_below: int
    dense_layers: int

    @classmethod
    def of(cls, config: SSDKVConfig) -> Choice | None:
        """As the options say; None: everybody attends to everything.

        Raises:
            UnsupportedError: the native kernels do not load.
        """
        if config.selector == "exact":
            return None
        sparse = config.sparse
        budget = Budget(share=sparse.budget)
        if sparse.budget_tokens is not None:
            budget = Budget(tokens=sparse.budget_tokens)
        sinks = sparse.sink_tokens
        selector: Selector
        match config.selector:
            case "window":
                selector = WindowSelector(budget, sinks)
            case "bounds":
                selector = BoundsSelector(budget, sinks, ScoringKernels())
            case "adaptive":
                kernels, floor = ScoringKernels(), Budget(share=sparse.floor)
                scorer = BoundsSelector(budget, sinks, kernels)
                selector = AdaptiveSelector(scorer, sparse.mass, floor, budget, sinks, kernels)
        return cls(selector, config.page_tokens, config.exact_below, sparse.dense_layers)

    def rows(self, rows: Sequence[Row], contexts: Sequence[NDArray[np.int64]]) -> list[int]:
        """Those of a step's rows, by number, that choose: their query is a single token."""
        return [
            i
            for i, row in enumerate(rows)
            if row.tokens == 1 and len(contexts[i]) and row.first_position + 1 >= self.exact_below
        ]
