"""Draw a dashboard's panels from Prometheus, for whoever has no Grafana at hand."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from vllm_ssdkv.grafana.board import Board, Panel, fill_in
from vllm_ssdkv.grafana.prometheus import Prometheus, Series

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLUMNS: Final = 24
_INCHES_PER_COLUMN: Final = 0.62
_INCHES_PER_ROW: Final = 0.34
_DPI: Final = 80
_LEGEND_ENTRIES: Final = 6
_POINTS: Final = 240
_DAY_S: Final = 86400.0
"""Matplotlib's dates are days since 1970."""

_FIXED: Final = {"percentunit": (100.0, " %"), "none": (1.0, "")}
_SUFFIX: Final = {"ops": "/s", "iops": "/s", "decbytes": "B", "Bps": "B/s", "s": "s", "short": ""}

_PREFIXES: Final = ("", "k", "M", "G", "T", "P")


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


def ask(prometheus: Prometheus, panel: Panel, period: Period) -> list[tuple[str, Series]]:
    """Name and values of every series of a panel.

    Raises:
        PrometheusError: see :class:`Prometheus`.
    """
    return [
        (query.name(series.labels), series)
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
        series = ask(prometheus, panel, period)
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


def _draw_number(
    figure: Any,  # noqa: ANN401
    panel: Panel,
    series: list[tuple[str, Series]],
    x: float,
    top: float,
    rows: int,
) -> None:
    values = [one.values[-1] for _, one in series]
    text = "no data" if not values else format_value(float(values[0]), panel.unit)
    if panel.named:
        text = "\n".join(", ".join(name.split(", ")) for name, _ in series) or "no data"
    figure.text(x, top - 0.7 / rows, panel.title, fontsize=9, ha="center", color="#444444")
    size = 10 if panel.named else 20
    figure.text(x, top - 2.4 / rows, text, fontsize=size, ha="center", va="center", color="#1f60c4")


def _draw_lines(axes: Axes, panel: Panel, series: list[tuple[str, Series]], period: Period) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axes.set_title(panel.title, fontsize=9, loc="left", color="#444444")
    if not series:
        axes.text(0.5, 0.5, "no data", transform=axes.transAxes, ha="center", color="#999999")
    axes.set_xlim(period.start / _DAY_S, period.end / _DAY_S)
    below: dict[float, float] = {}
    for name, one in series:
        times = np.asarray(one.times) / _DAY_S
        bases = [below.get(t, 0.0) if panel.stacked else 0.0 for t in one.times]
        values = one.values + bases
        below.update(zip(one.times, values, strict=True))
        (line,) = axes.plot(times, values, linewidth=1.2, label=name, clip_on=False)
        if alone := _alone(values):  # else the legend would have dots, too
            line.set(marker="o", markersize=3, markevery=alone)
        alpha = 0.3 if panel.stacked else 0.05
        axes.fill_between(times, bases, values, alpha=alpha, color=line.get_color())
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_locator(MaxNLocator(4))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda v, _: format_value(v, panel.unit)))
    axes.xaxis.set_major_locator(_time_locator())
    axes.xaxis.set_major_formatter(_time_format(period))
    axes.tick_params(labelsize=7, colors="#666666")
    axes.grid(visible=True, color="#eeeeee")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    handles, labels = axes.get_legend_handles_labels()
    named = _largest(series)
    axes.legend(
        [handles[i] for i in named],
        [_shortened(labels[i]) for i in named],
        fontsize=6.5,
        ncols=2,
        frameon=False,
        loc="upper left",
        bbox_to_anchor=(-0.02, -0.16),
    )


def _alone(values: NDArray[np.float64]) -> list[int]:
    """Samples without a neighbour, of which a line would show nothing."""
    here = np.concatenate([[False], np.isfinite(values), [False]])
    found: list[int] = np.flatnonzero(here[1:-1] & ~here[:-2] & ~here[2:]).tolist()
    return found


def _largest(series: list[tuple[str, Series]]) -> list[int]:
    """Those that the legend has room for, in order: what is always 0 needs a name least."""
    height = [float(np.nan_to_num(one.values).max(initial=0)) for _, one in series]
    return sorted(sorted(range(len(series)), key=lambda i: -height[i])[:_LEGEND_ENTRIES])


def _time_locator() -> Any:  # noqa: ANN401
    from matplotlib.dates import AutoDateLocator

    return AutoDateLocator(minticks=3, maxticks=5)  # type: ignore[no-untyped-call]  # untyped there


def _time_format(period: Period) -> Any:  # noqa: ANN401
    from matplotlib.dates import DateFormatter

    text = "%H:%M:%S" if period.end - period.start < 600 else "%H:%M"
    return DateFormatter(text)  # type: ignore[no-untyped-call]  # untyped there


def _shortened(label: str, most: int = 34) -> str:
    return label if len(label) <= most else f"…{label[-most + 1 :]}"


def format_value(value: float, unit: str) -> str:
    """A number with its unit, as Grafana would write it. ``unit`` is Grafana's name of it."""
    if unit in _FIXED:
        factor, suffix = _FIXED[unit]
        return f"{value * factor:.4g}{suffix}"
    suffix = _SUFFIX[unit]
    if unit == "s" and 0 < abs(value) < 1:
        return f"{value * 1e3:.3g} ms" if abs(value) >= 1e-3 else f"{value * 1e6:.3g} µs"
    if unit == "s":
        return f"{value:.4g} s"
    power = 0
    while abs(value) >= 1000 and power < len(_PREFIXES) - 1:
        value, power = value / 1000, power + 1
    space = " " if power or suffix.startswith("B") else ""
    return f"{value:.3g}{space}{_PREFIXES[power]}{suffix}"
