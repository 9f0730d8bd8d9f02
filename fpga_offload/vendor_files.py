"""Files for AMD's tools that hold arguments: connectivity of a link, registers of a kernel.

They follow the documented interface (UG1393, on configuration files of ``v++`` and on packaging RTL
kernels) and were never run: the tools are not in any package index.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from vllm_ssdkv.fpga_offload.description import (
    CONTROL,
    GLOBAL_INTERRUPT,
    INTERRUPT_ENABLE,
    INTERRUPT_STATUS,
    KERNELS,
    Kernel,
)

PLATFORM: Final = "xilinx_u2_gen3x4_xdma_gc_2_202110_1"
"""Of the SmartSSD."""
MEMORY: Final = "bank0"
"""Tag of its only DDR, as ``platforminfo`` lists it."""
RTL_PORTS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "gmem_q": "m_axi_list",
        "gmem_list": "m_axi_list",
        "gmem_pages": "m_axi_page",
        "gmem_channels": "m_axi_page",
        "gmem_out": "m_axi_out",
    }
)
"""Port of the RTL kernels for each memory port of the description: queries come with the lists."""
_UNRUN: Final = "Written to the documented interface, never run."
_CONTROL_REGISTERS: Final = (
    ("CTRL", CONTROL),
    ("GIER", GLOBAL_INTERRUPT),
    ("IP_IER", INTERRUPT_ENABLE),
    ("IP_ISR", INTERRUPT_STATUS),
)


def connectivity() -> str:
    """Configuration of ``v++ --link`` for one SmartSSD: each kernel once, all ports on its DDR."""
    lines = [f"# {_UNRUN}", f"# Platform {PLATFORM}.", "[connectivity]"]
    for kernel in KERNELS:
        lines.append(f"nk={kernel.name}:1:{kernel.name}_1")
        lines += [
            f"sp={kernel.name}_1.{argument.name}:{MEMORY}"
            for argument in kernel.arguments
            if argument.kind == "address"
        ]
    return "\n".join([*lines, ""])


def registers_tcl() -> str:
    """Tcl procedures that tell Vivado's IP packager the registers of each kernel."""
    lines = [f"# {_UNRUN}"]
    for kernel in KERNELS:
        lines += [f"proc {kernel.name}_registers {{block}} {{", *_registers(kernel), "}"]
    return "\n".join([*lines, ""])


def _registers(kernel: Kernel) -> list[str]:
    lines = []
    for name, offset in _CONTROL_REGISTERS:
        lines += _register(name, offset, 32)
    for register in kernel.registers():
        argument = register.argument
        lines += _register(argument.name, register.offset, 8 * argument.nbytes)
        if argument.kind == "address":
            lines += [
                "  set parameter [ipx::add_register_parameter ASSOCIATED_BUSIF $register]",
                f"  set_property value {RTL_PORTS[argument.port]} $parameter",
            ]
    return lines


def _register(name: str, offset: int, bits: int) -> list[str]:
    return [
        f"  set register [ipx::add_register {name} $block]",
        f"  set_property address_offset 0x{offset:03x} $register",
        f"  set_property size {bits} $register",
    ]
