"""Sinks and the newest tokens, whatever the query asks: the baseline that sparse selectors beat.

StreamingLLM (Xiao et al. 2024) keeps the first tokens, to which heads with nothing to do attend,
and a window. What is neither is lost, so a task that looks something up in the middle fails: where
it does not, the task does not tell selectors apart.
"""

from __future__ import annotations

import numpy as np
import torch

from vllm_ssdkv.sparse.protocol import Budget, ContextSummaries, Needs, Selection, page_budget
from vllm_ssdkv.sparse.selector_parts import SelectorParts


class WindowSelector:
    """Chooses the sinks, then the newest pages, up to the budget. See ``protocol.Selector``."""

    name = "window"
    needs = Needs()

    def __init__(self, budget: Budget, sink_tokens: int) -> None:
        """``sink_tokens``: first tokens of the context to keep, rounded up to pages."""
        self.budget = budget
        self.sink_tokens = sink_tokens

    @classmethod
    def of(cls, parts: SelectorParts) -> WindowSelector:
        """As the options say."""
        return cls(parts.budget, parts.options.sink_tokens)

    def select(
        self,
        query: torch.Tensor,
        context: ContextSummaries,
        scale: float,
        window_lse: torch.Tensor | None = None,
    ) -> Selection:
        """The same pages for every head of a row; ``mass`` is NaN but where all are taken."""
        heads = context.layout.kv_heads
        sinks = -(-self.sink_tokens // context.layout.page_tokens)
        lists = []
        mass = np.full((len(context), heads), np.nan, np.float32)
        for row, (have, most) in enumerate(
            zip(context.pages.tolist(), page_budget(self.budget, context).tolist(), strict=True)
        ):
            first = min(sinks, most)
            pages = np.r_[0:first, have - (most - first) : have].astype(np.int32)
            lists += [pages] * heads
            if most == have:
                mass[row] = 1
        return Selection.of(lists, mass)
