"""The picture of ``ssdkv lab reproduce --figure``: our points, and those that a paper prints."""

from __future__ import annotations

from pathlib import Path

from vllm_ssdkv.profiling.rig.plot import curves, picture
from vllm_ssdkv.profiling.simulation.papers.curves import Curves


def plot(given: Curves, path: Path) -> None:
    """Write the picture. Reads no display."""
    with picture(path, 6.4, 4.4) as figure:
        axes = figure.subplots()
        curves(axes, given.ours, markersize=3)
        published = {f"{name}, published": points for name, points in given.published.items()}
        curves(axes, published, "x", linestyle="", markersize=8)
        highest = max(x for points in given.ours.values() for x, _ in points)
        if highest > 32:
            axes.set_xscale("log", base=2)
        axes.set(title=given.title, xlabel=given.x, ylabel=given.y)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
