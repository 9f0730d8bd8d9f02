"""``ssdkv ls``, ``ssdkv inspect``, ``ssdkv rm``: the stores on this machine."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Final, TypeVar

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from vllm_ssdkv.base.errors import SSDKVError, StoreError
from vllm_ssdkv.base.host import default_root
from vllm_ssdkv.base.sizes import approximate_size, blocks_of
from vllm_ssdkv.cli import arguments
from vllm_ssdkv.store.devices.data_file import peek_superblock
from vllm_ssdkv.store.devices.owner import DATA_NAME
from vllm_ssdkv.store.devices.remote_devices import stub_of
from vllm_ssdkv.store.maintenance.catalog import (
    StoreDetails,
    inspect_store,
    stores_below,
    summarize,
    without_state_below,
)
from vllm_ssdkv.store.maintenance.offline_store import StoredStore, find_store
from vllm_ssdkv.store.maintenance.remove import (
    Removal,
    check_unused,
    plan_left_over,
    plan_removal,
)
from vllm_ssdkv.store.maintenance.remove import remove as remove_files

FAILED: Final = 1
Seen = TypeVar("Seen")


@contextlib.contextmanager
def _errors() -> Iterator[None]:
    try:
        yield
    except (SSDKVError, OSError) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(FAILED) from None


def _when(seconds: int) -> str:
    if not seconds:
        return "never"
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M UTC")


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, show_header=bool(columns))
    for column in columns or ("", ""):
        table.add_column(column, overflow="fold")
    return table


def look_at_all(
    directories: Sequence[Path] | None, look: Callable[[StoredStore], Seen]
) -> tuple[list[Seen], list[str]]:
    """Look at every store in the directories and two folders below.

    Args:
        directories: None or empty: the cache directory.
        look: Called for each store; may raise SSDKVError or OSError.

    Returns:
        Of each store that could be looked at; and a line of text for each of the others.
    """
    found: list[Seen] = []
    named = list(directories or [])
    broken = [line for path in named if (line := _unreadable(path))]
    roots = named or [default_root()]
    for state in {s: None for d in roots for s in stores_below(d)}:
        try:
            found.append(look(find_store([], state)))
        except (SSDKVError, OSError) as error:
            broken.append(f"{state}: {error}")
    for device, copy in {
        d: copy for root in roots for d, copy in without_state_below(root)
    }.items():
        broken.append(
            f"{device}: a device of the store {copy.store} of {copy.model}, whose state directory "
            f"{copy.state} is not there: an engine that has this device goes on with what is left"
        )
    return found, broken


def _unreadable(path: Path) -> str:
    """Reason that keeps a directory from being looked at; empty when nothing does."""
    try:
        os.scandir(path).close()
    except FileNotFoundError:
        return f"{path} does not exist: is it mounted?"
    except NotADirectoryError:
        return ""
    except OSError as error:
        return f"{path}: {error.strerror}"
    return ""


def list_stores(
    directories: Annotated[
        list[Path] | None,
        typer.Argument(
            parser=arguments.place,
            metavar="DIR...",
            help="Directories to search; default: the cache directory.",
        ),
    ] = None,
    as_json: arguments.Json = False,
) -> None:
    """List the stores in the cache directory or in DIR, and two folders below.

    Exits with 1 when a store cannot be read; the others are listed.
    """
    found, broken = look_at_all(directories, summarize)
    if as_json:
        arguments.print_json([dataclasses.asdict(store) for store in found])
    else:
        table = _table("Store", "Model", "Mode", "Blocks", "Allocated", "Last opened")
        for store in found:
            opened = "in use" if store.in_use else _when(store.last_opened)
            opened += ", suspended" if store.suspended else ""
            table.add_row(
                Text(store.state_dir),
                Text(store.model),
                store.mode,
                blocks_of(store.stored, store.slots, store.slots_to_come),
                approximate_size(store.disk_bytes),
                opened,
            )
        Console().print(table if found else "no stores")
    for line in broken:
        typer.echo(line, err=True)
    if broken:
        raise typer.Exit(FAILED)


def inspect(
    directories: arguments.Devices = None,
    state_dir: arguments.StateDir = None,
    as_json: arguments.Json = False,
) -> None:
    """Show one store: geometry, devices, sizes, and the content of its journal. Changes nothing."""
    with _errors():
        details = inspect_store(find_store(directories or [], state_dir))
    if as_json:
        arguments.print_json(dataclasses.asdict(details))
    else:
        _show(details, Console())


def _show(details: StoreDetails, console: Console) -> None:
    summary, geometry = details.summary, details.geometry
    table = _table()
    size = approximate_size(summary.block_bytes)
    blocks = blocks_of(summary.stored, summary.slots, summary.slots_to_come)
    for name, value in (
        ("store", summary.store),
        ("state directory", summary.state_dir),
        ("model", summary.model),
        ("mode", f"{summary.mode}, {summary.ranks} rank(s)"),
        ("blocks", f"{blocks}, {size} each on every rank"),
        ("allocated", approximate_size(summary.disk_bytes)),
        ("journal", f"{details.journal_bytes} bytes, {details.damaged_records} damaged records"),
        ("opened", f"{details.opened} times, last {_when(summary.last_opened)}"),
        ("in use", "yes" if summary.in_use else "no"),
        ("suspended", summary.suspended or "no"),
        ("encryption", f"key id {details.key_id}" if details.key_id else "off"),
        ("geometry", ", ".join(f"{name} {value}" for name, value in geometry.items())),
        ("two copies", f"{details.doubled_slots:,} slots"),
        ("stripe unit", approximate_size(details.stripe_unit_bytes)),
        ("fingerprint", ", ".join(f"{k} {v}" for k, v in sorted(details.fingerprint.items()))),
    ):
        table.add_row(name, Text(value))
    if details.problem:
        table.add_row("problem", Text(details.problem, "bold red"))
    console.print(table)
    devices = _table("Device", "Capacity", "Weight", "Files")
    for device in details.devices:
        lines = [Text(device.problem, "bold red")] if device.problem else []
        for file in device.files:
            wrong = [str(copy) for copy in file.superblocks if isinstance(copy, str)]
            if file.nbytes < file.expected_bytes:
                wrong.append(f"{file.expected_bytes} bytes expected")
            lines.append(Text(f"rank {file.rank}: {approximate_size(file.nbytes)}"))
            lines += [Text(text, "bold red") for text in wrong]
        capacity = approximate_size(device.capacity)
        devices.add_row(Text(device.path), capacity, f"{device.weight:g}", Text("\n").join(lines))
    console.print(devices)


def remove(
    directories: arguments.Devices = None,
    state_dir: arguments.StateDir = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Remove without asking.")] = False,
    left_over: Annotated[
        str | None,
        typer.Option(
            "--left-over",
            metavar="STORE",
            help="UUID of a store that was removed while the drives in DIR were away; its remains "
            "there are removed.",
        ),
    ] = None,
    as_json: arguments.Json = False,
) -> None:
    """Remove one store that no engine uses: its own files, and the superblocks of raw devices.

    The command removes only files that carry the name of the store. It also removes devices that
    you do not name, if they name the state directory as theirs; a copy or a backup does not count.
    It shows first the store, the files to be removed and the files that stay.

    Exits with 1 when the store is in use, when you answer no, or when one of its devices is absent.
    When that device is back, remove its files with --left-over.
    """
    with _errors():
        if left_over is None:
            removal = plan_removal(directories or [], state_dir)
        else:
            removal = plan_left_over(
                [*(directories or []), *([state_dir] if state_dir else [])], left_over
            )
        if not (removal.files or removal.raw):
            raise StoreError("nothing of the store is there")
        check_unused(removal)
        _show_removal(removal)
        if not yes and not typer.confirm("Remove this?", err=True):
            raise typer.Exit(FAILED)
        volumes = _volumes(removal)
        remove_files(removal)
        _remove_cache_folders(removal)
    for line in volumes:
        typer.echo(line, err=True)
    for path in removal.missing:
        typer.echo(
            f"{path} is not there, and nothing was removed from it: when it is back, remove what "
            f"is left with ssdkv rm --left-over {removal.store} {path}",
            err=True,
        )
    if as_json:
        content = {
            "store": removal.store,
            "model": removal.model,
            "last_opened": removal.last_opened,
            "removed": [str(file) for file in removal.files],
            "wiped": [str(path) for path in removal.raw],
            "missing": [str(path) for path in removal.missing],
            "kept": [{"path": str(kept.path), "why": kept.why} for kept in removal.kept],
            "bytes": removal.nbytes,
        }
        arguments.print_json(content)
    else:
        typer.echo(f"removed, {approximate_size(removal.nbytes)} are free again")
    if removal.missing:
        raise typer.Exit(FAILED)


def _volumes(removal: Removal) -> list[str]:
    """Lines about volumes on nodes, which a store that is removed leaves behind."""
    lines = []
    for file in removal.files:
        about = stub_of(file.parent)
        if about is None or DATA_NAME.fullmatch(file.name) is None:
            continue
        with contextlib.suppress(OSError, StoreError):
            block = peek_superblock(file)
            if about.shared:
                lines.append(
                    "the volume that it shares with other engines stays on the node: ssdkv node "
                    f"volumes {about.node}"
                )
            elif block is not None:
                lines.append(
                    f"its volume on a node stays: ssdkv node volumes {about.node} --remove "
                    f"{block.device}"
                )
    return lines


def _show_removal(removal: Removal) -> None:
    """Say what goes, of which store, on the error output."""
    model = f" of {removal.model}" if removal.model else ""
    opened = f", last opened {_when(removal.last_opened)}" if removal.last_opened else ""
    typer.echo(f"store {removal.store}{model}{opened}", err=True)
    size = approximate_size(removal.nbytes)
    typer.echo(f"to be removed, {size}:", err=True)
    for path in removal.files:
        used = _when(int(path.stat().st_mtime))
        typer.echo(f"  {path}, {approximate_size(path.stat().st_size)}, written {used}", err=True)
    for path in removal.raw:
        typer.echo(f"  {path}: its superblocks", err=True)
    for kept in removal.kept:
        typer.echo(f"left alone: {kept.path}: {kept.why}", err=True)


def _remove_cache_folders(removal: Removal) -> None:
    """Folders that a start without the option devices has made go with the store."""
    root = default_root()
    for folder in {file.parent for file in removal.files}:
        for path in (folder, *folder.parents):
            if root not in path.parents or any(path.iterdir()):
                break
            path.rmdir()
