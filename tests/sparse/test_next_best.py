"""Pages that come behind a selection."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from vllm_ssdkv import _kernels
from vllm_ssdkv.kernels.scoring import CpuScoringKernels
from vllm_ssdkv.sparse.choice_counts import CountedPages
from vllm_ssdkv.sparse.next_best import next_best
from vllm_ssdkv.sparse.protocol import Selection
from vllm_ssdkv.sparse.score_lookup import scores_of
from vllm_ssdkv.sparse.scores import Scores
from vllm_ssdkv.sparse.sizes import offsets

HEADS, COLUMNS = 2, (40, 7)


def scores(seed: int) -> Scores:
    rng = np.random.default_rng(seed)
    table = rng.permutation(HEADS * sum(COLUMNS)).astype(np.float32)
    mass = np.full_like(table, 0.01)
    return Scores(table, mass, np.zeros((2, HEADS), np.float32), offsets(np.array(COLUMNS)))


def lists(selection: Selection) -> list[list[int]]:
    return [part.tolist() for part in np.split(selection.pages, selection.begin[1:-1])]


def counts_of(parts: list[dict[int, float]]) -> CountedPages:
    pages, begin = flat([sorted(part) for part in parts])
    counts = [part[page] for part in parts for page in sorted(part)]
    return CountedPages(pages, np.array(counts, dtype=np.float32), begin)


NOTHING: list[dict[int, float]] = [{}] * (2 * HEADS)


@pytest.mark.parametrize("seed", range(4))
def test_by_scores_alone_where_nothing_is_counted(seed: int) -> None:
    found = scores(seed)
    most = np.array([16, 3], dtype=np.int32)
    chosen = CpuScoringKernels().choose(found, most, most, sinks=2)
    behind = next_best(chosen, counts_of(NOTHING))
    assert behind.mass.shape == chosen.mass.shape
    for number, (taken, mine) in enumerate(zip(lists(chosen), lists(behind), strict=True)):
        rest = [page for page in by_score(found, number) if page not in taken]
        assert mine == rest[: (2, 1)[number // HEADS]]


def by_score(found: Scores, number: int) -> list[int]:
    """Pages of a list, the best first."""
    row, head = divmod(number, HEADS)
    first = HEADS * int(found.first[row]) + head * COLUMNS[row]
    table = np.asarray(found.score)[first : first + COLUMNS[row]]
    order: list[int] = np.argsort(-table).tolist()
    return order


@pytest.mark.parametrize("seed", range(4))
def test_the_sum_of_both_ranks_decides(seed: int) -> None:
    found = scores(seed)
    most = np.array([16, 3], dtype=np.int32)
    chosen = CpuScoringKernels().choose(found, most, most)
    behind = [[p for p in by_score(found, n) if p not in lists(chosen)[n]] for n in range(4)]
    # Third and fourth by score, which are counted, against the first, and one from far behind
    # that is counted most: ranks (by score, by count) of 3+0, 2+1, 0+3, 1+4, 4+2.
    counted = counts_of(
        [
            {part[2]: 1.5, part[3]: 2.5, part[9]: 0.5, taken[0]: 9} if n < HEADS else {}
            for n, (part, taken) in enumerate(zip(behind, lists(chosen), strict=True))
        ]
    )
    best = lists(next_best(chosen, counted))
    for n in range(HEADS):
        assert set(best[n]) < {behind[n][0], behind[n][2], behind[n][3]}
        assert best[n] == sorted(best[n])  # equal sums by number
        assert len(best[n]) == 2


def test_scores_are_the_same_from_a_table_of_the_gpu() -> None:
    found = scores(1)
    pages, begin = flat([[3, 9], [0], [6], [2, 5]])
    table = torch.zeros(2, HEADS, max(COLUMNS))
    for number in range(2 * HEADS):
        row, head = divmod(number, HEADS)
        first = HEADS * int(found.first[row]) + head * COLUMNS[row]
        line = np.asarray(found.score)[first : first + COLUMNS[row]]
        table[row, head, : COLUMNS[row]] = torch.from_numpy(line)
    same = replace(found, score=table)
    assert scores_of(same, pages, begin).tolist() == scores_of(found, pages, begin).tolist()
    assert scores_of(found, pages, begin)[3] == table[1, 0, 6]


def test_behind_everything_and_behind_tokens_there_is_nothing() -> None:
    found = scores(5)
    most = np.array([40, 7], dtype=np.int32)
    everything = CpuScoringKernels().choose(found, most, most)
    assert lists(next_best(everything, counts_of(NOTHING))) == [[], [], [], []]
    unscored = Selection(everything.pages, everything.begin, everything.mass)
    assert lists(next_best(unscored, counts_of(NOTHING))) == [[], [], [], []]


SETS = st.lists(
    st.tuples(st.sets(st.integers(0, 30), max_size=12), st.sets(st.integers(0, 30), max_size=12)),
    max_size=6,
)


def flat(parts: list[list[int]]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    edges = np.cumsum([0, *map(len, parts)]).astype(np.int32)
    return np.array([page for part in parts for page in part], dtype=np.int32), edges


@given(SETS)
def test_lists_without_others(sets: list[tuple[set[int], set[int]]]) -> None:
    pages, begin = flat([sorted(wide) for wide, _ in sets])
    known, known_begin = flat([sorted(narrow) for _, narrow in sets])
    left, edges = _kernels.without(pages, begin, known, known_begin)
    wanted, wanted_edges = flat([sorted(wide - narrow) for wide, narrow in sets])
    assert left.tolist() == wanted.tolist()
    assert edges.tolist() == wanted_edges.tolist()


def test_lists_that_do_not_fit_are_refused() -> None:
    pages, begin = flat([[1, 2], [3]])
    for wrong in ([0, 2], [0, 2, 4], [1, 2, 3], [0, 4, 3], []):
        edges = np.array(wrong, dtype=np.int32)
        with pytest.raises(ValueError, match="list"):
            _kernels.without(pages, begin, pages, edges)
        with pytest.raises(ValueError, match="list"):
            _kernels.without(pages, edges, pages, begin)
