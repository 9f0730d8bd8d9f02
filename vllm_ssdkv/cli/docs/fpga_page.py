"""Generated tables of ``docs/fpga.md``: cycles, cells, estimates, and the papers' figures."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from vllm_ssdkv.cli.docs.doc_pages import with_section
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
from vllm_ssdkv.fpga_offload.results import CYCLES, FOLDER, SYNTHESIS, read_cycles, read_synthesis
from vllm_ssdkv.profiling.table import Table

_WIDTH: Final = 100
_CONTEXTS: Final = (4096, 32768, 262144)
_LAYERS, _KV_HEADS, _GROUP, _HEAD = 32, 8, 4, 128


def fpga_page(page: str, folder: Path = FOLDER) -> str:
    """The page with its tables made anew, from the results in ``folder``.

    Raises:
        BenchError: there are none, or they are damaged.
        ValueError: the page lacks a section.
    """
    cycles = read_cycles(folder / CYCLES)
    cells = read_synthesis(folder / SYNTHESIS)
    line = simulated_cycles(cycles.rows, kernel="attend", head_size=_HEAD, group=_GROUP)
    steps = [
        DecodeStep(_LAYERS, 1, _KV_HEADS, _GROUP, _HEAD, tokens=tokens) for tokens in _CONTEXTS
    ]
    rows = estimate_rows(list(CARDS.values()), steps, line)
    sections: dict[str, list[str | Table]] = {
        "fpga cycles": [_made_by(cycles.command, cycles.tools), cycles_table(cycles.rows)],
        "fpga cells": [_made_by(cells.command, cells.tools), cells_table(cells.rows)],
        "fpga estimates": [steps_table(rows), constants_table(list(CARDS.values()), line)],
        "fpga figures": [figures_table(figures(cells.rows))],
    }
    for name, parts in sections.items():
        page = with_section(page, name, _text(parts))
    return page


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
            lines += [line] if line.startswith("|") else textwrap.wrap(line, _WIDTH) or [""]
        lines.append("")
    return "\n".join(lines).strip()
