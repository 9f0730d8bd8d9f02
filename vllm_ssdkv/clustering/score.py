"""Swarm's score of clusters for the cache in DRAM: frequency by what a read costs.

Equation (6), corrected: ``f * (T_base + s * T_transfer) / s`` for a cluster of s bytes that was
activated f times: seconds that holding it saves per byte. As printed,
``(f * T_base + s * T_transfer) / s``, the cost of transfer is the same for all clusters, and drops
out of their order. The product's cache holds pages of one size, to which the score is frequency by
the drive's cost alone: ``csrc/cache/page_order.hpp``.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from vllm_ssdkv.clustering.co_activation import I64

F64 = NDArray[np.float64]


def frequency_and_cost(
    frequency: I64, nbytes: I64, base_s: float, byte_s: float, *, printed: bool = False
) -> F64:
    """Score of each cluster, [clusters]; the highest stays.

    Args:
        frequency: Of activation, see :func:`updated_frequency`.
        nbytes: Size, above 0.
        base_s: Seconds of a read of no bytes.
        byte_s: Seconds that each byte takes.
        printed: As the paper prints it.
    """
    size = nbytes.astype(np.float64)
    if printed:
        return (frequency * base_s + size * byte_s) / size
    return frequency * (base_s + size * byte_s) / size


def updated_frequency(
    frequency: I64, activated: NDArray[np.bool_], cached: NDArray[np.bool_]
) -> I64:
    """Frequencies after a step: 1 more where activated, 1 less, not below 0, where only cached."""
    idle = cached & ~activated
    changed: I64 = np.maximum(frequency + activated - idle, 0)
    return changed
