"""Libraries of another version are refused before any of their kernels is called."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from vllm_ssdkv.base.errors import FpgaVersionError
from vllm_ssdkv.fpga_offload.description import (
    KERNELS,
    VERSION,
    KernelShape,
    layout_fingerprint,
)
from vllm_ssdkv.fpga_offload.library import LibraryBackend
from vllm_ssdkv.fpga_offload.rtlsim import RtlsimBackend
from vllm_ssdkv.fpga_offload.xrt.runtime import BRIDGE, BRIDGE_VERSION, inspect

SHAPE = KernelShape(128, 1, "float16")
HALTS = [f"ssdkv_fpga_{name}" for name in ("open", "close", *(one.name for one in KERNELS))]
RIGHT = {"version": VERSION, "layout": layout_fingerprint()}


def build(path: Path, says: dict[str, int], halts: list[str]) -> Path:
    """Library whose functions answer with numbers, or end the process."""
    compiler = shutil.which("cc") or shutil.which("g++")
    if compiler is None:
        pytest.skip("no C compiler")
    source = path.with_suffix(".c")
    answers = [f"unsigned {name}(void) {{ return {value}u; }}" for name, value in says.items()]
    ends = [f"void {name}(void) {{ __builtin_trap(); }}" for name in halts]
    source.write_text("\n".join(answers + ends))
    command = [compiler, "-x", "c", "-shared", "-fPIC", str(source), "-o", str(path)]
    subprocess.run(command, check=True, timeout=60)
    return path


@pytest.mark.parametrize(
    ("changes", "halts", "text"),
    [
        ({"version": VERSION + 1}, HALTS, f"version {VERSION + 1}, and version {VERSION} is"),
        ({"layout": 7}, HALTS, "layout 0x00000007, and 0x[0-9a-f]{8} is needed"),
        ({"version": None}, HALTS, "has no function ssdkv_fpga_version"),
        ({"layout": None}, HALTS, "has no function ssdkv_fpga_layout"),
        ({}, HALTS[:-1], "has no function ssdkv_fpga_sparf"),
    ],
)
def test_another_abi_is_refused(
    tmp_path: Path, changes: dict[str, int | None], halts: list[str], text: str
) -> None:
    says = {f"ssdkv_fpga_{k}": v for k, v in (RIGHT | changes).items() if v is not None}
    path = build(tmp_path / "libssdkv_csim.so", says, halts)
    with pytest.raises(FpgaVersionError, match=f"{path}.* {text}.*build it again"):
        LibraryBackend("csim", path, SHAPE)


def test_a_simulation_without_faults_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSDKV_FPGA_BUILD", str(tmp_path))
    says = {f"ssdkv_fpga_{k}": v for k, v in RIGHT.items()} | {"ssdkv_fpga_open": 1}
    build(tmp_path / "rtlsim_d128_g1.so", says, [*HALTS[1:], "ssdkv_fpga_rtl_memory"])
    with pytest.raises(FpgaVersionError, match="has no function ssdkv_fpga_rtl_fault"):
        RtlsimBackend(SHAPE)


@pytest.mark.parametrize(
    ("says", "text"),
    [
        ({}, "has no function ssdkv_xrt_version"),
        ({"ssdkv_xrt_version": BRIDGE_VERSION - 1}, f"bridge of version {BRIDGE_VERSION - 1}"),
        ({"ssdkv_xrt_version": BRIDGE_VERSION}, "has no function ssdkv_xrt_error"),
    ],
)
def test_another_bridge_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: dict[str, int], text: str
) -> None:
    monkeypatch.setenv("SSDKV_FPGA_BUILD", str(tmp_path))
    build(tmp_path / BRIDGE, says, ["ssdkv_xrt_inspect"])
    with pytest.raises(FpgaVersionError, match=text):
        inspect("kernels.xclbin")
