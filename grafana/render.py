"""Draw a dashboard's panels from Prometheus, for whoever has no Grafana at hand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from vllm_ssdkv.grafana.board import Board, Panel, Query, fill_in
from vllm_ssdkv.grafana.legend import ShortLabels
from vllm_ssdkv.grafana.prometheus import Prometheus, Series
from vllm_ssdkv.grafana.values import format_value

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLUMNS: Final = 24
_INCHES_PER_COLUMN: Final = 0.62
_INCHES_PER_ROW: Final = 0.34
_DPI: Final = 80
_LEGEND_ENTRIES: Final = 6
_LEGEND_CHARS: Final = 36
_POINTS: Final = 240
_DAY_S: Final = 86400.0
"""Matplotlib's dates are days since 1970."""

_TICKS_S: Final = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600)
_MOST_TICKS: Final = 6
_COLORS: Final = {"red": "#d44a3a", "orange": "#ff9830", "blue": "#1f60c4"}
"""Colours by Grafana's names."""

Named = tuple[str, NDArray[np.float64]]
"""A series: its name, and its values on the period's grid, NaN where it has none."""


@dataclass(frozen=True, slots=True)
class Period:
    """What is drawn.

    Attributes:
        start: Seconds since 1970.
        end: The same.
        rate_interval_s: Grafana's ``$__rate_interval``: four times the scrape interval, at least.
    """

    start: float
    end: float
    rate_interval_s: float

    @property
    def step_s(self) -> float:
        """Seconds between two points."""
        return max((self.end - self.start) / _POINTS, self.rate_interval_s / 8)

    def times(self) -> NDArray[np.float64]:
        """Seconds since 1970 of all points."""
        count = int((self.end - self.start) / self.step_s + 1.5)
        return self.start + self.step_s * np.arange(count, dtype=np.float64)

    def on_grid(self, series: Series) -> NDArray[np.float64]:
        """A value for each of the :meth:`times`, NaN where there is none: a line then has a gap."""
        grid = np.full(len(self.times()), np.nan)
        at = np.rint((series.times - self.start) / self.step_s).astype(np.int64)
        inside = (at >= 0) & (at < len(grid))
        grid[at[inside]] = series.values[inside]
        return grid


def ask(prometheus: Prometheus, panel: Panel, period: Period) -> list[tuple[Query, Series]]:
    """Every series of a panel, and the query that it answers.

    Raises:
        PrometheusError: see :class:`Prometheus`.
    """
    return [
        (query, series)
        for query in panel.queries
        for series in prometheus.query_range(
            fill_in(query.expression, period.rate_interval_s),
            period.start,
            period.end,
            period.step_s,
        )
    ]


