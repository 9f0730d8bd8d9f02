"""Curves of throughput over I/O size, one panel per direction, depth and number of devices."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm_ssdkv.base.errors import BenchError
from vllm_ssdkv.base.sizes import format_size


def plot(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Write the picture; rows as in the JSON document. Reads no display.

    Raises:
        BenchError: nothing was measured, or the file cannot be written.
    """
    from matplotlib.figure import Figure

    measured = [row for row in rows if "bytes_per_s" in row]
    panels = sorted({(row["op"], row["devices"], row["depth"]) for row in measured})
    if not panels:
        raise BenchError("nothing was measured: there is nothing to plot")
    columns = min(3, len(panels))
    lines = -(-len(panels) // columns)
    figure = Figure(figsize=(5.5 * columns, 3.6 * lines), layout="constrained")
    axes = figure.subplots(lines, columns, squeeze=False).ravel()
    for (op, devices, depth), axis in zip(panels, axes, strict=False):
        here = [
            row
            for row in measured
            if (row["op"], row["devices"], row["depth"]) == (op, devices, depth)
        ]
        for name in dict.fromkeys(row["contender"] for row in here):
            points = sorted(
                (row["size"], row["bytes_per_s"] / 1e6) for row in here if row["contender"] == name
            )
            sizes, rates = zip(*points, strict=True)
            axis.plot(sizes, rates, marker="o", markersize=3, label=name)
        ticks = sorted({row["size"] for row in here})
        axis.set(
            title=f"{op}, {devices} device(s), depth {depth}",
            xscale="log",
            yscale="log",
            xlabel="I/O size",
            ylabel="MB/s",
        )
        axis.set_xticks(ticks, [format_size(size) for size in ticks])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    for axis in axes[len(panels) :]:
        axis.set_visible(False)
    handles = {
        label: handle
        for axis in figure.axes
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)
    }
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=5)
    try:
        figure.savefig(path, dpi=120)
    except OSError as error:
        raise BenchError(f"{path} cannot be written: {error.strerror}") from error
