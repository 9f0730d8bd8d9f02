"""Pages by logits of all of their tokens, from K in a few bits.

Each key, less the mean of its block, is rotated at random (two rounds of signs and a Hadamard
matrix) and rounded to 1, 2 or 4 bits a channel (RaBitQ, Gao and Long 2024), with a weight that
makes its logits right on average. A page's score is the softmax mass of its tokens by these logits:
an estimate of what attention would give to it, from a fourteenth of the KV with 2 bits. Query heads
that share pages: see ``page_logits.py``. ``docs/format.md`` says how codes lie in a store.
"""

from __future__ import annotations

from typing import Self

import torch

from vllm_ssdkv.sparse.protocol import Budget, ContextSummaries, Needs
from vllm_ssdkv.sparse.scores import ScoringKernels, Table
from vllm_ssdkv.sparse.selector_parts import SelectorParts
from vllm_ssdkv.sparse.selectors.page_logits import PageLogitsSelector
from vllm_ssdkv.sparse.sizes import Offsets


class CodesSelector(PageLogitsSelector):
    """Chooses the pages of the largest mass. See ``protocol.Selector`` and ``scores.Scorer``."""

    name = "codes"

    def __init__(
        self, budget: Budget, sink_tokens: int, kernels: ScoringKernels, bits: int
    ) -> None:
        """``bits`` of a channel: 1, 2 or 4."""
        super().__init__(budget, sink_tokens, kernels)
        self.bits = bits
        self.needs = Needs(codes=bits)

    @classmethod
    def of(cls, parts: SelectorParts) -> Self:
        """As the options say."""
        options = parts.options
        return cls(parts.budget, options.sink_tokens, parts.kernels(), options.code_bits)

    def logits(
        self, query: torch.Tensor, context: ContextSummaries, scale: float
    ) -> tuple[Table, Offsets]:
        """See :meth:`ScoringKernels.code_logits`."""
        return self.kernels.code_logits(query, context, scale, self.bits)
