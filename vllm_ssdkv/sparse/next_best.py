"""The pages that come next behind those that were chosen.

The query of the next token chooses about a third of them anew, so they are worth reading where that
costs no time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from vllm_ssdkv import _kernels
from vllm_ssdkv.sparse.protocol import Selection
from vllm_ssdkv.sparse.scores import Scores, ScoringKernels

_SHARE: Final = 8
"""As many as this part of what was chosen, for each list, or a few more."""


@dataclass(frozen=True, slots=True)
class Ranked:
    """By what pages were chosen, and by whom."""

    kernels: ScoringKernels
    scores: Scores

    def next_best(self, selection: Selection) -> Selection:
        """The pages by these scores behind those of ``selection``, which was made from them.

        Lists, rows and order are as there; ``mass`` is NaN.
        """
        rows, heads = selection.mass.shape
        chosen = np.diff(selection.begin).reshape(rows, heads).max(axis=1, initial=0)
        most = (chosen + np.maximum(chosen // _SHARE, 1)).astype(np.int32)
        wide = self.kernels.choose(self.scores, most, most)
        pages, begin = _kernels.without(wide.pages, wide.begin, selection.pages, selection.begin)
        return Selection(pages, begin, np.full((rows, heads), np.nan, np.float32))


def next_best(selection: Selection) -> Selection:
    """As :meth:`Ranked.further`; nothing, where pages were not chosen by scores of pages."""
    if selection.ranked is not None:
        return selection.ranked.next_best(selection)
    mass = np.full_like(selection.mass, np.nan)
    return Selection(selection.pages[:0], np.zeros_like(selection.begin), mass)
