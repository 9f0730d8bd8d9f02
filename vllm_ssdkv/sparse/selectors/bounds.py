"""Pages by upper bounds of their logits, from the minimum and maximum of each channel of K.

Quest (Tang et al., ICML 2024): a page's bound for a query is the sum over
channels of ``max(q * min, q * max)``, which no logit of the page exceeds. It reads two vectors per
page instead of ``page_tokens``.

The query heads of a KV head share its pages, which Quest does not treat. Here each turns its bounds
into softmax weights over its pages, and its window where that is known; a page's score is the mean
of them (``ScoringKernels.weigh``). Sums or maxima of the bounds themselves would let the head with
the largest logits decide alone.

Which rows select by which selector: ``connector/worker/selector_registry.py``. Pages are taken by
their scores in ``kernels/scoring.py``.
"""

from __future__ import annotations

import torch

from vllm_ssdkv.sparse.protocol import Budget, ContextSummaries, Needs, Selection, page_budget
from vllm_ssdkv.sparse.scores import Scores, ScoringKernels


class BoundsSelector:
    """Chooses the pages with the highest bounds. See ``protocol.Selector`` and ``scores.Scorer``.

    ``mass`` takes the bounds for logits: it compares contexts and steps, and is no guarantee.
    """

    name = "bounds"
    needs = Needs(bounds=True)

    def __init__(self, budget: Budget, sink_tokens: int, kernels: ScoringKernels) -> None:
        """``sink_tokens``: first tokens of the context, always chosen, rounded up to pages."""
        self.budget = budget
        self.sink_tokens = sink_tokens
        self.kernels = kernels

    def score(
        self,
        query: torch.Tensor,
        context: ContextSummaries,
        scale: float,
        window_lse: torch.Tensor | None = None,
    ) -> Scores:
        """Weights of all pages, which are scores and masses alike."""
        logits, first = self.kernels.bound_logits(query, context, scale)
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
        return self.kernels.choose(scores, pages, pages, sinks)
