"""Hardware that systems run on: GPUs, links, drives, flash, near-storage devices, hosts, nodes.

Bytes, seconds and bytes per second throughout; prices in USD.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import cache
from typing import ClassVar, Final, TypeVar

from vllm_ssdkv.base.errors import ConfigError
from vllm_ssdkv.config.offload import DriveProfile
from vllm_ssdkv.offload.testing.drive_timing import DRIVES as TIMINGS
from vllm_ssdkv.offload.testing.drive_timing import DriveTiming
from vllm_ssdkv.offload.testing.flash import FlashTiming
from vllm_ssdkv.profiling.simulation.description import (
    DATA,
    Description,
    Positive,
    Whole,
    read_descriptions,
)

NODE_FIGURES: Final = "node_protocol.json"
"""File that ``bench_node`` and ``bench_node_attention`` write."""


class Gpu(Description):
    """An accelerator.

    Example:
        gpu("a6000").bandwidth

    Attributes:
        flops: Of dense matrices in 16 bit, per second.
    """

    kind: ClassVar[str] = "gpus"
    memory_bytes: Positive
    bandwidth: Positive
    flops: Positive
    price_usd: Positive | None = None


class Link(Description):
    """A link or a network, in one direction; the other way has as much."""

    kind: ClassVar[str] = "links"
    bandwidth: Positive


class Drive(Description):
    """A drive that reads and writes. One queue; a request costs its bytes or its turn.

    Attributes:
        latency_s: Seconds to the first byte, beside others: it occupies nobody. The median.
        latency_p99_s: That 99 of 100 requests keep. None: all are alike.
        endurance_bytes: That may be written in its life.
    """

    kind: ClassVar[str] = "drives"
    read_bandwidth: Positive
    write_bandwidth: Positive
    iops: Positive
    latency_s: Positive
    latency_p99_s: Positive | None = None
    capacity_bytes: Positive | None = None
    endurance_bytes: Positive | None = None
    price_usd: Positive | None = None

    def read_s(self, requests: int, nbytes: float) -> float:
        """Seconds for which reads occupy the drive."""
        return max(nbytes / self.read_bandwidth, requests / self.iops)

    def write_s(self, requests: int, nbytes: float) -> float:
        """Seconds for which writes occupy the drive."""
        return max(nbytes / self.write_bandwidth, requests / self.iops)


class Flash(Description):
    """Inside of a drive: dies behind channels, and what a page takes.

    Attributes:
        dies: Of one channel; they read beside each other.
        read_s: Of a page, from cells to the die's register.
        firmware_s: Of one request.
    """

    kind: ClassVar[str] = "flash"
    channels: Whole
    dies: Whole
    page_bytes: Whole
    read_s: Positive
    program_s: Positive
    channel_bandwidth: Positive
    firmware_s: Positive
    link_bandwidth: Positive

    @property
    def rewrite_s(self) -> float:
        """Seconds of a write of less than a page, with nothing beside it: read, then programmed."""
        return self.firmware_s + self.read_s + self.program_s

    def as_drive(self, name: str) -> Drive:
        """The drive that it makes: the slowest of dies, channels and link, by the product's model
        of them. IOPS are those of whole pages.
        """
        shape = self.channels, self.dies, self.page_bytes
        reads = FlashTiming(*shape, self.read_s, self.channel_bandwidth)
        programs = FlashTiming(*shape, self.program_s, self.channel_bandwidth)
        bandwidth = min(reads.bandwidth, self.link_bandwidth)
        figures = {
            "read_bandwidth": bandwidth,
            "write_bandwidth": min(programs.bandwidth, self.link_bandwidth),
            "iops": bandwidth / self.page_bytes,
            "latency_s": self.firmware_s + self.read_s + reads.transfer_s,
        }
        return Drive.model_validate(
            {"name": name, **figures, "sources": dict.fromkeys(figures, f"flash {self.name}")}
        )


class NearStorage(Description):
    """A drive that attends: a computational drive or a SmartSSD.

    Attributes:
        timing: Name of its timing in :mod:`vllm_ssdkv.offload.testing.drive_timing`, which the
            product's throttled twins go by.
        attend_bandwidth: Bytes/s of K and V that its kernel attends to from its own memory.
        prefill_bandwidth: Bytes/s that are written while nobody reads.
        flash: Name of the flash in it.
        latency_p99_s: See :class:`Drive`.
    """

    kind: ClassVar[str] = "near_storage"
    timing: DriveProfile
    attend_bandwidth: Positive | None = None
    prefill_bandwidth: Positive | None = None
    flash: str | None = None
    latency_p99_s: Positive | None = None
    capacity_bytes: Positive | None = None
    endurance_bytes: Positive | None = None
    price_usd: Positive | None = None

    @property
    def drive(self) -> DriveTiming:
        """The product's timing of this drive, with the rate of the kernel that is given here."""
        timing = TIMINGS[self.timing]
        if self.attend_bandwidth is None:
            return timing
        return replace(timing, attend_bandwidth=self.attend_bandwidth)


