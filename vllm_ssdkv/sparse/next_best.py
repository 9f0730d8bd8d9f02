"""The pages that the next token may choose, beside those that were chosen now.

Two things speak for a page: its score for the last query, and how often it was chosen lately
(``sparse/choice_counts.py``). Pages are ranked by each, and taken by the sum of both ranks. Two in
five are chosen then, so they are worth reading where that costs no time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from vllm_ssdkv import _kernels
from vllm_ssdkv.sparse.choice_counts import CountedPages
from vllm_ssdkv.sparse.protocol import Selection
from vllm_ssdkv.sparse.score_lookup import scores_of
from vllm_ssdkv.sparse.scores import Scores, ScoringKernels

_SHARE: Final = 8
"""Divisor of the number of chosen pages of a list: it gives the number of next best pages to
take."""

_LOOKED_AT: Final = 2
"""Pages next by score that are looked at, for each that is taken; all that are counted are, too."""


@dataclass(frozen=True, slots=True)
class Ranked:
    """Scores by which pages were chosen, and the rows that chose."""

    kernels: ScoringKernels
    scores: Scores

    def next_best(self, selection: Selection, counted: CountedPages) -> Selection:
        """The pages that come next behind those of ``selection``, which was made by these scores.

        Lists and rows are as there, each list the best first; ``mass`` is NaN.
        """
        rows, heads = selection.mass.shape
        chosen = np.diff(selection.begin)
        taken = np.maximum(chosen // _SHARE, 1).astype(np.int32)
        wide = (chosen + _LOOKED_AT * taken).reshape(rows, heads).max(axis=1, initial=0)
        most = wide.astype(np.int32)
        scored = self.kernels.choose(self.scores, most, most)
        pages, begin = _kernels.unite(scored.pages, scored.begin, counted.pages, counted.begin)
        pages, begin = _kernels.without(pages, begin, selection.pages, selection.begin)
        score = scores_of(self.scores, pages, begin)
        threads = torch.get_num_threads()
        best, edges = _kernels.best_by_ranks(
            pages, score, begin, counted.pages, counted.counts, counted.begin, taken, threads
        )
        return Selection(best, edges, np.full((rows, heads), np.nan, np.float32))


def next_best(selection: Selection, counted: CountedPages) -> Selection:
    """As :meth:`Ranked.next_best`; nothing, where pages were not chosen by scores of pages."""
    if selection.ranked is not None:
        return selection.ranked.next_best(selection, counted)
    mass = np.full_like(selection.mass, np.nan)
    return Selection(selection.pages[:0], np.zeros_like(selection.begin), mass)
