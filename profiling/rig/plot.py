"""Pictures of results: curves, stacked columns and bars, drawn without a display."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_ssdkv.base.errors import BenchError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SUFFIXES = (".png", ".svg", ".pdf")
Points = Sequence[tuple[float, float]]


def require_plot(path: Path) -> None:
    """Check, before anything is measured, that a plot can be drawn.

    Raises:
        BenchError: the file type is unknown, or matplotlib is not installed.
    """
    if path.suffix not in SUFFIXES:
        raise BenchError(f"{path} does not end in {', '.join(SUFFIXES)}")
    try:
        import matplotlib as _  # noqa: F401
    except ImportError:
        raise BenchError("a plot needs matplotlib: pip install matplotlib") from None


@contextmanager
def picture(path: Path, width: float, height: float, dpi: float | None = None) -> Iterator[Figure]:
    """A figure of so many inches, which is written when it is drawn.

    Raises:
        BenchError: the file cannot be written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    yield figure
    try:
        figure.savefig(path, dpi=dpi or "figure")
    except OSError as error:
        raise BenchError(f"cannot write {path}: {error.strerror}") from error


def curves(
    axes: Axes,
    lines: Mapping[str, Points],
    marker: str = "o",
    **style: Any,  # noqa: ANN401 - of matplotlib's plot
) -> None:
    """Draw a line per name."""
    for name, points in lines.items():
        axes.plot(*zip(*points, strict=True), marker=marker, label=name, **style)


def powers_of_two(
    axes: Axes, ticks: Sequence[float] = (), labels: Sequence[str] | None = None
) -> None:
    """Make x logarithmic; ``ticks``: those that are shown, and how."""
    axes.set_xscale("log", base=2)
    if ticks:
        axes.set_xticks(ticks, labels or [f"{tick:g}" for tick in ticks])
    axes.grid(visible=True, alpha=0.3)


def stacked(
    axes: Axes,
    names: Sequence[Any],
    parts: Mapping[str, Sequence[float]],
    colors: Sequence[str | None] = (),
) -> None:
    """Draw a column per name, of parts on each other."""
    below = [0.0] * len(names)
    for number, (part, heights) in enumerate(parts.items()):
        color = colors[number] if colors else None
        axes.bar(names, heights, bottom=below, color=color, label=part)
        below = [low + high for low, high in zip(below, heights, strict=True)]


def bars(
    axes: Axes, rows: Sequence[str], columns: Mapping[str, Sequence[float]], fontsize: float
) -> None:
    """Draw bars to the right, one per row and column, the first row on top."""
    height = 0.8 / len(columns)
    for number, (name, values) in enumerate(columns.items()):
        places = [row + height * number for row in range(len(rows))]
        axes.barh(places, values, height, label=name)
    middle = (0.8 - height) / 2
    axes.set_yticks([row + middle for row in range(len(rows))], rows, fontsize=fontsize)
    axes.invert_yaxis()
    axes.grid(axis="x", alpha=0.3)
    axes.legend(fontsize=fontsize)
