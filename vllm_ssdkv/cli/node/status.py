"""``ssdkv node status``: how a node is."""

from __future__ import annotations

import msgspec
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
from vllm_ssdkv.node.protocol.credentials import Credentials
from vllm_ssdkv.node.protocol.messages import AskStatus, Status


def ask_status(address: Address, credentials: Credentials | None, timeout: float) -> Status:
    """Ask a node how it is. Blocks for at most ``timeout`` seconds a step.

    Raises:
        NodeError: it does not answer, or refuses.
        CredentialsError: the address needs keys.
    """
    with status_session(address, credentials, timeout) as session:
        return session.call(AskStatus(), Status, timeout)


def status(
    address: NodeAddress,
    keys: EngineKeys = None,
    timeout: Timeout = 3.0,
    as_json: arguments.Json = False,
) -> None:
    """Show the stores of a node and their users.

    Exits with 1 if no node answers, the node refuses, or it is about to end.
    """
    try:
        found = ask_status(Address.parse(address), read_keys(keys), timeout)
    except SSDKVError as error:
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
