"""Order of tokens within blocks: the oracle of the engine's ``sparse.token_order``.

An order is a permutation, int64 [tokens]: page p of the store holds tokens
``order[16 * p : 16 * p + 16]``. Blocks keep their tokens, and the first page keeps its own.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from vllm_ssdkv.profiling.clusters.trace import F32, I64, PAGE, Bools

ITERATIONS = 8
"""Iterations of the power method for each halving."""


def by_position(tokens: int) -> I64:
    """Order of the text."""
    return np.arange(tokens)


def by_keys(keys: F32, block: int, iterations: int = ITERATIONS) -> I64:
    """Pages of alike keys: a block's tokens are halved along the direction of most variance.

    ``keys`` [tokens, size], whole pages; ``block`` tokens, a multiple of a page.
    """
    return _in_blocks(len(keys), block, lambda of: _halved(keys, of, iterations))


def by_co_activation(chosen: Bools, block: int) -> I64:
    """Pages of tokens that the same queries chose, by ``chosen`` [queries, tokens].

    The token with most company begins a page; the token closest to its members joins, again and
    again. Closeness is Jaccard's.
    """
    return _in_blocks(chosen.shape[1], block, lambda of: _grouped(chosen[:, of], of))


def _in_blocks(tokens: int, block: int, arrange: Callable[[I64], list[I64]]) -> I64:
    parts: list[I64] = [np.arange(min(PAGE, tokens))]
    for first in range(0, tokens, block):
        inside = np.arange(max(first, PAGE), min(first + block, tokens))
        if len(inside):
            parts += arrange(inside)
    return np.concatenate(parts)


def _halved(keys: F32, tokens: I64, iterations: int) -> list[I64]:
    """These tokens as pages: halved at a page's edge until each half is one."""
    if len(tokens) <= PAGE:
        return [tokens]
    centred = keys[tokens] - keys[tokens].mean(0)
    direction = centred[0] - centred[len(centred) // 2] + np.float32(1e-3)
    for _ in range(iterations):
        direction = centred.T @ (centred @ direction)
        direction /= np.linalg.norm(direction) + np.float32(1e-9)
    order = tokens[np.argsort(centred @ direction, kind="stable")]
    half = -(-len(tokens) // 2 // PAGE) * PAGE
    half = min(max(half, PAGE), len(tokens) - 1)
    return [*_halved(keys, order[:half], iterations), *_halved(keys, order[half:], iterations)]


def _grouped(chosen: Bools, tokens: I64) -> list[I64]:
    """These tokens as pages of those that were chosen together."""
    matrix = chosen.astype(np.float32)
    both = matrix.T @ matrix
    alone = np.diag(both)
    close = both / np.maximum(alone[:, None] + alone[None] - both, 1)
    company = close.sum(1)
    free = np.ones(len(tokens), np.bool_)
    pages = []
    for first in np.argsort(-company, kind="stable").tolist():
        if not free[first]:
            continue
        members = [first]
        free[first] = False
        total = close[first].copy()
        while len(members) < PAGE and free.any():
            # Tokens without company go by position: the text's order is the next best guess.
            following = int(np.argmax(np.where(free, total + 1e-6 * company, -1)))
            free[following] = False
            members.append(following)
            total += close[following]
        pages.append(tokens[members])
    return pages
