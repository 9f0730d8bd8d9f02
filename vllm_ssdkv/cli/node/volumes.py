"""``ssdkv node volumes``: what engines in mode ``page`` have on a node, and how it is removed."""

from __future__ import annotations

from typing import Annotated
from uuid import UUID

import typer
from rich.console import Console
from rich.table import Table

from vllm_ssdkv.base.errors import SSDKVError
from vllm_ssdkv.base.node_address import Address
from vllm_ssdkv.base.sizes import approximate_size
from vllm_ssdkv.cli import arguments
from vllm_ssdkv.cli.node.status_session import (
    EngineKeys,
    NodeAddress,
    Timeout,
    read_keys,
    status_session,
)
from vllm_ssdkv.node.protocol.messages import (
    AskVolumes,
    Done,
    RemoveVolume,
    Volumes,
    VolumeStatus,
)


def volumes(
    address: NodeAddress,
    remove: Annotated[
        UUID | None,
        typer.Option(metavar="NAME", help="Remove this volume; no engine may have it open."),
    ] = None,
    keys: EngineKeys = None,
    timeout: Timeout = 10.0,
    as_json: arguments.Json = False,
) -> None:
    """Show the volumes of a node, or remove one.

    A volume has the slots of one rank of an engine in mode page. It stays when the engine ends, so
    that a restart finds the stored data. Remove the volumes of engines that are gone for good here.
    Exits with 1 if the node does not answer or refuses.
    """
    try:
        with status_session(Address.parse(address), read_keys(keys), timeout) as session:
            if remove is not None:
                session.call(RemoveVolume(remove.bytes), Done, timeout)
            found = session.call(AskVolumes([]), Volumes, timeout).volumes
    except SSDKVError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from None
    if as_json:
        arguments.print_json({"volumes": [_as_json(volume) for volume in found]})
    else:
        _print(found)


def _as_json(volume: VolumeStatus) -> dict[str, object]:
    content = {name: getattr(volume, name) for name in volume.__struct_fields__}
    return {**content, "name": str(UUID(bytes=volume.name))}


def _print(found: list[VolumeStatus]) -> None:
    table = Table("volume", "model", "drive", "size", "used by an engine")
    for volume in found:
        used = "now" if volume.open else f"{volume.idle_s / 3600:.1f} h ago"
        size = approximate_size(volume.nbytes)
        table.add_row(str(UUID(bytes=volume.name)), volume.model, volume.drive, size, used)
    Console().print(table)
