"""The picture of ``ssdkv bench clusters``: a panel for each table of figures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from vllm_ssdkv.base.errors import BenchError
from vllm_ssdkv.profiling.table import Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLUMNS = 2
_LINE = 0.17
"""Inches of a bar."""


def plot(tables: Sequence[Table], path: Path) -> None:
    """Write the picture; tables whose figures are words are left out. Reads no display.

    Raises:
        BenchError: the file cannot be written.
    """
    from matplotlib.figure import Figure

    shown = [table for table in tables if _figures(table)]
    lines = -(-len(shown) // _COLUMNS)
    heights = [
        max(2.5, _LINE * max(len(table.rows) for table in shown[i : i + _COLUMNS]) + 1.2)
        for i in range(0, len(shown), _COLUMNS)
    ]
    figure = Figure(figsize=(9 * _COLUMNS, sum(heights)), layout="constrained")
    axes = figure.subplots(lines, _COLUMNS, squeeze=False, height_ratios=heights).ravel()
    for table, panel in zip(shown, axes, strict=False):
        _bars(panel, table)
    for panel in axes[len(shown) :]:
        panel.set_visible(False)
    try:
        figure.savefig(path, dpi=90)
    except OSError as error:
        raise BenchError(f"cannot write {path}: {error.strerror}") from error


def _figures(table: Table) -> list[int]:
    """Columns of floats."""
    return [
        number
        for number in range(1, len(table.columns))
        if any(isinstance(row[number], float) for row in table.rows)
    ]


def _bars(axes: Axes, table: Table) -> None:
    """A bar for each row and column of figures."""
    columns = _figures(table)
    height = 0.8 / len(columns)
    place = np.arange(len(table.rows))
    for number, column in enumerate(columns):
        values = [row[column] if isinstance(row[column], float) else 0.0 for row in table.rows]
        axes.barh(place + height * number, values, height, label=table.columns[column])  # type: ignore[arg-type] # floats, see above
    words = [c for c in range(len(table.columns)) if c not in columns]
    labels = [", ".join(table.text(row[c]) for c in words) for row in table.rows]
    axes.set_yticks(place + 0.4, labels, fontsize=7)
    axes.invert_yaxis()
    axes.set_title(table.title, fontsize=10)
    axes.grid(axis="x", alpha=0.3)
    axes.legend(fontsize=7)
