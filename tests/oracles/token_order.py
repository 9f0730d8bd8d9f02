"""Order of a block's tokens by likeness, the definition that kernels are measured by."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

TURNS = 50
"""Of power iteration: enough to have the direction itself."""


def token_order(rows: NDArray[np.float64], page_tokens: int, kept: int) -> NDArray[np.int64]:
    """Which token comes at each place, int64 [T], of tokens with these rows, [T, width].

    The first ``kept`` pages keep their tokens; the others are halved across the direction of most
    variance down to pages, the larger half first, each in the order of positions.
    """
    first = kept * page_tokens
    order = np.arange(len(rows))
    _halve(rows.astype(np.float64), order[first:], page_tokens)
    return order


def _halve(rows: NDArray[np.float64], members: NDArray[np.int64], page_tokens: int) -> None:
    pages = len(members) // page_tokens
    if pages < 2:
        return
    left = (pages - pages // 2) * page_tokens
    centred = rows[members] - rows[members].mean(axis=0)
    along = centred[0] - centred[len(members) // 2] + 1e-3
    for _ in range(TURNS):
        along = centred.T @ (centred @ along)
        along /= max(float(np.linalg.norm(along)), 1e-300)
    by_projection = np.argsort(centred @ along, kind="stable")
    front, back = np.sort(by_projection[:left]), np.sort(by_projection[left:])
    members[:] = members[np.concatenate([front, back])]
    _halve(rows, members[:left], page_tokens)
    _halve(rows, members[left:], page_tokens)


def spread_within(rows: NDArray[np.float64], order: NDArray[np.int64], page_tokens: int) -> float:
    """Squared distances of tokens from the means of their pages, added up."""
    pages = rows[order].reshape(-1, page_tokens, rows.shape[1])
    return float(np.square(pages - pages.mean(axis=1, keepdims=True)).sum())
