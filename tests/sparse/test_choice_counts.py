"""Counts of choices against a model that has a table of all pages."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from vllm_ssdkv.sparse.choice_counts import ChoiceCounts, CountedPages

Lists = list[list[int]]
"""Pages of each of two KV heads."""


def count(known: ChoiceCounts, chosen: dict[str, tuple[int, Lists]]) -> list[dict[int, float]]:
    lists = [sorted(pages) for _, heads in chosen.values() for pages in heads]
    blocks = np.array([size for size, _ in chosen.values()])
    flat = np.array([page for pages in lists for page in pages], dtype=np.int32)
    begin: NDArray[np.int32] = np.cumsum([0, *map(len, lists)]).astype(np.int32)
    return tables(known.count(1, list(chosen), blocks, flat, begin))


def tables(counted: CountedPages) -> list[dict[int, float]]:
    edges = counted.begin[1:-1]
    parts = zip(np.split(counted.pages, edges), np.split(counted.counts, edges), strict=True)
    return [dict(zip(a.tolist(), b.tolist(), strict=True)) for a, b in parts]


@given(st.lists(st.lists(st.integers(0, 30), min_size=4, max_size=4, unique=True), max_size=12))
def test_the_highest_counts_are_kept(steps: list[list[int]]) -> None:
    known, model = ChoiceCounts(), dict[int, float]()
    for chosen in steps:
        model = {page: 0.9 * old for page, old in model.items()}
        for page in chosen:
            model[page] = model.get(page, 0) + 1
        best = sorted(model, key=lambda page: (-round(model[page], 5), page))[:8]
        model = {page: model[page] for page in best}
        first, second = count(known, {"a": (3, [chosen, []])})
        assert second == {}
        assert list(first) == sorted(model)
        assert np.allclose(list(first.values()), [model[page] for page in sorted(model)])


def test_rows_are_known_by_their_request() -> None:
    known = ChoiceCounts()
    a, b = [[1, 2], [7]], [[5], []]
    count(known, {"a": (4, a), "b": (5, b)})
    moved = count(known, {"new": (9, a), "b": (5, b), "a": (4, [[2], [7]])})
    assert moved[:2] == [{1: 1, 2: 1}, {7: 1}]
    assert np.isclose(moved[2][5], 1.9)
    assert np.allclose(sorted(moved[4].values()), [0.9, 1.9])
    # A shorter context has begun anew; who was in no step is not known.
    again = count(known, {"a": (3, a)})
    assert again == [{1: 1, 2: 1}, {7: 1}]
    assert count(known, {"b": (5, b)}) == [{5: 1}, {}]
