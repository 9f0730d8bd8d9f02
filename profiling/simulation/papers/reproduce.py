"""All rows, P1 to P27: one list, and its tables."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from functools import cache
from typing import Any

from vllm_ssdkv.profiling.simulation import systems
from vllm_ssdkv.profiling.simulation.papers import (
    dockerssd,
    flash_drive,
    flexgen,
    hilos,
    instinfer,
    pools,
    swarm,
)
from vllm_ssdkv.profiling.simulation.papers.constants import constants
from vllm_ssdkv.profiling.simulation.papers.declared import rests_on
from vllm_ssdkv.profiling.simulation.papers.result import Result, Verdict, verdict_of
from vllm_ssdkv.profiling.simulation.papers.swarm_traces import TraceFigures
from vllm_ssdkv.profiling.table import Table

ROWS = tuple(f"P{number}" for number in range(1, 28))


@cache
def results(figures: TraceFigures | None = None) -> tuple[Result, ...]:
    """Every row and part, in their order. Seconds of one core, the first time.

    ``figures``: of traces; those that were kept, if not given.
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
    return {row: verdict_of(parts) for row, parts in _by_row(results(figures)).items()}


def _by_row(parts: Iterable[Result]) -> dict[str, list[Result]]:
    found: dict[str, list[Result]] = {}
    for one in parts:
        found.setdefault(one.row, []).append(one)
    return found


def summary(figures: TraceFigures | None = None) -> str:
    """Count predicted rows alone; name the others by their kind."""
    parts = results(figures)
    predicted = _by_row(one for one in parts if one.kind == "predicted")
    judged = {row: verdict_of(found) for row, found in predicted.items()}
    inside = [row for row, verdict in judged.items() if verdict == "pass"]
    missed = [row for row, verdict in judged.items() if verdict == "miss"]
    holds, theirs = ("holds", "its") if len(inside) == 1 else ("hold", "their")
    others = "; ".join(
        f"{kind} {', '.join(_by_row(one for one in parts if one.kind == kind))}"
        for kind in ("arithmetic", "calibrated", "measured")
    )
    return (
        f"Of {len(judged)} predicted rows {len(inside)} {holds} with all of {theirs} predicted "
        f"parts: {', '.join(inside) or 'none'}. Misses: {', '.join(missed) or 'none'}. "
        f"Rows and parts that predict nothing: {others}."
    )


def _figure(value: float | None) -> str | None:
    return None if value is None else f"{value:.4g}"


def _distance(one: Result) -> str:
    """Distance of ours, and of a ratio its effect."""
    if one.distance is None or not one.target.demanded:
        return "-"
    effect = "" if one.effect is None else f"; effect {one.effect:.2f}"
    return f"{one.distance:+.1%}{effect}"


def tables(
    wanted: Collection[str] | None = None, figures: TraceFigures | None = None
) -> list[Table]:
    """Results, what they rest on, the papers' baselines beside a good path, and all constants.

    ``wanted``: rows that are shown; all, if missing.
    """
    columns = ["row", "kind", "result", "published", "ours", "distance", "passes", "verdict"]
    rows = Table("Published and ours", columns)
    notes = Table("What they rest on", ["rows", "note"])
    beside = Table(
        "Against a good I/O path",
        ["row", "result", "paper's baseline", "good I/O path"],
        note="A good I/O path does the same work on the same drives with O_DIRECT and io_uring. It "
        "gets as much time beside KV as the paper's own system. FlexGen maps its files, and gets "
        "0.91 GB/s of a drive of 7.",
    )
    shown = [one for one in results(figures) if wanted is None or one.row in wanted]
    sources: dict[str, list[str]] = {}
    told: dict[str, list[Result]] = {}
    for one in shown:
        ours, distance = _figure(one.ours), _distance(one)
        cells = [one.name, one.kind, one.what, one.target.text, ours, distance]
        rows.add(*cells, one.target.tolerance.partition(",")[0], one.verdict)
        sources.setdefault(one.source, []).append(one.row)
        if one.note:
            told.setdefault(one.note, []).append(one)
        if one.beside is not None:
            beside.add(one.name, one.what, _figure(one.ours), _figure(one.beside))
    of_rows = (f"{source}: {', '.join(dict.fromkeys(names))}" for source, names in sources.items())
    rows.note = f"An effect passes from 0.8 to 1.25. Sources: {'; '.join(of_rows)}."
    for note, parts in told.items():
        margins = [
            (f"{one.name}: " if parts[1:] else "")
            + "; ".join(f"{name} {value:.4g}" for name, value in one.margins.items())
            for one in parts
            if one.margins
        ]
        notes.add(", ".join(one.name for one in parts), " ".join([note, *margins]))
    own = [_modes(), _in_turn(), flash_drive.table(), _hits(), _nodes()] if wanted is None else []
    return [rows, notes, beside, *own, _constants(shown)]


