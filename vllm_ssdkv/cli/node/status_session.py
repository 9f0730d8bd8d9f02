"""Session of a command that asks a node how it is, and the arguments that all of them have."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from vllm_ssdkv.base.node_address import Address
from vllm_ssdkv.cli import arguments
from vllm_ssdkv.node.client.session import Peer, Session
from vllm_ssdkv.node.protocol.credentials import Credentials

NodeAddress = Annotated[
    str,
    typer.Argument(metavar="ADDRESS", help="Address of the node: unix:///path or tcp://host:port."),
]

EngineKeys = Annotated[
    Path | None,
    typer.Option(
        parser=arguments.directory,
        metavar="DIR",
        help="Directory of an engine's keys, if the address needs them.",
    ),
]

Timeout = Annotated[
    float, typer.Option(min=0.1, max=600, help="Time limit of each answer in seconds.")
]


def read_keys(keys: Path | None) -> Credentials | None:
    """Keys of this directory; None: none.

    Raises:
        CredentialsError: they cannot be read.
    """
    return None if keys is None else Credentials.load(keys, "engine")


@contextlib.contextmanager
def status_session(
    address: Address, credentials: Credentials | None, timeout: float
) -> Iterator[Session]:
    """Open a session that only asks, and close it. ``timeout``: seconds.

    Raises:
        NodeError: the node does not answer, or refuses.
        CredentialsError: the address needs keys.
    """
    peer = Peer(address, credentials, "status", "")
    session = Session.open(peer, with_bytes=False, timeout=timeout)
    try:
        yield session
    finally:
        session.close()
