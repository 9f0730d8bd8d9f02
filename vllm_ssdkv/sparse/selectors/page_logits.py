"""Pages by one logit each, which stands for all of the page's tokens.

The query heads of a KV head share its pages. Each turns its logits into softmax weights over its
pages, and its window where that is known; a page's score is the mean of them
(``ScoringKernels.weigh``). Sums or maxima of the logits themselves would let the head with the
largest ones decide alone.

Which rows select by which selector: ``connector/worker/selector_registry.py``. Pages are taken by
their scores in ``kernels/scoring.py``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Self

import torch

from vllm_ssdkv.sparse.protocol import Budget, ContextSummaries, Needs, Selection, page_budget
from vllm_ssdkv.sparse.scores import Scores, ScoringKernels, Table
from vllm_ssdkv.sparse.selector_parts import SelectorParts
from vllm_ssdkv.sparse.sizes import Offsets


class PageLogitsSelector(ABC):
    """Chooses the pages of the largest weights. See ``protocol.Selector`` and ``scores.Scorer``."""

    name: str
    needs: Needs

    def __init__(self, budget: Budget, sink_tokens: int, kernels: ScoringKernels) -> None:
        """``sink_tokens``: first tokens of the context, always chosen, rounded up to pages."""
        self.budget = budget
        self.sink_tokens = sink_tokens
        self.kernels = kernels

    @classmethod
    def of(cls, parts: SelectorParts) -> Self:
        """As the options say."""
        return cls(parts.budget, parts.options.sink_tokens, parts.kernels())

    @abstractmethod
    def logits(
        self, query: torch.Tensor, context: ContextSummaries, scale: float
    ) -> tuple[Table, Offsets]:
        """Logits of all context pages, by query head."""

    def score(
        self,
        query: torch.Tensor,
        context: ContextSummaries,
        scale: float,
        window_lse: torch.Tensor | None = None,
    ) -> Scores:
        """Weights of all pages, which are scores and masses alike."""
        logits, first = self.logits(query, context, scale)
        return self.kernels.weigh(logits, first, window_lse, query.shape[1], context)

    def complete(
        self, selection: Selection, scores: Scores, context: ContextSummaries
    ) -> Selection:
        """Nothing to add: attention over the pages is the output."""
        return selection

    def select(
        self,
        query: torch.Tensor,
        context: ContextSummaries,
        scale: float,
        window_lse: torch.Tensor | None = None,
    ) -> Selection:
        """As many pages as the budget has, sinks first."""
        scores = self.score(query, context, scale, window_lse)
        pages = page_budget(self.budget, context)
        sinks = -(-self.sink_tokens // context.layout.page_tokens)
        chosen = self.kernels.choose(scores, pages, pages, sinks)
        return self.complete(chosen, scores, context)
