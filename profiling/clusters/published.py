"""Figures that Swarm's authors published, and ours beside them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np

from vllm_ssdkv.profiling.clusters.drives import DRIVES, pool_bandwidth
from vllm_ssdkv.profiling.clusters.trace import F32

ENTRY_BYTES: Final = 4096
PAPER_DRIVES: Final = 8


@dataclass(frozen=True, slots=True)
class Published:
    """A figure of the paper.

    Attributes:
        value: As printed.
        reason: Why ours differs, or what makes it equal.
    """

    name: str
    what: str
    value: str
    reason: str


FIGURES: Final = (
    Published(
        "P9",
        "8 PM9A3, entries of 4 KiB, GB/s",
        "37.67",
        "The drives' IOPS are the limit: 8 x 1.1 M x 4 KiB. Reproduced by the model, within 5 %.",
    ),
    Published(
        "P10",
        "time and bandwidth of reads against No Cluster",
        "2.41x; 2.72x",
        "Not reproducible against a good baseline: with summaries in DRAM, No Cluster reads chosen "
        "pages only, and pages of 8 KiB are not IOPS-bound. The paper's reads all keys to score "
        "them. These are equal pages, not equal recall: Swarm's hold less mass.",
    ),
    Published(
        "P11",
        "scheduling against static: time; bytes against no dedup",
        "2.57x; 1.24x",
        "The paper's are means of three baselines, which papers.md has. The size follows from the "
        "number of replicas, which the threshold makes.",
    ),
    Published(
        "P12",
        "selection by medoids against all keys, 128K to 1M",
        "6.9x .. 12.2x",
        "Processor time of one thread, medoids of clusters of pages against single tokens. No "
        "context of 128K is recorded here, so growth with length is not shown.",
    ),
    Published(
        "P13",
        "distance of members after an update: rule (9); Min-Diff; Min-Size",
        "1.012; 3.0; 21.4",
        "The order is reproduced, the size is not: with conditional probabilities new pages are "
        "popular ones, and as close as old ones.",
    ),
    Published(
        "P14",
        "hit rate against LRU",
        "above at every budget",
        "Not reproduced: above LRU where the cache holds less than a step's choice, below it where "
        "it holds about that or much more.",
    ),
    Published(
        "P15",
        "length at which IOPS give way to bandwidth, 4 drives",
        "32K (900P), 64K (PM9A3)",
        "Not reproducible: bytes and requests both grow with the length, so their ratio has no "
        "knee. A fixed time per step, which the paper does not name, would make one.",
    ),
)


def p9() -> float:
    """GB/s of 8 PM9A3 that read entries of 4 KiB."""
    return pool_bandwidth(DRIVES[0], PAPER_DRIVES, ENTRY_BYTES) / 1e9


def selection_speedup(
    keys: F32, medoids: F32, query: F32, share: float = 0.1, repeats: int = 5
) -> float:
    """Time to choose ``share`` of all entries, over that of the same of medoids. One thread.

    ``keys`` [entries, size], ``medoids`` [clusters, size], ``query`` [group, size].
    """
    every, few = _search(keys, query, share), _search(medoids, query, share)
    return _seconds(every, repeats) / _seconds(few, repeats)


def _search(keys: F32, query: F32, share: float) -> Callable[[], None]:
    """Search of the nearest keys by inner product, in an index that is built already."""
    import faiss

    index = faiss.IndexFlatIP(keys.shape[1])
    index.add(np.ascontiguousarray(keys))
    count = max(1, int(share * len(keys)))
    queries = np.ascontiguousarray(query)

    def search() -> None:
        threads = faiss.omp_get_max_threads()
        faiss.omp_set_num_threads(1)
        try:
            index.search(queries, count)
        finally:
            faiss.omp_set_num_threads(threads)

    return search


def _seconds(work: Callable[[], None], repeats: int) -> float:
    """Least time of some runs."""
    least = float("inf")
    for _ in range(repeats):
        begin = time.perf_counter()
        work()
        least = min(least, time.perf_counter() - begin)
    return least
