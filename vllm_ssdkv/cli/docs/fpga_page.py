"""The generated page about the FPGA: cycles, cells, estimates, the papers' figures, arguments."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from vllm_ssdkv.cli.docs.doc_pages import NOTICE
from vllm_ssdkv.cli.fpga.estimate import estimate_rows
from vllm_ssdkv.cli.fpga.tables import (
    cells_table,
    constants_table,
    cycles_table,
    figures_table,
    steps_table,
)
from vllm_ssdkv.fpga_offload.cards import CARDS
from vllm_ssdkv.fpga_offload.estimator import DecodeStep, simulated_cycles
from vllm_ssdkv.fpga_offload.figures import figures
from vllm_ssdkv.fpga_offload.generate import lists
from vllm_ssdkv.fpga_offload.results import CYCLES, FOLDER, SYNTHESIS, read_cycles, read_synthesis
from vllm_ssdkv.profiling.table import Table

_WIDTH: Final = 100
_CONTEXTS: Final = (4096, 32768, 262144)
_INTRO: Final = """\
# FPGA kernels: tables

Simulation and synthesis of the kernels that [fpga.md](fpga.md) describes.
"""
_ESTIMATES: Final = (
    "`ssdkv lab fpga estimate` makes these from the cycles above and the constants below, for a "
    "decode step of one context with the attention of Llama-3.1-8B: 32 layers, 8 KV heads, G = 4, "
    "d = 128. Each chunk of pages comes while the kernel attends to the one before. In a SmartSSD "
    "every byte passes the memory twice: the drive writes it, the kernel reads it."
)
_DIFFERENCES: Final = """\
| difference | papers | here |
|---|---|---|
| tools | Vitis HLS and Vivado, placed and routed | RTL by hand; counts by Yosys, not placed |
| counts | with the platform's shell, AXI and DMA (HILOS) | without a shell |
| K of a block | transposed on chip | HLS: the same; RTL: a tree of adders, no transpose |
| softmax | base e, rescaled by multiplying | base 2, a whole number as maximum |
| output | normalised attention of a head | partial states, which merge over any split |
| addresses | a context in one piece, padded to 32 tokens | lists of pages in any order |
| checks of pages | not said | by digests, before the state is folded |
| sparse attention | SparF in the flash channels (InstInfer) | SparF behind the bus |
| power | 11 to 16 W (HILOS) | not measured |
"""
_RECORDS: Final = (
    "Behind an argument's name are its register and its kind, behind a field's its offset in bytes "
    "and its type."
)
_LAYERS, _KV_HEADS, _GROUP, _HEAD = 32, 8, 4, 128


def fpga_page(folder: Path = FOLDER) -> str:
    """Text of ``docs/fpga-tables.md``, from the results in ``folder``.

    Raises:
        BenchError: there are none, or they are damaged.
    """
    cycles = read_cycles(folder / CYCLES)
    cells = read_synthesis(folder / SYNTHESIS)
    line = simulated_cycles(cycles.rows, kernel="attend", head_size=_HEAD, group=_GROUP)
    steps = [
        DecodeStep(_LAYERS, 1, _KV_HEADS, _GROUP, _HEAD, tokens=tokens) for tokens in _CONTEXTS
    ]
    rows = estimate_rows(list(CARDS.values()), steps, line)
    sections: dict[str, list[str | Table]] = {
        "Cycles": [_made_by(cycles.command, cycles.tools), cycles_table(cycles.rows)],
        "Cells": [_made_by(cells.command, cells.tools), cells_table(cells.rows)],
        "Estimates": [_ESTIMATES, steps_table(rows), constants_table(list(CARDS.values()), line)],
        "Beside the papers": [figures_table(figures(cells.rows)), _DIFFERENCES],
        "Arguments and records": [_RECORDS, lists()],
    }
    parts = [NOTICE, _INTRO, *(f"## {name}\n\n{_text(parts)}" for name, parts in sections.items())]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def _made_by(command: str, tools: object) -> str:
    names = tools if isinstance(tools, dict) else {}
    versions = ", ".join(f"{name} {version}" for name, version in names.items())
    return f"By `{command}`{f', with {versions}' if versions else ''}:"


def _text(parts: Sequence[str | Table]) -> str:
    """Paragraphs and tables, without a line of prose that is too long."""
    lines = []
    for part in parts:
        text = part if isinstance(part, str) else part.markdown().strip()
        for line in text.splitlines():
            indent = "  " if line.startswith("- ") else ""
            wrapped = textwrap.wrap(line, _WIDTH, subsequent_indent=indent) or [""]
            lines += [line] if line.startswith("|") else wrapped
        lines.append("")
    return "\n".join(lines).strip()