def render(board: Board, prometheus: Prometheus, period: Period, path: Path) -> int:
    """Draw a dashboard into a PNG file.

    Returns:
        Panels without data.

    Raises:
        PrometheusError: see :class:`Prometheus`.
        OSError: the file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    asked = {panel: ask(prometheus, panel, period) for panel in board.panels}
    labels = ShortLabels(series.labels for found in asked.values() for _, series in found)
    rows = max(panel.y + panel.height for panel in board.panels) + 2
    width, height = _COLUMNS * _INCHES_PER_COLUMN, rows * _INCHES_PER_ROW
    figure = Figure(figsize=(width, height), dpi=_DPI, facecolor="white")
    FigureCanvasAgg(figure)
    begin, end = (datetime.fromtimestamp(t, UTC) for t in (period.start, period.end))
    when = f"{begin:%Y-%m-%d %H:%M} to {end:%H:%M} UTC"
    figure.text(0.01, 1 - 1 / rows, board.title, fontsize=15, weight="bold", va="center")
    figure.text(0.99, 1 - 1 / rows, when, fontsize=9, ha="right", va="center", color="#666666")
    empty = 0
    for panel in board.panels:
        top = 1 - (panel.y + 2) / rows
        left = panel.x / _COLUMNS
        if panel.kind == "row":
            figure.text(left + 0.01, top - 0.6 / rows, panel.title, fontsize=12, weight="bold")
            continue
        series = [
            (_name(query, labels.of(one.labels)), period.on_grid(one))
            for query, one in asked[panel]
        ]
        empty += not series
        box = (
            left + 0.045,
            top - (panel.height - 2.4) / rows,
            panel.width / _COLUMNS - 0.06,
            (panel.height - 3.6) / rows,
        )
        if panel.kind == "stat":
            _draw_number(figure, panel, series, left + panel.width / 2 / _COLUMNS, top, rows)
        else:
            _draw_lines(figure.add_axes(box), panel, series, period)
    figure.savefig(path)
    return empty


def _name(query: Query, labels: Mapping[str, str]) -> str:
    """Legend of a series; of labels that are left out, what stood between them goes, too."""
    return " ".join(word for word in query.name(labels).split() if word != "/")


def _draw_number(
    figure: Any,  # noqa: ANN401
    panel: Panel,
    series: list[Named],
    x: float,
    top: float,
    rows: int,
) -> None:
    known = [values[np.isfinite(values)] for _, values in series]
    values = [float(one[-1]) for one in known if len(one)]
    text = format_value(values[0], panel.unit) if values else "no data"
    if panel.named:
        text = "\n".join(name for name, _ in series) or "no data"
    reached = [limit.color for limit in panel.limits if values and values[0] >= limit.value]
    color = _COLORS[reached[-1] if reached else "blue"]
    figure.text(x, top - 0.7 / rows, panel.title, fontsize=9, ha="center", color="#444444")
    size = 10 if panel.named else 20
    figure.text(x, top - 2.4 / rows, text, fontsize=size, ha="center", va="center", color=color)


def _draw_lines(axes: Axes, panel: Panel, series: list[Named], period: Period) -> None:
    axes.set_title(panel.title, fontsize=9, loc="left", color="#444444")
    if not series:
        axes.text(0.5, 0.5, "no data", transform=axes.transAxes, ha="center", color="#999999")
    times = period.times() / _DAY_S
    below, lines = np.zeros(len(times)), []
    for _, own in series:
        values = own + below if panel.stacked else own
        bases = below.copy()
        if panel.stacked:
            below += np.nan_to_num(own)
        (line,) = axes.plot(times, values, linewidth=1.2, clip_on=False)
        lines.append(line)
        if alone := _alone(values):  # else the legend would have dots, too
            line.set(marker="o", markersize=3, markevery=alone)
        alpha = 0.3 if panel.stacked else 0.05
        axes.fill_between(times, bases, values, alpha=alpha, color=line.get_color())
    _draw_axes(axes, panel, series, period)
    _draw_limits(axes, panel)
    named, others = _in_legend(series)
    shown = [lines[i] for i in named]
    # A series may have no name of its own, as that of the only node.
    names = [_shortened(series[i][0] or panel.title) for i in named]
    if others:
        (nothing,) = axes.plot([], [], alpha=0)
        shown, names = [*shown, nothing], [*names, others]
    axes.legend(
        shown,
        names,
        fontsize=6.5,
        ncols=2,
        frameon=False,
        loc="upper left",
        bbox_to_anchor=(-0.02, -0.16),
    )


def _draw_axes(axes: Axes, panel: Panel, series: list[Named], period: Period) -> None:
    from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator

    axes.set_xlim(period.start / _DAY_S, period.end / _DAY_S)
    highest = axes.get_ylim()[1] if any(np.nanmax(own, initial=0) > 0 for _, own in series) else 1
    axes.set_ylim(bottom=0, top=highest)
    known = np.concatenate([np.zeros(0), *(own[np.isfinite(own)] for _, own in series)])
    whole = panel.unit == "none" and bool((known == np.rint(known)).all())
    # Round numbers of the unit that is written.
    power = int(np.log(max(highest, 1)) / np.log(1024)) if panel.unit == "bytes" else 0
    ticks = MaxNLocator(4, integer=whole).tick_values(0, highest / 1024**power)
    axes.yaxis.set_major_locator(FixedLocator([tick * 1024.0**power for tick in ticks]))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda v, _: format_value(v, panel.unit)))
    axes.xaxis.set_major_locator(FixedLocator(time_ticks(period)))
    axes.xaxis.set_major_formatter(_time_format(period))
    axes.tick_params(labelsize=7, colors="#666666")
    axes.grid(visible=True, color="#eeeeee")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _draw_limits(axes: Axes, panel: Panel) -> None:
    """Where limits are within twice of what the lines reach: else they would flatten these."""
    _, top = axes.get_ylim()
    near = [limit for limit in panel.limits if limit.value <= 2 * top]
    for limit in near:
        axes.axhline(limit.value, color=_COLORS[limit.color], linewidth=1, linestyle=(0, (4, 3)))
    axes.set_ylim(top=max([top, *(1.05 * limit.value for limit in near)]))


def _alone(values: NDArray[np.float64]) -> list[int]:
    """Samples without a neighbour, of which a line would show nothing."""
    here = np.concatenate([[False], np.isfinite(values), [False]])
    found: list[int] = np.flatnonzero(here[1:-1] & ~here[:-2] & ~here[2:]).tolist()
    return found


def _in_legend(series: list[Named]) -> tuple[list[int], str]:
    """Those that the legend has room for, in order, and a line about the others: what is always 0
    needs a name least."""
    height = [float(np.nan_to_num(own).max(initial=0)) for _, own in series]
    wanted = sorted(range(len(series)), key=lambda i: -height[i])
    if len(series) > _LEGEND_ENTRIES:
        wanted = [i for i in wanted if height[i] > 0][:_LEGEND_ENTRIES] or wanted[:1]
    left = [height[i] for i in range(len(series)) if i not in wanted]
    others = f"and {len(left)} more{', all 0' if not any(left) else ''}" if left else ""
    return sorted(wanted), others


def time_ticks(period: Period) -> list[float]:
    """Round times of day, a few of them, as matplotlib's dates."""
    length = period.end - period.start
    days = -(-length // (_MOST_TICKS * _DAY_S))
    step = next((s for s in _TICKS_S if length / s <= _MOST_TICKS), max(1, days) * _DAY_S)
    first = -(-period.start // step) * step
    return [float(t / _DAY_S) for t in np.arange(first, period.end, step)]


def _time_format(period: Period) -> Any:  # noqa: ANN401
    from matplotlib.dates import DateFormatter

    length = period.end - period.start
    text = "%H:%M:%S" if length < 600 else "%H:%M" if length < 2 * _DAY_S else "%m-%d %H:%M"
    return DateFormatter(text)  # type: ignore[no-untyped-call]  # untyped there


def _shortened(label: str) -> str:
    return label if len(label) <= _LEGEND_CHARS else f"{label[: _LEGEND_CHARS - 1]}…"
