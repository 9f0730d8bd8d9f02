"""``ssdkv lab profile``: queries and keys of a real engine, and what co-activation is in them."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from vllm_ssdkv.base.errors import BenchError
from vllm_ssdkv.base.sizes import GIB
from vllm_ssdkv.cli import arguments
from vllm_ssdkv.cli.bench.bench import PlotOption
from vllm_ssdkv.cli.bench.tables_output import print_tables
from vllm_ssdkv.profiling.clusters.plan import Document, ModelShape, RecordPlan
from vllm_ssdkv.profiling.clusters.recording import record_missing, require_sizes
from vllm_ssdkv.profiling.clusters.summary import heat, summary_table
from vllm_ssdkv.profiling.clusters.trace import read_traces
from vllm_ssdkv.profiling.recall.recall import MODEL_DIR
from vllm_ssdkv.profiling.rig.child_process import Event

_TASKS: Final = ("multikey", "chain", "copy")


def profile(
    directory: Annotated[
        Path,
        typer.Argument(
            parser=arguments.place, metavar="DIR", help="Directory for the traces; it is created."
        ),
    ],
    document: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FILE",
            help="Text file, repeated for several, or a task of the demo's model: multikey, "
            "chain, single, copy. Default: three tasks.",
        ),
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option(
            parser=arguments.directory,
            metavar="DIR",
            help="Model directory; default: the demo's model.",
        ),
    ] = None,
    tokens: Annotated[
        int, typer.Option(min=1024, help="Tokens of each document, decode steps included.")
    ] = 8191,
    steps: Annotated[
        int,
        typer.Option(
            min=16, max=4096, help="Number of decode steps, over the document's own tokens."
        ),
    ] = 256,
    prompt: Annotated[
        int, typer.Option(min=64, max=8192, help="Number of queries kept from the prompt's end.")
    ] = 1024,
    layers: Annotated[
        int | None,
        typer.Option(min=1, help="Number of layers to record, spread evenly; default: all."),
    ] = None,
    most: Annotated[
        int,
        typer.Option(
            "--max-size",
            parser=arguments.size,
            metavar="SIZE",
            show_default="1GiB",
            help="Limit of all traces together; a larger recording is refused before it starts.",
        ),
    ] = GIB,
    as_json: arguments.Json = False,
    plot_file: PlotOption = None,
) -> None:
    """Record traces from a real vLLM in page mode, and show their co-activation.

    A trace holds, for each layer and head, all keys and the queries of the decode steps and of the
    prompt's end. Attention is exact; the next token of each decode step is the document's. A second
    run records only the missing documents.

    The tables show the share of a decode step's pages that the step before had, and the share that
    popularity predicts. Another document's profile is the control. The half test predicts half of a
    step's pages from the other half. `ssdkv lab bench clusters DIR` measures methods on the same
    traces.
    """
    from vllm_ssdkv.profiling.rig.plot import require_plot

    console = Console(stderr=True)
    place = model or MODEL_DIR
    try:
        if plot_file is not None:
            require_plot(plot_file)
        shape = ModelShape.read(place)
        documents = _documents(document, demo=model is None)
        plan = RecordPlan(
            os.fspath(place),
            os.fspath(directory),
            "",
            documents,
            tuple(shape.spread(layers or shape.layers)),
            tokens,
            prompt,
            steps,
        )
        require_sizes(plan, shape, most)
        _record(plan, directory, console)
        _, traces = read_traces(directory)
        table = summary_table(traces)
        if plot_file is not None:
            from vllm_ssdkv.cli.profile.profile_plot import plot

            plot(table, heat(traces), plot_file)
    except BenchError as error:
        typer.echo(f"ssdkv lab profile: {error}", err=True)
        raise typer.Exit(1) from error
    print_tables([table], as_json=as_json)


def _documents(named: list[str] | None, *, demo: bool) -> tuple[Document, ...]:
    """Documents to record.

    Raises:
        BenchError: nothing is named for a model of one's own, a file is missing, or two documents
            have one name.
    """
    if not demo and not named:
        raise BenchError("--document: name a text file; tasks are those of the demo's model")
    found = tuple(Document.of(one) for one in named or _TASKS)
    names = [document.name for document in found]
    for document in found:
        if names.count(document.name) > 1:
            raise BenchError(f"--document: two are named {document.name}; rename a file")
        if document.task and not demo:
            raise BenchError(f"--document {document.task}: a task of the demo's model, not of this")
    return found


def _record(plan: RecordPlan, directory: Path, console: Console) -> None:
    """Record what is missing, with a bar for each document.

    Raises:
        BenchError: the directory cannot be written, there is no vLLM, or the engine failed.
    """
    if importlib.util.find_spec("vllm") is None:
        raise BenchError("vLLM is not installed in this environment")
    try:
        directory.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise BenchError(f"{directory} cannot be made: {error.strerror}") from error
    columns = (TextColumn("{task.description}"), BarColumn(20), TimeElapsedColumn())
    try:
        with Progress(*columns, console=console, transient=True) as progress:
            task = progress.add_task("starting vLLM", total=1.0)

            def watch(event: Event) -> None:
                if event["event"] == "progress":
                    name = event["document"]
                    progress.update(task, description=name, completed=event["done"])
                elif event["event"] == "part":
                    progress.console.print(f"recorded {event['part']['file']}", highlight=False)

            record_missing(plan, watch)
    except OSError as error:
        raise BenchError(f"{directory} cannot be written: {error.strerror}") from error
