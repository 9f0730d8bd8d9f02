"""Counts of co-activation against plain counting, and their memory."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.clustering.strategies import FORMS, seeds, windows
from vllm_ssdkv.clustering.co_activation import ActivationWindow, Form


@given(st.integers(1, 20), st.sampled_from([1, 3, 64, 70]), st.integers(0, 150), seeds)
def test_counts_are_those_of_the_last_queries(
    pages: int, steps: int, queries: int, seed: int
) -> None:
    random = np.random.default_rng(seed)
    chosen = random.random((queries, pages)) < 0.3
    window = ActivationWindow(pages, steps)
    for row in chosen:
        window.record(np.flatnonzero(row))
    last = chosen[max(0, queries - steps) :].astype(np.int64)
    every = np.arange(pages)
    assert np.array_equal(window.together(every, every), last.T @ last)
    assert np.array_equal(window.frequency(), last.sum(axis=0))


@given(windows(), st.sampled_from(FORMS), st.integers(0, 6), st.sampled_from([0.3, 0.5, 0.95]))
def test_partners_are_the_closest_of_all_pages(
    window: ActivationWindow, form: Form, partners: int, threshold: float
) -> None:
    pages = np.arange(len(window))
    both = window.together(pages, pages).astype(np.float64)
    alone = np.diag(both).copy()
    with np.errstate(invalid="ignore"):
        shares = {
            "jaccard": both / (alone[:, None] + alone - both),
            "conditional": both / np.minimum(alone[:, None], alone),
            "printed": both / both.sum(),
        }
    share = np.nan_to_num(shares[form])
    np.fill_diagonal(share, 0)
    found = window.affinity(form, threshold, partners)
    margin = np.abs(1 - share - threshold) > 1e-6  # of single precision
    assert np.all(found.density >= ((1 - share < threshold) & margin).sum(axis=1))
    assert np.all(found.density <= ((1 - share < threshold) | ~margin).sum(axis=1))
    for page in pages:
        best = np.sort(share[page])[::-1][:partners]
        listed = found.partner[page] >= 0
        assert listed.sum() == (best > 0).sum()
        near = found.partner[page][listed]
        assert page not in near
        assert len(set(near.tolist())) == len(near)
        assert np.allclose(found.weight[page][listed], best[best > 0])
        assert np.allclose(share[page, near], best[best > 0])
        assert np.all(found.weight[page][~listed] == 0)


def test_new_pages_were_chosen_by_nobody() -> None:
    window = ActivationWindow(2, 4)
    window.record(np.array([0, 1]))
    window.grow(5)
    window.record(np.array([1, 4]))
    assert window.frequency().tolist() == [1, 2, 0, 0, 1]
    window.grow(3)
    assert len(window) == 5


def test_memory_is_bounded() -> None:
    pages, partners = 65_536, 16  # 1M tokens
    window = ActivationWindow(pages, 64)
    random = np.random.default_rng(0)
    for _ in range(200):
        window.record(random.choice(pages, 64, replace=False))
    assert window.nbytes == 512 << 10
    affinity = window.affinity("conditional", 0.5, partners)
    held = affinity.partner.nbytes + affinity.weight.nbytes + affinity.density.nbytes
    assert held == pages * (8 * partners + 8)


def test_a_window_holds_a_query() -> None:
    with pytest.raises(ValueError, match="at least 1 query"):
        ActivationWindow(3, 0)
