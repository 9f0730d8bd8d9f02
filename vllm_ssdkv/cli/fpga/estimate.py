"""``ssdkv lab fpga estimate``: time of a decode step's attention on cards, the papers' cells."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeAlias, get_args

import typer
from rich.console import Console
from rich.progress import Progress

from vllm_ssdkv.base.errors import BenchError
from vllm_ssdkv.cli import arguments
from vllm_ssdkv.cli.bench.bench import PlotOption
from vllm_ssdkv.cli.bench.tables_output import print_tables
from vllm_ssdkv.cli.fpga.arguments import DtypeOption, GroupOption, HeadSizeOption, shape_of
from vllm_ssdkv.cli.fpga.tables import constants_table, figures_table, steps_table
from vllm_ssdkv.fpga_offload.cards import CARDS, DDR_BANDWIDTH, Card, CardName, Constant
from vllm_ssdkv.fpga_offload.estimator import (
    DecodeStep,
    KernelCycles,
    SparfReads,
    hilos_cycles,
    simulated_cycles,
    simulated_sparf,
)
from vllm_ssdkv.fpga_offload.estimator import (
    estimate as estimate_step,
)
from vllm_ssdkv.fpga_offload.figures import figures
from vllm_ssdkv.fpga_offload.results import (
    CYCLES,
    FOLDER,
    SYNTHESIS,
    Cycles,
    read_cycles,
    read_synthesis,
)

Row: TypeAlias = dict[str, Any]
KernelName: TypeAlias = Literal["simulated", "hilos"]

_CONTEXTS: Final = "1024,4096,16384,65536,262144,1048576"
_MOST_CONTEXT: Final = 1 << 24
_GIVEN: Final = "given on the command line"


def estimate(
    card_names: Annotated[
        str, typer.Option("--cards", help="Cards to estimate: any of smartssd, flash-controller.")
    ] = "smartssd,flash-controller",
    contexts: Annotated[str, typer.Option(help="Tokens of each context.")] = _CONTEXTS,
    batch: Annotated[
        int, typer.Option(min=1, max=1024, help="Number of contexts in the step.")
    ] = 1,
    devices: Annotated[
        int, typer.Option(min=1, max=128, help="Number of cards that share the work.")
    ] = 1,
    layers: Annotated[
        int, typer.Option(min=1, max=1024, help="Number of layers with attention.")
    ] = 32,
    kv_heads: Annotated[int, typer.Option(min=1, max=256, help="KV heads of a layer.")] = 8,
    group: GroupOption = 4,
    head_size: HeadSizeOption = 128,
    dtype: DtypeOption = "float16",
    kernel: Annotated[
        str,
        typer.Option(
            help="Source of the cycles: simulated, from our RTL; hilos, from the paper's Table 3."
        ),
    ] = "simulated",
    sparf: Annotated[
        float | None,
        typer.Option(
            min=0.001,
            max=1,
            help="Share of the tokens that SparF chooses, by pages; default: no choice.",
        ),
    ] = None,
    channels: Annotated[
        int, typer.Option(min=1, max=256, help="Channels that SparF's first step reads.")
    ] = 16,
    by_page: Annotated[
        bool, typer.Option("--by-page", help="Let SparF choose whole pages.")
    ] = False,
    clock: Annotated[
        float | None, typer.Option(min=1, max=2000, help="Clock in MHz; default: the papers'.")
    ] = None,
    flash: Annotated[
        float | None,
        typer.Option(min=0.01, max=1000, help="Flash bandwidth in GB/s; default: the papers'."),
    ] = None,
    efficiency: Annotated[
        float | None,
        typer.Option(
            min=0.01, max=1, help="Efficiency of a SmartSSD's DDR; default: as calibrated."
        ),
    ] = None,
    start: Annotated[
        float,
        typer.Option(
            min=0, max=1e6, help="Time to start a chunk in microseconds; it was not measured."
        ),
    ] = 0,
    chunk: Annotated[
        int | None,
        typer.Option(
            parser=arguments.size, metavar="SIZE", help="Size of a chunk of pages; default: 16MiB."
        ),
    ] = None,
    results: Annotated[
        Path | None,
        typer.Option(
            parser=arguments.directory,
            metavar="DIR",
            help="Folder of cycles.json and synthesis.json; default: those of the package.",
        ),
    ] = None,
    as_json: arguments.Json = False,
    plot_file: PlotOption = None,
) -> None:
    """Estimate a decode step's attention on a SmartSSD and on a flash drive's controller.

    The card fetches each chunk of pages while the kernel attends to the one before, so a step takes
    the maximum of flash, the kernel's memory and the kernel's cycles, plus the time to start.
    Cycles are those of our RTL in simulation, or of HILOS' Table 3. Nothing ran on a card. The
    clock is the papers' unless `--clock` sets another. Times are lower bounds: they exclude the
    host, and queries and partial states on PCIe.

    The last table has the papers' counts of cells beside ours, which were synthesised.
    """
    from vllm_ssdkv.profiling.rig.plot import require_plot

    shape_of(head_size, group, dtype)
    arguments.one_of("--kernel", kernel, get_args(KernelName))
    names = arguments.names("--cards", card_names, get_args(CardName))
    lengths = arguments.whole_numbers("--contexts", contexts, 1, _MOST_CONTEXT)
    reads = None if sparf is None else SparfReads(channels, sparf, by_page=by_page)
    chosen = [
        _with(CARDS[name], clock=clock, flash=flash, efficiency=efficiency, start=start)
        for name in names
    ]
    if chunk is not None:
        if chunk < 1:
            raise typer.BadParameter(f"{chunk} bytes", param_hint="--chunk")
        chosen = [dataclasses.replace(card, chunk_bytes=chunk) for card in chosen]
    console = Console(stderr=True)
    try:
        if plot_file is not None:
            require_plot(plot_file)
        cycles = read_cycles((results or FOLDER) / CYCLES).rows
        cells = read_synthesis((results or FOLDER) / SYNTHESIS).rows
        line = _line(kernel, cycles, head_size, group, dtype, sparse=reads is not None)
        steps = [
            DecodeStep(layers, batch, kv_heads, group, head_size, tokens, reads)
            for tokens in lengths
        ]
        with Progress(console=console, transient=True) as progress:
            rows = estimate_rows(chosen, steps, line, devices, progress)
        document: Row = {
            "kernel": dataclasses.asdict(line),
            "cards": [dataclasses.asdict(card) for card in chosen],
            "rows": rows,
            "figures": [dataclasses.asdict(figure) for figure in figures(cells)],
        }
        if plot_file is not None:
            from vllm_ssdkv.cli.fpga.estimate_plot import plot

            plot(document, plot_file)
    except BenchError as error:
        typer.echo(f"ssdkv lab fpga estimate: {error}", err=True)
        raise typer.Exit(1) from error
    tables = [
        constants_table(chosen, line),
        steps_table(rows),
        figures_table(figures(cells)),
    ]
    print_tables(tables, as_json=as_json, beside=document)


def _with(
    card: Card,
    *,
    clock: float | None,
    flash: float | None,
    efficiency: float | None,
    start: float,
) -> Card:
    """The card with constants of the command line in place of its own."""
    if clock is not None:
        card = dataclasses.replace(card, clock=Constant(clock * 1e6, "assumed", _GIVEN))
    if flash is not None:
        card = dataclasses.replace(card, flash=Constant(flash * 1e9, "assumed", _GIVEN))
    if efficiency is not None and card.memory is not None:
        memory = Constant(DDR_BANDWIDTH * efficiency, "assumed", _GIVEN)
        card = dataclasses.replace(card, memory=memory)
    if start:
        card = dataclasses.replace(card, start=Constant(start / 1e6, "assumed", _GIVEN))
    return card


def _line(
    name: str, cycles: Sequence[Cycles], head_size: int, group: int, dtype: str, *, sparse: bool
) -> KernelCycles:
    """Cycles of the kernel that was asked for.

    For SparF those of its second step, and so marked, where the first was not simulated.

    Raises:
        BenchError: it was not simulated or published for these heads.
    """
    if name == "hilos":
        if sparse or head_size != 128:
            raise BenchError("HILOS' kernel attends to whole contexts, with heads of 128 channels")
        return hilos_cycles(group)
    known = {row.kernel for row in cycles if (row.head_size, row.group) == (head_size, group)}
    if sparse and "sparf_first" in known:
        return simulated_sparf(cycles, head_size=head_size, group=group, dtype=dtype)
    kernel = "sparf_second" if sparse else "attend"
    line = simulated_cycles(cycles, kernel=kernel, head_size=head_size, group=group, dtype=dtype)
    if sparse:
        return dataclasses.replace(line, name="RTL, second step", origin="assumed")
    return line


def estimate_rows(
    cards: Sequence[Card],
    steps: Sequence[DecodeStep],
    line: KernelCycles,
    devices: int = 1,
    progress: Progress | None = None,
) -> list[Row]:
    """A row for each card and step, as in the JSON document."""
    cases = [(card, step) for card in cards for step in steps]
    shown = cases if progress is None else progress.track(cases, description="estimating")
    return [_row(card, step, line, devices) for card, step in shown]


def _row(card: Card, step: DecodeStep, line: KernelCycles, devices: int) -> Row:
    found = estimate_step(step, card, line, devices)
    return {
        "card": card.name,
        "devices": devices,
        "batch": step.rows,
        "context": step.tokens,
        "kv_bytes": step.nbytes,
        "read_bytes": step.read_bytes,
        **dataclasses.asdict(found),
        "bound": found.bound,
        "origin": "estimated",
    }
