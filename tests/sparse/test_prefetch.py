"""Last choices, found again for the same requests, whatever row they have."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from vllm_ssdkv.sparse.prefetch import Prediction, SelectionHistory

Lists = list[list[int]]
"""Pages of each KV head."""


def edges(lists: Lists) -> NDArray[np.int32]:
    return np.cumsum([0, *map(len, lists)]).astype(np.int32)


def remember(guesses: SelectionHistory, layer: int, chosen: dict[str, tuple[int, Lists]]) -> None:
    lists = [pages for _, heads in chosen.values() for pages in heads]
    blocks = np.array([size for size, _ in chosen.values()])
    flat = np.array([page for pages in lists for page in pages], dtype=np.int32)
    guesses.remember(layer, list(chosen), blocks, flat, edges(lists))


def lists_of(guess: Prediction | None) -> dict[int, Lists]:
    """Pages of each KV head, two of them, by row."""
    if guess is None:
        return {}
    parts = [part.tolist() for part in np.split(guess.pages, guess.begin[1:-1])]
    return {row: parts[2 * i : 2 * i + 2] for i, row in enumerate(guess.rows.tolist())}


def test_rows_are_known_by_their_request() -> None:
    guesses = SelectionHistory()
    a, b, c = [[0, 3], [1]], [[2], []], [[4, 5, 6], [0]]
    remember(guesses, 1, {"a": (4, a), "b": (5, b), "c": (9, c)})
    same = guesses.recall(1, ["a", "b", "c"], np.array([4, 6, 9]))
    assert lists_of(same) == {0: a, 1: b, 2: c}
    others = guesses.recall(1, ["c", "new", "a"], np.array([9, 7, 5]))
    assert lists_of(others) == {0: c, 2: a}
    assert guesses.recall(1, ["new"], np.array([7])) is None
    assert guesses.recall(0, ["a"], np.array([4])) is None


def test_a_request_that_began_anew_is_not_known() -> None:
    guesses = SelectionHistory()
    a, b = [[0, 3], [1]], [[2], []]
    remember(guesses, 0, {"a": (4, a), "b": (5, b)})
    assert lists_of(guesses.recall(0, ["a", "b"], np.array([3, 5]))) == {1: b}
    remember(guesses, 0, {"a": (3, b)})
    assert lists_of(guesses.recall(0, ["a", "b"], np.array([3, 5]))) == {0: b}
