"""Synthesis of the RTL by Yosys, for counts of cells: no clock, no placement, no power.

Yosys runs in the environment that ``make fpga`` brings. Modules are mapped one by one and counted
by how often they stand in the design, so that an adder is mapped once. Look-up tables come out
higher than with the vendor's tools, multipliers and block RAMs are what they are.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from vllm_ssdkv.base.errors import FpgaError
from vllm_ssdkv.fpga_offload.results import Cells
from vllm_ssdkv.fpga_offload.rtlsim import build_folder

Family = Literal["xcup", "xc7"]
RTL: Final = Path(__file__).parent / "rtl"
PACKAGE: Final = Path(__file__).parent / "generated" / "ssdkv_fpga.svh"
_RUN: Final = (
    "import sys\n"
    "from pyosys import libyosys\n"
    "libyosys.run_pass('script ' + sys.argv[1], libyosys.Design())\n"
)


@dataclass(frozen=True, slots=True)
class Design:
    """A part of the engine that is synthesised by itself.

    Attributes:
        top: Its module.
        head_size: Whether the module is made for one.
        group: Likewise.
    """

    top: str
    head_size: bool = False
    group: bool = False


DESIGNS: Final[Mapping[str, Design]] = {
    "core": Design("attention_core", head_size=True, group=True),
    "attend": Design("attend", head_size=True, group=True),
    "sparf": Design("sparf", head_size=True, group=True),
    "choice": Design("channel_choice", head_size=True, group=True),
    "scores": Design("channel_scores", head_size=True, group=True),
    "mix": Design("mean_mix", head_size=True, group=True),
    "mass": Design("token_mass", group=True),
    "axi": Design("page_reader", head_size=True),
    "filter": Design("row_filter"),
    "topk": Design("argtopk"),
    "checksum": Design("checksum", head_size=True),
}
"""Designs by their names in the results."""


def synthesise(
    design: str, family: Family, head_size: int = 128, group: int = 1, timeout_s: float = 1800.0
) -> Cells:
    """Map a design to a family's cells, and count them.

    Args:
        design: Of :data:`DESIGNS`.
        family: ``xcup``: that of the KU15P. ``xc7``: that of the Zynq 7045.
        head_size: Channels of a head, where the design has one.
        group: Query heads of a KV head, likewise.
        timeout_s: Yosys is ended then.

    Raises:
        FpgaError: Yosys is missing, fails, or takes too long.
    """
    part = DESIGNS[design]
    parameters = {"D": head_size} if part.head_size else {}
    parameters |= {"G": group} if part.group else {}
    top = f"/{part.top}.sv"
    # The top is read at once: where one that is deferred has a filter in it, Yosys makes it twice.
    sources = [
        line.replace(" -defer", "") if line.endswith(top) else line for line in read_sources()
    ]
    sources.sort(key=lambda line: line.endswith(top))
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="ssdkv-synth-") as folder:
        counts = Path(folder) / "stat.json"
        run_yosys(
            [
                *sources,
                *(f"chparam -set {name} {value} {part.top}" for name, value in parameters.items()),
                f"hierarchy -top {part.top}",
                f"rename -top {part.top}",
                f"synth_xilinx -family {family} -top {part.top} -noiopad -noclkbuf",
                f"tee -q -o {counts} stat -json",
            ],
            timeout_s,
        )
        found = count_cells(json.loads(counts.read_text(encoding="utf-8")), part.top)
    seconds = time.monotonic() - start
    return _cells(found, design, family, head_size, group, seconds)


def map_unit(top: str, family: Family, netlist: Path, timeout_s: float = 600.0) -> None:
    """Write a unit as a flat netlist of a family's cells, to be simulated against the RTL.

    Raises:
        FpgaError: as :func:`synthesise`.
    """
    run_yosys(
        [
            *read_sources(),
            f"hierarchy -top {top}",
            f"synth_xilinx -family {family} -top {top} -flatten -noiopad -noclkbuf",
            f"rename {top} {top}_netlist",
            f"write_verilog -noattr {netlist}",
        ],
        timeout_s,
    )


def yosys_version() -> str:
    """Version of Yosys: that of the package which has it.

    Raises:
        FpgaError: it is missing.
    """
    program = "import importlib.metadata; print(importlib.metadata.version('pyosys'))"
    done = subprocess.run(
        [_yosys_python(), "-P", "-c", program],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    if done.returncode != 0:
        raise FpgaError(f"{build_folder()}: there is no Yosys; make fpga brings it")
    return done.stdout.strip()


def cell_models() -> Path:
    """Yosys' models of the cells, for simulation."""
    found = sorted((build_folder() / "venv").glob("lib/*/site-packages/**/xilinx/cells_sim.v"))
    if not found:
        raise FpgaError(f"{build_folder()}: there are no models of cells; make fpga brings Yosys")
    return found[0]


