"""As many pages as it takes to cover a share of the attention (top-p), for any scorer.

A head that looks at one place needs a page, one that averages over the text needs many; a fixed
budget gives both the same. The mass is the scorer's estimate, so ``p`` is a dial, not a bound of
the error; by codes it is without bias. ``1 - mass`` is the estimated missing mass, for the engine
to export.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_ssdkv.sparse.protocol import Budget, ContextSummaries, Selection, page_budget
from vllm_ssdkv.sparse.scores import Scorer, ScoringKernels
from vllm_ssdkv.sparse.selector_parts import SelectorParts


class AdaptiveSelector:
    """Chooses pages by score until ``p`` of the mass is covered. See ``protocol.Selector``."""

    name = "adaptive"

    def __init__(
        self,
        scorer: Scorer,
        p: float,
        floor: float,
        cap: Budget,
        sink_tokens: int,
        kernels: ScoringKernels,
    ) -> None:
        """Choose between ``floor`` and ``cap``, sinks counted in both, the window in ``cap``.

        Args:
            scorer: Scores pages, by ``kernels``.
            p: Mass to cover, above 0. 1 is never reached: then ``cap`` decides, and with a cap of
                everything the output is exact.
            floor: Share of the context's tokens to choose at least. Above the cap it counts as the
                cap.
            cap: The most to choose.
            sink_tokens: First tokens of the context, always chosen, rounded up to pages.
            kernels: Of selection.

        Raises:
            ValueError: ``p`` is out of range.
        """
        if not 0 < p <= 1:
            raise ValueError(f"p must be above 0 and at most 1, not {p}")
        self.scorer = scorer
        self.needs = scorer.needs
        self.p = p
        self.floor = floor
        self.budget = cap
        self.sink_tokens = sink_tokens
        self.kernels = kernels

    @classmethod
    def of(cls, parts: SelectorParts) -> AdaptiveSelector:
        """As the options say."""
        options = parts.options
        return cls(
            parts.scorer(),
            options.mass,
            options.floor,
            parts.budget,
            options.sink_tokens,
            parts.kernels(),
        )

    def least(self, context: ContextSummaries) -> NDArray[np.int32]:
        """Pages that each row chooses at least for each KV head, as far as the cap allows, int32
        [R]."""
        pages = context.context_tokens * self.floor // context.layout.page_tokens
        return pages.astype(np.int32)

    def select(
        self,
        query: torch.Tensor,
        context: ContextSummaries,
        scale: float,
        window_lse: torch.Tensor | None = None,
    ) -> Selection:
        """Sinks, then pages by score; ``mass`` says how far they got."""
        scores = self.scorer.score(query, context, scale, window_lse)
        most = page_budget(self.budget, context)
        sinks = -(-self.sink_tokens // context.layout.page_tokens)
        chosen = self.kernels.choose(scores, self.least(context), most, sinks, self.p)
        return replace(self.scorer.complete(chosen, scores, context), wanted=self.p)
