"""Options of a node, ``ssdkv node run``: its addresses, its drives and memory, its limits.

``docs/options.md`` has a table that is generated from here.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Final, Literal

import yaml
from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from vllm_ssdkv.base.errors import ConfigError
from vllm_ssdkv.base.host import DEFAULT_DRAM_LIMIT, available_memory, is_block_device
from vllm_ssdkv.base.sizes import GIB, MIB, SIZE_TEXT, parse_size
from vllm_ssdkv.config.encryption import EncryptionConfig
from vllm_ssdkv.config.engine import MAX_DEVICES, MAX_DRAM_GIB, DeviceConfig, gib_or_none
from vllm_ssdkv.config.io import IoConfig
from vllm_ssdkv.config.problems import checked_options
from vllm_ssdkv.config.schema import PATH_TEXT, Allowed, OptionModel, PathText, Reason

MAX_ADDRESSES: Final = 16
_ADDRESS_TEXT: Final = "unix:///path or tcp://host:port"


def _mode(value: str) -> str:
    if len(value) not in (3, 4) or any(c not in "01234567" for c in value):
        raise ValueError("not a file mode in octal digits")
    if int(value, 8) & 0o7111 or not int(value, 8) & 0o200:
        raise ValueError("a socket is read and written, by its owner at least, and not run")
    return value


class NodeConfig(OptionModel):
    """All options of a node. Instances never change.

    Example:
        NodeConfig.from_options(options_in(Path("/etc/ssdkv/node.yaml")))
    """

    listen: Annotated[
        tuple[str, ...],
        Allowed(f"a list of up to {MAX_ADDRESSES} addresses, each {_ADDRESS_TEXT}"),
        Field(
            strict=False,
            min_length=1,
            max_length=MAX_ADDRESSES,
            description="Addresses at which engines find the node: `unix:///run/ssdkv.sock` for "
            "those of this host, `tcp://10.0.0.2:7070` for others. A TCP address that other hosts "
            "can reach needs `keys`.",
        ),
        Reason("Only the user knows where the engines run."),
    ]
    devices: Annotated[
        tuple[DeviceConfig, ...],
        Allowed(
            f'a list of up to {MAX_DEVICES} directories, such as ["/mnt/nvme0/kv"], or of objects '
            "with path and the other fields of a device"
        ),
        Field(
            strict=False,
            min_length=1,
            max_length=MAX_DEVICES,
            description="Directories on the SSDs. Each store (one model and number of ranks) has "
            "a directory of its own in each of them, and its share of their capacity. A raw block "
            "device holds one store, so a node takes none.",
        ),
        Reason("Only the user knows where the SSDs are mounted."),
    ]
    dram_gib: Annotated[
        float | None,
        Allowed('a number of GiB or a size such as "64GiB"'),
        Field(gt=0, le=MAX_DRAM_GIB, description="Memory of the DRAM tier of all stores together."),
        BeforeValidator(gib_or_none, json_schema_input_type=float | str | None),
        Reason("null: 10 % of the available memory, at most 4 GiB, as for an engine."),
    ] = None
    store_share: Annotated[
        float,
        Field(
            gt=0,
            le=1,
            description="Share of `dram_gib`, and of the capacity of each device, that a store "
            "gets at its first use. If no share is left, the least recently used store gives up "
            "its memory, and its space on the drives if needed.",
        ),
        Reason("Two models at a time, or one of twice the size after an option was set."),
    ] = 0.5
    shares: Annotated[
        dict[str, Annotated[float, Field(gt=0, le=1)]],
        Allowed('an object such as {"Qwen/Qwen3-8B": 0.75}'),
        Field(description="Shares of single models, by the name that vLLM was started with."),
        Reason("Empty: all models get the same share."),
    ] = {}  # noqa: RUF012 - pydantic copies it
    replicas: Annotated[
        Literal[1, 2],
        Field(
            description="Number of copies of each block, on different devices, as for an engine."
        ),
        Reason("1: lost blocks are recomputed."),
    ] = 1
    recover: Annotated[
        Literal["quiet", "strict", "none"],
        Field(description="Reaction to damage when a store is opened, as for an engine."),
        Reason("Nobody should have to repair a cache before it works."),
    ] = "quiet"
    admission: Annotated[
        Literal["all", "second_use"],
        Field(
            description="Blocks that are written: `all`, or those that the engines of a store "
            "together recently computed a second time."
        ),
        Reason("all: a prefix is found the first time that it is asked for again."),
    ] = "all"
    encryption: Annotated[
        EncryptionConfig | None,
        Field(
            description="Encryption of the stores, as for an engine. The node has the key; "
            "engines need none."
        ),
        Reason("null: off."),
    ] = None
    io: Annotated[
        IoConfig,
        Field(description="Transfer of bytes between the devices and memory, as for an engine."),
    ] = IoConfig()
    socket_mode: Annotated[
        str,
        Allowed('octal digits such as "0660"'),
        Field(
            description="File mode of Unix sockets. A user who may write to one can read "
            "everything in the store of its model, and take space in it."
        ),
        AfterValidator(_mode),
        Reason("0600: engines of the same user."),
    ] = "0600"
    keys: Annotated[
        PathText | None,
        Allowed(PATH_TEXT),
        Field(
            description="Directory of the node's certificate and key, as `ssdkv node keys` makes "
            "them. Engines at TCP addresses must then have keys of the same authority."
        ),
        Reason("null: Unix sockets and addresses of this host only."),
    ] = None
    metrics: Annotated[
        str | None,
        Allowed("host:port, or a port of 127.0.0.1"),
        Field(
            description="Address of `/metrics` for Prometheus. It needs no keys, and shows only "
            "names of models and numbers."
        ),
        Reason("null: off; `ssdkv node status` prints the state for people."),
    ] = None
    lease: Annotated[
        float,
        Field(
            ge=1,
            le=600,
            description="Seconds after which a silent engine counts as dead: the node releases "
            "its pins and drops its unfinished writes. Engines send a message three times in that "
            "time.",
        ),
        Reason(
            "10: the requests of a process that is stopped or swapped for 10 s have failed as well."
        ),
    ] = 10.0
    most_sessions: Annotated[
        int,
        Field(
            ge=1,
            le=16384,
            description="Maximum number of connections of schedulers, workers and status clients; "
            "one more is refused.",
        ),
        Reason("256: about thirty engines of eight GPUs, and a limit for a broken client."),
    ] = 256
    transfer: Annotated[
        int,
        Field(
            ge=MIB,
            le=64 * GIB,
            description="Maximum number of bytes that one worker may have in flight to the node.",
        ),
        Allowed(SIZE_TEXT, is_size=True),
        BeforeValidator(parse_size),
        Reason(
            "256MiB: a chunk of prefill of a large model. The memory is the engine's, not the "
            "node's."
        ),
    ] = 256 * MIB
    attend_gib: Annotated[
        float | None,
        Allowed('a number of GiB or a size such as "4GiB"'),
        Field(
            gt=0,
            le=MAX_DRAM_GIB,
            description="Memory for the pages that the node attends to, for each worker of an "
            'engine with `offload` `{"kind": "node"}`; the most recently read pages stay. It '
            "comes on top of `dram_gib`, and so does half as much again, at least 32 MiB, for "
            "descriptions of contexts and for calls.",
        ),
        BeforeValidator(gib_or_none, json_schema_input_type=float | str | None),
        Reason("null: a quarter of `dram_gib`."),
    ] = None
    attend_threads: Annotated[
        int | None,
        Field(
            ge=1,
            le=1024,
            description="Maximum number of threads that attend here for each such worker. Without "
            "the system's OpenMP runtime (`libgomp1`) it is one.",
        ),
        Reason("null: half of the CPUs, which use up DRAM's bandwidth."),
    ] = None
    drain: Annotated[
        float,
        Field(
            ge=0,
            le=3600,
            description="Seconds that SIGTERM gives to writes in progress. Engines continue "
            "without the node, and reconnect when it is back.",
        ),
        Reason(
            "This is below the 30 s that container runtimes wait, and longer than any healthy "
            "write."
        ),
    ] = 20.0

    @classmethod
    def from_options(cls, options: Mapping[str, object], where: str = "options") -> NodeConfig:
        """Check options and freeze them; ``where`` they come from, for the text of errors.

        Raises:
            ConfigError: as :func:`checked_options` says it.
        """
        return checked_options(cls, options, where)

    @model_validator(mode="after")
    def _no_contradictions(self) -> NodeConfig:
        lines = [
            f"devices[{i}].path: {device.path} is a raw block device: make a file system on it, "
            "and name a directory there"
            for i, device in enumerate(self.devices)
            if is_block_device(device.path)
        ]
        if self.replicas > len(self.devices):
            lines.append(
                f"replicas: {self.replicas} copies need {self.replicas} devices: name another "
                "directory in devices, or leave replicas at 1"
            )
        if lines:
            raise ValueError("\n".join(lines))
        return self

    def share_of(self, model: str) -> float:
        """Share of memory and drives for a store of this model."""
        return self.shares.get(model, self.store_share)

    def dram_bytes(self) -> int:
        """Bytes of DRAM for all stores. Reads the available memory where no size was given."""
        if self.dram_gib is None:
            return min(DEFAULT_DRAM_LIMIT, available_memory() // 10)
        return int(self.dram_gib * GIB)

    def attend_bytes(self) -> int:
        """Bytes of memory in which a worker's pages are attended to."""
        if self.attend_gib is None:
            return self.dram_bytes() // 4
        return int(self.attend_gib * GIB)


def options_in(path: Path) -> dict[str, object]:
    """Options of a node in a file, YAML or JSON.

    Raises:
        ConfigError: it cannot be read, or has no object of options.
    """
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found):
        raise ConfigError(f"{path}: no object of options of a node (docs/options.md)")
    return found
