"""Lanes: how devices of unequal speed or size share the units of a stripe."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite

MAX_LANES = 64
"""Lanes used to approximate unequal weights (more only where there are more devices)."""

WEIGHT_TOLERANCE = 0.02
"""Relative error of a device's share that ends the search for a shorter lane list."""


def lanes_for(weights: Sequence[float]) -> tuple[int, ...]:
    """Device of each lane: a short list in which device d appears in proportion to its weight.

    The list length is the smallest that meets :data:`WEIGHT_TOLERANCE` (else the most exact one
    up to :data:`MAX_LANES`); a device's lanes are spread evenly (smooth weighted round robin).

    Raises:
        ValueError: no weights, or one that is not finite and positive.
    """
    if not weights or not all(isfinite(w) and w > 0 for w in weights):
        raise ValueError(f"device weights must be finite and positive, not {list(weights)}")
    total = float(sum(weights))
    shares = [w / total for w in weights]
    best: list[int] = []
    best_error = float("inf")
    for lanes in range(len(shares), max(MAX_LANES, len(shares)) + 1):
        counts = _apportion(shares, lanes)
        error = max(abs(c / lanes - s) / s for c, s in zip(counts, shares, strict=True))
        if error < best_error - 1e-12:
            best, best_error = counts, error
        if best_error <= WEIGHT_TOLERANCE:
            break
    return _spread(best)


def _apportion(shares: Sequence[float], lanes: int) -> list[int]:
    """Whole numbers >= 1 that sum to ``lanes``, close to ``shares * lanes`` (largest remainder)."""
    counts = [max(1, int(s * lanes)) for s in shares]
    while sum(counts) != lanes:
        step = 1 if sum(counts) < lanes else -1
        movable = [d for d in range(len(shares)) if step > 0 or counts[d] > 1]
        chosen = max(movable, key=lambda d: (step * (shares[d] * lanes - counts[d]), -d))
        counts[chosen] += step
    return counts


def _spread(counts: Sequence[int]) -> tuple[int, ...]:
    total = sum(counts)
    credit = [0] * len(counts)
    lanes: list[int] = []
    for _ in range(total):
        credit = [c + w for c, w in zip(credit, counts, strict=True)]
        chosen = max(range(len(counts)), key=lambda d: (credit[d], -d))
        credit[chosen] -= total
        lanes.append(chosen)
    return tuple(lanes)
