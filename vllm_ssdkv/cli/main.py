"""The command ``ssdkv`` and its subcommands."""

from __future__ import annotations

import signal
import sys
from typing import Annotated

import typer

from vllm_ssdkv import __version__
from vllm_ssdkv.cli import batch, config
from vllm_ssdkv.cli.bench import bench
from vllm_ssdkv.cli.bench.accuracy import accuracy
from vllm_ssdkv.cli.bench.clusters import clusters
from vllm_ssdkv.cli.bench.decode import decode
from vllm_ssdkv.cli.bench.mlperf_kv import mlperf_kv
from vllm_ssdkv.cli.bench.offload import offload
from vllm_ssdkv.cli.bench.ttft import ttft
from vllm_ssdkv.cli.demo.demo import demo, demo_model
from vllm_ssdkv.cli.docs import docs
from vllm_ssdkv.cli.doctor.doctor import doctor
from vllm_ssdkv.cli.fpga import fpga
from vllm_ssdkv.cli.monitor import dashboard
from vllm_ssdkv.cli.monitor.top import top
from vllm_ssdkv.cli.node import node
from vllm_ssdkv.cli.plan.plan import plan
from vllm_ssdkv.cli.pool import pool
from vllm_ssdkv.cli.profile.profile import profile
from vllm_ssdkv.cli.reproduce.reproduce import reproduce
from vllm_ssdkv.cli.serve import serve
from vllm_ssdkv.cli.store.fsck import fsck
from vllm_ssdkv.cli.store.quota import quota
from vllm_ssdkv.cli.store.resume import resume
from vllm_ssdkv.cli.store.stores import inspect, list_stores, remove

app = typer.Typer(
    name="ssdkv",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
    help="KV cache of vLLM on SSDs: see it work, check and measure machines, options and stores.",
)
app.command()(demo)
app.command()(demo_model)
app.command()(serve)
app.command()(doctor)
app.command()(plan)
app.command()(profile)
app.command()(reproduce)
app.command()(top)
app.command("ls")(list_stores)
app.command()(inspect)
app.command()(fsck)
app.command("rm")(remove)
app.command()(resume)
app.command()(quota)
app.add_typer(batch.app, name="batch")
bench.app.command()(accuracy)
bench.app.command()(clusters)
bench.app.command()(decode)
bench.app.command("mlperf-kv")(mlperf_kv)
bench.app.command()(offload)
bench.app.command()(ttft)
app.add_typer(bench.app, name="bench")
app.add_typer(config.app, name="config")
app.add_typer(dashboard.app, name="dashboard")
app.add_typer(docs.app, name="docs")
app.add_typer(fpga.app, name="fpga")
app.add_typer(pool.app, name="pool")
app.add_typer(node.app, name="node")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _options(
    _version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_print_version,
            is_eager=True,
            help="Print the version of vllm-ssdkv.",
        ),
    ] = False,
) -> None:
    pass


def main() -> None:
    """Entry point. Who is told to end (SIGTERM) ends what it has started, and removes what it has
    made for a while, as after Ctrl-C."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    app(prog_name="ssdkv")


if __name__ == "__main__":
    main()
