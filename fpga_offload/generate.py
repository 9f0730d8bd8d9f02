"""Files that other languages and tools read, from :mod:`vllm_ssdkv.fpga_offload.description`.

``ssdkv lab docs write`` writes them, ``ssdkv lab docs check`` fails when one is stale.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from vllm_ssdkv.fpga_offload import description
from vllm_ssdkv.fpga_offload.description import (
    BEAT_BYTES,
    CHANNEL_BEAT_BYTES,
    KERNELS,
    LAYOUTS,
    Argument,
    Flag,
    Kernel,
    Layout,
    Status,
)
from vllm_ssdkv.fpga_offload.vendor_files import connectivity, registers_tcl, rtl_top

NOTICE = "Generated from fpga_offload/description.py by `ssdkv lab docs write`; do not edit."
DIRECTORY = Path(__file__).parent / "generated"

_C_TYPES = {"address": "uint64_t", "u64": "uint64_t", "u32": "uint32_t", "i32": "int32_t"}
_C_TYPES["f32"] = "float"

_NUMBERS = (
    "VERSION",
    "PAGE_TOKENS",
    "BLOCK_TOKENS",
    "BEAT_BYTES",
    "CHANNEL_BEAT_BYTES",
    "SCORE_TOKENS",
    "MAX_GROUP",
    "MAX_JOB_ENTRIES",
    "MAX_SPARF_TOKENS",
    "MAX_JOBS",
)
"""Constants of the description that every language gets."""


def c_abi() -> str:
    """Header of the C ABI of ``csim`` and ``rtlsim``."""
    numbers = "\n".join(
        f"#define SSDKV_FPGA_{name} {getattr(description, name)}u" for name in _NUMBERS
    )
    flags = "\n".join(f"#define SSDKV_FPGA_FLAG_{one.name} {int(one)}u" for one in Flag)
    codes = "\n".join(f"#define SSDKV_FPGA_STATUS_{one.name} {int(one)}" for one in Status)
    places = "\n".join(
        f"#define SSDKV_FPGA_{kernel.name}_ARGUMENT_{argument.name} {place}u".upper()
        .replace("#DEFINE", "#define")
        .replace(f" {place}U", f" {place}u")
        for kernel in KERNELS
        for place, argument in enumerate(kernel.arguments)
    )
    structures = "\n\n".join(_c_layout(layout) for layout in LAYOUTS)
    arguments = "\n\n".join(_c_arguments(kernel) for kernel in KERNELS)
    calls = "\n".join(
        f"int32_t ssdkv_fpga_{kernel.name}(ssdkv_fpga_device* device,\n"
        f"                          const ssdkv_fpga_{kernel.name}_args* args);"
        for kernel in KERNELS
    )
    return f"""/* {NOTICE}
 *
 * C ABI of kernels in a shared library. Addresses are those of the process, as 64 bits.
 */
#ifndef SSDKV_FPGA_ABI_H
#define SSDKV_FPGA_ABI_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {{
#endif

{numbers}
/* Fingerprint of all arguments and records. */
#define SSDKV_FPGA_LAYOUT {description.layout_fingerprint():#010x}u

{flags}

{codes}

/* Places of arguments, as a status says them. */
{places}

{structures}

{arguments}

typedef struct ssdkv_fpga_device ssdkv_fpga_device;

/* SSDKV_FPGA_VERSION of the library. */
uint32_t ssdkv_fpga_version(void);
/* SSDKV_FPGA_LAYOUT of the library. */
uint32_t ssdkv_fpga_layout(void);
/* Kernels of one shape; of the flags BFLOAT16 counts. NULL: there are none. */
ssdkv_fpga_device* ssdkv_fpga_open(uint32_t head_size, uint32_t group, uint32_t flags);
void ssdkv_fpga_close(ssdkv_fpga_device* device);
/* Run a kernel to its end. One thread at a time per device. The status record is written, and its
 * code is returned. */
{calls}

#ifdef __cplusplus
}}
#endif

