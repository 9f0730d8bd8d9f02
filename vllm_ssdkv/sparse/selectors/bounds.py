"""Pages by upper bounds of their logits, from the minimum and maximum of each channel of K.

Quest (Tang et al., ICML 2024): a page's bound for a query is the sum over
channels of ``max(q * min, q * max)``, which no logit of the page exceeds. It reads two vectors per
page instead of ``page_tokens``. Query heads that share pages, which Quest does not treat: see
``page_logits.py``.
"""

from __future__ import annotations

import torch

from vllm_ssdkv.sparse.protocol import ContextSummaries, Needs
from vllm_ssdkv.sparse.scores import Table
from vllm_ssdkv.sparse.selectors.page_logits import PageLogitsSelector
from vllm_ssdkv.sparse.sizes import Offsets


class BoundsSelector(PageLogitsSelector):
    """Chooses the pages with the highest bounds. See ``protocol.Selector`` and ``scores.Scorer``.

    ``mass`` takes the bounds for logits: it compares contexts and steps, and is no guarantee.
    """

    name = "bounds"
    needs = Needs(bounds=True)

    def logits(
        self, query: torch.Tensor, context: ContextSummaries, scale: float
    ) -> tuple[Table, Offsets]:
        """See :meth:`ScoringKernels.bound_logits`."""
        return self.kernels.bound_logits(query, context, scale)
