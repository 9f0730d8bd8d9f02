"""Tables of ``ssdkv lab fpga`` and of ``docs/fpga.md``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vllm_ssdkv.fpga_offload.cards import CARDS, Card
from vllm_ssdkv.fpga_offload.estimator import KernelCycles
from vllm_ssdkv.fpga_offload.figures import Figure
from vllm_ssdkv.fpga_offload.results import Cells, Cycles
from vllm_ssdkv.profiling.table import Table


def constants_table(cards: Sequence[Card], kernel: KernelCycles) -> Table:
    """Constants of an estimate, and where each comes from."""
    table = Table("Constants", ["of", "what", "value", "is", "source"], decimals=2)
    for card in cards:
        rows = [
            ("flash, GB/s", card.flash, 1e9),
            ("memory, GB/s", card.memory, 1e9),
            ("clock, MHz", card.clock, 1e6),
            ("start, us", card.start, 1e-6),
        ]
        for name, constant, unit in rows:
            if constant is not None:
                value = constant.value / unit
                table.add(card.name, name, value, constant.origin, constant.source)
        table.add(card.name, "chunk, MiB", card.chunk_bytes / 2**20, "assumed", "two of them fit")
    off = f"{100 * kernel.error:.1f} % off at most"
    source = {
        "simulated": f"straight line through simulated runs, {off}",
        "published": "Table 3 at 296.05 MHz",
        "assumed": "SparF's first step was not simulated: as if reading was all of it",
    }[kernel.origin]
    name = f"{kernel.name} kernel"
    table.add(name, "cycles of a beat", kernel.beat, kernel.origin, source)
    table.add(name, "cycles of a job more", kernel.job, kernel.origin, source)
    if kernel.token:
        table.add(name, "cycles of a token, to choose", kernel.token, kernel.origin, source)
    return table


def steps_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Times of a decode step's attention, in milliseconds."""
    table = Table(
        "Attention of a decode step, estimated",
        [
            *("card", "devices", "contexts", "batch", "read, GB"),
            *("flash, ms", "memory, ms", "kernel, ms", "step, ms", "bound"),
        ],
        decimals=2,
        note="flash, memory, kernel: each alone. step: chunk after chunk, with overlap. A lower "
        "bound: without the host, PCIe for queries and states, and unless given the start.",
    )
    for row in rows:
        memory = row["memory_s"]
        table.add(
            row["card"],
            row["devices"],
            row["context"],
            row["batch"],
            row["read_bytes"] / 1e9,
            row["flash_s"] * 1e3,
            None if memory is None else memory * 1e3,
            row["kernel_s"] * 1e3,
            row["total_s"] * 1e3,
            row["bound"],
        )
    return table


def figures_table(figures: Sequence[Figure]) -> Table:
    """Cells of the papers' kernels beside ours, which were synthesised."""
    table = Table(
        "Published figures",
        ["figure", "paper", "published", "ours", "ours / theirs"],
        decimals=2,
        note=" ".join(
            ("-: not synthesised.", *dict.fromkeys(figure.note for figure in figures)),
        ),
    )
    for one in figures:
        table.add(one.name, one.paper, _number(one.published), _number(one.ours), one.ratio)
    return table


def _number(value: float | None) -> str | None:
    """A count whole, a rate with two decimals."""
    if value is None:
        return None
    return f"{value:,.0f}" if value >= 1000 or value == int(value) else f"{value:.2f}"


def trials_table(document: Mapping[str, Any]) -> Table:
    """Random contexts through a backend, as ``ssdkv lab fpga simulate`` has them."""
    table = Table(
        f"{document['backend']}, d = {document['head_size']}, G = {document['group']}, "
        f"{document['dtype']}",
        ["tokens", "error", "wrong digests", "cycles", "line rate", "seconds", "holds"],
        decimals=3,
        note="error: largest distance from float64 over the largest output. line rate: share of "
        "the cycles that moved a beat of pages. seconds: of this machine.",
    )
    for row in document["rows"]:
        table.add(
            row["tokens"],
            f"{row['error']:.1e}",
            row["wrong_digests"],
            row["cycles"],
            row["line_rate"],
            row["seconds"],
            "yes" if row["holds"] else "no",
        )
    return table


def cycles_table(rows: Sequence[Cycles]) -> Table:
    """Cycles of the simulated kernels, by number of tokens."""
    tokens = sorted({row.tokens for row in rows})
    table = Table(
        "Cycles in simulation",
        ["kernel", "d", "G", "dtype", *(f"{count} tokens" for count in tokens)],
        note="Cycles, and the line rate: the share of them that moved a beat of 64 bytes of pages.",
    )
    found: dict[tuple[str | int, ...], dict[int, str]] = {}
    for row in rows:
        of_kernel = found.setdefault((row.kernel, row.head_size, row.group, row.dtype), {})
        of_kernel[row.tokens] = f"{row.cycles}, {row.line_rate:.3f}"
    for kernel, cells in found.items():
        table.add(*kernel, *(cells.get(count) for count in tokens))
    return table


def cells_table(rows: Sequence[Cells]) -> Table:
    """Cells of the synthesised designs."""
    table = Table(
        "Cells by synthesis",
        ["design", "family", "d", "G", "LUT", "FF", "DSP", "BRAM36", "URAM"],
        decimals=1,
        note="By Yosys, which counts more LUTs than Vivado does; DSP and BRAM are firm. Not placed "
        "or routed: no clock follows from them.",
    )
    for row in rows:
        table.add(
            row.design,
            row.family,
            row.head_size,
            row.group,
            row.lut,
            row.ff,
            row.dsp,
            float(row.bram36),
            row.uram,
        )
    return table


def shares_table(rows: Sequence[Cells]) -> Table:
    """Shares of the papers' FPGAs that designs take, in percent."""
    table = Table(
        "Shares of the papers' FPGAs, %",
        ["design", "G", "card", "LUT", "FF", "DSP", "BRAM36"],
        decimals=1,
    )
    for row in rows:
        card = next(card for card in CARDS.values() if card.family == row.family)
        shares = [
            100 * used / there
            for used, there in (
                (row.lut, card.fpga.lut),
                (row.ff, card.fpga.ff),
                (row.dsp, card.fpga.dsp),
                (row.bram36, card.fpga.bram36),
            )
        ]
        table.add(row.design, row.group, card.name, *shares)
    return table
