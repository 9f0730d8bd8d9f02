"""Nodes of a pool that Kubernetes runs: manifests, and what kubectl says of their pods."""

from __future__ import annotations

import json
import subprocess
from typing import Any, Final

from vllm_ssdkv.base.errors import PoolError
from vllm_ssdkv.cli.pool.node_state import NodeState
from vllm_ssdkv.config.pool import KubernetesPool

LABEL: Final = "app.kubernetes.io/name=ssdkv-node"
STATEFUL_SET: Final = "statefulset/ssdkv-node"
_PORT: Final = "7070"
_KUBECTL_S: Final = 90.0
"""Longest time of a kubectl command, beside what it is told to wait for."""


class KubernetesNodes:
    """The pods of ``deploy/kubernetes``, or of manifests with the same names. One thread.

    Example:
        >>> KubernetesNodes(pool.kubernetes).up(patience_s=300)
        [NodeState(name='ssdkv-node-0', host='worker-1', state='serves', ...)]
    """

    def __init__(self, options: KubernetesPool) -> None:
        self._options = options

    def up(self, patience_s: float) -> list[NodeState]:
        """Apply the manifests and wait until all pods are ready. Blocks for ``patience_s``.

        Raises:
            PoolError: kubectl is missing, or says no.
        """
        self._kubectl("apply", "-k", self._options.manifests)
        wait = f"--timeout={patience_s:.0f}s"
        self._kubectl("rollout", "status", STATEFUL_SET, wait, limit_s=patience_s)
        return self.status()

    def status(self) -> list[NodeState]:
        """Ask Kubernetes for the pods; one that is ready serves. Errors as :meth:`up`."""
        found = json.loads(self._kubectl("get", "pods", "-l", LABEL, "-o", "json"))
        return [_state(pod) for pod in found["items"]]

    def drain(self, patience_s: float) -> list[NodeState]:
        """Have no pods, and wait for their ends; their volumes stay. Errors as :meth:`up`."""
        self._kubectl("scale", STATEFUL_SET, "--replicas=0")
        wait = f"--timeout={patience_s:.0f}s"
        self._kubectl("wait", "pods", "-l", LABEL, "--for=delete", wait, limit_s=patience_s)
        return self.status()

    def down(self, patience_s: float) -> list[NodeState]:
        """Delete what the manifests made; the volumes of pods stay. Errors as :meth:`up`."""
        wait = ("--ignore-not-found", "--wait", f"--timeout={patience_s:.0f}s")
        self._kubectl("delete", "-k", self._options.manifests, *wait, limit_s=patience_s)
        return self.status()

    def _kubectl(self, *arguments: str, limit_s: float = 0.0) -> str:
        where = ["--namespace", self._options.namespace]
        if self._options.context is not None:
            where += ["--context", self._options.context]
        command = ["kubectl", *where, *arguments]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=limit_s + _KUBECTL_S, check=False
            )
        except FileNotFoundError as error:
            raise PoolError("runner: there is no kubectl in the PATH: install it") from error
        except subprocess.TimeoutExpired as error:
            raise PoolError(f"kubectl {arguments[0]}: no end in {error.timeout:.0f} s") from error
        if done.returncode:
            raise PoolError(f"kubectl {arguments[0]}: {done.stderr.strip()}")
        return done.stdout


def _state(pod: dict[str, Any]) -> NodeState:
    name, status = pod["metadata"]["name"], pod.get("status", {})
    ready = any(
        condition["type"] == "Ready" and condition["status"] == "True"
        for condition in status.get("conditions", ())
    )
    return NodeState(
        name=name,
        host=pod["spec"].get("nodeName", ""),
        state="serves" if ready else "silent",
        addresses=(f"tcp://{name}.ssdkv-node:{_PORT}",),
        problem="" if ready else f"{status.get('phase', 'Unknown')}: kubectl describe pod {name}",
    )
