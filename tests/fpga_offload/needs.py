"""Marks of tests that need what `make fpga` builds: skipped by name, a failure where it must be."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from vllm_ssdkv.fpga_offload.description import KernelShape
from vllm_ssdkv.fpga_offload.rtlsim import rtlsim_library
from vllm_ssdkv.fpga_offload.xrt.runtime import bridge_path

XRT_HEADERS = Path("/usr/include/xrt")


def _needs(*files: Path) -> pytest.MarkDecorator:
    missing = [str(path) for path in files if not path.exists()]
    required = os.environ.get("SSDKV_FPGA_REQUIRED") == "1"
    return pytest.mark.skipif(
        bool(missing) and not required, reason=f"{', '.join(missing)}: run `make fpga`"
    )


def needs_rtlsim(head_size: int, group: int) -> pytest.MarkDecorator:
    """The simulated RTL of a shape."""
    return _needs(rtlsim_library(KernelShape(head_size, group, "float16")))


def needs_xrt() -> pytest.MarkDecorator:
    """XRT and the bridge to it."""
    return _needs(bridge_path(), XRT_HEADERS)


def build_shape(shape: str) -> None:
    """Build the simulated RTL of a shape, as ``scripts/fpga.sh`` names it. Blocks for minutes."""
    script = Path(__file__).parents[2] / "scripts" / "fpga.sh"
    subprocess.run([script, shape], check=True, timeout=3600)
