"""Swarm: rows P9 to P15. Most need traces of a model, which the lab of clusters reads."""

from __future__ import annotations

from vllm_ssdkv.profiling.simulation.hardware import Drive, find
from vllm_ssdkv.profiling.simulation.papers.result import Result, Target
from vllm_ssdkv.profiling.simulation.papers.swarm_traces import TraceFigures, kept

PAPER = "Swarm"
ENTRY_BYTES = 4096
LAB = "`ssdkv lab reproduce --traces DIR` measures it; docs/clusters.md has six traces"


def entry_bandwidth(drive: Drive, count: int, entry_bytes: int = ENTRY_BYTES) -> float:
    """Bytes/s of drives that read single entries, each one request, evenly spread, without end."""
    return count * entry_bytes / drive.read_s(1, entry_bytes)


def _of_traces(figures: TraceFigures) -> list[Result]:
    """P11 to P14."""
    copies = (
        "Mean over three baselines: static, no balance, no dedup. Both depend on the number of "
        "replicas, which the threshold sets. The paper does not give the threshold."
    )
    rules = (figures.rule_nine, figures.min_diff, figures.min_size)
    nine, diff, size = (0.0 if value is None else value for value in rules)
    known = None not in rules
    order = float(nine < diff < size)
    return [
        Result(
            *("P11", "time", "three baselines against Swarm's schedule, 8 drives"),
            Target.times(2.57),
            figures.schedule_gain,
            figures.source,
            "measured",
            note=copies,
        ),
        Result(
            *("P11", "bytes", "pages that three baselines read against Swarm"),
            Target.times(1.24),
            figures.volume_gain,
            figures.source,
            "measured",
            note=copies,
        ),
        Result(
            *("P12", "", "selection by medoids against all keys, 128K to 1M tokens"),
            Target.band(6.9, 12.2),
            None,
            figures.source,
            "measured",
            note="We have no trace of that length. On ours Swarm would compare a medoid for every "
            f"{figures.keys_gain:.0f} keys; `ssdkv lab bench clusters` times both.",
        ),
        Result(
            *("P13", "order", "distance after an update: theirs < Min-Diff < Min-Size"),
            Target.near(1, 0, "1.012 < 3.0 < 21.4"),
            order if known else None,
            figures.source,
            "measured",
            note="1: this order; 0: another. The other two distances are not reproduced.",
            margins={"theirs": nine, "Min-Diff": diff, "Min-Size": size} if known else {},
        ),
        Result(
            *("P13", "theirs", "distance after an update over that before"),
            Target.times(1.012, "1.012"),
            figures.rule_nine,
            figures.source,
            "measured",
            note="Below 1, new pages are closer than old ones.",
        ),
        Result(
            *("P14", "", "hit rate of its cache above that of LRU, 5 to 50 % of the context"),
            Target.near(1, 0, "at every budget"),
            float(figures.hits_more > 0),
            figures.source,
            "measured",
            note="0: lower at some budget. Longer traces gave the same (docs/clusters.md).",
            margins={"least difference": figures.hits_more},
        ),
    ]


def results(figures: TraceFigures | None = None) -> list[Result]:
    """Rows P9 to P15. ``figures``: of traces; those that were kept, if not given."""
    return [
        Result(
            *("P9", "", "8 PM9A3, entries of 4 KiB, GB/s"),
            Target.near(37.67, 0.08),
            entry_bandwidth(find(Drive, "pm9a3"), 8) / 1e9,
            PAPER,
            "arithmetic",
            note="IOPS of 8 drives.",
        ),
        Result(
            *("P10", "", "time and bandwidth of reads, throughput"),
            Target.report("2.41x; 2.72x; 3.99, 1.76, 1.47x"),
            None,
            PAPER,
            "measured",
            note=f"It does not follow against a baseline with summaries in DRAM. {LAB}.",
        ),
        Result(
            *("P15", "", "length at which IOPS give way to bandwidth, 4 drives"),
            Target.report("32K (900P), 64K (PM9A3)"),
            None,
            PAPER,
            "arithmetic",
            note="Bytes and requests both grow with the length. So no length divides them without "
            "a fixed time per step, which the paper does not name.",
        ),
        *_of_traces(figures or kept()),
    ]