class Host(Description):
    """A server without its GPU and drives.

    Attributes:
        dram_bandwidth: Bytes/s of its memory; a copied byte takes three: it is read, its place is
            fetched, and it is written.
    """

    kind: ClassVar[str] = "hosts"
    clock_hz: Positive | None = None
    dram_bytes: Positive | None = None
    dram_bandwidth: Positive | None = None
    price_usd: Positive | None = None
    chassis_usd: Positive | None = None


class IoPath(Description):
    """Software between drives and accelerator.

    Attributes:
        drive_bandwidth: Bytes/s that it gets from one drive, whatever the drive could.
        request_s: Seconds of its one thread for each block.
        in_flight: Blocks of a request that it reads beside each other. None: enough.
        relayed: 1: all of a request is in DRAM before any of it goes to the accelerator.
    """

    kind: ClassVar[str] = "paths"
    drive_bandwidth: Positive | None = None
    request_s: Positive | None = None
    in_flight: Whole | None = None
    relayed: Whole | None = None


class StorageNode(Description):
    """A drive with an address that runs programs.

    Attributes:
        clock_hz: Of its processor.
        channels: Of its flash.
        cores: That attend.
        core_attend_bandwidth: Bytes/s of K and V that one of them attends to.
        flash: Name of its flash; it has so many channels of it.
    """

    kind: ClassVar[str] = "nodes"
    clock_hz: Positive
    dram_bytes: Positive
    channels: Whole
    capacity_bytes: Positive
    cores: Whole | None = None
    core_attend_bandwidth: Positive | None = None
    flash: str | None = None


@dataclass(frozen=True, slots=True)
class NodeCosts:
    """Seconds that a node of ours costs beside drives and memory, as ``bench_node`` measured them.

    Example:
        node_costs("tcp").load_s(blocks=128, nbytes=1 << 25)

    Attributes:
        load: Of each hit.
        block: Of each of its blocks.
        byte: Of each of its bytes.
        attend: Of a small call of attention.
    """

    load: float
    block: float
    byte: float
    attend: float

    def load_s(self, blocks: int, nbytes: float) -> float:
        """Seconds that a hit takes longer than from a store in the engine's process."""
        return self.load + blocks * self.block + nbytes * self.byte


def node_costs(socket: str) -> NodeCosts:
    """Costs that were measured through sockets of this kind.

    Raises:
        ConfigError: nothing was.
    """
    measured = json.loads((DATA / NODE_FIGURES).read_text())
    keys = ("load_s", "block_s", "byte_s", "attend_s")
    whole = {kind for kind, figures in measured.items() if set(keys) <= set(figures)}
    if socket not in whole:
        raise ConfigError(f"node: got {socket!r}; measured are {', '.join(sorted(whole))}")
    return NodeCosts(*(measured[socket][key] for key in keys))


