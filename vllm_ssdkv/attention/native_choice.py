"""Selectors whose choice native code makes, and how it is told of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_ssdkv import _kernels
from vllm_ssdkv.kernels.operands.step_tables import NEWEST
from vllm_ssdkv.sparse.next_best import Ranked
from vllm_ssdkv.sparse.protocol import ContextSummaries, Selection, Selector, page_budget
from vllm_ssdkv.sparse.scores import Floats, Scorer, Scores
from vllm_ssdkv.sparse.selectors.adaptive import AdaptiveSelector
from vllm_ssdkv.sparse.selectors.bounds import BoundsSelector
from vllm_ssdkv.sparse.selectors.codes import CodesSelector
from vllm_ssdkv.sparse.selectors.page_logits import PageLogitsSelector
from vllm_ssdkv.sparse.selectors.spread import SpreadSelector
from vllm_ssdkv.sparse.selectors.window import WindowSelector
from vllm_ssdkv.sparse.sizes import ContextSizes
from vllm_ssdkv.store.read.selected_context import SelectedContexts

_RECORDS: Final[dict[type, _kernels.PageRecord]] = {
    BoundsSelector: _kernels.PageRecord.BOUNDS,
    SpreadSelector: _kernels.PageRecord.SPREAD,
    CodesSelector: _kernels.PageRecord.CODES,
}
"""Records by which native code scores pages as these selectors do; their subclasses may not."""

Made: TypeAlias = tuple[
    NDArray[np.int32], NDArray[np.int32], Floats | None, Floats | None, Floats | None
]
"""Answer of ``StepPlan.choices`` for one group."""


def is_native(selector: Selector) -> bool:
    """Check whether native code chooses as this selector does, and whether the attention to its
    pages needs nothing more."""
    if type(selector) is AdaptiveSelector:
        return _is_scorer(selector.scorer)
    return _is_scorer(selector) or type(selector) is WindowSelector


def _is_scorer(one: Selector | Scorer) -> bool:
    """Check whether native code scores pages so, and whether the scores tell nothing more than
    pages."""
    return type(one) in _RECORDS and not (isinstance(one, SpreadSelector) and one.estimate_rest)


def native_choice(
    selector: Selector,
    context: ContextSummaries,
    held: SelectedContexts,
    query: Callable[[], torch.Tensor],
) -> _kernels.ScoredPages | _kernels.ListedPages:
    """The choice of one that :func:`is_native`, for all layers of a step.

    Args:
        selector: See above.
        context: Sizes of the rows' contexts.
        held: The contexts.
        query: Of the rows, in any layer.
    """
    if not isinstance(selector, PageLogitsSelector | AdaptiveSelector):
        same = selector.select(query(), context, 1.0)  # which does not look at the query
        return _kernels.ListedPages(same.pages, same.begin)
    most = page_budget(selector.budget, context)
    scorer: object = selector
    least, wanted = most, 0.0
    if isinstance(selector, AdaptiveSelector):
        scorer, least, wanted = selector.scorer, selector.least(context), selector.p
    return _kernels.ScoredPages(
        _RECORDS[type(scorer)],
        selector.needs.codes,
        held.page_records(0),
        held.record_bytes,
        -(-selector.sink_tokens // context.layout.page_tokens),
        least,
        most,
        wanted,
    )


def selector_limits(selector: Selector, context: ContextSummaries) -> tuple[int, int, bool]:
    """Pages that the only row of ``context`` takes at least and at most, as tables of a device have
    it, and whether it scores them: of a selector that :func:`is_native`."""
    if isinstance(selector, WindowSelector):
        return NEWEST, int(page_budget(selector.budget, context)[0]), False
    if not isinstance(selector, PageLogitsSelector | AdaptiveSelector):
        raise TypeError(f"{selector.name} has no budget of pages")
    most = int(page_budget(selector.budget, context)[0])
    least = most
    if isinstance(selector, AdaptiveSelector):
        least = int(selector.least(context)[0])
    return least, most, min(least, most) < int(context.pages[0])


def selection_of(selector: Selector, sizes: ContextSizes, made: Made, heads: int) -> Selection:
    """The selection of rows of these ``sizes`` that native code has made as the selector does."""
    pages, begin, mass, weights, window = made
    if mass is None or weights is None or window is None:
        return Selection(pages, begin, np.ones((len(sizes.pages), heads), np.float32))
    if not isinstance(selector, PageLogitsSelector | AdaptiveSelector):
        raise TypeError(f"{selector.name} has no weights")
    scores = Scores(weights, weights, window.reshape(-1, heads), sizes.first_page)
    ranked = Ranked(selector.kernels, scores)
    return Selection(pages, begin, mass.reshape(-1, heads), ranked=ranked)
