"""``ssdkv quota``: the room that all stores of a user take, and what another size would mean."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from vllm_ssdkv.base.sizes import approximate_size, blocks_of, format_size
from vllm_ssdkv.cli import arguments
from vllm_ssdkv.cli.store.disk_usage import FileSystemSpace, StoreSpace, filesystems, store_space
from vllm_ssdkv.cli.store.stores import look_at_all
from vllm_ssdkv.config.engine import MIN_CAPACITY

FAILED: Final = 1
_BAD: Final = "bold red"


def _capacity(text: str | int) -> int:
    nbytes = arguments.size(text)
    if nbytes < MIN_CAPACITY:
        raise typer.BadParameter(f"{text} is less than {format_size(MIN_CAPACITY)}")
    return nbytes


def _stores(stores: Sequence[StoreSpace]) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in ("Store", "Model", "Device", "Capacity", "Allocated", "Blocks"):
        table.add_column(column, overflow="fold")
    for store in stores:
        blocks = blocks_of(store.stored, store.slots, store.slots_to_come)
        blocks += ", in use" if store.in_use else ""
        if store.forecast is not None:
            lost = store.stored - store.forecast.kept
            blocks += f" -> {blocks_of(store.forecast.kept, store.forecast.slots)}"
            blocks += f", {lost:,} given up" if lost else ""
        for row, device in enumerate(store.devices):
            first = row == 0
            capacity = approximate_size(device.capacity)
            if store.forecast is not None:
                capacity += f" -> {approximate_size(store.forecast.capacity)}"
            table.add_row(
                Text(store.state_dir if first else ""),
                Text(store.model if first else ""),
                Text(device.path),
                capacity,
                approximate_size(device.on_disk) if device.filesystem else "-",
                blocks if first else "",
            )
    return table


def _filesystems(found: Sequence[FileSystemSpace]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("File system", overflow="fold")
    for column in ("Size", "Stores", "Other files", "Free", "Stores may grow by"):
        table.add_column(column, justify="right")
    for place in found:
        sizes = (place.size, place.stores, place.others, place.free)
        growth = Text(approximate_size(place.growth), _BAD if place.short else "")
        table.add_row(Text(place.mount), *map(approximate_size, sizes), growth)
    return table


def _advice(found: Sequence[FileSystemSpace], capacity: int | None) -> list[str]:
    lines = [
        f"{place.mount}: {approximate_size(place.short)} are missing for the stores to reach their "
        "capacities: make room, or lower devices[].capacity"
        for place in found
        if place.short
    ]
    if capacity is not None:
        lines.append(
            f"to have it so: give devices[].capacity {format_size(capacity)} and restart the "
            "engine; blocks given up are computed again when they are needed"
        )
    return lines


def quota(
    directories: Annotated[
        list[Path] | None,
        typer.Argument(
            parser=arguments.place,
            metavar="DIR...",
            help="Directories to search; default: the cache directory.",
        ),
    ] = None,
    capacity: Annotated[
        int | None,
        typer.Option(
            parser=_capacity,
            metavar="SIZE",
            help="Show the effect of this size of each device, such as 200GiB.",
        ),
    ] = None,
    as_json: arguments.Json = False,
) -> None:
    """Show the space that stores have and use, and the other data on their file systems.

    The command looks in the cache directory or in DIR, and two folders below. It changes nothing:
    the capacity is an option of the engine, devices[].capacity, and takes effect at its next start.
    Exits with 1 when a store cannot be read; the others are shown.
    """
    stores, broken = look_at_all(directories, partial(store_space, capacity=capacity))
    try:
        found = filesystems(stores)
    except OSError as error:
        found = []
        broken.append(str(error))
    if as_json:
        content = {
            "stores": [dataclasses.asdict(store) for store in stores],
            "filesystems": [dataclasses.asdict(place) for place in found],
        }
        arguments.print_json(content)
    elif stores:
        console = Console()
        console.print(_stores(stores))
        console.print()
        console.print(_filesystems(found))
        for line in _advice(found, capacity):
            console.print(line, markup=False, highlight=False, soft_wrap=True)
    else:
        typer.echo("no stores")
    for line in broken:
        typer.echo(line, err=True)
    if broken:
        raise typer.Exit(FAILED)
