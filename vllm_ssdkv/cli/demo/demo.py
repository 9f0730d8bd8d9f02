"""``ssdkv demo``: contexts larger than the KV cache, a restart, and stock vLLM to compare with."""

from __future__ import annotations

import importlib.util
import time
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Console
from rich.markup import escape
from rich.panel import Panel
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from vllm_ssdkv.base.errors import SSDKVError
from vllm_ssdkv.cli import arguments
from vllm_ssdkv.cli.demo import directories as demo_directories
from vllm_ssdkv.cli.demo.phase_process import run_phase
from vllm_ssdkv.cli.demo.plan import (
    BLOCK_TOKENS,
    MIN_CAPACITY,
    PHASES,
    TIMES_CAPACITY,
    DemoPlan,
    Phase,
)
from vllm_ssdkv.cli.demo.report import Report
from vllm_ssdkv.profiling.recall import recall
from vllm_ssdkv.profiling.rig.child_process import Event, PhaseError, tail
from vllm_ssdkv.store.format.manifest import Manifest

_TITLES: Final[dict[Phase, str]] = {
    "page": "1/3  page mode: each context is larger than the KV cache",
    "restart": "2/3  a new process on the same directories",
    "stock": "3/3  stock vLLM with enough KV memory",
}


def _capacity(context: int, capacity: int | None) -> int:
    largest = context // TIMES_CAPACITY // BLOCK_TOKENS * BLOCK_TOKENS
    if capacity is None:
        return largest
    if not MIN_CAPACITY <= capacity <= largest:
        raise typer.BadParameter(
            f"from {MIN_CAPACITY} to a quarter of --context, {largest}", param_hint="--kv-capacity"
        )
    return capacity // BLOCK_TOKENS * BLOCK_TOKENS


def _stores(directories: list[Path]) -> tuple[Path, ...]:
    try:
        stores = demo_directories.places(directories)
    except OSError as error:
        raise typer.BadParameter(
            f"{error.filename}: {error.strerror}", param_hint="--dir"
        ) from None
    if len(set(stores)) < len(stores):
        raise typer.BadParameter("give each directory once", param_hint="--dir")
    return stores


def _watched(plan: DemoPlan, phase: Phase, log: Path, timeout: float, console: Console) -> Event:
    """Run a phase with a progress bar: two steps per request, its first token and its end."""
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(20),
        TextColumn("{task.completed}/{task.total}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("starting vLLM", total=2 * plan.requests)

        def watch(event: Event) -> None:
            if event["event"] == "ready":
                progress.update(task, description=f"{plan.requests} requests")
            elif event["event"] == "progress":
                progress.update(task, completed=event["answering"] + event["ended"])

        return run_phase(plan, phase, log, timeout, watch)


def _show(report: Report, phase: Phase, console: Console) -> None:
    """Show the results of the phase that has just ended."""
    if phase == "page":
        console.print(report.first_run())
        facts = report.first_run_facts()
    elif phase == "restart":
        console.print(report.second_run())
        facts = report.second_run_facts()
    else:
        facts = report.comparison()
    for fact in facts:
        console.print(fact, highlight=False, markup=False, soft_wrap=True)
    started, ran = report.results[phase]["start_s"], report.results[phase]["run_s"]
    console.print(f"started in {started:.1f} s, served in {ran:.1f} s", style="dim")
    console.print()


def _run(plan: DemoPlan, timeout: float, console: Console) -> Report:
    """All phases.

    Raises:
        typer.Exit: a phase failed; why has been shown.
    """
    questions = plan.questions()
    results: dict[Phase, Event] = {}
    slot_bytes = 0
    for phase in PHASES:
        console.print(_TITLES[phase], style="bold")
        log = demo_directories.home() / f"{phase}.log"
        console.print(f"log: {escape(str(log))}", style="dim", soft_wrap=True)
        try:
            results[phase] = _watched(plan, phase, log, timeout, console)
        except PhaseError as error:
            console.print(tail(log), markup=False, highlight=False, soft_wrap=True)
            console.print(f"this phase {error}; its log is {escape(str(log))}", style="bold red")
            raise typer.Exit(1) from None
        manifest = Manifest.load(Path(plan.stores[0]))
        slot_bytes = manifest.geometry.slot_bytes if manifest else slot_bytes
        disks = {path: demo_directories.disk_bytes(Path(path)) for path in plan.stores}
        report = Report(plan, questions, results, slot_bytes, disks)
        _show(report, phase, console)
    return report


def _conclude(report: Report, console: Console) -> None:
    for note in report.notes():
        console.print(f"note: {note}", style="yellow", markup=False)
    problems = report.problems()
    if problems:
        console.print(Panel("\n".join(map(escape, problems)), title="FAILED", style="bold red"))
        raise typer.Exit(1)
    console.print(Panel(report.summary(), title="ssdkv demo", style="green"))


def demo(
    directories: Annotated[
        list[Path] | None,
        typer.Option(
            "--dir",
            parser=arguments.directory,
            metavar="DIR",
            help="Directory on an SSD, repeated for several; the demo makes a folder of its own "
            "in each. Default: two folders in ~/.cache/ssdkv-demo.",
        ),
    ] = None,
    requests: Annotated[
        int, typer.Option(min=1, max=256, help="Number of concurrent requests.")
    ] = 8,
    context: Annotated[
        int,
        typer.Option(
            min=TIMES_CAPACITY * MIN_CAPACITY,
            max=recall.MAX_CONTEXT,
            help="Tokens of each request's prompt.",
        ),
    ] = 8192,
    kv_capacity: Annotated[
        int | None,
        typer.Option(
            help="Size of vLLM's KV cache in tokens. The default, a quarter of the context, is "
            "also the maximum."
        ),
    ] = None,
    as_json: arguments.Json = False,
    keep: Annotated[
        bool,
        typer.Option(help="Use the stores of an earlier demo, and keep them afterwards."),
    ] = False,
    timeout: Annotated[float, typer.Option(help="Time limit of each phase in seconds.")] = 900.0,
) -> None:
    """Serve contexts larger than the KV cache, restart, and compare with stock vLLM.

    The demo uses a tiny model of this package, so it downloads nothing. Without a GPU it runs on
    vLLM's CPU build. Exits with 1 when a phase fails, when a token differs from stock vLLM, or when
    a stored context is not found again after the restart.
    """
    console = Console(stderr=as_json)
    if importlib.util.find_spec("vllm") is None:
        console.print("vLLM is not installed in this environment", style="bold red")
        raise typer.Exit(1)
    started = time.monotonic()
    capacity = _capacity(context, kv_capacity)
    stores = _stores(directories or [])
    plan = DemoPlan(tuple(map(str, stores)), requests, context, capacity)
    try:
        if not keep:
            demo_directories.clean(stores)
        try:
            report = _run(plan, timeout, console)
        finally:
            if not keep:
                demo_directories.remove(stores)
    except SSDKVError as error:
        console.print(str(error), style="bold red", markup=False, soft_wrap=True)
        raise typer.Exit(1) from None
    seconds = time.monotonic() - started
    if as_json:
        arguments.print_json(report.figures(seconds))
    console.print(f"{seconds:.0f} s in all", style="dim")
    _conclude(report, console)


def demo_model() -> None:
    """Print the directory of the demo's model, for `vllm serve` and the examples."""
    typer.echo(str(recall.MODEL_DIR))
