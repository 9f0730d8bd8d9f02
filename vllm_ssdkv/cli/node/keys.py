"""``ssdkv node keys``: keys with which nodes and engines know each other."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vllm_ssdkv.base.errors import SSDKVError
from vllm_ssdkv.cli import arguments
from vllm_ssdkv.node.protocol.credentials import make_keys


def keys(
    directory: Annotated[
        Path,
        typer.Argument(
            parser=arguments.place,
            metavar="DIR",
            help="Directory for the keys; it is created if missing.",
        ),
    ],
    days: Annotated[
        int, typer.Option(min=1, max=36500, help="Validity of the keys in days.")
    ] = 3650,
    as_json: arguments.Json = False,
) -> None:
    """Make keys for nodes and their engines, which TLS needs on a network.

    A node needs `authority.pem`, `node.pem` and `node-key.pem`, an engine `authority.pem`,
    `engine.pem` and `engine-key.pem`. Copy them to the machines over a channel that you trust.
    Anyone who has them may read and write all KV. To revoke them, make new ones for all and restart
    nodes and engines. Exits with 1 if DIR has keys.
    """
    try:
        made = make_keys(directory, days)
    except SSDKVError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from None
    if as_json:
        arguments.print_json({"files": [str(path) for path in made], "days": days})
        return
    for path in made:
        typer.echo(path)