#endif
"""


def _c_layout(layout: Layout) -> str:
    lines = [f"/* {layout.doc} */", "typedef struct {"]
    for field in layout.fields:
        count = f"[{field.count}]" if field.count > 1 else ""
        lines += [f"  /* {field.doc} */", f"  {_C_TYPES[field.type]} {field.name}{count};"]
    return "\n".join([*lines, f"}} ssdkv_fpga_{layout.name};"])


def _c_arguments(kernel: Kernel) -> str:
    lines = [f"/* {kernel.doc} */", "typedef struct {"]
    for argument in kernel.arguments:
        lines += [f"  /* {argument.doc} */", f"  {_C_TYPES[argument.kind]} {argument.name};"]
    return "\n".join([*lines, f"}} ssdkv_fpga_{kernel.name}_args;"])


_HLS_TYPES = {
    "q": "beat_t",
    "pages": "beat_t",
    "channel_pages": "channel_beat_t",
    "entries": "entry_t",
    "channels": "std::uint64_t",
    "mean_value": "float_beat_t",
    "out": "float_beat_t",
    "masks": "std::uint32_t",
    "choices": "choice_t",
    "digests": "std::uint64_t",
    "status": "status_t",
}
"""Element types of the kernels' pointers, by argument; those of jobs are of the kernel."""


def hls_header() -> str:
    """Parameters of the HLS kernels, and their interfaces, as macros."""
    kernels = "\n\n".join(_hls_kernel(kernel) for kernel in KERNELS)
    return f"""// {NOTICE}
#pragma once

{kernels}
"""


def _hls_kernel(kernel: Kernel) -> str:
    prefix = f"SSDKV_FPGA_{kernel.name.upper()}"
    parameters, cast, pragmas = [], [], []
    for argument in kernel.arguments:
        pointer = _hls_pointer(kernel, argument)
        parameters.append(f"{pointer or f'std::{_C_TYPES[argument.kind]}'} {argument.name}")
        value = f"(args).{argument.name}"
        cast.append(f"reinterpret_cast<{pointer}>({value})" if pointer else value)
        if pointer:
            pragmas.append(f"m_axi port = {argument.name} bundle = {argument.port} offset = slave")
        pragmas.append(f"s_axilite port = {argument.name}")
    pragmas.append("s_axilite port = return")
    texts = [f'_Pragma("HLS INTERFACE {pragma}")' for pragma in pragmas]
    names = [argument.name for argument in kernel.arguments]
    return "\n\n".join(
        (
            f"// {kernel.doc}\n" + _macro(f"{prefix}_PARAMETERS", parameters, ","),
            _macro(f"{prefix}_NAMES", names, ","),
            "// The same, from the C ABI's structure.\n"
            + _macro(f"{prefix}_FROM(args)", cast, ","),
            _macro(f"{prefix}_INTERFACE", texts, ""),
        )
    )


def _hls_pointer(kernel: Kernel, argument: Argument) -> str:
    """Type of a pointer; empty for a number."""
    if argument.kind != "address":
        return ""
    jobs = "job_t" if kernel.name == "attend" else f"{kernel.name}_job_t"
    const = "const " if argument.direction == "in" else ""
    return f"{const}{_HLS_TYPES.get(argument.name, jobs)}*"


def _macro(name: str, parts: Sequence[str], separator: str) -> str:
    return f"#define {name} \\\n  " + f"{separator} \\\n  ".join(parts)


def svh() -> str:
    """Parameters of the RTL."""
    lines = [f"// {NOTICE}", "package ssdkv_fpga;"]
    lines += [f"localparam int {name} = {getattr(description, name)};" for name in _NUMBERS]
    lines += [f"localparam logic [31:0] FLAG_{one.name} = {int(one)};" for one in Flag]
    lines += [f"localparam logic [31:0] STATUS_{one.name} = {int(one)};" for one in Status]
    for name in ("CONTROL", "GLOBAL_INTERRUPT", "INTERRUPT_ENABLE", "INTERRUPT_STATUS"):
        lines.append(f"localparam logic [11:0] REG_{name} = 12'h{getattr(description, name):03x};")
    for kernel in KERNELS:
        for register in kernel.registers():
            name = f"{kernel.name}_{register.argument.name}".upper()
            lines.append(f"localparam logic [11:0] REG_{name} = 12'h{register.offset:03x};")
    for layout in LAYOUTS:
        lines.append(f"localparam int {layout.name.upper()}_BYTES = {layout.nbytes};")
        for field, offset in layout.offsets():
            name = f"{layout.name}_{field.name}".upper()
            lines.append(f"localparam int {name}_AT = {offset};")
    return "\n".join([*lines, "endpackage", ""])