def read_sources() -> list[str]:
    """Commands of Yosys that read the RTL and the operators below it."""
    sources = sorted(RTL.glob("*.sv"))
    return [
        f"read_verilog -defer {build_folder() / 'zkf.v'}",
        f"read_verilog -sv {PACKAGE}",
        *(f"read_verilog -sv -defer {source}" for source in sources),
    ]


def run_yosys(commands: list[str], timeout_s: float) -> None:
    """Run commands of Yosys.

    Raises:
        FpgaError: as :func:`synthesise`.
    """
    python = _yosys_python()
    with tempfile.TemporaryDirectory(prefix="ssdkv-yosys-") as folder:
        script = Path(folder) / "script.ys"
        script.write_text("\n".join(commands) + "\n", encoding="utf-8")
        try:
            done = subprocess.run(
                [python, "-P", "-c", _RUN, script],
                env={**os.environ, "LC_ALL": "C.UTF-8"},
                capture_output=True,
                text=True,
                timeout=timeout_s,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise FpgaError(f"Yosys did not end within {timeout_s:.0f} s") from error
    if done.returncode != 0:
        tail = "\n".join((done.stdout + done.stderr).splitlines()[-5:])
        raise FpgaError(f"Yosys failed with status {done.returncode}: {tail}")


def _yosys_python() -> Path:
    python = build_folder() / "venv" / "bin" / "python"
    if not python.exists():
        raise FpgaError(f"{python}: there is no Yosys; make fpga brings it")
    return python


def count_cells(statistics: Mapping[str, Any], top: str) -> Counter[str]:
    """Cells below a module, by type, from Yosys' ``stat -json`` of modules that are not flat."""
    modules = {name.lstrip("\\"): content for name, content in statistics["modules"].items()}
    known: dict[str, Counter[str]] = {}

    def below(name: str) -> Counter[str]:
        if name not in known:
            found: Counter[str] = Counter()
            for kind, count in modules[name]["num_cells_by_type"].items():
                kind = kind.lstrip("\\")  # noqa: PLW2901  (one name for both spellings)
                if kind in modules:
                    for cell, each in below(kind).items():
                        found[cell] += each * count
                else:
                    found[kind] += count
            known[name] = found
        return known[name]

    roots = [name for name in modules if name == top or f"\\{top}" in name]
    if len(roots) != 1:
        raise FpgaError(f"Yosys made {len(roots)} modules of {top}")
    return below(roots[0])


def _cells(
    found: Counter[str], design: str, family: str, head_size: int, group: int, seconds: float
) -> Cells:
    def count(pattern: str) -> int:
        return sum(number for kind, number in found.items() if re.fullmatch(pattern, kind))

    memory = 0
    for kind, number in found.items():
        memory += number * _LUTS_OF_MEMORY.get(kind, 1 if kind.startswith("SRL") else 0)
    return Cells(
        design,
        family,
        head_size,
        group,
        lut=count(r"LUT\d|INV") + memory,
        ff=count(r"FD\w+"),
        dsp=count(r"DSP48\w+"),
        bram36=count(r"RAMB36\w+") + count(r"RAMB18\w+") / 2,
        uram=count(r"URAM\w+"),
        seconds=round(seconds, 1),
    )


_LUTS_OF_MEMORY: Final[Mapping[str, int]] = {
    "RAM32X1D": 2,
    "RAM64X1D": 2,
    "RAM128X1D": 4,
    "RAM32M": 4,
    "RAM64M": 4,
    "RAM32M16": 8,
    "RAM64M8": 8,
    "RAM256X1D": 8,
    "RAM512X1S": 8,
}
"""Look-up tables that a memory made of them takes."""
