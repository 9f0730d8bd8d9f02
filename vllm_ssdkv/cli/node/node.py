"""Group of commands ``ssdkv node``."""

from __future__ import annotations

import typer

from vllm_ssdkv.cli.node.keys import keys
from vllm_ssdkv.cli.node.run import run
from vllm_ssdkv.cli.node.status import status
from vllm_ssdkv.cli.node.volumes import volumes

app = typer.Typer(no_args_is_help=True, help="Run a store that serves engines, and make its keys.")
app.command()(run)
app.command()(status)
app.command()(volumes)
app.command()(keys)