def _modes() -> Table:
    """Our modes on the machine of InstInfer."""
    batch = 64
    table = Table(
        f"OPT-13B, batch {batch}, contexts of {systems.CONTEXT} tokens, one drive",
        ["system", "tokens/s"],
        decimals=2,
        note="Ours, sparse, reads an eighth of the pages, with as much time beside KV as "
        "InstInfer. Ours, exact, is the good I/O path. `offload.share: auto` sets the share of the "
        "drives.",
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


def _in_turn() -> Table:
    """Two mini-batches, by batch and drives."""
    counts = (1, 2, 4, 8, 20)
    table = Table(
        "Speedup by two mini-batches, over drives of InstInfer's",
        ["batch", *(str(count) for count in counts)],
        decimals=2,
        note="OPT-13B with `offload`; the GPU reads the weights for each half. It is not built "
        "(decision 020).",
    )
    for batch in (4, 8, 16, 32, 256):
        table.add(str(batch), *(instinfer.gain_in_turn(batch, count) for count in counts))
    return table


def _hits() -> Table:
    """Loads of a stored prompt."""
    table = Table(
        "Llama-3.1-8B, prompt of 32,768 tokens that is stored, four PM9A3, H100",
        ["loaded by", "ms"],
        note="`ssdkv lab bench io` measured one request of LMCache and of vLLM's tier. Ours is the "
        "good I/O path. `bench_node` measured the cost of a node on two cores, without a network.",
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
        note="Nodes have DockerSSD's size and a port of 25 Gbit/s each; the host has one of 100. "
        "The rate at which a core attends is assumed.",
    )
    for count in (4, 16, 64, 128):
        table.add(
            str(count), *(pools.step(count, near=near).tokens_per_s for near in (True, False))
        )
    return table


def _constants(shown: Iterable[Result]) -> Table:
    """Constants that these rows rest on."""
    table = Table(
        "Constants",
        ["constant", "value", "from", "rows"],
        note="A tenth more of a constant moves each of its rows, and no other: a test changes them "
        "all. calibrated by: rows whose published result it is, a share of whose step it is, or "
        "that it was fitted to; it predicts none of them.",
    )
    serves: dict[str, list[str]] = {}
    for one in shown:
        for name in rests_on(one.name):
            serves.setdefault(name, []).append(one.row)
    before = ""
    for name, constant in constants().items():
        if name in serves:
            source = constant.source
            if constant.calibrated:
                source += f"; calibrated by {', '.join(constant.calibrated)}"
            cells = (
                "the same" if source == before else source,
                ", ".join(dict.fromkeys(serves[name])),
            )
            table.add(name, f"{constant.value:g}", *cells)
            before = source
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
                "ours": one.ours,
                "distance": one.distance,
                "effect": one.effect,
                "passes": one.target.tolerance,
                "margins": dict(one.margins),
                "verdict": one.verdict,
                "kind": one.kind,
                "constants": sorted(rests_on(one.name)),
                "source": one.source,
                "note": one.note,
                "good_path": one.beside,
            }
            for one in results(figures)
            if wanted is None or one.row in wanted
        ],
    }
