"""Lanes: how devices of unequal speed or size share the units of a stripe."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite

MAX_LANES = 64
"""Lanes used to approximate unequal weights (more only where there are more devices)."""

WEIGHT_TOLERANCE = 0.02
"""Relative error of a device's share that ends the search for a shorter lane list."""


def lanes_for(weights: Sequence[float], copies: int = 1) -> tuple[int, ...]:
    """Device of each lane: a short list in which device d appears in proportion to its weight.

    Where there are two copies, no device gets more than half of the lanes, whatever its weight:
    the other copy of what lies there must lie elsewhere.

    The list length is the smallest that meets :data:`WEIGHT_TOLERANCE` (else the most exact one
    up to :data:`MAX_LANES`); a device's lanes are spread evenly (smooth weighted round robin).

    Raises:
        ValueError: no weights, fewer than copies, or one that is not finite and positive.
    """
    if not weights or not all(isfinite(w) and w > 0 for w in weights):
        raise ValueError(f"device weights must be finite and positive, not {list(weights)}")
    if len(weights) < copies:
        raise ValueError(f"{copies} copies on {len(weights)} device(s)")
    if copies > 1:
        total = sum(weights)
        weights = [min(w, total - w) for w in weights]
    total = float(sum(weights))
    shares = [w / total for w in weights]
    best: list[int] = []
    best_error = float("inf")
    for lanes in range(len(shares), max(MAX_LANES, len(shares)) + 1):
        counts = _apportion(shares, lanes)
        if copies * max(counts) > lanes:
            continue
        error = max(abs(c / lanes - s) / s for c, s in zip(counts, shares, strict=True))
        if error < best_error - 1e-12:
            best, best_error = counts, error
        if best_error <= WEIGHT_TOLERANCE:
            break
    return _spread(best)


def partners(lanes: Sequence[int]) -> tuple[int, ...]:
    """Lane of the second copy of what has its first copy on each lane: a permutation of the lanes
    that leaves none on its device.

    Lanes sorted by device, then position, are shifted by as many as the device with most lanes has.
    Devices are taken in the order of their first lanes, since their numbers are those of one run
    only. So equal devices form a ring in which each has the second copies of its neighbour (chained
    declustering, Hsiao and DeWitt 1990): when one is lost, all others share its reads.

    Raises:
        ValueError: a device has more than half of the lanes.
    """
    counts = [lanes.count(device) for device in set(lanes)]
    shift = max(counts, default=0)
    if 2 * shift > len(lanes):
        raise ValueError(f"a device has {shift} of {len(lanes)} lanes: it would hold both copies")
    order = sorted(range(len(lanes)), key=lambda lane: (lanes.index(lanes[lane]), lane))
    found = [0] * len(lanes)
    for i, lane in enumerate(order):
        found[lane] = order[(i + shift) % len(order)]
    return tuple(found)


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
