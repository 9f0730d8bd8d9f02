"""Pages by mean and variance of each channel of K: by how much attention they hold on average.

A page's logit is ``q . mean + q^2 . variance / 2``, scaled: the second cumulant of its tokens'
logits, where channels vary on their own. ``exp`` of it is the mean of ``exp`` over the tokens where
logits are normal: an estimate of the page's mass, where bounds look for its largest token.
Centroids alone (RetroInfer, Chen et al. 2025) leave out the second term, and lose pages whose
tokens differ. Summaries are as large as bounds; pages of alike tokens make both terms sharper.
"""

from __future__ import annotations

import torch

from vllm_ssdkv.sparse.protocol import ContextSummaries, Needs
from vllm_ssdkv.sparse.scores import Table
from vllm_ssdkv.sparse.selectors.page_logits import PageLogitsSelector
from vllm_ssdkv.sparse.sizes import Offsets


class SpreadSelector(PageLogitsSelector):
    """Chooses the pages of the largest estimated mass. See ``protocol.Selector``."""

    name = "spread"
    needs = Needs(spread=True)

    def logits(
        self, query: torch.Tensor, context: ContextSummaries, scale: float
    ) -> tuple[Table, Offsets]:
        """See :meth:`ScoringKernels.spread_logits`."""
        return self.kernels.spread_logits(query, context, scale)
