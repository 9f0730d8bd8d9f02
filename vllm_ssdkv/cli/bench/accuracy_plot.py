"""The picture of ``ssdkv lab bench accuracy``: right answers by budget, by task and length."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_ssdkv.profiling.recall.recall import TASKS
from vllm_ssdkv.profiling.rig.plot import picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Row = dict[str, Any]


def plot(rows: list[Row], path: Path) -> None:
    """Write the picture; rows as in the JSON document. Reads no display."""
    lengths = sorted({row["context"] for row in rows})
    with picture(path, 3.2 * len(TASKS) + 3.2, 2.6 * len(lengths), dpi=110) as figure:
        axes = figure.subplots(len(lengths), len(TASKS) + 1, squeeze=False)
        for line, length in enumerate(lengths):
            here = [row for row in rows if row["context"] == length]
            for column, task in enumerate(TASKS):
                asked = here[0]["asked"]
                panel = axes[line, column]
                _curves(panel, here, [100 * row["right"][task] / asked for row in here])
                panel.set_title(f"{task}, {length} tokens, {asked} questions", fontsize=9)
                panel.set_ylim(-4, 104)
                panel.set_ylabel("% right")
            _curves(axes[line, -1], here, [_error(row) for row in here])
            axes[line, -1].set_title(f"error of attention, {length} tokens", fontsize=9)
            axes[line, -1].set_ylabel("relative L2")
        handles, labels = axes[0, 0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))


def _curves(axes: Axes, rows: list[Row], values: list[float]) -> None:
    """A line per selector over its budgets; ``exact`` has one value for all. Later ones are
    thinner, so that curves that lie on each other are all seen."""
    shares = sorted({row["budget"] for row in rows if row["selector"] != "exact"})
    width = 6.0
    for name in dict.fromkeys(row["selector"] for row in rows):
        mine = [
            (row["budget"], value)
            for row, value in zip(rows, values, strict=True)
            if row["selector"] == name
        ]
        if name == "exact":
            axes.axhline(mine[0][1], color="black", linewidth=1, label=name)
        else:
            points = list(zip(*sorted(mine), strict=True))
            axes.plot(*points, marker="o", markersize=width + 2, linewidth=width, label=name)
            width = max(1.0, width / 1.8)
    axes.set_xscale("log", base=2)
    axes.set_xticks(shares, [as_fraction(share) for share in shares])
    axes.minorticks_off()
    axes.invert_xaxis()
    axes.set_xlabel("budget")
    axes.grid(visible=True, alpha=0.3)


def as_fraction(share: float) -> str:
    """A budget as it is mostly named: 1/8."""
    return str(Fraction(share).limit_denominator(1000))


def as_percent(share: float) -> str:
    """A small budget as it is mostly named: 5 %."""
    return f"{100 * share:g} %"


def _error(row: Row) -> float:
    """Mean over the layers; exact attention has none."""
    layers = row.get("deviation", [])
    return float(sum(layer["relative_l2"] for layer in layers)) / max(1, len(layers))
