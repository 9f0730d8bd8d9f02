"""``ssdkv lab reproduce``: results of papers beside what the simulator says."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from vllm_ssdkv.base.errors import SSDKVError
from vllm_ssdkv.cli import arguments
from vllm_ssdkv.cli.bench.bench import PlotOption
from vllm_ssdkv.cli.bench.tables_output import print_tables, write_markdown
from vllm_ssdkv.profiling.console import progress
from vllm_ssdkv.profiling.table import Table

if TYPE_CHECKING:
    from vllm_ssdkv.profiling.simulation.papers.swarm_traces import TraceFigures


def reproduce(
    rows: Annotated[
        str | None, typer.Option(help="Rows to show, such as P3,P17; default: all.")
    ] = None,
    traces: Annotated[
        Path | None,
        typer.Option(
            parser=arguments.directory,
            metavar="DIR",
            help="Directory of traces made by `ssdkv lab profile`. They answer P10 to P14 through "
            "the lab of `ssdkv lab bench clusters`, in place of the kept numbers. This takes "
            "minutes of one core.",
        ),
    ] = None,
    markdown: Annotated[
        Path | None,
        typer.Option(parser=arguments.file_to_write, metavar="FILE", help="File for the tables."),
    ] = None,
    figure: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Chart to draw into `--plot`: instinfer-devices, -batches or -traffic, "
            "swarm-entries, hilos-intervals, -shares, -ablation, -settings, "
            "-kernel or -endurance, "
            "dockerssd-lengths, -cache or -nodes, flexgen-batches.",
        ),
    ] = None,
    plot_file: PlotOption = None,
    as_json: arguments.Json = False,
) -> None:
    """Simulate the published results of InstInfer, Swarm, HILOS, DockerSSD and FlexGen, and
    compare.

    Each row has the published number, ours, their distance, its rule, its kind and its constants. A
    miss is shown with its cause, or with the facts that the paper leaves out. The last line counts
    predicted rows only. Baselines of the papers stand beside the same work on a good I/O path.

    The command takes seconds of one core. `docs/papers.md` has the whole list. With `--traces`, a
    last table has the results of Swarm's rows on queries and keys that a model computed.
    """
    from vllm_ssdkv.profiling.rig.plot import require_plot
    from vllm_ssdkv.profiling.simulation.papers.curves import CURVES
    from vllm_ssdkv.profiling.simulation.papers.reproduce import ROWS, document, summary, tables

    wanted = None if rows is None else arguments.names("--rows", rows, ROWS)
    if (figure is None) != (plot_file is None):
        raise typer.BadParameter("--figure NAME and --plot FILE belong together")
    if figure is not None and figure not in CURVES:
        known = ", ".join(CURVES)
        raise typer.BadParameter(f"{figure!r}: any of {known}", param_hint="--figure")
    try:
        if figure is not None and plot_file is not None:
            from vllm_ssdkv.cli.reproduce.curves_plot import plot

            require_plot(plot_file)
            plot(CURVES[figure](), plot_file)
            return
        figures, answers = (None, []) if traces is None else _of_traces(traces)
        made = tables(wanted, figures) + answers
        if markdown is not None:
            write_markdown(made, markdown)
    except SSDKVError as error:
        typer.echo(f"ssdkv lab reproduce: {error}", err=True)
        raise typer.Exit(1) from error
    if as_json:
        arguments.print_json(
            {**document(wanted, figures), "of_traces": [asdict(table) for table in answers]}
        )
        return
    print_tables([table for table in made if table.rows], as_json=False)
    typer.echo(summary(figures))


def _of_traces(directory: Path) -> tuple[TraceFigures, list[Table]]:
    """Swarm's rows on recorded traces: figures for P11 and P13, and the lab's table.

    Raises:
        BenchError: the traces are damaged, or there are none.
    """
    from vllm_ssdkv.profiling.clusters.lab import Settings, measure
    from vllm_ssdkv.profiling.clusters.trace import read_traces
    from vllm_ssdkv.profiling.simulation.papers.swarm_traces import measure as figures_of

    _, found = read_traces(directory)
    with progress(Console(stderr=True)) as note:
        table = measure(found, Settings(tokens=False), note)[-1]
        note("Swarm's rows")
        return figures_of(found), [table]
