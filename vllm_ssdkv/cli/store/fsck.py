"""``ssdkv fsck``: is a store that no engine uses whole, and repair it."""

from __future__ import annotations

import dataclasses
import json
import shlex
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from vllm_ssdkv.base.errors import SSDKVError
from vllm_ssdkv.base.sizes import approximate_size, blocks_of
from vllm_ssdkv.cli import arguments
from vllm_ssdkv.store.maintenance.fsck import examined
from vllm_ssdkv.store.maintenance.fsck_report import Report
from vllm_ssdkv.store.maintenance.repair import repair as repair_store

PROBLEMS = 1
CANNOT_CHECK = 2


def as_json(report: Report, *, repair: bool) -> str:
    """The report as a JSON object: the fields of :class:`Report`, and whether to repair."""
    content = {"clean": report.clean, "repair": repair} | dataclasses.asdict(report)
    return json.dumps(content, indent=2)


def render(report: Report, console: Console, *, repair: bool, from_headers: bool = False) -> None:
    """Print what was found, for people."""
    console.print(
        f"store {report.store} in {report.state_dir}: {len(report.devices)} device(s), "
        f"{report.ranks} rank(s), {blocks_of(report.stored, report.slots, report.slots_to_come)}",
        highlight=False,
    )
    read = approximate_size(report.checked_bytes)
    console.print(f"{report.checked_slots} slots read and verified, {read}", highlight=False)
    if report.clean and report.out_of_reach:
        console.print(
            f"nothing wrong in what can be read; {report.out_of_reach} block(s) lie on absent "
            "devices, and are found again when these are back",
            style="yellow",
        )
        return
    if report.clean:
        console.print("clean", style="green")
        return
    table = Table(box=None, pad_edge=False)
    for name in ("Finding", "Times", "For example", "Cure"):
        table.add_column(name, overflow="fold", no_wrap=name in ("Finding", "Times"))
    for kind in report.kinds():
        example = kind.example
        state = Text(example.kind, "green" if example.repaired else "bold red")
        cure = Text("repaired", "green") if example.repaired else Text(example.cure)
        table.add_row(state, str(kind.count), Text(f"{example.subject}: {example.text}"), cure)
    console.print(table)
    total = sum(report.counts.values())
    lines = [f"{total} problem(s)", f"{report.bad} block(s) cannot be served"]
    if report.found or report.lost:
        lines.append(
            f"{report.found} were found by the headers of their slots, {report.lost} slot(s) with "
            "such a header are not whole"
        )
    if report.out_of_reach:
        lines.append(f"{report.out_of_reach} are on absent devices only and were not read")
    console.print("; ".join(lines), highlight=False)
    if repair:
        console.print(f"{total - report.unrepaired} repaired, {report.unrepaired} left")
    elif "device" in report.counts:
        console.print("--repair is refused while a device is absent: it would drop what lies there")
    else:
        named = [*report.devices, "--state-dir", report.state_dir]
        options = "--repair --from-headers" if from_headers else "--repair"
        command = f"to repair: ssdkv fsck {options} {shlex.join(named)}"
        console.print(command, markup=False, highlight=False, soft_wrap=True)


def check(
    directories: list[Path],
    state_dir: Path | None,
    console: Console,
    *,
    repair: bool,
    from_headers: bool = False,
) -> Report:
    """Check, and on request repair, with a progress bar on the console."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("slots", total=None)

        def progress(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        with examined(
            directories, state_dir, write=repair, from_headers=from_headers, progress=progress
        ) as found:
            if repair:
                repair_store(found)
            return found.report


def fsck(
    directories: arguments.Devices = None,
    state_dir: arguments.StateDir = None,
    repair: Annotated[
        bool, typer.Option("--repair", help="Drop damaged data; good data is never touched.")
    ] = False,
    from_headers: Annotated[
        bool,
        typer.Option(
            "--from-headers",
            help="Search the headers of all slots for blocks that the journal does not name. With "
            "--repair they are added to the index, and the old journal is kept as "
            "journal.rejected.",
        ),
    ] = False,
    json_wanted: arguments.Json = False,
) -> None:
    """Check a store that no engine uses: its files, and every page of every stored block.

    An absent device is a problem, and repair needs it, unless an engine has used the store without
    it since. The other devices are checked in any case.

    Exits with 0 when there are no problems, 1 when there are some (also when they were repaired), 2
    when the store cannot be checked.
    """
    messages = Console(stderr=True)
    try:
        report = check(
            directories or [], state_dir, messages, repair=repair, from_headers=from_headers
        )
    except (SSDKVError, OSError) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(CANNOT_CHECK) from None
    if json_wanted:
        typer.echo(as_json(report, repair=repair))
    else:
        render(report, Console(), repair=repair, from_headers=from_headers)
    if not report.clean:
        raise typer.Exit(PROBLEMS)
