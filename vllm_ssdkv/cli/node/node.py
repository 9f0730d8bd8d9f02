"""Group of commands ``ssdkv node``."""

from __future__ import annotations

import typer

from vllm_ssdkv.cli.node.keys import keys

app = typer.Typer(no_args_is_help=True, help="Run a store that serves engines, and make its keys.")
app.command()(keys)
