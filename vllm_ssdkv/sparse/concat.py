"""Selections of some rows from those of others: put together, taken apart, carried on."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from vllm_ssdkv.sparse.protocol import Selection


def concat(
    parts: Sequence[tuple[NDArray[np.int64], Selection]], kv_heads: int, page_tokens: int
) -> Selection:
    """The selection of all R rows, in their order.

    Where one part has a token mask, the pages of the others get one that leaves nothing out; where
    one has an alpha, the rows of the others have NaN.

    Args:
        parts: At least one: which of the R rows, int64 [r], and what was chosen for them. Each row
            is in one part; a part that is the only one is in order.
        kv_heads: Of the layout.
        page_tokens: Likewise.
    """
    if len(parts) == 1:
        return parts[0][1]
    rows = np.concatenate([which for which, _ in parts])
    found = [selection for _, selection in parts]
    counts = np.concatenate([np.diff(selection.begin) for selection in found])
    mask: NDArray[np.uint8] | None = None
    if any(selection.token_mask is not None for selection in found):
        mask = np.concatenate([_mask(selection, page_tokens) for selection in found])
    alphas = [selection.alpha for selection in found if selection.alpha is not None]
    alpha: NDArray[np.float32] | None = None
    if alphas:
        heads = alphas[0].shape[1]
        alpha = np.concatenate([_alpha(selection, kv_heads, heads) for selection in found])
    whole = Selection(
        np.concatenate([selection.pages for selection in found]),
        _edges(counts),
        np.concatenate([selection.mass for selection in found]),
        mask,
        alpha,
    )
    return rows_of(whole, np.argsort(rows), kv_heads)


def rows_of(selection: Selection, rows: NDArray[np.int64], kv_heads: int) -> Selection:
    """The selection of some rows, int64 [r], in this order."""
    if np.array_equal(rows, np.arange((len(selection.begin) - 1) // kv_heads)):
        return selection
    lists = (rows[:, None] * kv_heads + np.arange(kv_heads)).ravel()
    counts = np.diff(selection.begin)[lists]
    begin = _edges(counts)
    take = np.repeat(selection.begin[lists] - begin[:-1], counts) + np.arange(begin[-1])
    mask, alpha = selection.token_mask, selection.alpha
    return Selection(
        selection.pages[take],
        begin,
        selection.mass[rows],
        None if mask is None else mask[take],
        None if alpha is None else alpha[rows],
    )


def extend(
    selection: Selection, pages: NDArray[np.int64], more: NDArray[np.int64], kv_heads: int
) -> Selection:
    """The selection with the pages by which its rows' contexts have become longer.

    Args:
        selection: Of R rows.
        pages: Pages that each row's context had, int64 [R].
        more: Pages that it has got since, int64 [R]: all of them are attended to.
        kv_heads: Of the layout.
    """
    if not more.any():
        return selection
    counts = np.repeat(more, kv_heads)
    before = np.repeat(np.cumsum(counts) - counts, counts)
    new = np.repeat(np.repeat(pages, kv_heads), counts) + np.arange(len(before)) - before
    at = np.repeat(selection.begin[1:], counts)
    mask = selection.token_mask
    return Selection(
        np.insert(selection.pages, at, new.astype(np.int32)),
        selection.begin + _edges(counts),
        selection.mass,
        None if mask is None else np.insert(mask, at, 1, axis=0),
        selection.alpha,
    )


def _edges(counts: NDArray[np.integer]) -> NDArray[np.int32]:
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)


def _mask(selection: Selection, page_tokens: int) -> NDArray[np.uint8]:
    if selection.token_mask is not None:
        return selection.token_mask
    return np.ones((len(selection.pages), page_tokens), np.uint8)


def _alpha(selection: Selection, kv_heads: int, heads: int) -> NDArray[np.float32]:
    if selection.alpha is not None:
        return selection.alpha
    return np.full(((len(selection.begin) - 1) // kv_heads, heads), np.nan, np.float32)
