"""The picture of ``ssdkv lab bench decode``: tokens per second over context, and a step's parts."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from vllm_ssdkv.kernels.step_clock import PARTS
from vllm_ssdkv.profiling.rig.plot import curves, picture, powers_of_two, stacked

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_SPLIT: Final = (*PARTS, "other")
_COLORS: Final = (
    *("tab:purple", "tab:orange", "tab:olive", "tab:red", "tab:blue", "tab:cyan"),
    "tab:gray",
)

_TITLE_COLUMNS: Final = 55
"""Characters that fit above the plots of one batch size."""

Row = dict[str, Any]


def plot(document: Row, path: Path) -> None:
    """Write the picture; the document as in the JSON file. Reads no display."""
    rows: list[Row] = document["rows"]
    batches = sorted({row["requests"] for row in rows})
    with picture(path, 5.2 * len(batches), 7.5, dpi=110) as figure:
        axes = figure.subplots(2, len(batches), squeeze=False)
        for column, batch in enumerate(batches):
            mine = [row for row in rows if row["requests"] == batch]
            _speed(axes[0, column], mine)
            axes[0, column].set_title(f"{batch} request{'s' if batch > 1 else ''} at a time")
            _split(axes[1, column], mine)
        rule, devices = document["model"], document["devices"]
        title = (
            f"{devices} emulated devices of {rule['bandwidth'] / 2**20:g} MiB/s, {rule['iops']:g} "
            f"requests/s and {1000 * rule['latency']:g} ms each; budget {document['budget']:g}"
        )
        figure.suptitle(textwrap.fill(title, _TITLE_COLUMNS * len(batches)))


def _speed(axes: Axes, rows: list[Row]) -> None:
    from matplotlib.ticker import LogLocator

    lengths = sorted({row["context"] for row in rows})
    lines = {
        name: [(row["context"], row["tokens_per_s"]) for row in rows if row["selector"] == name]
        for name in dict.fromkeys(row["selector"] for row in rows)
    }
    curves(axes, lines)
    powers_of_two(axes, lengths)
    axes.set_yscale("log")
    axes.yaxis.set_minor_locator(LogLocator(subs=(2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("{x:g}")
    axes.set_xlabel("context, tokens")
    axes.set_ylabel("tokens/s")
    axes.grid(visible=True, which="both", alpha=0.3)
    axes.legend()


def _split(axes: Axes, rows: list[Row]) -> None:
    names = [f"{row['selector']}\n{row['context']}" for row in rows]
    parts = {part: [1000 * row["parts_s"][part] for row in rows] for part in _SPLIT}
    stacked(axes, names, parts, _COLORS)
    io = [1000 * row["io_s"] for row in rows]
    axes.plot(names, io, "_", color="black", markersize=24, label="I/O of the busiest device")
    axes.set_ylabel("ms per step")
    axes.tick_params(axis="x", labelsize=8)
    axes.legend(fontsize=8)
