"""Pages that come behind a selection."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from vllm_ssdkv import _kernels
from vllm_ssdkv.kernels.scoring import CpuScoringKernels
from vllm_ssdkv.sparse.next_best import next_best
from vllm_ssdkv.sparse.protocol import Selection
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


@pytest.mark.parametrize("seed", range(4))
def test_the_best_of_those_that_were_passed_over(seed: int) -> None:
    found = scores(seed)
    most = np.array([16, 3], dtype=np.int32)
    chosen = CpuScoringKernels().choose(found, most, most, sinks=2)
    behind = next_best(chosen)
    assert behind.mass.shape == chosen.mass.shape
    table = np.asarray(found.score)
    for number, (taken, mine) in enumerate(zip(lists(chosen), lists(behind), strict=True)):
        row, head = divmod(number, HEADS)
        first = HEADS * int(found.first[row]) + head * COLUMNS[row]
        order = np.argsort(-table[first : first + COLUMNS[row]])
        rest = [page for page in order.tolist() if page not in taken]
        # Sinks that are no good make room for more.
        assert (2, 1)[row] <= len(mine) <= (4, 3)[row]
        assert mine == sorted(rest[: len(mine)])


def test_behind_everything_and_behind_tokens_there_is_nothing() -> None:
    found = scores(5)
    most = np.array([40, 7], dtype=np.int32)
    everything = CpuScoringKernels().choose(found, most, most)
    assert lists(next_best(everything)) == [[], [], [], []]
    unscored = Selection(everything.pages, everything.begin, everything.mass)
    assert lists(next_best(unscored)) == [[], [], [], []]


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
