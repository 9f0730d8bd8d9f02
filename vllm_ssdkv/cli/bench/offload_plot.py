"""The picture of ``ssdkv lab bench offload``: speed, scaling, write-back, bytes over the link."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from vllm_ssdkv.profiling.rig.plot import picture, stacked

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Row = dict[str, Any]

_IN_DRAM: Final = {"none": "--", "host": ":", "shared": "-."}
"""Lines of the ways to attend to contexts in DRAM."""


def plot(document: Row, path: Path) -> None:
    """Write the picture; the document as in the JSON file. Reads no display."""
    rows: list[Row] = document["rows"]
    plain = [row for row in rows if not row["interval"]]
    largest = {name: max(row[name] for row in rows) for name in ("context", "batch")}
    mine = [row for row in plain if all(row[name] == value for name, value in largest.items())]
    with picture(path, 13, 8.5, dpi=110) as figure:
        axes = figure.subplots(2, 2)
        _speed(axes[0, 0], mine)
        _scaling(axes[0, 1], mine)
        _write_back(axes[1, 0], [row for row in rows if row["interval"]], document["writes"])
        near = [row for row in mine if row["place"] in ("dram", "flash")]
        near = [row for row in near if row["way"] not in ("none", "shared")]
        _link(axes[1, 1], near)
        figure.suptitle(
            f"{largest['batch']} x {largest['context']} tokens, drives slower by "
            f"{document['dilation']:g}, budget {document['budget']:g}"
        )


def _name(row: Row) -> str:
    where = "" if row["place"] in ("dram", "flash") else f" over {row['place']}'s link"
    return f"{row['way']}{where}, {row['selector']}"


def _curves(axes: Axes, rows: Sequence[Row], *, relative: bool) -> None:
    """Tokens/s over the number of drives, or over those of one drive."""
    for name in dict.fromkeys(map(_name, rows)):
        points = sorted((row["drives"], row["tokens_per_s"]) for row in rows if _name(row) == name)
        drives = [number for number, _ in points]
        if len(set(drives)) < 2:
            continue
        base = points[0][1] * 1.0 / drives[0] if relative else 1.0
        axes.plot(drives, [speed / base for _, speed in points], marker="o", label=name)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xlabel("drives")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.grid(visible=True, alpha=0.3)


def _speed(axes: Axes, rows: Sequence[Row]) -> None:
    exact = [row for row in rows if row["selector"] == "exact"]
    _curves(axes, [row for row in exact if row["drives"]], relative=False)
    for row in exact:
        if row["place"] == "dram":
            style = _IN_DRAM[row["way"]]
            axes.axhline(row["tokens_per_s"], ls=style, color="gray", label=f"{row['way']}, DRAM")
    axes.set_ylabel("tokens/s")
    axes.legend(fontsize=7)


def _scaling(axes: Axes, rows: Sequence[Row]) -> None:
    twins = [row for row in rows if row["place"] == "flash"]
    _curves(axes, twins, relative=True)
    drives = sorted({row["drives"] for row in twins})
    axes.plot(drives, drives, color="black", lw=0.8, label="linear")
    axes.set_ylabel("times one drive")
    axes.legend(fontsize=7)


def _write_back(axes: Axes, charged: Sequence[Row], written: Sequence[Row]) -> None:
    """Speed by the tokens between two writes: lines of drives that attend, dots of the store."""
    curves = [(row["way"], "-", row) for row in charged]
    curves += [(f"store to {row['profile']}", ":", row) for row in written]
    for name, style in dict.fromkeys((name, style) for name, style, _ in curves):
        mine = {row["interval"]: row["tokens_per_s"] for one, _, row in curves if one == name}
        best = max(mine.values())
        speeds = [speed / best for speed in mine.values()]
        axes.plot(list(mine), speeds, style, marker="o", label=name)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_xlabel("tokens between two writes")
    axes.set_ylabel("of the best")
    axes.set_ylim(0, 1.05)
    axes.grid(visible=True, alpha=0.3)
    if curves:
        axes.legend(fontsize=7)


def _link(axes: Axes, rows: Sequence[Row]) -> None:
    names = [f"{row['way']} {row['drives'] or ''}\n{row['selector']}" for row in rows]
    payloads = list(rows[0]["link_bytes"]) if rows else []
    place = list(range(len(rows)))
    stacked(axes, place, {name: [row["link_bytes"][name] for row in rows] for name in payloads})
    wanted = [row["link_formula"] for row in rows]
    axes.plot(place, wanted, "_", color="black", markersize=10, label="formula")
    axes.set_xticks(place, names, fontsize=5, rotation=90)
    axes.set_ylabel("bytes per row, token and layer")
    axes.legend(fontsize=7)
