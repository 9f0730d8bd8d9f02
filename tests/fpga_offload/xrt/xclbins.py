"""xclbins for XRT's no-op device, made from the description of the kernels."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from xml.sax.saxutils import quoteattr

from vllm_ssdkv.fpga_offload.description import KERNELS, Kernel

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
    ports = sorted({argument.port for argument in kernel.arguments if argument.port})
    lines = [
        f'<kernel name={quoteattr(kernel.name)} language="c">',
        '<port name="S_AXI_CONTROL" mode="slave" range="0x1000" dataWidth="32" '
        'portType="addressable" base="0x0"/>',
    ]
    lines += [
        f'<port name={quoteattr(port)} mode="master" range="0xFFFFFFFFFFFFFFFF" '
        'dataWidth="512" portType="addressable" base="0x0"/>'
        for port in ports
    ]
    for place, register in enumerate(kernel.registers()):
        argument, offset = register.argument, register.offset + shift
        of_memory = argument.kind == "address"
        lines.append(
            f'<arg name={quoteattr(argument.name)} addressQualifier="{int(of_memory)}" '
            f'id="{place}" port={quoteattr(argument.port or "S_AXI_CONTROL")} '
            f'size="{argument.nbytes:#x}" offset="{offset:#x}" hostOffset="0x0" '
            f'hostSize="{argument.nbytes:#x}" type="{"void*" if of_memory else "uint"}"/>'
        )
    unit = f"<instance name={quoteattr(kernel.name + '_1')}>"
    lines.append(
        f'{unit}<addrRemap base="{address:#x}" port="S_AXI_CONTROL" range="0x1000"/></instance>'
    )
    return "".join([*lines, "</kernel>"])


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
