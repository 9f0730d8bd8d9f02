"""Synthesis: budgets of cells, and a mapped netlist that does what the RTL does."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.fpga_offload.needs import needs_rtlsim
from vllm_ssdkv.base.errors import FpgaError
from vllm_ssdkv.fpga_offload.results import Cells, read_synthesis
from vllm_ssdkv.fpga_offload.rtlsim import build_folder
from vllm_ssdkv.fpga_offload.synth import (
    DESIGNS,
    RTL,
    Family,
    cell_models,
    count_cells,
    map_unit,
    run_yosys,
    synthesise,
    yosys_version,
)

NEEDS_TOOLS = needs_rtlsim(128, 1)
BUDGETS: dict[Family, tuple[int, int]] = {"xcup": (60_000, 100), "xc7": (65_000, 100)}
"""LUT and DSP of the core for one query head: a ninth of the KU15P, a third of the Zynq 7045."""
UNIT_BUDGETS = {"core": (10_000, 32), "checksum": (1_000, 8)}
"""Parts that are synthesised alone, and the LUT and DSP that each takes at least."""
CHECKSUM_BUDGET = 6_000, 50


def within_budget(cells: Cells, family: Family) -> bool:
    lut, dsp = BUDGETS[family] if cells.design == "core" else CHECKSUM_BUDGET
    least_lut, least_dsp = UNIT_BUDGETS[cells.design]
    return least_lut < cells.lut <= lut and least_dsp < cells.dsp <= dsp


@pytest.mark.soak
@NEEDS_TOOLS
@pytest.mark.parametrize("family", BUDGETS)
@pytest.mark.parametrize("design", UNIT_BUDGETS)
def test_a_design_fits_its_budget(design: str, family: Family) -> None:
    """Minutes of Yosys; the counts on record are checked each time."""
    cells = synthesise(design, family)
    assert within_budget(cells, family), cells


@NEEDS_TOOLS
def test_the_row_filter_is_counted_as_on_record() -> None:
    """A small unit, to see that counts follow from the RTL as it is."""
    recorded = {(row.design, row.family): row for row in read_synthesis().rows}["filter", "xcup"]
    cells = synthesise("filter", "xcup", timeout_s=300)
    assert (cells.lut, cells.ff, cells.dsp) == (recorded.lut, recorded.ff, recorded.dsp)


@pytest.mark.parametrize("family", BUDGETS)
def test_recorded_counts_are_within_the_budgets(family: Family) -> None:
    rows = [row for row in read_synthesis().rows if row.family == family]
    cores = [row for row in rows if (row.design, row.group) == ("core", 1)]
    assert cores
    for row in cores + [row for row in rows if row.design == "checksum"]:
        assert within_budget(row, family), row
    assert {row.design for row in rows} <= set(DESIGNS)


@NEEDS_TOOLS
def test_a_netlist_does_what_the_rtl_does(tmp_path: Path) -> None:
    netlist, program = tmp_path / "netlist.v", tmp_path / "netlist.vvp"
    map_unit("mul_single_wide", "xc7", netlist)
    assert "DSP48E1" in netlist.read_text()
    sources = [
        Path(__file__).parent / "netlist_tb.sv",
        netlist,
        RTL / "float.sv",
        build_folder() / "zkf.v",
        cell_models(),
    ]
    built = ["iverilog", "-g2012", "-s", "netlist_tb", "-o", str(program), *map(str, sources)]
    subprocess.run(built, check=True, timeout=120)
    said = subprocess.run(["vvp", program], check=True, timeout=300, capture_output=True, text=True)
    found = re.search(r"mismatches (\d+) nonzero (\d+)", said.stdout)
    assert found is not None, said.stdout
    assert int(found[1]) == 0
    assert int(found[2]) > 10_000


@NEEDS_TOOLS
def test_the_version_of_yosys_is_that_of_the_lock() -> None:
    lock = (Path(__file__).parents[3] / "requirements" / "fpga.lock").read_text()
    assert f"pyosys=={yosys_version()}" in lock


@NEEDS_TOOLS
def test_what_yosys_refuses_is_told() -> None:
    with pytest.raises(FpgaError, match="Yosys failed with status"):
        run_yosys(["hierarchy -top nothing"], 60)


def test_a_missing_yosys_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSDKV_FPGA_BUILD", str(tmp_path))
    with pytest.raises(FpgaError, match="there is no Yosys; make fpga brings it"):
        run_yosys([], 1)
    with pytest.raises(FpgaError, match="no models of cells"):
        cell_models()
    with pytest.raises(FpgaError, match="there is no Yosys"):
        yosys_version()


def test_cells_are_counted_by_how_often_their_module_stands_there() -> None:
    modules = {
        "\\top": {"num_cells_by_type": {"pair": 2, "FDRE": 1}},
        "\\pair": {"num_cells_by_type": {"adder": 2, "LUT2": 1}},
        "\\adder": {"num_cells_by_type": {"LUT6": 5, "DSP48E2": 1}},
    }
    found = count_cells({"modules": modules}, "top")
    assert found == {"LUT6": 20, "DSP48E2": 4, "LUT2": 2, "FDRE": 1}
