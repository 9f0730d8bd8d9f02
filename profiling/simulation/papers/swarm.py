"""Swarm: rows P9 to P15. Most need traces of a model, which the lab of clusters reads."""

from __future__ import annotations

import simpy

from vllm_ssdkv.profiling.simulation.hardware import Drive, find
from vllm_ssdkv.profiling.simulation.papers.result import Basis, Result, Target
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


def results() -> list[Result]:
    """Rows P9 to P15."""
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
            *("P11", "scheduling against static: time; bytes"),
            *("2.57x; 1.24x", "25%; 10%"),
            f"{LAB}. Its size follows from the number of replicas.",
        ),
        (
            *("P12", "selection by medoids, 128K to 1M tokens"),
            *("6.9x .. 12.2x", "20%, monotone"),
            f"{LAB}; no trace of that length is recorded.",
        ),
        (
            *("P13", "distance after an update: Min-Size, Min-Diff, theirs"),
            *("21.4, 3.0, 1.012", "order; < 1.05"),
            f"{LAB}.",
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
        basis: Basis = "reported" if row in FOLLOWS_NOT else "predicted"
        rows.append(Result(row, "", what, target, None, table, basis, note))
    return rows
