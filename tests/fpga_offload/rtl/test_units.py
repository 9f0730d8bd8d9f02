"""Units of the RTL by themselves, simulated by Icarus."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.fpga_offload.needs import needs_rtlsim
from vllm_ssdkv.fpga_offload.synth import RTL


def simulate(unit: str, folder: Path, *options: str) -> str:
    """Output of the bench of a unit. ``options``: of Icarus."""
    program, bench = folder / f"{unit}.vvp", Path(__file__).parent / f"{unit}_tb.sv"
    top = f"{unit}_tb"
    built = ["iverilog", "-g2012", *options, "-s", top, "-o", program, bench, RTL / f"{unit}.sv"]
    subprocess.run([str(part) for part in built], check=True, timeout=60)
    said = subprocess.run(["vvp", program], check=True, timeout=120, capture_output=True, text=True)
    return said.stdout


@needs_rtlsim(128, 1)
@pytest.mark.parametrize("digit", [4, 8])
def test_the_largest_are_taken_and_ties_by_place(tmp_path: Path, digit: int) -> None:
    said = simulate("argtopk", tmp_path, f"-Pargtopk_tb.DIGIT={digit}")
    found = re.search(r"wrong (\d+) taken (\d+)", said)
    assert found is not None, said
    assert int(found[1]) == 0
    assert int(found[2]) > 1000


@needs_rtlsim(128, 1)
def test_registers_speak_ap_ctrl_hs(tmp_path: Path) -> None:
    said = simulate("control_registers", tmp_path)
    assert "wrong 0" in said, said
    assert re.search(r"checks 1[0-9]", said), said
