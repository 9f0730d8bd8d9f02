"""``ssdkv node run``: a store that serves engines, in this process."""

from __future__ import annotations

import logging
import signal
from pathlib import Path
from typing import Annotated

import typer

from vllm_ssdkv.base.errors import SSDKVError
from vllm_ssdkv.cli import arguments
from vllm_ssdkv.config.node import NodeConfig, options_in
from vllm_ssdkv.node.server.daemon import Node

_FORMAT = "%(asctime)s %(levelname)s %(message)s"


def run(
    config: Annotated[
        Path | None,
        typer.Option(
            parser=arguments.file_to_read,
            metavar="FILE",
            help="File of the node's options, YAML or JSON (docs/options.md). The flags below take "
            "precedence.",
        ),
    ] = None,
    listen: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ADDRESS",
            help="Address to listen on (option `listen`): unix:///path or tcp://host:port. Repeat "
            "it for several.",
        ),
    ] = None,
    device: Annotated[
        list[Path] | None,
        typer.Option(
            parser=arguments.place,
            metavar="DIR",
            help="Directory on an SSD (option `devices`). Repeat it for several.",
        ),
    ] = None,
    dram: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE", help="Memory of the DRAM tier, such as 64GiB (option `dram_gib`)."
        ),
    ] = None,
    keys: Annotated[
        Path | None,
        typer.Option(
            parser=arguments.directory,
            metavar="DIR",
            help="Directory that `ssdkv node keys` made (option `keys`).",
        ),
    ] = None,
    metrics: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="Address of `/metrics` (option `metrics`)."),
    ] = None,
) -> None:
    """Run a node until SIGTERM or Ctrl-C.

    Engines use it with `"nodes": ["ADDRESS"]` in place of a store of their own. The node writes all
    saved data before it ends, and exits with 0. It exits with 1 if it cannot start, or if writes
    did not end within the option `drain`.
    """
    ending = {signal.SIGTERM, signal.SIGINT}
    # Blocked before there are threads, which inherit it: this one waits for them.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ending)
    try:
        given = {} if config is None else options_in(config)
        flags = {
            "listen": listen or None,
            "devices": [str(path) for path in device] if device else None,
            "dram_gib": dram,
            "keys": None if keys is None else str(keys),
            "metrics": metrics,
        }
        given |= {name: value for name, value in flags.items() if value is not None}
        node = Node(NodeConfig.from_options(given, "options of the node"))
    except SSDKVError as error:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from None
    logging.basicConfig(format=_FORMAT, level=logging.INFO)
    node.start()
    signal.sigwait(ending)
    if not node.close():
        raise typer.Exit(1)
