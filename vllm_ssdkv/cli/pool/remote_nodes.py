"""Nodes of a pool on other machines: ``ssdkv pool`` there does what it does here.

A machine gets, by ssh or from an actor of Ray, a pool of its one node as text, and answers with the
node's state as JSON. One code starts and ends processes, :mod:`vllm_ssdkv.cli.pool.local_nodes`.
"""

from __future__ import annotations

import json
import logging
import shlex
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, Literal, TypeAlias

from vllm_ssdkv.base.errors import PoolError
from vllm_ssdkv.cli.pool.local_nodes import LocalNodes
from vllm_ssdkv.cli.pool.node_state import NodeState
from vllm_ssdkv.config.pool import PoolConfig, PooledNode

Verb: TypeAlias = Literal["up", "status", "drain", "down"]

_MOST_AT_ONCE: Final = 16
_ROUND_TRIP_S: Final = 90.0
"""Longest time of a command on another machine, beside what its node may take."""


def perform(
    pool: PoolConfig, nodes: Sequence[PooledNode], verb: Verb, patience_s: float
) -> list[NodeState]:
    """Do it with nodes of this machine. Blocks."""
    local = LocalNodes(pool, nodes)
    if verb == "status":
        return local.status()
    return {"up": local.up, "drain": local.drain, "down": local.down}[verb](patience_s)


def by_ssh(
    pool: PoolConfig, nodes: Sequence[PooledNode], verb: Verb, patience_s: float
) -> list[NodeState]:
    """Do it with nodes of other machines, some at a time. Blocks."""

    def one(node: PooledNode) -> NodeState:
        return _one_by_ssh(pool, node, verb, patience_s)

    with ThreadPoolExecutor(_MOST_AT_ONCE) as threads:
        return list(threads.map(one, nodes))


def _one_by_ssh(pool: PoolConfig, node: PooledNode, verb: Verb, patience_s: float) -> NodeState:
    there = [pool.program, "pool", verb, "-", "--json"]
    if verb != "status":
        there += ["--patience", str(patience_s)]
    try:
        done = subprocess.run(
            [*pool.ssh, node.host, shlex.join(there)],
            input=json.dumps(pool.on_its_machine(node)),
            capture_output=True,
            text=True,
            timeout=patience_s + _ROUND_TRIP_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return NodeState(node.name, node.host, "unknown", problem=f"{pool.ssh[0]}: {error}")
    try:
        (found,) = json.loads(done.stdout)["nodes"]
        return NodeState.from_json(found, node.host)
    except (ValueError, TypeError, KeyError):
        said = done.stderr.strip() or f"{pool.ssh[0]} ended with {done.returncode}"
        return NodeState(node.name, node.host, "unknown", problem=said)


class NodeActor:
    """Actor of Ray on the machine of a node, which is a process beside it.

    Example:
        >>> NodeActor().perform(json.dumps(pool.on_its_machine(node)), "status", 0)
        '{"name": "a", ...}'
    """

    def perform(self, text: str, verb: Verb, patience_s: float) -> str:
        """Do it with the one node of the pool in ``text``. Returns its state as JSON."""
        pool = PoolConfig.from_options(json.loads(text))
        (state,) = perform(pool, pool.nodes, verb, patience_s)
        return json.dumps(state.as_json())


def by_ray(
    pool: PoolConfig, nodes: Sequence[PooledNode], verb: Verb, patience_s: float
) -> list[NodeState]:
    """Do it with nodes on machines of the Ray cluster that this one belongs to. Blocks.

    Each node has an actor, which stays until ``down``: Ray ends the processes of one that is gone.

    Raises:
        PoolError: Ray is not installed, or no cluster is to be found.
    """
    try:
        import ray
    except ImportError as error:
        raise PoolError(
            f'runner: ray cannot be imported ({error}): pip install ray, or set runner "hosts"'
        ) from error
    try:
        ray.init(
            "auto",
            namespace="ssdkv-pool",
            log_to_driver=False,
            logging_level=logging.WARNING,
        )
    except ConnectionError as error:
        raise PoolError(f"runner: no Ray cluster: start one with ray start ({error})") from error
    try:
        limit_s = patience_s + _ROUND_TRIP_S
        return [_one_by_ray(ray, pool, node, verb, patience_s, limit_s) for node in nodes]
    finally:
        ray.shutdown()


def _one_by_ray(
    ray: Any,  # noqa: ANN401 - the module, which need not be installed
    pool: PoolConfig,
    node: PooledNode,
    verb: Verb,
    patience_s: float,
    limit_s: float,
) -> NodeState:
    places = [found["NodeID"] for found in ray.nodes() if node.host == found["NodeManagerAddress"]]
    if not places:
        problem = f"no machine of the Ray cluster has the address {node.host}: see ray status"
        return NodeState(node.name, node.host, "unknown", problem=problem)
    strategy = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(places[0], soft=False)
    actor = (
        ray.remote(NodeActor)
        .options(
            name=f"node-{node.name}",
            get_if_exists=True,
            lifetime="detached",
            num_cpus=0,
            scheduling_strategy=strategy,
        )
        .remote()
    )
    text = json.dumps(pool.on_its_machine(node))
    try:
        answer = ray.get(actor.perform.remote(text, verb, patience_s), timeout=limit_s)
    except ray.exceptions.RayError as error:
        return NodeState(node.name, node.host, "unknown", problem=str(error))
    state = NodeState.from_json(json.loads(answer), node.host)
    if verb == "down" and state.state == "stopped":
        ray.kill(actor)
    return state
