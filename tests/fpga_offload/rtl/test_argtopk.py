"""The RTL's arg-top-k, simulated by Icarus."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from tests.fpga_offload.needs import needs_rtlsim
from vllm_ssdkv.fpga_offload.synth import RTL


@needs_rtlsim(128, 1)
def test_the_largest_are_taken_and_ties_by_place(tmp_path: Path) -> None:
    program = tmp_path / "argtopk.vvp"
    bench = Path(__file__).parent / "argtopk_tb.sv"
    built = ["iverilog", "-g2012", "-s", "argtopk_tb", "-o", program, bench, RTL / "argtopk.sv"]
    subprocess.run(built, check=True, timeout=60)
    said = subprocess.run(["vvp", program], check=True, timeout=120, capture_output=True, text=True)
    found = re.search(r"wrong (\d+) taken (\d+)", said.stdout)
    assert found is not None, said.stdout
    assert int(found[1]) == 0
    assert int(found[2]) > 1000
