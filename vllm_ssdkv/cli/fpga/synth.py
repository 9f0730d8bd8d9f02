"""``ssdkv lab fpga synth``: cells that the RTL takes, by Yosys."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any, Final, TypeAlias, get_args

import typer
from rich.console import Console
from rich.progress import Progress

from vllm_ssdkv.base.errors import SSDKVError
from vllm_ssdkv.cli import arguments
from vllm_ssdkv.cli.bench.tables_output import print_tables
from vllm_ssdkv.cli.fpga.arguments import HeadSizeOption
from vllm_ssdkv.cli.fpga.tables import cells_table, shares_table
from vllm_ssdkv.fpga_offload.description import GROUPS, HEAD_SIZES
from vllm_ssdkv.fpga_offload.results import Cells, Results, add_results

Row: TypeAlias = dict[str, Any]

_MOST_SECONDS: Final = 86400


def synth(
    designs: Annotated[
        str, typer.Option(help="Units to synthesise, such as core,axi; core is attention alone.")
    ] = "core",
    families: Annotated[
        str,
        typer.Option(
            help="FPGA family: xcup is that of a SmartSSD's KU15P, xc7 that of a Zynq 7045."
        ),
    ] = "xcup",
    groups: Annotated[str, typer.Option(help="Query heads per KV head: 1, 2, 4, 5, 8.")] = "1",
    head_size: HeadSizeOption = 128,
    timeout: Annotated[
        int, typer.Option(min=1, max=_MOST_SECONDS, help="Time limit for each design in seconds.")
    ] = 1800,
    output: Annotated[
        Path | None,
        typer.Option(
            parser=arguments.file_to_write,
            metavar="FILE",
            help="File for the counts, in the format of fpga_offload/results/synthesis.json; it "
            "replaces the counts of the same designs.",
        ),
    ] = None,
    as_json: arguments.Json = False,
) -> None:
    """Count the cells of the RTL kernels, mapped by Yosys to a family of FPGAs.

    Yosys counts more look-up tables than the vendor's tools; multipliers and block RAMs are firm.
    Nothing is placed or routed, so no clock follows. A core takes one minute to several. `make
    fpga` installs Yosys.
    """
    from vllm_ssdkv.fpga_offload.synth import DESIGNS, Family, synthesise, yosys_version

    names = arguments.names("--designs", designs, tuple(DESIGNS))
    chosen: list[Family] = arguments.names("--families", families, get_args(Family))
    wanted = arguments.whole_numbers("--groups", groups, min(GROUPS), max(GROUPS))
    for group in wanted:
        arguments.one_of("--groups", group, GROUPS)
    arguments.one_of("--head-size", head_size, HEAD_SIZES)
    cases = [
        (name, family, group)
        for family in chosen
        for name in names
        for group in (wanted if DESIGNS[name].group else [1])
    ]
    cells: list[Cells] = []
    try:
        tools = {"yosys": yosys_version()}
        with Progress(console=Console(stderr=True), transient=True) as progress:
            for name, family, group in progress.track(cases, description="synthesising"):
                cells.append(synthesise(name, family, head_size, group, timeout))
    except SSDKVError as error:
        typer.echo(f"ssdkv lab fpga synth: {error}", err=True)
        raise typer.Exit(1) from error
    if output is not None:
        add_results(Results("ssdkv lab fpga synth --output FILE", tools, cells), output)
    document: Row = {"rows": [dataclasses.asdict(row) for row in cells]}
    print_tables([cells_table(cells), shares_table(cells)], as_json=as_json, beside=document)
