"""The picture of ``ssdkv lab profile``: heat maps of pages over steps, and what finds them."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from vllm_ssdkv.profiling.clusters.trace import F32
from vllm_ssdkv.profiling.rig.plot import bars, picture
from vllm_ssdkv.profiling.table import Table


def plot(table: Table, heat: dict[str, F32], path: Path) -> None:
    """Write the picture. Reads no display."""
    with picture(path, 5.2 * len(heat), 9, dpi=110) as figure:
        grid = figure.add_gridspec(2, len(heat))
        for column, (name, mass) in enumerate(heat.items()):
            axes = figure.add_subplot(grid[0, column])
            image = axes.imshow(
                np.log10(np.maximum(mass, 1e-6)).T, aspect="auto", origin="lower", cmap="magma"
            )
            axes.set(title=name, xlabel="decode step", ylabel="page")
            figure.colorbar(image, ax=axes, label="log10 of mass")
        axes = figure.add_subplot(grid[1, :])
        rows = [row for row in table.rows if all(isinstance(cell, float) for cell in row[1:])]
        columns = {
            name: [float(row[column] or 0) for row in rows] for column, name in enumerate(heat, 1)
        }
        bars(axes, [str(row[0]) for row in rows], columns, 8)
        axes.axvline(10, color="black", linewidth=1, linestyle=":")
        axes.set_xlabel("%")
