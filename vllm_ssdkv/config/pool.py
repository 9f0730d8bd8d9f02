"""Options of a pool: which nodes there are, where each runs, and who starts them.

``docs/options.md`` has a table that is generated from here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Final, Literal

from pydantic import AfterValidator, Field, model_validator

from vllm_ssdkv.config.node import NodeConfig
from vllm_ssdkv.config.problems import checked_options
from vllm_ssdkv.config.schema import Allowed, OptionModel, PathText, Reason

MAX_NODES: Final = 128
LOCAL: Final = "local"
_LONGEST_PATH: Final = 107
"""Bytes of a Unix socket's path; Linux has 108 with the zero at its end."""
_NAME_TEXT: Final = "up to 32 of a-z, 0-9 and -"


def _name(value: str) -> str:
    if not (0 < len(value) <= 32) or not set(value) <= set("abcdefghijklmnopqrstuvwxyz0123456789-"):
        raise ValueError("no name of a node")
    return value


def _host(value: str) -> str:
    if not value or value.startswith("-") or not value.isprintable() or " " in value:
        raise ValueError("no host")
    return value


class PooledNode(OptionModel):
    """One node of a pool."""

    name: Annotated[
        str,
        Allowed(_NAME_TEXT),
        Field(description="Name of the node in this pool, and of its folder."),
        AfterValidator(_name),
        Reason("Only the user knows it."),
    ]
    host: Annotated[
        str,
        Allowed('"local", or what ssh or Ray call the machine'),
        Field(
            description="Machine of the node: `local`, a destination of ssh such as "
            "`user@10.0.0.2`, or with Ray the IP address of one of its machines."
        ),
        AfterValidator(_host),
        Reason("local: this machine."),
    ] = LOCAL
    options: Annotated[
        dict[str, object],
        Allowed("an object of options of a node"),
        Field(description="Options of this [node](#a-node); they override those of the pool."),
        Reason("Empty: the pool's `options` for all."),
    ] = {}  # noqa: RUF012 - pydantic copies it


class KubernetesPool(OptionModel):
    """Manifests of a pool, and the cluster that gets them."""

    manifests: Annotated[
        PathText,
        Allowed("a path (relative to where `ssdkv pool` is started)"),
        Field(description="Folder with a `kustomization.yaml`, such as `deploy/kubernetes`."),
        Reason("The manifests are the user's: storage class, sizes and registry are in them."),
    ]
    context: Annotated[
        str | None,
        Field(description="Context of kubectl's configuration."),
        Reason("null: the current one."),
    ] = None
    namespace: Annotated[
        str,
        Allowed("the name of a namespace"),
        Field(description="Namespace of everything that is applied."),
        AfterValidator(_name),
        Reason("default: that of Kubernetes."),
    ] = "default"


class PoolConfig(OptionModel):
    """All options of a pool. Instances never change.

    Example:
        PoolConfig.from_options({"directory": "/srv/pool", "nodes": [{"name": "a"}], ...})
    """

    runner: Annotated[
        Literal["hosts", "kubernetes", "ray"],
        Field(
            description="Runner of the nodes: `hosts` starts processes on this machine and on "
            "others through ssh, `kubernetes` applies manifests by kubectl, `ray` starts an actor "
            "on the machine of each node."
        ),
        Reason("hosts: it needs nothing but ssh."),
    ] = "hosts"
    directory: Annotated[
        PathText | None,
        Allowed("a path, the same on each machine"),
        Field(
            description="Folder on each machine with a folder for each node's options, log and "
            "socket. It is created if missing. It is required unless Kubernetes runs the nodes."
        ),
        Reason("null: Kubernetes has none."),
    ] = None
    options: Annotated[
        dict[str, object],
        Allowed("an object of options of a node"),
        Field(
            description="[Options of a node](#a-node) that all nodes share unless they have "
            "their own."
        ),
        Reason("Empty: the defaults of the node."),
    ] = {}  # noqa: RUF012 - pydantic copies it
    nodes: Annotated[
        tuple[PooledNode, ...],
        Allowed(f"a list of up to {MAX_NODES} objects with name, host, options"),
        Field(
            strict=False,
            max_length=MAX_NODES,
            description="Nodes of the pool, a fixed list.",
        ),
        Reason("Empty: with Kubernetes, the manifests say how many there are."),
    ] = ()
    ssh: Annotated[
        tuple[str, ...],
        Allowed('a list such as ["ssh", "-p", "2222"]'),
        Field(
            strict=False,
            min_length=1,
            max_length=64,
            description="Command that reaches a host; the host and the remote command follow.",
        ),
        Reason("A pool must not wait for a password."),
    ] = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10")
    program: Annotated[
        str,
        Field(min_length=1, description="Command that starts `ssdkv` on hosts that ssh reaches."),
        Reason("ssdkv: it is in the PATH of the user there."),
    ] = "ssdkv"
    kubernetes: Annotated[
        KubernetesPool | None,
        Field(description="Cluster of the nodes, if Kubernetes runs them."),
        Reason("null: there is none."),
    ] = None

    @classmethod
    def from_options(cls, options: Mapping[str, object], where: str = "options") -> PoolConfig:
        """Check options and freeze them, those of each node, too.

        Raises:
            ConfigError: as :func:`checked_options` says it.
        """
        pool = checked_options(cls, options, where)
        for node in pool.nodes:
            NodeConfig.from_options(pool.options_of(node), f"{where}: node {node.name}")
        return pool

    @model_validator(mode="after")
    def _no_contradictions(self) -> PoolConfig:
        lines = []
        names = [node.name for node in self.nodes]
        if len(set(names)) < len(names):
            lines.append("nodes: two have one name: give each its own")
        if self.runner == "kubernetes":
            if self.kubernetes is None:
                lines.append("kubernetes: give it manifests, or another runner")
            if self.nodes or self.options or self.directory is not None:
                lines.append(
                    "runner: of Kubernetes the manifests say which nodes there are: leave out "
                    "nodes, options and directory"
                )
        else:
            if not self.nodes:
                lines.append("nodes: none: give at least one, such as [{name: a}]")
            if self.directory is None:
                lines.append("directory: missing: give a folder such as /var/lib/ssdkv/pool")
            lines += [
                f"directory: the path of a socket, {self.directory}/{node.name}/node.sock, is "
                f"longer than {_LONGEST_PATH} bytes: name a shorter folder"
                for node in self.nodes
                if len(self.control_address(node).encode()) - len("unix://") > _LONGEST_PATH
            ]
            if self.kubernetes is not None:
                lines.append('kubernetes: has no effect: leave it out, or set runner "kubernetes"')
        if lines:
            raise ValueError("\n".join(lines))
        return self

    def options_of(self, node: PooledNode) -> dict[str, object]:
        """Options of a node, its own before the pool's, with the socket that the pool asks at."""
        options = {**self.options, **node.options}
        listen = options.get("listen", ())
        if isinstance(listen, (list, tuple)):
            options["listen"] = [*listen, self.control_address(node)]
        return options

    def control_address(self, node: PooledNode) -> str:
        """Address at which the pool asks a node: a Unix socket in its folder."""
        return f"unix://{self.directory}/{node.name}/node.sock"

    def on_its_machine(self, node: PooledNode) -> dict[str, object]:
        """Options of a pool of this one node, for ``ssdkv pool`` on the machine that has it."""
        options = {**self.options, **node.options}
        return {"directory": self.directory, "nodes": [{"name": node.name, "options": options}]}
