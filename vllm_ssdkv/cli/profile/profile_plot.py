"""The picture of ``ssdkv profile``: heat maps of pages over steps, and what finds them."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from vllm_ssdkv.base.errors import BenchError
from vllm_ssdkv.profiling.clusters.trace import F32
from vllm_ssdkv.profiling.table import Table


def plot(table: Table, heat: dict[str, F32], path: Path) -> None:
    """Write the picture. Reads no display.

    Raises:
        BenchError: the file cannot be written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.2 * len(heat), 9), layout="constrained")
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
    height = 0.8 / len(heat)
    for column, name in enumerate(heat, 1):
        values = [row[column] for row in rows]
        axes.barh(np.arange(len(rows)) + height * column, values, height, label=name)  # type: ignore[arg-type] # floats, see above
    axes.set_yticks(np.arange(len(rows)) + 0.5, [str(row[0]) for row in rows], fontsize=8)
    axes.invert_yaxis()
    axes.axvline(10, color="black", linewidth=1, linestyle=":")
    axes.set_xlabel("%")
    axes.grid(axis="x", alpha=0.3)
    axes.legend()
    try:
        figure.savefig(path, dpi=110)
    except OSError as error:
        raise BenchError(f"cannot write {path}: {error.strerror}") from error
