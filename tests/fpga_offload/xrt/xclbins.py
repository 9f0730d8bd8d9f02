"""xclbins for XRT's no-op device, made from the description of the kernels."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

from vllm_ssdkv.fpga_offload.description import KERNELS, Kernel
from vllm_ssdkv.fpga_offload.generate import kernel_metadata

_CORE = (
    '<?xml version="1.0" encoding="UTF-8"?><project name="test">'
    '<platform vendor="xilinx" boardid="u2" name="gen3x4_xdma_gc">'
    '<device name="fpga0" fpgaDevice="kintexuplus:xcku15p:ffve1760:-2:e">'
    '<core name="OCL_REGION_0" target="bitstream" type="clc_region" clockFreq="300MHz" '
    f'numComputeUnits="{len(KERNELS)}">%s</core></device></platform></project>'
)
_FIRST_UNIT = 0x1800000
_UNIT_BYTES = 0x10000


def _metadata(kernel: Kernel, address: int, shift: int) -> str:
    return re.sub(
        r' offset="(\w+)"',
        lambda found: f' offset="{int(found[1], 16) + shift:#x}"',
        kernel_metadata(kernel, address),
    )


def maker(folder: Path, include: Path) -> Callable[..., Path]:
    """Compile the packer, and answer with what makes an xclbin in ``folder``.

    That takes its ``name``, the ``kernels`` in it, and ``shift``, by which their registers lie
    elsewhere than in this version.
    """
    program = folder / "make_xclbin"
    source = Path(__file__).parent / "make_xclbin.cpp"
    # XRT's header is C, and full of what C++ warns of.
    command = ["g++", "-std=c++20", "-w", "-fpermissive", f"-isystem{include}", str(source)]
    subprocess.run([*command, "-o", str(program)], check=True, timeout=120)

    def make(name: str, kernels: Sequence[Kernel] = KERNELS, shift: int = 0) -> Path:
        target, metadata = folder / f"{name}.xclbin", folder / f"{name}.xml"
        units = [(one, _FIRST_UNIT + i * _UNIT_BYTES) for i, one in enumerate(kernels)]
        metadata.write_text(_CORE % "".join(_metadata(one, at, shift) for one, at in units))
        listed = [
            word for one, at in units for word in (one.name, str(at), str(len(one.arguments)))
        ]
        subprocess.run([program, target, metadata, *listed], check=True, timeout=60)
        return target

    return make
