"""``ssdkv lab bench clusters``: methods to choose, place and cache pages, on recorded traces."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from vllm_ssdkv.base.errors import BenchError
from vllm_ssdkv.cli import arguments
from vllm_ssdkv.cli.bench.bench import PlotOption
from vllm_ssdkv.cli.bench.tables_output import print_tables, write_markdown
from vllm_ssdkv.profiling.clusters.trace import PAGE, Trace, read_traces
from vllm_ssdkv.profiling.console import progress


def clusters(
    directory: Annotated[
        Path,
        typer.Argument(
            parser=arguments.directory,
            metavar="DIR",
            help="Directory of traces, made by `ssdkv lab profile`.",
        ),
    ],
    only: Annotated[
        str | None, typer.Option(help="Traces to simulate, such as chain,copy; default: all.")
    ] = None,
    budgets: Annotated[str, typer.Option(help="Shares of the pages that are read.")] = "0.05,0.1",
    drives: Annotated[str, typer.Option(help="Numbers of drives, from 1 to 8.")] = "1,2,4,8",
    batches: Annotated[str, typer.Option(help="Numbers of contexts at a time.")] = "1,4",
    lengths: Annotated[
        str | None,
        typer.Option(
            help="Lengths in tokens to which contexts are also cut; default: whole contexts."
        ),
    ] = None,
    heads: Annotated[
        int,
        typer.Option(min=1, max=64, help="Number of KV heads of a trace whose recall is measured."),
    ] = 6,
    every: Annotated[
        int, typer.Option(min=1, max=64, help="Measure one in this many decode steps.")
    ] = 8,
    tokens: Annotated[
        bool,
        typer.Option(help="Also measure PQ, k-means and FAISS; this needs the extra `clusters`."),
    ] = True,
    markdown: Annotated[
        Path | None,
        typer.Option(parser=arguments.file_to_write, metavar="FILE", help="File for the tables."),
    ] = None,
    as_json: arguments.Json = False,
    plot_file: PlotOption = None,
) -> None:
    """Compare clusters of pages with single pages, on the traces of a directory.

    Methods are No Cluster (single pages by each selector, also with similar or co-activated tokens
    in a page), blocks of InfLLM, PQ, k-means on keys, and Swarm with its ablations. Read times come
    from a model of drives: the maximum of bytes by bandwidth and requests by IOPS. The last table
    compares with published numbers.

    The command reads no drives and runs no engine; it takes minutes of one core.
    """
    from vllm_ssdkv.profiling.clusters.lab import Settings, measure
    from vllm_ssdkv.profiling.rig.plot import require_plot

    settings = Settings(
        budgets=arguments.numbers("--budgets", budgets, 0.005, 0.5),
        drives=arguments.whole_numbers("--drives", drives, 1, 8),
        heads=heads,
        every=every,
        batches=arguments.whole_numbers("--batches", batches, 1, 64),
        tokens=tokens,
    )
    console = Console(stderr=True)
    try:
        if plot_file is not None:
            require_plot(plot_file)
        traces = _traces(directory, only, lengths)
        with progress(console) as note:
            tables = measure(traces, settings, note)
        if markdown is not None:
            write_markdown(tables, markdown)
        if plot_file is not None:
            from vllm_ssdkv.cli.bench.clusters_plot import plot

            plot(tables, plot_file)
    except BenchError as error:
        typer.echo(f"ssdkv lab bench clusters: {error}", err=True)
        raise typer.Exit(1) from error
    print_tables(tables, as_json=as_json)


def _traces(directory: Path, only: str | None, lengths: str | None) -> list[Trace]:
    """The traces that take part, whole or cut.

    Raises:
        BenchError: one is damaged, or ``only`` names one that is not there.
    """
    _, traces = read_traces(directory)
    if only is not None:
        names = only.split(",")
        known = [trace.name for trace in traces]
        if wrong := sorted(set(names) - set(known)):
            raise BenchError(f"--only {wrong[0]}: {directory} has {', '.join(known)}")
        traces = [trace for trace in traces if trace.name in names]
    if lengths is None:
        return traces
    longest = min(trace.context for trace in traces)
    wanted = arguments.numbers("--lengths", lengths, 64 * PAGE, longest)
    return [trace.shortened(int(n) // PAGE * PAGE) for n in wanted for trace in traces]
