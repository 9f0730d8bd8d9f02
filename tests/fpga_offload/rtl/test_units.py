"""Units of the RTL by themselves, simulated by Icarus."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import numpy as np
import pytest

from tests.fpga_offload.needs import needs_rtlsim
from vllm_ssdkv.base.checksum import checksum_pages
from vllm_ssdkv.fpga_offload.description import HEAD_SIZES
from vllm_ssdkv.fpga_offload.synth import RTL


def simulate(unit: str, folder: Path, **parameters: int) -> str:
    """Output of the bench of a unit, which runs in the folder."""
    program, bench = folder / f"{unit}.vvp", Path(__file__).parent / f"{unit}_tb.sv"
    top = f"{unit}_tb"
    given = [f"-P{top}.{name}={value}" for name, value in parameters.items()]
    built = ["iverilog", "-g2012", "-s", top, *given, "-o", program, bench, RTL / f"{unit}.sv"]
    subprocess.run([str(part) for part in built], check=True, timeout=60)
    said = subprocess.run(
        ["vvp", program], check=True, timeout=120, capture_output=True, text=True, cwd=folder
    )
    return said.stdout


@needs_rtlsim(128, 1)
@pytest.mark.parametrize("digit", [4, 8])
def test_the_largest_are_taken_and_ties_by_place(tmp_path: Path, digit: int) -> None:
    said = simulate("argtopk", tmp_path, DIGIT=digit)
    found = re.search(r"wrong (\d+) taken (\d+)", said)
    assert found is not None, said
    assert int(found[1]) == 0
    assert int(found[2]) > 1000


@needs_rtlsim(128, 1)
def test_registers_speak_ap_ctrl_hs(tmp_path: Path) -> None:
    said = simulate("control_registers", tmp_path)
    assert "wrong 0" in said, said
    assert re.search(r"checks 1[0-9]", said), said


@needs_rtlsim(128, 1)
@pytest.mark.parametrize("pauses", [0, 1])
@pytest.mark.parametrize("head_size", HEAD_SIZES)
def test_checksums_are_the_stores(tmp_path: Path, head_size: int, pauses: int) -> None:
    """K of eight pages, then their V, and one page by itself between them; twice."""
    half, lines = 32 * head_size, []
    pages = np.random.default_rng(head_size).integers(0, 256, (18, 2, half), np.uint8)
    for first in (0, 9):
        order = [(first + i, i, 0) for i in range(8)] + [(first + 8, 16, 0), (first + 8, 16, 1)]
        for page, slot, value in order + [(first + i, i, 1) for i in range(8)]:
            for at in range(0, half, 64):
                beat = pages[page, value, at : at + 64][::-1].tobytes().hex()
                lines.append(f"{int(at == 0)}{value}{slot:02x}_{page:04x}_{beat}")
    (tmp_path / "beats.hex").write_text("\n".join(lines))
    said = simulate("checksum", tmp_path, D=head_size, BEATS=len(lines), PAUSES=pauses)
    found = {int(one): int(word, 16) for one, word in re.findall(r"digest (\d+) (\w+)", said)}
    address = pages.ctypes.data + 2 * half * np.arange(18, dtype=np.uint64)
    wanted = checksum_pages(address, 2 * half)
    assert found == dict(enumerate(wanted.tolist())), said
    if not pauses:
        cycles = re.search(r"cycles (\d+)", said)
        assert cycles is not None
        assert int(cycles[1]) < len(lines) + 60
