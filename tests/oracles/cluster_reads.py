"""Reads of whole clusters over drives, counted one by one: no code of the scheduler."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from vllm_ssdkv.clustering.clusters import Clusters
from vllm_ssdkv.clustering.co_activation import I64

Places = list[tuple[int, int]]
"""Page and drive of each member that is read, in the order of clusters and members."""


def places(clusters: list[list[list[int]]], which: list[list[int]], drives: int) -> list[Places]:
    """Reads of each head: its clusters, those that it activates, and where all members lie.

    Members of all clusters of all heads are dealt to the drives in turn.
    """
    found, next_drive = [], 0
    for of_head, wanted in zip(clusters, which, strict=True):
        lies: list[Places] = []
        for members in of_head:
            lies.append([(page, (next_drive + i) % drives) for i, page in enumerate(members)])
            next_drive += len(members)
        found.append([place for number in wanted for place in lies[number]])
    return found


def as_they_lie(heads: list[Places], drives: int) -> list[int]:
    """Reads of each drive where every copy is read."""
    counts = Counter(drive for head in heads for _, drive in head)
    return [counts[drive] for drive in range(drives)]


def replicas(
    clusters: list[list[list[int]]], which: list[list[int]], drives: int
) -> list[list[int]]:
    """Drives of each page that is read, once for each head; that of its first cluster first.

    Copies of a page in clusters that are not activated can be read, too.
    """
    everywhere = places(clusters, [list(range(len(one))) for one in clusters], drives)
    entries = []
    for lies, wanted, of_head in zip(everywhere, which, clusters, strict=True):
        for page in sorted({page for number in wanted for page in of_head[number]}):
            entries.append(list(dict.fromkeys(drive for other, drive in lies if other == page)))
    return entries


def least_of_the_busiest(entries: list[list[int]], drives: int) -> int:
    """Fewest reads of the busiest drive that any choice of replicas has: a matching of entries."""
    most = -(-len(entries) // drives)
    while not _fits(entries, most):
        most += 1
    return most


def _fits(entries: list[list[int]], most: int) -> bool:
    """Check whether each entry finds a drive with no drive reading more than ``most``."""
    held: dict[int, list[int]] = {}

    def place(entry: int, seen: set[int]) -> bool:
        for drive in entries[entry]:
            if drive in seen:
                continue
            seen.add(drive)
            mine = held.setdefault(drive, [])
            if len(mine) < most:
                mine.append(entry)
                return True
            for i, other in enumerate(mine):
                if place(other, seen):
                    mine[i] = entry
                    return True
        return False

    return all(place(entry, set()) for entry in range(len(entries)))


def totals(clusters: list[Clusters], which: Iterable[list[I64]], drives: int) -> dict[str, int]:
    """Reads of the busiest drive, of all steps: by schedule, and ``copies`` and ``pages`` read.

    Each page is a request, and all drives are alike, so times of schedules go by these.
    """
    lists = [[members.tolist() for members in found.lists()] for found in clusters]
    found: Counter[str] = Counter()
    for picked in which:
        wanted = [numbers.tolist() for numbers in picked]
        lie = as_they_lie(places(lists, wanted, drives), drives)
        entries = replicas(lists, wanted, drives)
        found["static"] += max(lie)
        found["no balance"] += max(Counter(entry[0] for entry in entries).values())
        copies = [
            entry
            for entry, count in zip(entries, held(lists, wanted), strict=True)
            for _ in range(count)
        ]
        found["no dedup"] += least_of_the_busiest(copies, drives)
        found["full"] += least_of_the_busiest(entries, drives)
        found["copies"] += sum(lie)
        found["pages"] += len(entries)
    return found


def held(clusters: list[list[list[int]]], which: list[list[int]]) -> list[int]:
    """Copies of each page in clusters that are activated, in the order of :func:`replicas`."""
    return [
        count
        for wanted, of_head in zip(which, clusters, strict=True)
        for _, count in sorted(Counter(page for n in wanted for page in of_head[n]).items())
    ]
