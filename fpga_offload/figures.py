"""The papers' counts of cells of FPGA kernels beside ours, which were synthesised.

HILOS (Jang et al., ASPLOS 2026), Table 3, and InstInfer (Pan et al., arXiv 2409.04992), its table
of resources. Power is not among them: nothing here can measure it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vllm_ssdkv.fpga_offload.cards import (
    HILOS_CELLS,
    INSTINFER_ATTENTION,
    INSTINFER_FILTERS,
    INSTINFER_TOPK,
    Resources,
)
from vllm_ssdkv.fpga_offload.results import Cells

_HEAD = 128
_CORE = "The paper's kernel, its buffers and its ports; ours the core without buses."
_SHELL = "The paper's counts have the platform's shell; compare what a query head adds."


@dataclass(frozen=True, slots=True)
class Figure:
    """A published figure, and ours.

    Attributes:
        name: What was measured, with its unit.
        paper: It is of.
        published: Value.
        ours: Value; None: not simulated, or not synthesised.
        note: Why they differ, or what makes them equal.
    """

    name: str
    paper: str
    published: float
    ours: float | None
    note: str

    @property
    def ratio(self) -> float | None:
        """Ours over theirs."""
        return None if self.ours is None else self.ours / self.published


def figures(cells: Sequence[Cells]) -> list[Figure]:
    """All figures, with what the results of synthesis say beside them."""
    return [*hilos_cells(cells), *instinfer_cells(cells)]


def hilos_cells(cells: Sequence[Cells]) -> list[Figure]:
    """Cells of HILOS' kernels, and what each query head adds to them."""
    found = []
    for group, theirs in HILOS_CELLS.items():
        row = _find(cells, "core", "xcup", group)
        found += _compared(f"core, G = {group}", "HILOS", theirs, row, _SHELL)
    first, last = HILOS_CELLS[1], HILOS_CELLS[5]
    ours_first, ours_last = (_find(cells, "core", "xcup", group) for group in (1, 5))
    for name in ("lut", "dsp"):
        theirs_each = (getattr(last, name) - getattr(first, name)) / 4
        ours_each = None
        if ours_first is not None and ours_last is not None:
            ours_each = (getattr(ours_last, name) - getattr(ours_first, name)) / 4
        title = f"{name.upper()} of a query head more"
        note = "From G = 1 to 5. Yosys counts more LUTs than Vivado does."
        found.append(Figure(title, "HILOS", theirs_each, ours_each, note))
    return found


def instinfer_cells(cells: Sequence[Cells]) -> list[Figure]:
    """Cells of InstInfer's units, on the family of the Zynq 7045."""
    parts = (
        ("core", INSTINFER_ATTENTION, "attention", _CORE),
        (
            "topk",
            INSTINFER_TOPK,
            "argtopk",
            "Ours selects by radix from up to 65,536 keys of 32 bits, which it keeps.",
        ),
        (
            "filter",
            INSTINFER_FILTERS,
            "row filters",
            "Theirs are eight, one in each flash channel; ours is one, behind the bus.",
        ),
    )
    found = []
    for design, theirs, name, note in parts:
        row = _find(cells, design, "xc7", 1)
        found += _compared(name, "InstInfer", theirs, row, note)
    return found


def _compared(
    name: str, paper: str, theirs: Resources, row: Cells | None, note: str
) -> list[Figure]:
    """A figure for each kind of cells that the paper counts."""
    found = []
    for kind in ("lut", "ff", "dsp", "bram36"):
        published = getattr(theirs, kind)
        if published:
            ours = None if row is None else float(getattr(row, kind))
            title = f"{kind.upper()} of {name}"
            found.append(Figure(title, paper, published, ours, note))
    return found


def _find(cells: Sequence[Cells], design: str, family: str, group: int) -> Cells | None:
    """A design with heads of 128 channels."""
    for row in cells:
        if (row.design, row.family, row.group, row.head_size) == (design, family, group, _HEAD):
            return row
    return None
