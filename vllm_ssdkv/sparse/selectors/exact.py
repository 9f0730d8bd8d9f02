"""Everything: the selector that loses nothing."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_ssdkv.sparse.protocol import Budget, ContextSummaries, Needs, Selection


class ExactSelector:
    """Chooses every page of the context. See ``protocol.Selector``."""

    name = "exact"
    needs = Needs()
    budget = Budget(share=1.0)

    def select(
        self,
        query: torch.Tensor,
        context: ContextSummaries,
        scale: float,
        window_lse: torch.Tensor | None = None,
    ) -> Selection:
        """All pages of every row and head; ``mass`` is 1."""
        heads = context.layout.kv_heads
        lists = [np.arange(n, dtype=np.int32) for n in context.pages for _ in range(heads)]
        return selection_of(lists, np.ones((len(context), heads), np.float32))


def selection_of(lists: list[NDArray[np.int32]], mass: NDArray[np.float32]) -> Selection:
    """The selection of ``lists [R * kv_heads]`` of ascending page numbers."""
    begin = np.zeros(len(lists) + 1, np.int32)
    np.cumsum([len(pages) for pages in lists], out=begin[1:])
    return Selection(np.concatenate([np.empty(0, np.int32), *lists]), begin, mass)
