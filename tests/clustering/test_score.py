"""Score of clusters for the cache."""

from __future__ import annotations

import numpy as np

from vllm_ssdkv.clustering.score import frequency_and_cost, updated_frequency


def test_frequency_by_cost() -> None:
    frequency, size = np.array([4, 4, 0]), np.array([4096, 8192, 4096])
    score = frequency_and_cost(frequency, size, base_s=1e-5, byte_s=1e-9)
    assert np.allclose(score, [4 * (1e-5 + 4096e-9) / 4096, 4 * (1e-5 + 8192e-9) / 8192, 0])
    printed = frequency_and_cost(frequency, size, base_s=1e-5, byte_s=1e-9, printed=True)
    assert np.allclose(printed, [4e-5 / 4096 + 1e-9, 4e-5 / 8192 + 1e-9, 1e-9])


def test_frequency_falls_only_in_the_cache() -> None:
    frequency = np.array([2, 2, 2, 0])
    activated = np.array([True, False, False, False])
    cached = np.array([True, True, False, True])
    assert updated_frequency(frequency, activated, cached).tolist() == [3, 1, 2, 0]
