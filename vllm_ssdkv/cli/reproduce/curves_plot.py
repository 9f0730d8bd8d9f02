"""The picture of ``ssdkv reproduce --figure``: our points, and those that a paper prints."""

from __future__ import annotations

from pathlib import Path

from vllm_ssdkv.base.errors import BenchError
from vllm_ssdkv.profiling.simulation.papers.curves import Curves


def plot(curves: Curves, path: Path) -> None:
    """Write the picture. Reads no display.

    Raises:
        BenchError: the file cannot be written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4.4), layout="constrained")
    axes = figure.subplots()
    for name, points in curves.ours.items():
        x, y = zip(*points, strict=True)
        axes.plot(x, y, marker="o", markersize=3, label=name)
    for name, points in curves.published.items():
        x, y = zip(*points, strict=True)
        axes.plot(x, y, "x", markersize=8, label=f"{name}, published")
    highest = max(x for points in curves.ours.values() for x, _ in points)
    if highest > 32:
        axes.set_xscale("log", base=2)
    axes.set(title=curves.title, xlabel=curves.x, ylabel=curves.y)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    try:
        figure.savefig(path)
    except OSError as error:
        raise BenchError(f"cannot write {path}: {error.strerror}") from error
