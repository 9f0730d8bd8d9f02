"""The papers' figures of FPGA kernels beside ours, each with where it comes from.

HILOS (Jang et al., ASPLOS 2026), Table 3, and InstInfer (Pan et al., arXiv 2409.04992), its table
of resources. Power is not among them: nothing here can measure it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vllm_ssdkv.base.errors import BenchError
from vllm_ssdkv.fpga_offload.cards import (
    CARDS,
    HILOS_CELLS,
    HILOS_GFLOPS,
    INSTINFER_ATTENTION,
    INSTINFER_FILTERS,
    INSTINFER_TOPK,
    Origin,
    Resources,
)
from vllm_ssdkv.fpga_offload.estimator import attend_bandwidth, simulated_cycles
from vllm_ssdkv.fpga_offload.results import Cells, Cycles

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
        origin: Of ours.
        tolerance: Within which ours has to be, relative; None: the two are different things.
        note: Why they differ, or what makes them equal.
    """

    name: str
    paper: str
    published: float
    ours: float | None
    origin: Origin
    tolerance: float | None
    note: str

    @property
    def ratio(self) -> float | None:
        """Ours over theirs."""
        return None if self.ours is None else self.ours / self.published

    @property
    def holds(self) -> bool | None:
        """True if ours is within the tolerance; None: nothing is claimed, or ours is missing."""
        if self.ratio is None or self.tolerance is None:
            return None
        return abs(self.ratio - 1) <= self.tolerance


def figures(cycles: Sequence[Cycles], cells: Sequence[Cells]) -> list[Figure]:
    """All figures, with what the results of simulation and synthesis say beside them."""
    return [*speeds(cycles), *hilos_cells(cells), *instinfer_cells(cells)]


def speeds(cycles: Sequence[Cycles]) -> list[Figure]:
    """GFLOPS of HILOS' kernel (P20), by the simulated kernel behind the card's memory.

    One constant, the memory's efficiency, is calibrated for all three.
    """
    card = CARDS["smartssd"]
    found = []
    for group, published in HILOS_GFLOPS.items():
        ours, note = None, ""
        try:
            kernel = simulated_cycles(cycles, kernel="attend", head_size=_HEAD, group=group)
        except BenchError:
            note = "Our kernel was not simulated for this group."
        else:
            ours = group * attend_bandwidth(card, kernel) / 1e9
            fast = kernel.bandwidth(card.clock.value) > ours * 1e9 / group
            who = "by the calibrated memory; our kernel is faster" if fast else "by our kernel"
            note = f"P20: bound {who}."
        name = f"P20 attention, GFLOPS, G = {group}"
        found.append(Figure(name, "HILOS", published, ours, "calibrated", 0.05, note))
    return found


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
        found.append(Figure(title, "HILOS", theirs_each, ours_each, "synthesised", None, note))
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
            found.append(Figure(title, paper, published, ours, "synthesised", None, note))
    return found


def _find(cells: Sequence[Cells], design: str, family: str, group: int) -> Cells | None:
    """A design with heads of 128 channels."""
    for row in cells:
        if (row.design, row.family, row.group, row.head_size) == (design, family, group, _HEAD):
            return row
    return None
