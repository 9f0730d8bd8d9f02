"""Pages by mean and variance of each channel of K: by how much attention they hold on average.

A page's logit is ``q . mean + q^2 . variance / 2``, scaled: the second cumulant of its tokens'
logits, where channels vary on their own. ``exp`` of it is the mean of ``exp`` over the tokens where
logits are normal: an estimate of the page's mass, where bounds look for its largest token.
Centroids alone (RetroInfer, Chen et al. 2025) leave out the second term, and lose pages whose
tokens differ. Summaries are as large as bounds; pages of alike tokens make both terms sharper.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Self

import torch

from vllm_ssdkv.sparse.protocol import Budget, ContextSummaries, Needs, Selection
from vllm_ssdkv.sparse.scores import Scores, ScoringKernels, Table
from vllm_ssdkv.sparse.selector_parts import SelectorParts
from vllm_ssdkv.sparse.selectors.page_logits import PageLogitsSelector
from vllm_ssdkv.sparse.sizes import Offsets


class SpreadSelector(PageLogitsSelector):
    """Chooses the pages of the largest estimated mass. See ``protocol.Selector``."""

    name = "spread"

    def __init__(
        self,
        budget: Budget,
        sink_tokens: int,
        kernels: ScoringKernels,
        *,
        estimate_rest: bool = False,
    ) -> None:
        """``estimate_rest``: pages that are not chosen count as mean V, weighted by their estimated
        mass, as with SparQ's alpha; in place of nothing."""
        super().__init__(budget, sink_tokens, kernels)
        self.estimate_rest = estimate_rest
        self.needs = Needs(spread=True)

    @classmethod
    def of(cls, parts: SelectorParts) -> Self:
        """As the options say."""
        options = parts.options
        rest = options.estimate_rest
        return cls(parts.budget, options.sink_tokens, parts.kernels(), estimate_rest=rest)

    def complete(
        self, selection: Selection, scores: Scores, context: ContextSummaries
    ) -> Selection:
        """The selection with its alpha, if the rest is to be estimated."""
        if not self.estimate_rest:
            return selection
        if scores.of_pages is None:
            raise ValueError("these are not the scores of this selector")
        alpha = self.kernels.cover_pages(selection, scores.of_pages, context)
        return replace(selection, alpha=alpha)

    def logits(
        self, query: torch.Tensor, context: ContextSummaries, scale: float
    ) -> tuple[Table, Offsets]:
        """See :meth:`ScoringKernels.spread_logits`."""
        return self.kernels.spread_logits(query, context, scale)
