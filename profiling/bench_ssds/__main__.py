"""Command line of the bench for several SSDs."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from vllm_ssdkv.base.errors import BenchError, StoreError
from vllm_ssdkv.base.sizes import MIB
from vllm_ssdkv.profiling.bench_io.case import MEMORY_BYTES
from vllm_ssdkv.profiling.bench_io.files import bench_files
from vllm_ssdkv.profiling.bench_io.fio import find_fio
from vllm_ssdkv.profiling.bench_io.model import GEN4
from vllm_ssdkv.profiling.bench_io.report import machine
from vllm_ssdkv.profiling.bench_ssds import scenarios
from vllm_ssdkv.profiling.bench_ssds.scenarios import Effort, Row, UntrustedError
from vllm_ssdkv.profiling.bench_ssds.setup import Kind, Setup, make_setup
from vllm_ssdkv.profiling.bench_ssds.slots import GEOMETRY
from vllm_ssdkv.profiling.bench_ssds.slowing import REACHED, Course, slowing
from vllm_ssdkv.profiling.console import wide_console
from vllm_ssdkv.profiling.vssd.ssds import DEFAULT_FOLDER, require_fuse
from vllm_ssdkv.profiling.vssd.system import require_root
from vllm_ssdkv.profiling.vssd.throttle import ThrottleGroup
from vllm_ssdkv.store.format.slot_geometry import SUPERBLOCK_BYTES
from vllm_ssdkv.store.memory.arena import Arena
from vllm_ssdkv.store.placement.lanes import lanes_for
from vllm_ssdkv.store.placement.stripe_map import StripeMap

FULL = Effort(repeats=3, seconds=1.5, blocks=256, requests=32)
QUICK = Effort(repeats=1, seconds=0.5, blocks=64, requests=32)
"""32 requests at once are what vLLM's 16 + 16 threads can take."""

SCENARIOS = frozenset({"scaling", "requests", "sparse", "slowing"})

_STEP = 4 * MIB


