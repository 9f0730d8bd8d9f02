"""Reads of replicated entries over drives: their layout, and the drive that each is read from.

Swarm's layout (7) puts the members of a cluster on the drives in turn, and each cluster begins
where the one before ended. A page in several clusters so has replicas, on as many drives at most.
Its scheduler sorts entries by their replicas, fewest first, and reads each from the emptiest
bucket. That alone may miss the best buckets: an entry with two replicas may take the place that a
later one needs. :func:`assign` then moves entries along chains of replicas while that evens out two
buckets. In the end the fullest bucket is as small, and the emptiest as large, as any assignment
makes them (Harvey et al., "Semi-matchings for bipartite graphs and load balancing", 2003).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from vllm_ssdkv.clustering.clusters import Clusters
from vllm_ssdkv.clustering.co_activation import I64

Replicas: TypeAlias = Sequence[Sequence[int]]
"""Drives that have each entry: different ones, and at least one."""


def round_robin(clusters: Clusters, drives: int, first: int = 0) -> I64:
    """Drive of each member, int64 [members]; equation (7).

    Member n of a cluster lies on drive ``(p + n) mod drives``, and p grows by the members of each
    cluster: members are numbered through. Drives differ by 1 at most, of each cluster and of all.
    """
    return (first + np.arange(len(clusters.member))) % drives


def replicas_of(clusters: Clusters, drive: I64) -> list[list[int]]:
    """Drives of each page, from the drive of each member; that of its first cluster first."""
    found: list[list[int]] = [[] for _ in range(clusters.pages)]
    for page, where in zip(clusters.member.tolist(), drive.tolist(), strict=True):
        if where not in found[page]:
            found[page].append(where)
    return found


def assign(replicas: Replicas, drives: int, *, even: bool = True) -> NDArray[np.int64]:
    """Drive that each entry is read from, int64 [entries].

    Args:
        replicas: Of each entry.
        drives: Buckets.
        even: Move entries until no assignment has evener buckets. Else as in the paper.
    """
    load = [0] * drives
    chosen = np.zeros(len(replicas), np.int64)
    for entry in sorted(range(len(replicas)), key=lambda one: len(replicas[one])):
        drive = min(replicas[entry], key=lambda one: (load[one], one))
        chosen[entry] = drive
        load[drive] += 1
    if even:
        _even_out(replicas, chosen, load)
    return chosen


def static(replicas: Replicas) -> NDArray[np.int64]:
    """Drive of each entry's first replica, whatever the buckets hold: no balance."""
    return np.array([one[0] for one in replicas], np.int64)


def buckets(chosen: NDArray[np.int64], drives: int) -> list[list[int]]:
    """Entries that each drive reads."""
    found: list[list[int]] = [[] for _ in range(drives)]
    for entry, drive in enumerate(chosen.tolist()):
        found[drive].append(entry)
    return found


def _even_out(replicas: Replicas, chosen: NDArray[np.int64], load: list[int]) -> None:
    """Move entries from fuller to emptier buckets, along chains of replicas, while any can."""
    held = [set(bucket) for bucket in buckets(chosen, len(load))]
    moved = True
    while moved:
        moved = False
        for start in sorted(range(len(load)), key=lambda one: -load[one]):
            chain = _chain(replicas, held, load, start)
            if not chain:
                continue
            for entry, drive in chain:
                held[chosen[entry]].discard(entry)
                held[drive].add(entry)
                chosen[entry] = drive
            load[start] -= 1
            load[chain[0][1]] += 1
            moved = True
            break


def _chain(
    replicas: Replicas, held: list[set[int]], load: list[int], start: int
) -> list[tuple[int, int]]:
    """Entries and where they go, so that ``start`` has one less and a bucket at least 2 below it
    one more; the last of the way first. Empty: there is none."""
    came: dict[int, tuple[int, int]] = {start: (-1, -1)}
    queue = deque([start])
    while queue:
        drive = queue.popleft()
        if load[drive] <= load[start] - 2:
            chain = []
            while drive != start:
                entry, before = came[drive]
                chain.append((entry, drive))
                drive = before
            return chain
        for entry in sorted(held[drive]):
            for other in replicas[entry]:
                if other not in came:
                    came[other] = entry, drive
                    queue.append(other)
    return []
