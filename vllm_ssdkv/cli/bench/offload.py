"""``ssdkv lab bench offload``: attention near storage, on the host and on drives of the papers."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Console

from vllm_ssdkv.base.errors import SSDKVError
from vllm_ssdkv.cli import arguments
from vllm_ssdkv.cli.bench.bench import PlotOption
from vllm_ssdkv.cli.bench.recall_options import DirectoryOption
from vllm_ssdkv.cli.bench.tables_output import print_tables
from vllm_ssdkv.config.offload import MAX_DRIVES, OffloadConfig
from vllm_ssdkv.config.selectors import EXACT, SELECTORS
from vllm_ssdkv.profiling.console import progress

_LEAST_CONTEXT: Final = 256
_MOST_CONTEXT: Final = 131072
_MOST_INTERVAL: Final = 128
_WHOLE: Final = {
    "contexts": "4096",
    "batch": "4",
    "selectors": "exact,bounds,spread",
    "drives": "1,2,4,8",
    "intervals": "1,4,8,16,64",
}
"""Cases of a whole run, by option."""
_QUICK: Final = {
    "contexts": "1024",
    "batch": "2",
    "selectors": "exact,bounds",
    "drives": "1,4",
    "intervals": "1,16",
}
"""Cases of a quick run."""


def offload(
    directory: DirectoryOption = None,
    contexts: Annotated[
        str | None, typer.Option(help=f"Tokens of each context; default: {_WHOLE['contexts']}.")
    ] = None,
    batch: Annotated[
        str | None, typer.Option(help=f"Numbers of contexts at a time; default: {_WHOLE['batch']}.")
    ] = None,
    selectors: Annotated[
        str | None,
        typer.Option(help=f"Selectors of page mode; default: {_WHOLE['selectors']}."),
    ] = None,
    ways: Annotated[
        str,
        typer.Option(help="Devices that attend: any of none, host, shared, instinfer, smartssd."),
    ] = "none,host,shared,instinfer,smartssd",
    drives: Annotated[
        str | None,
        typer.Option(help=f"Numbers of drives, from 1 to 8; default: {_WHOLE['drives']}."),
    ] = None,
    intervals: Annotated[
        str | None,
        typer.Option(
            help=f"Tokens between two writes, as powers of two; default: {_WHOLE['intervals']}."
        ),
    ] = None,
    x_share: Annotated[
        str, typer.Option(help="Shares of the batch whose QKV inputs (X) are projected.")
    ] = "0.25,0.5",
    budget: Annotated[
        float, typer.Option(min=0.001, max=1, help="Share of the tokens that a query attends to.")
    ] = 0.125,
    dilation: Annotated[
        float, typer.Option(min=1, help="Factor by which drives are slower than the papers'.")
    ] = 20,
    threads: Annotated[
        int | None,
        typer.Option(
            min=1, help="Threads of the host's device; default: as for the option offload.threads."
        ),
    ] = None,
    quick: Annotated[
        bool,
        typer.Option(
            "--quick",
            help="Take two minutes at most: "
            + " ".join(f"--{name} {value}" for name, value in _QUICK.items())
            + ".",
        ),
    ] = False,
    as_json: arguments.Json = False,
    plot_file: PlotOption = None,
) -> None:
    """Decode with attention near storage, and compare devices, numbers of drives and link traffic.

    A small model decodes without vLLM. `none`: the thread of the step attends to contexts in DRAM,
    and as they come over the links of plain drives. `host`: the host's device attends. `shared`:
    both do, by `offload.share: auto`. `instinfer` and `smartssd`: drives with the timing of the
    papers attend to their parts of the pages. The host computes for them, so no case is faster than
    the host.

    The drives that attend are charged for the intervals between two writes; the store writes blocks
    of the same number of tokens. The X-cache is a model: projecting X is measured for `--x-share`,
    and the best share follows from the rates of this run.

    `--dilation` slows the drives and their links down, so that a small machine can keep up with
    eight of them: ratios hold, tokens/s do not. The last table has the ratios that the papers
    publish.
    """
    from vllm_ssdkv.profiling.offload.bench import WAYS, Settings, run
    from vllm_ssdkv.profiling.offload.tables import tables
    from vllm_ssdkv.profiling.rig.plot import require_plot

    asked = {
        "contexts": contexts,
        "batch": batch,
        "selectors": selectors,
        "drives": drives,
        "intervals": intervals,
    }
    cases = {name: asked[name] or value for name, value in (_QUICK if quick else _WHOLE).items()}
    settings = Settings(
        contexts=arguments.whole_numbers(
            "--contexts", cases["contexts"], _LEAST_CONTEXT, _MOST_CONTEXT
        ),
        batches=arguments.whole_numbers("--batch", cases["batch"], 1, 64),
        selectors=arguments.names("--selectors", cases["selectors"], (EXACT, *SELECTORS.names())),
        ways=arguments.names("--ways", ways, WAYS),
        drives=arguments.whole_numbers("--drives", cases["drives"], 1, MAX_DRIVES),
        intervals=_intervals(cases["intervals"]),
        x_shares=arguments.numbers("--x-share", x_share, 0, 1),
        budget=budget,
        dilation=dilation,
        threads=_threads(threads),
    )
    console = Console(stderr=True)
    root = Path(tempfile.mkdtemp(prefix="ssdkv-bench-", dir=directory))
    try:
        if plot_file is not None:
            require_plot(plot_file)
        with progress(console) as note:
            document = run(settings, root, note)
        made = tables(document)
        if plot_file is not None:
            from vllm_ssdkv.cli.bench.offload_plot import plot

            plot(document, plot_file)
    except SSDKVError as error:
        typer.echo(f"ssdkv lab bench offload: {error}", err=True)
        raise typer.Exit(1) from error
    finally:
        shutil.rmtree(root, ignore_errors=True)
    print_tables(made, as_json=as_json, beside=document)


def _intervals(text: str) -> list[int]:
    """Tokens between two writes: a block, or a part of one."""
    option = "--intervals"
    found = arguments.whole_numbers(option, text, 1, _MOST_INTERVAL)
    for tokens in found:
        if tokens & (tokens - 1):
            raise typer.BadParameter(f"{tokens} is no power of two", param_hint=option)
    return found


def _threads(asked: int | None) -> int:
    cpus = os.cpu_count() or 1
    if asked is not None and asked > cpus:
        raise typer.BadParameter(f"this machine has {cpus} CPUs", param_hint="--threads")
    return OffloadConfig(threads=asked).threads_of(1)
