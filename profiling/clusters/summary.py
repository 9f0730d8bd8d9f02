"""Summary of a profile: one table, and heat maps of pages over steps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vllm_ssdkv.profiling.clusters.stability import (
    Activity,
    control,
    half_test,
    page_heat,
    stability,
)
from vllm_ssdkv.profiling.clusters.trace import F32, Trace, budget_pages, pages_of, top
from vllm_ssdkv.profiling.table import Table

MOST_HEADS = 6
"""KV heads of a trace that are looked at, from layers spread evenly."""


def heat(traces: Sequence[Trace]) -> dict[str, F32]:
    """Mass of pages over decode steps, [steps, pages], mean of some heads, by trace."""
    return {trace.name: page_heat(trace, trace.heads(MOST_HEADS)) for trace in traces}


def summary_table(traces: Sequence[Trace]) -> Table:
    """Stability, popularity, control and half test of each trace, in percent."""
    table = Table(
        "Pages of a decode step that are known before, % (chance: 10)",
        ["found by", *(trace.name for trace in traces)],
        note="Half test: half of a step's pages is shown, the other half guessed, with what the "
        "prompt's last queries tell. Control: popularity in another document.",
    )
    columns = [_column(trace, _other(traces, i)) for i, trace in enumerate(traces)]
    for name in dict.fromkeys(name for column in columns for name in column):
        table.add(name, *(column.get(name) for column in columns))
    return table


def _other(traces: Sequence[Trace], number: int) -> Trace | None:
    """Another document of the same recording."""
    return traces[(number + 1) % len(traces)] if len(traces) > 1 else None


def _column(trace: Trace, other: Trace | None) -> dict[str, float]:
    """Means over some heads, in percent."""
    found: dict[str, list[float]] = {}
    for layer, head in trace.heads(MOST_HEADS):
        here = Activity.of(trace, layer, head)
        values = {"the context's share of all mass": _share(trace, layer, head)}
        values["mass in the top 10 % of pages"] = _concentration(trace, layer, head)
        values |= stability(here)
        if other is not None:
            name = "control: popularity in another document"
            values[name] = control(here, Activity.of(other, layer, head))
        values |= {f"half test: {name}": value for name, value in half_test(here).items()}
        for name, value in values.items():
            found.setdefault(name, []).append(value)
    return {name: 100 * float(np.mean(values)) for name, values in found.items()}


def _share(trace: Trace, layer: int, head: int) -> float:
    return float(trace.mass(layer, head, trace.decode_steps).sum(1).mean())


def _concentration(trace: Trace, layer: int, head: int) -> float:
    mass = pages_of(trace.mass(layer, head, trace.decode_steps))
    best = mass * top(mass, budget_pages(0.1, trace.pages))
    return float(best.sum() / max(float(mass.sum()), 1e-9))
