"""Files for AMD's tools: connectivity of a link, registers of a kernel, its top with AXI ports.

They follow the documented interface (UG1393, on configuration files of ``v++`` and on packaging RTL
kernels) and were never run: the tools are not in any package index.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, TypeAlias

from vllm_ssdkv.fpga_offload.description import (
    BEAT_BYTES,
    CHANNEL_BEAT_BYTES,
    CONTROL,
    GLOBAL_INTERRUPT,
    INTERRUPT_ENABLE,
    INTERRUPT_STATUS,
    KERNELS,
    Kernel,
)

PLATFORM: Final = "xilinx_u2_gen3x4_xdma_gc_2_202110_1"
"""Platform of the SmartSSD."""
MEMORY: Final = "bank0"
"""Tag of its only DDR, as ``platforminfo`` lists it."""
RTL_PORTS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "gmem_q": "m_axi_list",
        "gmem_list": "m_axi_list",
        "gmem_pages": "m_axi_page",
        "gmem_channels": "m_axi_channel",
        "gmem_out": "m_axi_out",
    }
)
"""Port of the RTL kernels for each memory port of the description: queries come with the lists."""
READ_PORTS: Final[Mapping[str, Mapping[str, int]]] = MappingProxyType(
    {
        "attend": {"list": 8 * BEAT_BYTES, "page": 8 * BEAT_BYTES},
        "sparf": {
            "list": 8 * BEAT_BYTES,
            "page": 8 * BEAT_BYTES,
            "channel": 8 * CHANNEL_BEAT_BYTES,
        },
    }
)
"""Ports that each RTL kernel reads by, and their bits."""
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


def rtl_top(name: str) -> str:
    """Module around an RTL kernel, with the names and signals that Vitis wants of one."""
    groups = [
        ("s", "s_axi_control", _CONTROL_SIGNALS),
        *((port, f"m_axi_{port}", _read_signals(bits)) for port, bits in READ_PORTS[name].items()),
        ("out", "m_axi_out", _WRITE_SIGNALS),
    ]
    ports, connected, constant, ignored = [], [], [], []
    for short, long, signals in groups:
        for signal, (direction, bits, kind) in signals.items():
            width = f"[{bits - 1}:0]" if bits > 1 else ""
            ports.append(f"    {direction:6} wire {width:7} {long}_{signal}")
            if kind == "kernel":
                connected.append(f"        .{short}_{signal}({long}_{signal})")
            elif kind == "ignored":
                ignored.append(f"{long}_{signal}")
            else:
                constant.append(f"    assign {long}_{signal} = {kind};")
    lines = [
        f"// {_UNRUN} Elaborated by Verilator.",
        "// Bursts are incrementing. Their length says where they end.",
        "`default_nettype none",
        f"module {name}_top #(parameter D = 128, parameter G = 1) (",
        "    input  wire         ap_clk,",
        "    input  wire         ap_rst_n,",
        "    output wire         interrupt,",
        ",\n".join(ports),
        ");",
        "    // Vitis resets low; the reset is registered once, for its fan-out.",
        "    reg rst = 1'b1;",
        "    always @(posedge ap_clk) rst <= !ap_rst_n;",
        "",
        f"    {name} #(.D(D), .G(G)) kernel(",
        "        .clk(ap_clk), .rst(rst), .interrupt(interrupt),",
        ",\n".join(connected) + ");",
        "",
        *constant,
        "    wire unused = &{" + ",\n        ".join(ignored) + "};",
        "endmodule",
        "`default_nettype wire",
        "",
    ]
    return "\n".join(lines)


_Signals: TypeAlias = Mapping[str, tuple[str, int, str]]
"""Direction, bits, and what a signal is: of the ``kernel``, ``ignored``, or a constant."""
_CONTROL_SIGNALS: Final[_Signals] = {
    "awvalid": ("input", 1, "kernel"),
    "awready": ("output", 1, "kernel"),
    "awaddr": ("input", 12, "kernel"),
    "wvalid": ("input", 1, "kernel"),
    "wready": ("output", 1, "kernel"),
    "wdata": ("input", 32, "kernel"),
    "wstrb": ("input", 4, "kernel"),
    "bvalid": ("output", 1, "kernel"),
    "bready": ("input", 1, "kernel"),
    "bresp": ("output", 2, "2'b00"),
    "arvalid": ("input", 1, "kernel"),
    "arready": ("output", 1, "kernel"),
    "araddr": ("input", 12, "kernel"),
    "rvalid": ("output", 1, "kernel"),
    "rready": ("input", 1, "kernel"),
    "rdata": ("output", 32, "kernel"),
    "rresp": ("output", 2, "2'b00"),
}
_WRITE_SIGNALS: Final[_Signals] = {
    "awvalid": ("output", 1, "kernel"),
    "awready": ("input", 1, "kernel"),
    "awaddr": ("output", 64, "kernel"),
    "awlen": ("output", 8, "kernel"),
    "awsize": ("output", 3, "3'd6"),
    "awburst": ("output", 2, "2'b01"),
    "wvalid": ("output", 1, "kernel"),
    "wready": ("input", 1, "kernel"),
    "wdata": ("output", 8 * BEAT_BYTES, "kernel"),
    "wstrb": ("output", BEAT_BYTES, "kernel"),
    "wlast": ("output", 1, "kernel"),
    "bvalid": ("input", 1, "kernel"),
    "bready": ("output", 1, "kernel"),
    "bresp": ("input", 2, "kernel"),
}


def _read_signals(bits: int) -> _Signals:
    return {
        "arvalid": ("output", 1, "kernel"),
        "arready": ("input", 1, "kernel"),
        "araddr": ("output", 64, "kernel"),
        "arlen": ("output", 8, "kernel"),
        "arsize": ("output", 3, f"3'd{(bits // 8).bit_length() - 1}"),
        "arburst": ("output", 2, "2'b01"),
        "rvalid": ("input", 1, "kernel"),
        "rready": ("output", 1, "kernel"),
        "rdata": ("input", bits, "kernel"),
        "rresp": ("input", 2, "kernel"),
        "rlast": ("input", 1, "ignored"),
    }


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
