"""Frequency in Swarm's score of clusters for the cache in DRAM.

Equation (6), corrected, is ``f * (T_base + s * T_transfer) / s`` for a cluster of s bytes that was
activated f times: seconds that holding it saves per byte. As printed,
``(f * T_base + s * T_transfer) / s``, the cost of transfer is the same for all clusters, and drops
out of their order. Caches here hold pages of one size, to which the score is frequency by the
drive's cost alone: ``csrc/cache/page_order.hpp``.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from vllm_ssdkv.clustering.co_activation import I64


def updated_frequency(
    frequency: I64, activated: NDArray[np.bool_], cached: NDArray[np.bool_]
) -> I64:
    """Frequencies after a step: 1 more where activated, 1 less, not below 0, where only cached."""
    idle = cached & ~activated
    changed: I64 = np.maximum(frequency + activated - idle, 0)
    return changed