class Network(Description):
    """A network between nodes, in one direction; the other way has as much.

    Attributes:
        bandwidth: Of one port.
        latency_s: One way.
    """

    kind: ClassVar[str] = "networks"
    bandwidth: Positive
    latency_s: Positive


class StoragePool(Description):
    """Storage nodes that decode, against a host that swaps. Work is counted in FLOP.

    Attributes:
        node: Name of the nodes' description.
        host: Name of the host's.
        nodes: Most of them.
        host_flop_per_byte: FLOP of the host in the time that swapping a byte of KV takes.
        pool_speedup: Of reading KV from the nodes' own flash, against that swapping.
    """

    kind: ClassVar[str] = "pools"
    node: str
    host: str
    host_flop_per_byte: Positive
    pool_speedup: Positive
    nodes: Whole

    @property
    def relative_flops(self) -> float:
        """FLOP of a node in those of the host: by their clocks."""
        host = find(Host, self.host)
        if host.clock_hz is None:
            raise ConfigError(
                f"hosts: {self.host}: clock_hz: missing; give it a value and a source"
            )
        return find(StorageNode, self.node).clock_hz / host.clock_hz


class Calibration(Description):
    """Shares of a step that papers print, and nobody can derive.

    Attributes:
        flexgen_kv_share: Of a step of FlexGen's, batch 64, that is KV.
        instinfer_kv_share: Of InstInfer's.
        sparse_read_share: Of the pages of flash that sparse attention reads.
    """

    kind: ClassVar[str] = "calibrations"
    flexgen_kv_share: Positive
    instinfer_kv_share: Positive
    sparse_read_share: Positive


class FlexGenCosts(Description):
    """Constants of FlexGen's cost model: bytes/s and FLOP/s.

    Attributes:
        to_gpu: From DRAM.
        cache_from_gpu: Of KV, to DRAM.
        hidden_from_gpu: Of activations, to DRAM.
        both_small: How few sequences and a narrow model together slow the CPU.
        few: How few sequences do.
        narrow: How a narrow model does.
    """

    kind: ClassVar[str] = "flexgen_costs"
    to_gpu: Positive
    cache_from_gpu: Positive
    hidden_from_gpu: Positive
    prefill_flops: Positive
    scores_flops: Positive
    decode_flops: Positive
    decode_scores_flops: Positive
    cpu_flops: Positive
    both_small: Positive
    few: Positive
    narrow: Positive


KINDS: Final[tuple[type[Description], ...]] = (
    Gpu,
    Link,
    Drive,
    Flash,
    NearStorage,
    Host,
    IoPath,
    StorageNode,
    Network,
    StoragePool,
    Calibration,
    FlexGenCosts,
)
_Kind = TypeVar("_Kind", bound=Description)


@cache
def _catalog(kind: type[Description]) -> dict[str, Description]:
    return dict(read_descriptions(kind, DATA / f"{kind.kind}.yaml"))


def described(kind: type[_Kind]) -> dict[str, _Kind]:
    """All descriptions of a kind that the package comes with, by name."""
    return {name: one for name, one in _catalog(kind).items() if isinstance(one, kind)}


def find(kind: type[_Kind], name: str) -> _Kind:
    """A description by name.

    Raises:
        ConfigError: there is none of that name.
    """
    known = described(kind)
    if name not in known:
        raise ConfigError(f"{kind.kind}: {name!r} is not described; known: {', '.join(known)}")
    return known[name]


@dataclass(frozen=True, slots=True)
class Machine:
    """A host with one GPU, a link to it, and drives behind a link of their own.

    Example:
        Machine(find(Gpu, "a6000"), find(Link, "pcie4-x16").bandwidth, 16e9, 4)

    Attributes:
        gpu_link: Bytes/s between host and GPU, each way.
        drives_link: Bytes/s that all drives together have to the host, each way.
        drives: Number of them.
    """

    gpu: Gpu
    gpu_link: float
    drives_link: float
    drives: int
