"""Group of commands ``ssdkv pool``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Final

import typer
import yaml

from vllm_ssdkv.base.errors import ConfigError, PoolError, SSDKVError
from vllm_ssdkv.cli import arguments
from vllm_ssdkv.cli.pool.kubernetes_nodes import KubernetesNodes
from vllm_ssdkv.cli.pool.node_state import NodeState
from vllm_ssdkv.cli.pool.remote_nodes import Verb, by_ray, by_ssh, perform
from vllm_ssdkv.config.pool import LOCAL, PoolConfig, PooledNode

FAILED: Final = 1
WRONG_ARGUMENTS: Final = 2

app = typer.Typer(no_args_is_help=True, help="Start, check, drain and stop the nodes of a list.")

_File = Annotated[
    str, typer.Argument(metavar="FILE", help="File of the pool, YAML or JSON; - is standard input.")
]
_Names = Annotated[
    list[str] | None, typer.Argument(metavar="NAME...", help="Names of nodes; default: all.")
]
_Patience = Annotated[float, typer.Option(min=0, max=3600, help="Time limit in seconds.")]


def read_pool(file: str) -> PoolConfig:
    """The pool in a file.

    Raises:
        ConfigError: it cannot be read, or has no pool.
    """
    try:
        text = sys.stdin.read() if file == "-" else arguments.place(file).read_text("utf-8")
        found = yaml.safe_load(text)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{file}: cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{file}: no object of options of a pool (docs/options.md)")
    return PoolConfig.from_options({str(name): value for name, value in found.items()}, file)


def run(pool: PoolConfig, names: Sequence[str], verb: Verb, patience_s: float) -> list[NodeState]:
    """Do it with these nodes, or with all. Blocks.

    Raises:
        PoolError: a name is none, or what runs the nodes is missing or says no.
    """
    if pool.runner == "kubernetes" and pool.kubernetes is not None:
        if names:
            raise PoolError("names: Kubernetes chooses among its pods: leave them out")
        nodes = KubernetesNodes(pool.kubernetes)
        if verb == "status":
            return nodes.status()
        return {"up": nodes.up, "drain": nodes.drain, "down": nodes.down}[verb](patience_s)
    chosen = [node for node in pool.nodes if not names or node.name in names]
    unknown = set(names) - {node.name for node in chosen}
    if unknown:
        listed = ", ".join(node.name for node in pool.nodes)
        raise PoolError(f"no node is called {', '.join(sorted(unknown))}: {listed}")
    if pool.runner == "ray":
        return by_ray(pool, chosen, verb, patience_s)
    states: dict[str, NodeState] = {}
    for doing, is_local in ((perform, True), (by_ssh, False)):
        here = [node for node in chosen if (node.host == LOCAL) == is_local]
        states |= {state.name: state for state in _done(doing, pool, here, verb, patience_s)}
    return [states[node.name] for node in chosen]


_Doing = Callable[[PoolConfig, Sequence[PooledNode], Verb, float], list[NodeState]]


def _done(
    doing: _Doing, pool: PoolConfig, nodes: Sequence[PooledNode], verb: Verb, patience_s: float
) -> list[NodeState]:
    return doing(pool, nodes, verb, patience_s) if nodes else []


def _command(
    file: str, names: Sequence[str] | None, verb: Verb, patience_s: float, as_json: bool
) -> list[NodeState]:
    """Do it, and print the states."""
    try:
        pool = read_pool(file)
    except ConfigError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(WRONG_ARGUMENTS) from None
    try:
        states = run(pool, names or (), verb, patience_s)
    except SSDKVError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(FAILED) from None
    if as_json:
        arguments.print_json({"nodes": [state.as_json() for state in states]})
    else:
        for state in states:
            typer.echo(state.line())
    for state in states:
        if state.problem:
            typer.echo(f"{state.name}: {state.problem}", err=True)
    return states


def _exit_unless(states: Sequence[NodeState], wanted: str) -> None:
    if any(state.problem or state.state != wanted for state in states):
        raise typer.Exit(FAILED)


@app.command()
def up(
    file: _File,
    names: _Names = None,
    patience: _Patience = 120.0,
    as_json: arguments.Json = False,
) -> None:
    """Start the nodes that do not run, and wait until all answer.

    Nodes that already run with these options stay as they are. Exits with 1 if a node does not
    answer in time or runs with other options, with 2 if FILE is no pool.
    """
    _exit_unless(_command(file, names, "up", patience, as_json), "serves")


@app.command()
def status(file: _File, names: _Names = None, as_json: arguments.Json = False) -> None:
    """Report for each node whether it serves.

    A node is silent while it starts or hangs. Exits with 1 unless all serve.
    """
    _exit_unless(_command(file, names, "status", 0.0, as_json), "serves")


@app.command()
def drain(
    file: _File,
    names: _Names = None,
    patience: _Patience = 60.0,
    as_json: arguments.Json = False,
) -> None:
    """Drain nodes: they finish their writes and end, for example before you remove a machine.

    Engines continue without them, and reconnect after `up`. No stored data is lost. Exits with 1 if
    a node has not ended in time; it goes on draining.
    """
    _exit_unless(_command(file, names, "drain", patience, as_json), "stopped")


@app.command()
def down(
    file: _File,
    names: _Names = None,
    patience: _Patience = 60.0,
    as_json: arguments.Json = False,
) -> None:
    """Drain nodes, and kill those that have not ended in time.

    Durable data stays on the drives, and is found after `up`. Exits with 1 if a node still runs.
    """
    _exit_unless(_command(file, names, "down", patience, as_json), "stopped")
