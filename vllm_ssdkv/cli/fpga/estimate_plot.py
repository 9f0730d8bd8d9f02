"""The picture of ``ssdkv lab fpga estimate``: time by length of the context, and what bounds it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from vllm_ssdkv.profiling.rig.plot import picture

_PARTS: Final = (
    ("flash_s", "SSD alone", "--", "C1"),
    ("memory_s", "DDR alone", ":", "C2"),
    ("kernel_s", "kernel alone", "-.", "C3"),
)
"""Parts of an estimate: key in a row, name, line, colour."""


def plot(document: Mapping[str, Any], path: Path) -> None:
    """Write the picture; the document as in the JSON file. Reads no display."""
    rows = document["rows"]
    names = list(dict.fromkeys(row["card"] for row in rows))
    with picture(path, 6 * len(names), 4.5, dpi=110) as figure:
        panels = figure.subplots(1, len(names), squeeze=False, sharey=True)[0]
        for axes, name in zip(panels, names, strict=True):
            mine = [row for row in rows if row["card"] == name]
            lengths = [row["context"] for row in mine]
            axes.plot(lengths, [row["total_s"] * 1e3 for row in mine], marker="o", label="step")
            for key, label, style, color in _PARTS:
                if mine[0][key] is not None:
                    axes.plot(
                        lengths,
                        [row[key] * 1e3 for row in mine],
                        ls=style,
                        color=color,
                        label=label,
                    )
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            axes.set_xlabel("tokens of each context")
            axes.set_title(f"{mine[0]['devices']} x {name}, batch {mine[0]['batch']}")
            axes.grid(visible=True, alpha=0.3)
            axes.legend(fontsize=8)
        panels[0].set_ylabel("ms for attention of all layers, estimated")
        figure.suptitle(f"cycles: {document['kernel']['name']}, {document['kernel']['origin']}")
