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
from vllm_ssdkv.sparse.selectors.sparf import SparfSelector
from vllm_ssdkv.sparse.selectors.spread import SpreadSelector
from vllm_ssdkv.sparse.selectors.window import WindowSelector
from vllm_ssdkv.sparse.sizes import ContextSizes
from vllm_ssdkv.store.read.selected_context import SelectedContexts

_RECORDS: Final[dict[type, _kernels.PageRecord]] = {
    BoundsSelector: _kernels.PageRecord.BOUNDS,
    SpreadSelector: _kernels.PageRecord.SPREAD,
    CodesSelector: _kernels.PageRecord.CODES,
    SparfSelector: _kernels.PageRecord.CHANNELS,
}
"""Data by which native code scores pages as these selectors do; their subclasses may not."""

Made: TypeAlias = tuple[
    NDArray[np.int32],
    NDArray[np.int32],
    Floats | None,
    Floats | None,
    Floats | None,
    NDArray[np.uint8] | None,
]
"""Answer of ``StepPlan.choices`` for one group."""


def is_native(selector: Selector, *, channels: bool) -> bool:
    """Check whether native code chooses as this selector does.

    Where DRAM does not have the contexts' ``channels`` (``sparse.channel_pages: "ssd"``), it does
    not for `sparf`: it reads nothing between the choice of channels and that of pages.
    """
    if type(selector) is WindowSelector:
        return True
    scorer = selector.scorer if type(selector) is AdaptiveSelector else selector
    return type(scorer) in _RECORDS and (channels or not scorer.needs.channels)


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
    if not isinstance(selector, PageLogitsSelector | AdaptiveSelector | SparfSelector):
        same = selector.select(query(), context, 1.0)  # which does not look at the query
        return _kernels.ListedPages(same.pages, same.begin)
    scorer: Selector | Scorer = selector
    layout = context.layout
    by_token, sinks = False, -(-selector.sink_tokens // layout.page_tokens)
    least = most = page_budget(selector.budget, context)
    wanted = 0.0
    if isinstance(selector, AdaptiveSelector):
        scorer, least, wanted = selector.scorer, selector.least(context), selector.p
    elif isinstance(selector, SparfSelector) and selector.granularity == "token":
        by_token, sinks = True, selector.sink_tokens
        least = most = selector.token_budget(context)
    channels = min(scorer.needs.channels, layout.head_size)
    return _kernels.ScoredPages(
        _RECORDS[type(scorer)],
        scorer.needs.codes,
        channels,
        held.channels(0) if channels else held.page_records(0),
        held.channel_bytes if channels else held.record_bytes,
        sinks,
        least,
        most,
        wanted,
        by_token,
        isinstance(scorer, SparfSelector | SpreadSelector) and scorer.estimate_rest,
    )


def selector_limits(selector: Selector, context: ContextSummaries) -> tuple[int, int, bool]:
    """Pages that the only row of ``context`` takes at least and at most, as tables of a device have
    it, and whether it scores them: of a selector that these choose by."""
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
    pages, begin, mass, weights, window, mask = made
    if mass is None:
        return Selection(pages, begin, np.ones((len(sizes.pages), heads), np.float32))
    covered = mass.reshape(-1, heads)
    if weights is None or window is None:
        return Selection(pages, begin, covered, mask)
    if not isinstance(selector, PageLogitsSelector | AdaptiveSelector | SparfSelector):
        raise TypeError(f"{selector.name} has no weights")
    scores = Scores(weights, weights, window.reshape(-1, heads), sizes.first_page)
    return Selection(pages, begin, covered, ranked=Ranked(selector.kernels, scores))
