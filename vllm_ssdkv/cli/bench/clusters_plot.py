"""The picture of ``ssdkv lab bench clusters``: a panel for each table of figures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_ssdkv.profiling.rig.plot import bars, picture
from vllm_ssdkv.profiling.table import Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLUMNS = 2
_LINE = 0.17
"""Inches of a bar."""


def plot(tables: Sequence[Table], path: Path) -> None:
    """Write the picture; tables whose figures are words are left out. Reads no display."""
    shown = [table for table in tables if _figures(table)]
    lines = -(-len(shown) // _COLUMNS)
    heights = [
        max(2.5, _LINE * max(len(table.rows) for table in shown[i : i + _COLUMNS]) + 1.2)
        for i in range(0, len(shown), _COLUMNS)
    ]
    with picture(path, 9 * _COLUMNS, sum(heights), dpi=90) as figure:
        axes = figure.subplots(lines, _COLUMNS, squeeze=False, height_ratios=heights).ravel()
        for table, panel in zip(shown, axes, strict=False):
            _panel(panel, table)
        for panel in axes[len(shown) :]:
            panel.set_visible(False)


def _figures(table: Table) -> list[int]:
    """Columns of floats."""
    return [
        number
        for number in range(1, len(table.columns))
        if any(isinstance(row[number], float) for row in table.rows)
    ]


def _panel(axes: Axes, table: Table) -> None:
    """Draw a bar for each row and column of figures."""
    shown = _figures(table)
    columns = {
        table.columns[c]: [v if isinstance(v := row[c], float) else 0.0 for row in table.rows]
        for c in shown
    }
    words = [c for c in range(len(table.columns)) if c not in shown]
    bars(axes, [", ".join(table.text(row[c]) for c in words) for row in table.rows], columns, 7)
    axes.set_title(table.title, fontsize=10)
