"""A selector of your own: pages by their own score and their neighbours'.

What a query looks for is often longer than a page. Here half of a page's score is its own and a
quarter is that of each page beside it, so that a passage is read as a whole. Scores are those of
the selector that `sparse.scorer` names.

    PYTHONPATH=examples/guests vllm serve MODEL --kv-transfer-config '{
      "kv_connector": "SSDKVConnector", "kv_role": "kv_both",
      "kv_connector_extra_config": {"mode": "page", "selector": "passages:PassageSelector"}}'
"""

from __future__ import annotations

import numpy as np
import torch

from vllm_ssdkv.sparse.protocol import ContextSummaries, Selection, page_budget
from vllm_ssdkv.sparse.selector_parts import SelectorParts


class PassageSelector:
    """Chooses the pages of the best passages. See ``vllm_ssdkv.sparse.protocol.Selector``."""

    name = "passages"
    version = 1

    def __init__(self, parts: SelectorParts) -> None:
        self.scorer = parts.scorer()
        self.kernels = parts.kernels()
        self.needs = self.scorer.needs
        self.budget = parts.budget
        self.sink_tokens = parts.options.sink_tokens

    @classmethod
    def of(cls, parts: SelectorParts) -> PassageSelector:
        """The selector as the options say."""
        return cls(parts)

    def select(
        self,
        query: torch.Tensor,
        context: ContextSummaries,
        scale: float,
        window_lse: torch.Tensor | None = None,
    ) -> Selection:
        """Sinks, then pages by passage, up to the budget."""
        scores = self.scorer.score(query, context, scale, window_lse)
        found = self.kernels.on_host(scores, context)
        sinks = -(-self.sink_tokens // context.layout.page_tokens)
        lists, mass = [], found.window_mass.copy()
        for row, most in enumerate(page_budget(self.budget, context).tolist()):
            for head, score in enumerate(found.score[row]):
                beside = np.pad(score, 1)
                passage = score / 2 + beside[:-2] / 4 + beside[2:] / 4
                passage[np.isnan(passage)] = np.inf  # broken data is attended to, and shows
                passage[:sinks] = np.inf
                pages = np.sort(np.argsort(-passage, kind="stable")[:most])
                lists.append(pages.astype(np.int32))
                covered = mass[row, head] + found.mass[row][head][pages].sum()
                mass[row, head] = 1 if most == len(score) else min(covered, 1)
        return self.scorer.complete(Selection.of(lists, mass), scores, context)
