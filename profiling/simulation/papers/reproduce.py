"""All rows, P1 to P26: one list, and its tables."""

from __future__ import annotations

from collections.abc import Collection
from functools import cache
from typing import Any

from vllm_ssdkv.profiling.simulation import systems
from vllm_ssdkv.profiling.simulation.hardware import KINDS, described
from vllm_ssdkv.profiling.simulation.papers import (
    dockerssd,
    flexgen,
    hilos,
    instinfer,
    pools,
    swarm,
)
from vllm_ssdkv.profiling.simulation.papers.result import Result, Verdict, verdict_of
from vllm_ssdkv.profiling.simulation.papers.swarm_traces import TraceFigures
from vllm_ssdkv.profiling.table import Table

ROWS = tuple(f"P{number}" for number in range(1, 27))
CALIBRATIONS = frozenset({"P6"})
"""Rows that are there to calibrate."""


@cache
def results(figures: TraceFigures | None = None) -> tuple[Result, ...]:
    """Every row and part, in their order. Seconds of one core, the first time.

    ``figures``: of traces; those on record, if not given.
    """
    found = [
        *instinfer.results(),
        *swarm.results(figures),
        *hilos.results(),
        *dockerssd.results(),
        *flexgen.results(),
    ]
    return tuple(sorted(found, key=lambda one: int(one.row[1:])))


def verdicts(figures: TraceFigures | None = None) -> dict[str, Verdict]:
    """Verdict of each row, over its parts."""
    parts: dict[str, list[Result]] = {}
    for one in results(figures):
        parts.setdefault(one.row, []).append(one)
    return {row: verdict_of(found) for row, found in parts.items()}


def summary(figures: TraceFigures | None = None) -> str:
    """Count the rows inside their tolerance, of those that are predictions."""
    counted = {
        row: verdict
        for row, verdict in verdicts(figures).items()
        if row not in CALIBRATIONS | swarm.FOLLOWS_NOT
    }
    inside = [row for row, verdict in counted.items() if verdict == "pass"]
    missed = [row for row, verdict in counted.items() if verdict == "miss"]
    made = [row for row, verdict in counted.items() if verdict == "calibrated"]
    unknown = [row for row, verdict in counted.items() if verdict == "not measured"]
    return (
        f"Of {len(counted)} rows that are to be predicted {len(inside)} are inside their tolerance "
        f"with all of their parts. Misses: {', '.join(missed) or 'none'}. "
        f"Made a constant or an assumption, and are no predictions: {', '.join(made) or 'none'}. "
        f"Not measured: {', '.join(unknown) or 'none'}."
    )


def _figure(value: float | None) -> str | None:
    return None if value is None else f"{value:.4g}"


def tables(
    wanted: Collection[str] | None = None, figures: TraceFigures | None = None
) -> list[Table]:
    """Results, what they rest on, the papers' baselines beside a good path, calibrated constants.

    ``wanted``: rows that are shown; all, if missing.
    """
    rows = Table(
        "Published and simulated",
        [
            *("row", "result", "published", "simulated", "deviation", "tolerance"),
            *("verdict", "basis", "source"),
        ],
    )
    notes = Table("What they rest on", ["row", "verdict", "note"])
    beside = Table(
        "Against a good I/O path",
        ["row", "result", "paper's baseline", "good I/O path"],
        note="The same work on the same drives behind O_DIRECT and io_uring, with as much time "
        "beside KV as the paper's own system needs. FlexGen maps its files and gets 0.91 GB/s of a "
        "drive of 7.",
    )
    for one in results(figures):
        if wanted is not None and one.row not in wanted:
            continue
        deviation = "-" if one.deviation is None else f"{one.deviation:+.1%}"
        cells = [one.name, one.what, one.target.text, _figure(one.ours), deviation]
        rows.add(*cells, one.target.tolerance, one.verdict, one.basis, one.source)
        if one.note:
            notes.add(one.name, one.verdict, one.note)
        if one.beside is not None:
            beside.add(one.name, one.what, _figure(one.ours), _figure(one.beside))
    own = [_modes(), _hits(), _nodes()] if wanted is None else []
    return [rows, notes, beside, *own, _calibrated()]


def _modes() -> Table:
    """Our modes on the machine of InstInfer."""
    batch = 64
    table = Table(
        f"OPT-13B, batch {batch}, contexts of {systems.CONTEXT} tokens, one drive",
        ["system", "tokens/s"],
        decimals=2,
        note="Ours reads an eighth of the pages where it is sparse, with as much time beside KV as "
        "InstInfer needs; exact, it is the good I/O path. How much drives attend to is by the "
        "plugin's own rule (`offload.share: auto`). For comparison with each other only.",
    )
    rows = [
        ("FlexGen", instinfer.flexgen(batch).tokens_per_s),
        ("FlexGen-SparQ", instinfer.flexgen_sparq(batch).tokens_per_s),
        ("good I/O path", instinfer.good_path(batch).tokens_per_s),
        ("InstInfer, dense", instinfer.near(batch).tokens_per_s),
        ("InstInfer, sparse", instinfer.near(batch, sparse=True).tokens_per_s),
        *instinfer.ours(batch),
    ]
    for name, speed in rows:
        table.add(name, speed)
    return table


def _hits() -> Table:
    """Loads of a stored prompt."""
    table = Table(
        "Llama-3.1-8B, prompt of 32,768 tokens that is stored, four PM9A3, H100",
        ["loaded by", "ms"],
        note="LMCache and vLLM's tier by what `ssdkv bench io` measured of one request of each, "
        "with no other request beside it. Ours is the good I/O path; what a node costs beside it "
        "was measured on two cores, without a network (`bench_node`).",
    )
    for name, seconds in pools.hits():
        table.add(name, 1e3 * seconds)
    return table


def _nodes() -> Table:
    """Pools of storage nodes."""
    table = Table(
        "Llama-3.1-70B, one context of 131,072 tokens on storage nodes, tokens/s",
        ["nodes", "nodes attend", "KV is brought"],
        decimals=2,
        note="Nodes of DockerSSD's size with a port of 25 Gbit/s each; the host has one of 100. "
        "What a core attends to is assumed.",
    )
    for count in (4, 16, 64, 128):
        table.add(
            str(count), *(pools.step(count, near=near).tokens_per_s for near in (True, False))
        )
    return table


def _calibrated() -> Table:
    table = Table("Calibrated constants", ["constant", "value", "from"])
    for kind in KINDS:
        for name, one in described(kind).items():
            for field in sorted(one.calibrated):
                value = getattr(one, field)
                table.add(f"{kind.kind}: {name}: {field}", f"{value:g}", one.sources[field])
    return table


def document(
    wanted: Collection[str] | None = None, figures: TraceFigures | None = None
) -> dict[str, Any]:
    """Results as JSON: all, or those of some rows."""
    return {
        "summary": summary(figures),
        "verdicts": verdicts(figures),
        "results": [
            {
                "row": one.row,
                "part": one.part,
                "what": one.what,
                "published": one.target.text,
                "simulated": one.ours,
                "deviation": one.deviation,
                "tolerance": one.target.tolerance,
                "verdict": one.verdict,
                "basis": one.basis,
                "source": one.source,
                "note": one.note,
                "good_path": one.beside,
            }
            for one in results(figures)
            if wanted is None or one.row in wanted
        ],
    }
