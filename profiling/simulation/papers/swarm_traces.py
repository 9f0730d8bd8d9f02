"""Swarm's figures that need traces: what the lab of clusters finds on some.

``python -m vllm_ssdkv.profiling.simulation.papers.swarm_traces DIR`` measures them on the traces of
`ssdkv lab profile`, and keeps them as those that `ssdkv lab reproduce` shows without traces.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Final

from vllm_ssdkv.base.errors import BenchError
from vllm_ssdkv.profiling.clusters import caching, lab, page_clusters, upkeep
from vllm_ssdkv.profiling.clusters.drives import DRIVES
from vllm_ssdkv.profiling.clusters.layer_reads import LAYER_HEADS
from vllm_ssdkv.profiling.clusters.trace import Trace, read_traces
from vllm_ssdkv.profiling.simulation.description import DATA

PAPER_DRIVES: Final = 8
KEPT: Final = DATA / "swarm_traces.json"


@dataclass(frozen=True, slots=True)
class TraceFigures:
    """Means over traces.

    Example:
        kept().schedule_gain

    Attributes:
        schedule_gain: Time of Swarm's three baselines over that of its schedule, their mean.
        volume_gain: Pages that they read over those that it reads, likewise.
        keys_gain: Keys of a context over medoids, which are all that Swarm compares.
        rule_nine: Distance of members after an update over that before, by rule (9).
        min_diff: The same, each new page to the nearest medoid.
        min_size: The same, to the smallest cluster. None of the three: no cluster took new pages.
        hits_more: Hit rate of Swarm's cache less that of LRU, at the budget that is worst for it.
        source: Where they are from.
    """

    schedule_gain: float
    volume_gain: float
    keys_gain: float
    rule_nine: float | None
    min_diff: float | None
    min_size: float | None
    hits_more: float
    source: str


def kept() -> TraceFigures:
    """Figures of the last run of this module."""
    return TraceFigures(**json.loads(KEPT.read_text()))


def keep(directory: Path) -> None:
    """Measure figures on traces, and keep them with the command that recorded these."""
    manifest, traces = read_traces(directory)
    documents = " ".join(f"--document {trace.name}" for trace in traces)
    options = {**manifest.settings, "layers": len(manifest.settings["layers"])}
    asked = " ".join(f"--{name} {value}" for name, value in options.items() if name != "model")
    found = measure(traces, f"the demo's model: `ssdkv lab profile DIR {documents} {asked}`")
    KEPT.write_text(json.dumps(asdict(found), indent=1) + "\n")


def measure(traces: Sequence[Trace], source: str = "") -> TraceFigures:
    """Measure them on traces, with the product's clusters. Seconds of a core for each trace.

    Raises:
        BenchError: there are none.
    """
    if not traces:
        raise BenchError("traces: none; record some with `ssdkv lab profile`")
    gains, volumes, keys = [], [], []
    rules: dict[str, list[float]] = {name: [] for name in upkeep.RULES}
    for trace in traces:
        heads = trace.adjacent_heads(LAYER_HEADS)
        clusters, which = lab.activated_clusters(trace, heads, lab.Settings(tokens=False))
        full, *others = (
            page_clusters.scheduled(which, clusters, PAPER_DRIVES, name)
            for name in page_clusters.SCHEDULES
        )
        least, pages = full.seconds(DRIVES[0]), full.pages.sum()
        gains.append(fmean(one.seconds(DRIVES[0]) / least for one in others))
        volumes.append(fmean(float(one.pages.sum() / pages) for one in others))
        keys.append(fmean(trace.context / len(one.medoid) for one in clusters))
        for layer, head in heads:
            for name, value in (upkeep.distances(trace, layer, head) or {}).items():
                rules[name].append(value)
    nine, diff, size = (fmean(found) if (found := rules[name]) else None for name in upkeep.RULES)
    names = ", ".join(trace.name for trace in traces)
    means = fmean(gains), fmean(volumes), fmean(keys)
    return TraceFigures(*means, nine, diff, size, _hits_more(traces), source or f"traces: {names}")


def _hits_more(traces: Sequence[Trace]) -> float:
    """Hit rate by Swarm's score less that by recency, the least of all budgets."""
    chosen = [lab.choices(trace)[0] for trace in traces]
    own, lru = (caching.POLICIES[name] for name in ("swarm (S-7)", "lru"))
    return min(
        fmean(
            caching.hit_rate(one, share, own) - caching.hit_rate(one, share, lru) for one in chosen
        )
        for share in lab.CACHE_SHARES
    )


if __name__ == "__main__":
    keep(Path(sys.argv[1]))
