"""``ssdkv node status``: how a node is."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from vllm_ssdkv.base.errors import NodeError, NodeGoneError, SSDKVError
from vllm_ssdkv.base.sizes import approximate_size
from vllm_ssdkv.cli import arguments
from vllm_ssdkv.node.protocol.address import Address
from vllm_ssdkv.node.protocol.channel import Channel
from vllm_ssdkv.node.protocol.credentials import Credentials
from vllm_ssdkv.node.protocol.frames import DEFAULT_LIMITS, VERSIONS
from vllm_ssdkv.node.protocol.messages import AskStatus, Hello, Message, Status, Welcome
from vllm_ssdkv.node.protocol.sockets import connect


def ask_status(address: Address, credentials: Credentials | None, timeout: float) -> Status:
    """Ask a node how it is. Blocks for at most ``timeout`` seconds a step.

    Raises:
        NodeError: it does not answer, or refuses.
        CredentialsError: the address needs keys.
    """
    with _connected(address, credentials, timeout) as channel:
        hello = Hello(VERSIONS[0], VERSIONS[-1], "status", "calls", "")
        welcome = _asked(channel, hello, timeout)
        if not isinstance(welcome, Welcome):
            raise NodeGoneError(f"{address} is no node")
        channel.agree(welcome.version, DEFAULT_LIMITS)
        status = _asked(channel, AskStatus(), timeout)
        if not isinstance(status, Status):
            raise NodeGoneError(f"{address} does not say how it is")
        return status


@contextlib.contextmanager
def _connected(
    address: Address, credentials: Credentials | None, timeout: float
) -> Iterator[Channel]:
    channel = connect(address, credentials, timeout)
    try:
        yield channel
    finally:
        channel.close()


def _asked(channel: Channel, message: Message, timeout: float) -> Message | None:
    channel.send(message, call_id=1, timeout=timeout)
    frame = channel.receive(timeout)
    if frame.error:
        raise NodeGoneError(frame.error)
    return frame.message


def status(
    address: Annotated[
        str, typer.Argument(metavar="ADDRESS", help="unix:///path or tcp://host:port.")
    ],
    keys: Annotated[
        Path | None,
        typer.Option(
            parser=arguments.directory,
            metavar="DIR",
            help="Keys of an engine, for an address that needs some.",
        ),
    ] = None,
    timeout: Annotated[
        float, typer.Option(min=0.1, max=600, help="Seconds to wait for each answer.")
    ] = 3.0,
    as_json: arguments.Json = False,
) -> None:
    """Show the stores of a node, and who uses them.

    Exits with 1 if nobody answers there, the node refuses, or it is about to end.
    """
    try:
        credentials = None if keys is None else Credentials.load(keys, "engine")
        found = ask_status(Address.parse(address), credentials, timeout)
    except (NodeError, SSDKVError) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from None
    if as_json:
        arguments.print_json(_as_json(found))
    else:
        _print(found)
    if found.draining:
        raise typer.Exit(1)


def _as_json(found: Status) -> dict[str, object]:
    content = {name: getattr(found, name) for name in found.__struct_fields__}
    for name in ("stores", "sessions"):
        content[name] = [msgspec.structs.asdict(entry) for entry in content[name]]
    return content


def _print(found: Status) -> None:
    console = Console()
    ends = ", about to end" if found.draining else ""
    console.print(
        f"node {found.version}, protocol {found.protocol}, up {found.uptime_s:.0f} s{ends}",
        highlight=False,
    )
    stores = Table("model", "ranks", "blocks", "stored", "in use", "DRAM", "directory")
    for store in found.stores:
        dram = store.frames * store.frame_bytes
        stores.add_row(
            store.model,
            str(store.ranks),
            f"{store.slots} of {store.block_tokens} tokens",
            str(store.ready),
            str(store.pinned),
            f"{approximate_size(dram)}, {store.frames_used / max(1, store.frames):.0%} used",
            store.path,
        )
    sessions = Table("role", "rank", "model", "connected", "pins", "writes", "run", "from")
    for session in found.sessions:
        sessions.add_row(
            session.role,
            str(session.rank) if session.role == "worker" else "",
            session.model,
            f"{session.age_s:.0f} s",
            str(session.pins),
            str(session.claims),
            session.run,
            session.peer,
        )
    console.print(stores if found.stores else "no store is open", highlight=False)
    console.print(sessions, highlight=False)
