"""``ssdkv doctor``: would this machine serve, and if not, what is missing."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from vllm_ssdkv.base.host import default_root
from vllm_ssdkv.cli import arguments
from vllm_ssdkv.cli.doctor import (
    check_devices,
    check_gds,
    check_host,
    check_io_uring,
    check_software,
)
from vllm_ssdkv.cli.doctor.check_result import Finding, Level

_STYLE = {Level.OK: "green", Level.WARN: "yellow", Level.FAIL: "bold red"}


def examine(devices: list[Path]) -> list[Finding]:
    """All checks, in the order in which one would repair things.

    Takes seconds to minutes: imports vLLM in a child process and measures each device.
    """
    findings = [
        *check_software.versions(),
        *check_software.entry_points(),
        *check_software.native_modules(),
        *check_software.encryption(),
        *check_software.probe_vllm(),
        *check_host.host(),
        *check_io_uring.io_uring(),
        check_gds.gds(),
    ]
    for path in devices or [default_root()]:
        findings.extend(check_devices.device(path))
    return findings


def render(findings: list[Finding], console: Console) -> None:
    """Print one row per finding, with its cure below it."""
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    table.add_column(overflow="fold")
    for finding in findings:
        text = Text(finding.text)
        if finding.cure:
            text.append(f"\n-> {finding.cure}", style="bold")
        level = Text(finding.level, style=_STYLE[finding.level])
        table.add_row(level, Text(finding.subject), text)
    console.print(table)
    count = {level: sum(finding.level is level for finding in findings) for level in Level}
    console.print(f"{count[Level.OK]} ok, {count[Level.WARN]} warn, {count[Level.FAIL]} fail")


def doctor(
    device: Annotated[
        list[Path] | None,
        typer.Option(
            parser=arguments.place,
            metavar="PATH",
            help="Directory or raw block device to check; may be repeated.",
        ),
    ] = None,
    as_json: arguments.Json = False,
) -> None:
    """Check versions, plugin, native modules, this machine and its SSDs.

    The command measures each SSD with a file of at most 64 MiB and removes the file. Exits with 1
    when a check fails.
    """
    findings = examine(device or [])
    if as_json:
        arguments.print_json([dataclasses.asdict(finding) for finding in findings])
    else:
        render(findings, Console())
    if any(finding.level is Level.FAIL for finding in findings):
        raise typer.Exit(1)
