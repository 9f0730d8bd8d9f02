"""Swarm: rows P9 to P15. Most need traces of a model, which the lab of clusters reads."""

from __future__ import annotations

import simpy

from vllm_ssdkv.profiling.simulation.hardware import Drive, find
from vllm_ssdkv.profiling.simulation.papers.result import Result, Target
from vllm_ssdkv.profiling.simulation.papers.swarm_traces import TraceFigures, recorded
from vllm_ssdkv.profiling.simulation.servers import Server

PAPER = "Swarm"
ENTRY_BYTES = 4096
ENTRIES = 64
"""Reads in the queue of a drive at a time."""
LAB = "`ssdkv reproduce --traces DIR` answers; docs/clusters.md has what it said of six traces"
FOLLOWS_NOT = frozenset({"P10", "P12", "P14", "P15"})
"""Rows that were measured as not following from anything that can be built here."""


def entry_bandwidth(drive: Drive, count: int, entry_bytes: int = ENTRY_BYTES) -> float:
    """Bytes/s of drives that read single entries, each one request, evenly spread, without end."""
    env = simpy.Environment()
    servers = [Server(env, f"drive {number}") for number in range(count)]
    for server in servers:
        for _ in range(ENTRIES):
            seconds = drive.read_s(1, entry_bytes)
            env.process(server.work(seconds, nbytes=entry_bytes, latency_s=drive.latency_s))
    env.run()
    return sum(server.usage().nbytes / server.usage().busy_s for server in servers)


def _of_traces(figures: TraceFigures) -> list[Result]:
    """P11 and P13."""
    copies = (
        "Measured, not simulated. The number of replicas makes both: at a threshold of 0.5 a page "
        "has 2 to 5 copies, and the paper's bytes are those of about 1.3, which its time does not "
        "go with: it does not give the threshold. With the heads of a layer as one entry, as the "
        "paper has it, 1.1 to 2.5 and 1.3 to 4.7."
    )
    found = (figures.rule_nine, figures.min_diff, figures.min_size)
    rules = ", ".join("-" if value is None else f"{value:.2f}" for value in found)
    return [
        Result(
            *("P11", "time", "scheduling against reads as they lie, 8 drives"),
            Target.near(2.57, 0.25, "2.57x"),
            figures.schedule_gain,
            source=figures.source,
            note=copies,
        ),
        Result(
            *("P11", "bytes", "every copy against each page once"),
            Target.near(1.24, 0.10, "1.24x"),
            figures.dedup_gain,
            source=figures.source,
            note=copies,
        ),
        Result(
            *("P13", "order", "distance after an update: theirs < Min-Diff < Min-Size"),
            Target.near(1, 0, "1.012 < 3.0 < 21.4"),
            None if figures.in_order is None else float(figures.in_order),
            source=figures.source,
            note=f"1: so. Ours: {rules}; the sizes of the other two are not reproduced.",
        ),
        Result(
            *("P13", "theirs", "distance after an update over that before"),
            Target.below(1.05, "1.012"),
            figures.rule_nine,
            source=figures.source,
            note="Below 1: new pages are popular ones, and closer than old ones.",
        ),
    ]


def results(figures: TraceFigures | None = None) -> list[Result]:
    """Rows P9 to P15. ``figures``: of traces; those on record, if not given."""
    table = PAPER
    rows = [
        Result(
            *("P9", "", "8 PM9A3, entries of 4 KiB, GB/s"),
            Target.near(37.67, 0.08),
            entry_bandwidth(find(Drive, "pm9a3"), 8) / 1e9,
            source=table,
            note="IOPS are the limit. Entries of 64 KiB would be read at the drives' bandwidth.",
        )
    ]
    for row, what, text, tolerance, note in (
        (
            *("P10", "time and bandwidth of reads, throughput"),
            *("2.41x; 2.72x; 3.99, 1.76, 1.47x", "report"),
            f"Does not follow against a baseline with summaries in DRAM. {LAB}.",
        ),
        (
            *("P12", "selection by medoids, 128K to 1M tokens"),
            *("6.9x .. 12.2x", "20%, monotone"),
            f"{LAB}; no trace of that length is recorded.",
        ),
        (
            *("P14", "hit rate against LRU"),
            *("above at every budget", "sign"),
            f"Does not follow. {LAB}.",
        ),
        (
            *("P15", "length at which IOPS give way to bandwidth, 4 drives"),
            *("32K (900P), 64K (PM9A3)", "one octave"),
            "Does not follow: bytes and requests both grow with the length, so no length divides "
            "them without a fixed time per step, which the paper does not name.",
        ),
    ):
        target = Target(text, 0.0, 0.0, tolerance)
        rows.append(Result(row, "", what, target, None, table, "reported", note))
    return [*rows, *_of_traces(figures or recorded())]
