"""The model of drives: counts against a slow reference, limits, balance."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_ssdkv.profiling.clusters.drives import (
    MOST_JOINED,
    PLACEMENTS,
    Drive,
    Load,
    load,
    pool_bandwidth,
)


@given(
    seed=st.integers(0, 999),
    drives=st.integers(1, 8),
    place=st.sampled_from(sorted(PLACEMENTS)),
    slot_pages=st.sampled_from([8, 32]),
)
def test_load_counts_runs_within_slots(seed: int, drives: int, place: str, slot_pages: int) -> None:
    rng = np.random.default_rng(seed)
    chosen = rng.random((3, 2, 3 * slot_pages)) < rng.random()
    found = load(chosen, PLACEMENTS[place], drives, slot_pages)
    for step in range(2):
        pages, requests = np.zeros(drives, int), np.zeros(drives, int)
        for head in range(3):
            for slot in range(3):
                row = chosen[head, step, slot * slot_pages : (slot + 1) * slot_pages]
                where = (slot + head if "head" in place else slot) % drives
                pages[where] += row.sum()
                requests[where] += (np.diff(np.concatenate([[0], row.astype(int)])) == 1).sum()
        np.testing.assert_array_equal(found.pages[step], pages)
        np.testing.assert_array_equal(found.requests[step], requests)


def test_long_runs_are_several_requests() -> None:
    chosen = np.ones((1, 1, 2 * MOST_JOINED + 1), np.bool_)
    found = load(chosen, PLACEMENTS["slot"], 1, chosen.shape[2])
    assert found.requests.tolist() == [[3]]


def test_time_is_that_of_the_tighter_limit_of_the_busiest_drive() -> None:
    drive = Drive("made", bandwidth=1e6, iops=1000)
    moving = Load(np.array([[4, 1]]), np.array([[1, 1]]))
    assert moving.seconds(drive, 1000) == pytest.approx(4e-3)
    asking = Load(np.array([[4, 1]]), np.array([[1, 9]]))
    assert asking.seconds(drive, 1000) == pytest.approx(9e-3)
    assert moving.imbalance == pytest.approx(4 / 2.5)


def test_small_entries_are_bound_by_iops_and_large_ones_by_bandwidth() -> None:
    drive = Drive("made", bandwidth=1e9, iops=1e5)
    assert pool_bandwidth(drive, 8, 4000) == pytest.approx(3.2e9)
    assert pool_bandwidth(drive, 8, 20000) == pytest.approx(8e9)