def region_bytes(devices: int, blocks: int) -> int:
    """Bytes of each device's file that the slots need, with equal or unequal shares."""
    shares = [[1.0] * devices, [*[1.0] * (devices - 1), 1 / scenarios.SLOW_FACTOR]]
    maps = [StripeMap(GEOMETRY, lanes_for(weights), devices) for weights in shares]
    units = max(m.device_units(device, blocks) for m in maps for device in range(devices))
    most = SUPERBLOCK_BYTES + units * GEOMETRY.unit_bytes
    return -(-most // _STEP) * _STEP


def measure(
    setup: Setup, effort: Effort, console: Console, only: frozenset[str] = SCENARIOS
) -> tuple[list[Row], list[Course]]:
    """The scenarios on these devices, with a table of each as it ends.

    Block-layer limits count in slices of 100 ms, so runs on throttled RAM disks take a second at
    the least.

    Raises:
        BenchError: fio does not see the devices that were asked for, or somebody failed.
    """
    rows: list[Row] = []
    courses: list[Course] = []
    if setup.kind == "loop":
        effort = replace(effort, seconds=max(effort.seconds, 1.0))

    def add(more: list[Row]) -> None:
        rows.extend(more)
        print_rows(console, more)

    arena = Arena(MEMORY_BYTES)
    try:
        region = region_bytes(setup.devices, effort.blocks)
        with bench_files(setup.directories, setup.devices, region) as files:
            kinds, absent = scenarios.engines(setup, files, arena)
            for name, reason in absent.items():
                console.print(f"{name}: absent: {reason}", markup=False)
            program = find_fio()
            if setup.kind == "twin":
                console.print("twins exist inside our engines only: no fio, no vLLM, no pools")
            elif program is None:
                console.print("fio is not installed: nobody has shown what the devices can do")
            else:
                add(scenarios.emulation(setup, files, program, effort))
            if "slowing" in only:  # which needs the room that RAID-0 takes
                courses = slowing(setup)
                print_courses(console, courses)
            folders: dict[str, Path] = {}
            if setup.kind == "fuse" and "requests" in only:
                # Not on RAM disks: their limits have no latency, which is what one request feels.
                folders[scenarios.ONE_DEVICE] = files[0].folder / "vllm"
                try:
                    raid = setup.raid0()
                except BenchError as error:
                    console.print(f"no RAID-0: {error}", markup=False)
                else:
                    folders[scenarios.RAID0] = raid / "vllm"
                    if program is not None:
                        add(scenarios.raid_emulation(setup, raid, program, effort))
            if folders and find_spec("vllm") is None:
                console.print("vLLM is not installed: only our own requests are measured")
                folders = {}
            if "scaling" in only:
                add(scenarios.scaling(setup, files, arena, effort, kinds))
            if "requests" in only:
                add(scenarios.requests(setup, files, arena, effort, kinds, folders))
            if "sparse" in only:
                add(scenarios.sparse(setup, files, arena, effort, kinds))
    finally:
        arena.close()
    return rows, courses


def print_rows(console: Console, rows: list[Row]) -> None:
    """A table for each scenario."""
    for scenario in dict.fromkeys(row.scenario for row in rows):
        table = Table(box=None, pad_edge=False)
        table.add_column(scenario, no_wrap=True)
        table.add_column("op", no_wrap=True)
        for name in ("SSDs", "at once", "MB/s", "IOPS", "of sum", "s/GB"):
            table.add_column(name, justify="right", no_wrap=True)
        for row in rows:
            if row.scenario == scenario:
                table.add_row(
                    row.what,
                    row.op,
                    str(row.devices),
                    str(row.at_once),
                    f"{row.bytes_per_s / 1e6:,.0f}",
                    f"{row.iops:,.0f}",
                    f"{row.of_sum:.2f}",
                    f"{row.cpu_s_per_gb:.3f}",
                )
        console.print(table)


def print_courses(console: Console, courses: list[Course]) -> None:
    """A table of how loads went on after a change."""
    table = Table(box=None, pad_edge=False)
    table.add_column("slowing", no_wrap=True)
    table.add_column("devices", no_wrap=True)
    for name in ("best MB/s", f"{REACHED:g} of it after", "then"):
        table.add_column(name, justify="right", no_wrap=True)
    for course in courses:
        reached = "never" if course.reached_s is None else f"{course.reached_s:.1f} s"
        figures = (f"{course.best / 1e6:,.0f}", reached, f"{course.steady:.2f}")
        table.add_row(course.load, course.when, *figures)
    console.print(table)


def possible_kinds(console: Console) -> list[Kind]:
    """Kinds of devices that can be made here, virtual SSDs and RAM disks if possible; says why one
    cannot."""
    kinds: list[Kind] = []
    needs: dict[Kind, Callable[[], object]] = {
        "fuse": require_fuse,
        "loop": lambda: ThrottleGroup(DEFAULT_FOLDER),
    }
    for kind, check in needs.items():
        try:
            require_root("emulated SSDs")
            check()
        except BenchError as error:
            console.print(f"no {kind} devices: {error}", markup=False)
        else:
            kinds.append(kind)
    return kinds or ["twin"]


def run(
    kind: Annotated[
        Kind | None,
        typer.Option(help="Kind of emulated SSD; default: fuse and loop as root, else twin."),
    ] = None,
    devices: Annotated[int, typer.Option(min=2, max=64, help="Number of devices.")] = 8,
    repeats: Annotated[
        int | None, typer.Option(min=1, max=100, help="Number of runs; medians count.")
    ] = None,
    dilation: Annotated[
        float, typer.Option(min=1, help="Factor by which a device is slower than a PCIe 4 drive.")
    ] = GEN4.dilation,
    only: Annotated[
        str,
        typer.Option(help="Scenarios to run: scaling, requests, sparse, slowing; default: all."),
    ] = ",".join(sorted(SCENARIOS)),
    json_file: Annotated[Path | None, typer.Option("--json", help="File for the results.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Make one short run of each.")] = False,
) -> None:
    """Make emulated SSDs, show with fio that they are what they should be, and measure.

    On a machine that is too slow or too busy for them, a larger dilation keeps the ratios.
    """
    chosen = frozenset(only.split(","))
    if not chosen <= SCENARIOS:
        raise typer.BadParameter(
            f"{', '.join(sorted(chosen - SCENARIOS))!r} is no scenario; there are "
            f"{', '.join(sorted(SCENARIOS))}",
            param_hint="--only",
        )
    effort = QUICK if quick else FULL
    if repeats is not None:
        effort = replace(effort, repeats=repeats)
    model = GEN4.slower(dilation / GEN4.dilation)
    console = wide_console()
    found: dict[str, list[dict[str, Any]]] = {}
    courses: dict[str, list[dict[str, Any]]] = {}
    untrusted: dict[str, str] = {}
    try:
        for each in [kind] if kind else possible_kinds(console):
            console.rule(f"{devices} {each}")
            with (
                tempfile.TemporaryDirectory(dir=Path.cwd(), prefix=".ssdkv-") as place,
                make_setup(each, devices, model, Path(place)) as setup,
            ):
                try:
                    rows, gone = measure(setup, effort, console, chosen)
                    found[each] = [row.plain() for row in rows]
                    courses[each] = [course.plain() for course in gone]
                except UntrustedError as error:
                    untrusted[each] = str(error)
                    typer.echo(f"{each} devices are not measured: {error}", err=True)
    except (BenchError, StoreError) as error:
        typer.echo(f"bench_ssds: {error}", err=True)
        raise typer.Exit(1) from error
    if json_file is not None:
        document = {"schema": 1, "machine": machine(), "model": model.plain()}
        document |= {"rows": found, "slowing": courses, "untrusted": untrusted}
        json_file.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    if not found:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(run)