def kernel_metadata(kernel: Kernel, address: int = 0x1800000) -> str:
    """A kernel as the metadata of an xclbin have it, with one unit whose registers lie at
    ``address``."""
    ports = {argument.port: 8 * BEAT_BYTES for argument in kernel.arguments if argument.port}
    if "gmem_channels" in ports:
        ports["gmem_channels"] = 8 * CHANNEL_BEAT_BYTES
    lines = [
        f'<kernel name="{kernel.name}" language="c">',
        '  <port name="S_AXI_CONTROL" mode="slave" range="0x1000" dataWidth="32"'
        ' portType="addressable" base="0x0"/>',
    ]
    lines += [
        f'  <port name="{port}" mode="master" range="0xFFFFFFFFFFFFFFFF" dataWidth="{width}"'
        ' portType="addressable" base="0x0"/>'
        for port, width in sorted(ports.items())
    ]
    for place, register in enumerate(kernel.registers()):
        argument = register.argument
        of_memory = argument.kind == "address"
        lines.append(
            f'  <arg name="{argument.name}" addressQualifier="{int(of_memory)}" id="{place}"'
            f' port="{argument.port or "S_AXI_CONTROL"}" size="{argument.nbytes:#x}"'
            f' offset="{register.offset:#x}" hostOffset="0x0" hostSize="{argument.nbytes:#x}"'
            f' type="{"void*" if of_memory else "uint"}"/>'
        )
    lines += [
        f'  <instance name="{kernel.name}_1">',
        f'    <addrRemap base="{address:#x}" port="S_AXI_CONTROL" range="0x1000"/>',
        "  </instance>",
        "</kernel>",
    ]
    return "\n".join([*lines, ""])


def lists() -> str:
    """Arguments and records as lists in Markdown."""
    parts = []
    for kernel in KERNELS:
        parts += [f"Kernel `{kernel.name}`: {kernel.doc}", _arguments(kernel)]
    for layout in LAYOUTS:
        parts += [f"Record `{layout.name}`, {layout.nbytes} bytes: {layout.doc}", _fields(layout)]
    return "\n\n".join(parts)


def _arguments(kernel: Kernel) -> str:
    return "\n".join(
        f"- `{one.argument.name}` ({one.offset:#05x}, {one.argument.kind}"
        f"{', written' if one.argument.direction == 'out' else ''}): {one.argument.doc}"
        for one in kernel.registers()
    )


def _fields(layout: Layout) -> str:
    return "\n".join(
        f"- `{field.name}` ({offset}, {field.type}"
        f"{f' x {field.count}' if field.count > 1 else ''}): {field.doc}"
        for field, offset in layout.offsets()
    )


FILES: Mapping[str, Callable[[], str]] = {
    "ssdkv_fpga.h": c_abi,
    "ssdkv_fpga_hls.h": hls_header,
    "ssdkv_fpga.svh": svh,
    **{
        f"{kernel.name}.xml": functools.partial(
            lambda one: f"<!-- {NOTICE} -->\n{kernel_metadata(one)}", kernel
        )
        for kernel in KERNELS
    },
    "connectivity.cfg": lambda: f"# {NOTICE}\n{connectivity()}",
    "registers.tcl": lambda: f"# {NOTICE}\n{registers_tcl()}",
    "attend_top.sv": lambda: f"// {NOTICE}\n{rtl_top('attend')}",
    "sparf_top.sv": lambda: f"// {NOTICE}\n{rtl_top('sparf')}",
}
"""Generated files, by name in ``generated/``."""


def write(directory: Path = DIRECTORY) -> None:
    """Write all files."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in FILES.items():
        (directory / name).write_text(text(), encoding="utf-8")


if __name__ == "__main__":
    write()
