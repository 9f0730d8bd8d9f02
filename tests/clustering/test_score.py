"""Score of clusters for the cache."""

from __future__ import annotations

import numpy as np

from vllm_ssdkv.clustering.score import updated_frequency


def test_frequency_falls_only_in_the_cache() -> None:
    frequency = np.array([2, 2, 2, 0])
    activated = np.array([True, False, False, False])
    cached = np.array([True, True, False, True])
    assert updated_frequency(frequency, activated, cached).tolist() == [3, 1, 2, 0]
