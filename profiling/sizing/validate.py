"""Predictions beside measurements: the table of ``docs/sizing.md``, and one of each setting."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from vllm_ssdkv.profiling.sizing.predict import TOLERANCE, Prediction, fit, predict, rows_of
from vllm_ssdkv.profiling.sizing.runs import RUNS, measure, read_runs
from vllm_ssdkv.profiling.table import Table

HERE: Final = (
    "exact, 3 drives, dram 0.2",
    "bounds, 3 drives, dram 0.2",
    "exact, 1 drives, dram 0.2",
    "bounds, 2 drives, dram 0.2",
)
"""Runs of ``ssdkv plan --validate``: two that calibrate, two that are predicted."""
LINE: Final = 100
"""Characters of a line of a page."""


def predictions(runs: Sequence[Mapping[str, Any]]) -> list[Prediction]:
    """Predictions of all runs that calibrate nothing, by those that do.

    Raises:
        BenchError: no run calibrates.
    """
    costs = fit(rows_of(run for run in runs if not run["predicted"]))
    rows = rows_of(run for run in runs if run["predicted"])
    known = [row for row in rows if row.get("selector", "reuse") in costs]
    return predict(known, costs)


def validate_here(console: Console, directory: Path | None = None) -> list[Prediction]:
    """Measure a few settings on throttled drives, now. Minutes.

    Raises:
        BenchError: an engine failed.
    """
    runs = []
    for run in (run for run in RUNS if run.name in HERE):
        rows = measure(run, directory, console)
        runs.append({"name": run.name, "predicted": run.predicted, "rows": rows})
    return predictions(runs)


def validation_table(found: Sequence[Prediction]) -> Table:
    """The table, misses in bold."""
    table = Table(
        "Predicted and measured", ["drives", "setting", "", "predicted", "measured", "off"]
    )
    for one in found:
        figures = [f"{one.predicted:.3g}", f"{one.measured:.3g}", f"{one.deviation:+.0%}"]
        cells = [f"**{text}**" for text in figures] if one.miss else figures
        table.add(one.drives, one.setting, one.what, *cells)
    inside = sum(not one.miss for one in found)
    table.note = f"{inside} of {len(found)} within {TOLERANCE:.0%}."
    return table


def summary(found: Sequence[Prediction]) -> Table:
    """Range of the deviations by mode and selector; the note has each miss with its numbers."""
    table = Table("Deviations", ["settings", "predictions", f"within {TOLERANCE:.0%}", "off"])
    kinds = [one.setting.rpartition(", ")[0] for one in found]
    for kind in dict.fromkeys(kinds):
        of = [one for one, its in zip(found, kinds, strict=True) if its == kind]
        off = sorted(one.deviation for one in of)
        inside = sum(not one.miss for one in of)
        table.add(kind, len(of), inside, f"{off[0]:+.0%} to {off[-1]:+.0%}")
    misses = [
        f"Missed: {one.setting}, {one.drives} drives: predicted {one.predicted:.3g} {one.what}, "
        f"measured {one.measured:.3g}."
        for one in found
        if one.miss
    ]
    table.note = " ".join([validation_table(found).note, *misses])
    return table


def section(path: Path) -> str:
    """Markdown of the summary, from the runs that a file has.

    Raises:
        BenchError: the file has no run that calibrates, or a line is no JSON.
    """
    runs = read_runs(path)
    table = summary(predictions(runs))
    loads = [run["load"] for run in runs]
    busy = f"Load of the two cores when the runs began: {min(loads):.1f} to {max(loads):.1f}."
    known = {run["name"] for run in runs}
    missing = [run.name for run in RUNS if run.predicted and run.name not in known]
    rest = f"Not measured: {'; '.join(missing)}." if missing else ""
    lines = table.markdown().splitlines()
    text = textwrap.fill(f"{table.note} {busy} {rest}".strip(), LINE)
    return "\n".join([*lines[2:-1], text]).strip()
