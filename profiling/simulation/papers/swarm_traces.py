"""Swarm's figures that need traces: what the lab of clusters finds, and what it found on record."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from vllm_ssdkv.base.errors import BenchError
from vllm_ssdkv.profiling.clusters import lab, page_clusters, upkeep
from vllm_ssdkv.profiling.clusters.drives import DRIVES
from vllm_ssdkv.profiling.clusters.layer_reads import LAYER_HEADS
from vllm_ssdkv.profiling.clusters.trace import Trace
from vllm_ssdkv.profiling.simulation.hardware import Recorded, find

PAPER_DRIVES = 8
ON_RECORD = "demo-traces"


@dataclass(frozen=True, slots=True)
class TraceFigures:
    """Means over traces.

    Example:
        recorded().schedule_gain

    Attributes:
        schedule_gain: Time of reads as they lie over that of the whole schedule, 8 drives.
        dedup_gain: Pages that are read with every copy over those read once.
        rule_nine: Distance of members after an update over that before, by rule (9).
        min_diff: The same, each new page to the nearest medoid.
        min_size: The same, to the smallest cluster. None of the three: no cluster took new pages.
        source: Where they are from.
    """

    schedule_gain: float
    dedup_gain: float
    rule_nine: float | None
    min_diff: float | None
    min_size: float | None
    source: str

    @property
    def in_order(self) -> bool | None:
        """Check whether the rules are in the paper's order. None: they are not known."""
        if self.rule_nine is None or self.min_diff is None or self.min_size is None:
            return None
        return self.rule_nine < self.min_diff < self.min_size


def recorded() -> TraceFigures:
    """Figures that were measured once, with the command that measures them again."""
    found = find(Recorded, ON_RECORD)
    return TraceFigures(
        found.schedule_gain,
        found.dedup_gain,
        found.rule_nine,
        found.min_diff,
        found.min_size,
        found.sources["schedule_gain"],
    )


def measure(traces: Sequence[Trace]) -> TraceFigures:
    """Measure them on traces, with the product's clusters. Seconds of a core for each trace.

    Raises:
        BenchError: there are none.
    """
    settings = lab.Settings(tokens=False)
    gains, copies = [], []
    rules: dict[str, list[float]] = {name: [] for name in upkeep.RULES}
    for trace in traces:
        heads = trace.adjacent_heads(LAYER_HEADS)
        clusters, which = lab.activated_clusters(trace, heads, settings)
        loads = {
            name: page_clusters.scheduled(which, clusters, PAPER_DRIVES, name)
            for name in page_clusters.SCHEDULES
        }
        seconds = {name: one.seconds(DRIVES[0]) for name, one in loads.items()}
        gains.append(seconds["static"] / seconds["full"])
        copies.append(float(loads["no dedup"].pages.sum() / loads["full"].pages.sum()))
        for layer, head in heads:
            for name, value in (upkeep.distances(trace, layer, head) or {}).items():
                rules[name].append(value)
    if not gains:
        raise BenchError("traces: none; record some with `ssdkv profile`")
    nine, diff, size = (fmean(found) if (found := rules[name]) else None for name in upkeep.RULES)
    names = ", ".join(trace.name for trace in traces)
    return TraceFigures(fmean(gains), fmean(copies), nine, diff, size, f"traces: {names}")
