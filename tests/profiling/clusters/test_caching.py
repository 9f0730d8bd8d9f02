"""Cache policies and guesses: cases whose result is known."""

from __future__ import annotations

import numpy as np
import pytest

from vllm_ssdkv.profiling.clusters.caching import (
    GUESSES,
    POLICIES,
    WARM_UP,
    hit_rate,
    right_guesses,
    updated_frequency,
)
from vllm_ssdkv.profiling.clusters.trace import Bools

STEPS = WARM_UP + 32


def cycle(pages: int, width: int) -> Bools:
    """Steps that choose ``width`` pages after those of the step before, round and round."""
    chosen = np.zeros((1, STEPS, pages), np.bool_)
    for step in range(STEPS):
        chosen[0, step, (step * width + np.arange(width)) % pages] = True
    return chosen


def test_frequency_falls_only_in_the_cache() -> None:
    frequency = np.array([2, 2, 2, 0])
    activated = np.array([True, False, False, False])
    cached = np.array([True, True, False, True])
    assert updated_frequency(frequency, activated, cached).tolist() == [3, 1, 2, 0]


@pytest.mark.parametrize("policy", POLICIES)
def test_what_is_always_chosen_is_always_there(policy: str) -> None:
    chosen = np.zeros((2, STEPS, 100), np.bool_)
    chosen[:, :, 10:20] = True
    assert hit_rate(chosen, 0.1, POLICIES[policy]) == 1
    assert hit_rate(chosen, 0.0, POLICIES[policy]) == 0


@pytest.mark.parametrize("policy", POLICIES)
def test_a_cache_of_everything_hits(policy: str) -> None:
    assert hit_rate(cycle(40, 4), 1.0, POLICIES[policy]) == 1


def test_lru_thrashes_where_counts_keep_favourites() -> None:
    chosen = cycle(100, 10)
    chosen[:, :, :5] = True
    assert hit_rate(chosen, 0.1, POLICIES["lru"]) < 0.5
    for name in ("decay", "frequency", "swarm (S-7)"):
        assert hit_rate(chosen, 0.1, POLICIES[name]) >= 0.3


def test_guesses_by_count_know_what_returns() -> None:
    rng = np.random.default_rng(0)
    chosen = np.zeros((64, 200), np.bool_)
    chosen[::2, 1:40] = True
    chosen[1::2, 100:140] = True
    right = right_guesses(chosen, rng.random(chosen.shape).astype(np.float32))
    assert right["decayed count"] > 0.9
    assert right["last scores"] < 0.5


def test_guesses_by_scores_know_what_is_next() -> None:
    pages = 400
    chosen = np.zeros((20, pages), np.bool_)
    scores = np.zeros((20, pages), np.float32)
    for step in range(20):
        first = 1 + step * GUESSES
        chosen[step, first : first + GUESSES] = True
        scores[step, first + GUESSES : first + 2 * GUESSES] = 1
    assert right_guesses(chosen, scores)["last scores"] == 1
