"""Layout over drives and buckets of reads."""

from __future__ import annotations

from itertools import chain, product

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.clustering.strategies import clusterings
from vllm_ssdkv.clustering.clusters import Clusters
from vllm_ssdkv.profiling.clusters.scheduling import (
    assign,
    buckets,
    replicas_of,
    round_robin,
    static,
)

drives = st.integers(1, 8)


def replicas(most_drives: int, most_entries: int) -> st.SearchStrategy[tuple[int, list[list[int]]]]:
    """Drives, and of each entry those that have it."""

    def of(count: int) -> st.SearchStrategy[tuple[int, list[list[int]]]]:
        one = st.lists(st.integers(0, count - 1), min_size=1, max_size=count, unique=True)
        return st.tuples(st.just(count), st.lists(one, max_size=most_entries))

    return st.integers(1, most_drives).flatmap(of)


def spread(loads: np.ndarray) -> int:
    return int(loads.max() - loads.min())


@given(clusterings(), drives, st.integers(0, 7))
def test_round_robin_is_even(clusters: Clusters, count: int, first: int) -> None:
    drive = round_robin(clusters, count, first)
    assert spread(np.bincount(drive, minlength=count)) <= 1
    for cluster in range(len(clusters)):
        part = drive[clusters.begin[cluster] : clusters.begin[cluster + 1]]
        assert spread(np.bincount(part, minlength=count)) <= 1
        assert np.all(np.diff(part) % count == (1 % count))


@given(clusterings(), drives)
def test_replicas_are_where_members_lie(clusters: Clusters, count: int) -> None:
    drive = round_robin(clusters, count)
    found = replicas_of(clusters, drive)
    for page in range(clusters.pages):
        assert set(found[page]) == set(drive[clusters.member == page].tolist())
        assert found[page][0] == drive[np.flatnonzero(clusters.member == page)[0]]


@given(replicas(8, 40), st.booleans())
def test_each_entry_is_read_once_where_it_lies(
    case: tuple[int, list[list[int]]], even: bool
) -> None:
    count, where = case
    chosen = assign(where, count, even=even)
    assert all(drive in where[entry] for entry, drive in enumerate(chosen.tolist()))
    assert sorted(chain(*buckets(chosen, count))) == list(range(len(where)))


@given(replicas(3, 7))
def test_no_assignment_has_evener_buckets(case: tuple[int, list[list[int]]]) -> None:
    """So buckets differ by 1 at most wherever replicas allow it."""
    count, where = case
    loads = np.bincount(assign(where, count), minlength=count)
    every = [np.bincount(one, minlength=count) for one in product(*where) if one]
    assert loads.max() <= min((one.max() for one in every), default=0)
    assert loads.min() >= max((one.min() for one in every), default=0)


@given(replicas(8, 30), st.integers(0, 8))
def test_enough_replicas_even_out_all_buckets(case: tuple[int, list[list[int]]], more: int) -> None:
    count, where = case
    loads = np.bincount(assign(where, count, even=False), minlength=count)
    needed = int((loads.max() - loads).sum())
    everywhere = [list(range(count))] * (needed + more)
    for even in (False, True):
        chosen = assign([*where, *everywhere], count, even=even)
        assert spread(np.bincount(chosen, minlength=count)) <= 1


def test_greedy_alone_misses_the_best_buckets() -> None:
    where = [[1, 0], [0, 2], [2]]
    loads = [np.bincount(assign(where, 3, even=even), minlength=3) for even in (False, True)]
    assert [load.tolist() for load in loads] == [[2, 0, 1], [1, 1, 1]]


def test_without_balance_the_first_replica_is_read() -> None:
    assert static([[1, 0], [0, 2], [2]]).tolist() == [1, 0, 2]
