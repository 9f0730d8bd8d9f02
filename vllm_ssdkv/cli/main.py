"""The command ``ssdkv`` and its subcommands."""

from __future__ import annotations

import signal
import sys
from typing import Annotated, Any, Final

import typer
from typer.core import TyperGroup

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
from vllm_ssdkv.cli.explain.explain import explain
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
from vllm_ssdkv.cli.warm import warm

MOVED: Final = frozenset({"bench", "demo-model", "docs", "fpga", "profile", "reproduce"})
"""Commands that version 0.1 moved into ``ssdkv lab``. Their old names go with 0.2."""


class _Commands(TyperGroup):
    """Commands at the top. The old name of one that moved says where it is now, and runs it."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:  # noqa: ANN401 - click's, or typer's own copy
        """The command of this name, old or new."""
        if cmd_name not in MOVED:
            return super().get_command(ctx, cmd_name)
        if not ctx.resilient_parsing:
            text = f"ssdkv {cmd_name} is now ssdkv lab {cmd_name}; the old name goes with 0.2"
            typer.echo(text, err=True)
        lab: Any = super().get_command(ctx, "lab")
        return lab.get_command(ctx, cmd_name)


app = typer.Typer(
    name="ssdkv",
    cls=_Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
    help="KV cache of vLLM on SSDs: see it work, serve with it, check machines and stores.",
)
app.command()(demo)
app.command()(serve)
app.command()(warm)
app.command()(plan)
app.command()(doctor)
app.command("ls")(list_stores)
app.command()(inspect)
app.command()(quota)
app.command()(top)
app.add_typer(dashboard.app, name="dashboard")
app.command()(fsck)
app.command()(resume)
app.command("rm")(remove)
app.add_typer(batch.app, name="batch")
app.add_typer(node.app, name="node")
app.add_typer(pool.app, name="pool")
app.add_typer(config.app, name="config")
app.command(context_settings={"ignore_unknown_options": True})(explain)

lab_app = typer.Typer(no_args_is_help=True, help="Measure, simulate, and write generated pages.")
bench.app.command()(accuracy)
bench.app.command()(clusters)
bench.app.command()(decode)
bench.app.command("mlperf-kv")(mlperf_kv)
bench.app.command()(offload)
bench.app.command()(ttft)
lab_app.add_typer(bench.app, name="bench")
lab_app.command()(demo_model)
lab_app.add_typer(docs.app, name="docs")
lab_app.add_typer(fpga.app, name="fpga")
lab_app.command()(profile)
lab_app.command()(reproduce)
app.add_typer(lab_app, name="lab")


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
