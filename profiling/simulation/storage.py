"""Drives of a machine: times of reads, attention and writes, and the share of each.

Rates of drives that attend are the product's own
(:mod:`vllm_ssdkv.offload.testing.drive_timing`), and so is the share of each drive: lanes of
:mod:`vllm_ssdkv.store.placement.lanes`.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from vllm_ssdkv.base.errors import ConfigError
from vllm_ssdkv.offload.testing.drive_timing import DriveTiming
from vllm_ssdkv.profiling.simulation.hardware import (
    Drive,
    Flash,
    IoPath,
    NearStorage,
    Network,
    StorageNode,
    find,
    node_costs,
)
from vllm_ssdkv.store.placement.lanes import lanes_for

NORMAL_P99: Final = 2.326
"""Standard deviations below which 99 of 100 values of a normal distribution lie."""


def drawn(median_s: float, p99_s: float | None, draw: str) -> float:
    """A latency by a log-normal distribution; the same ``draw`` gives the same one.

    ``p99_s`` None: always the median.
    """
    if p99_s is None or p99_s <= median_s:
        return median_s
    spread = math.log(p99_s / median_s) / NORMAL_P99
    return random.Random(draw).lognormvariate(math.log(median_s), spread)


class Device(Protocol):
    """Times for which work occupies one drive, in seconds."""

    @property
    def latency_s(self) -> float:
        """Seconds to the first byte, beside others."""
        ...

    def latency(self, draw: str) -> float:
        """One of its latencies; the same ``draw`` gives the same one."""
        ...

    @property
    def rate(self) -> float:
        """Bytes/s that it reads at best."""
        ...

    @property
    def rewrite_s(self) -> float:
        """Seconds of one write of less than a page, with nothing beside it."""
        ...

    def read_s(self, nbytes: float, requests: int) -> float:
        """Reading for the host."""
        ...

    def attend_s(self, nbytes: float) -> float:
        """Attention to K and V that it holds."""
        ...

    def write_s(self, nbytes: float, requests: int) -> float:
        """Writing what the host sends, or what it was sent to attend to."""
        ...

    def prompt_s(self, nbytes: float) -> float:
        """Writing KV of prompts, while nobody reads."""
        ...


@dataclass(frozen=True, slots=True)
class PlainDrive:
    """A drive behind a path of software, which may be slower than it. Does not attend."""

    drive: Drive
    path: IoPath | None = None

    @property
    def latency_s(self) -> float:
        """See ``Device``."""
        return self.drive.latency_s

    def latency(self, draw: str) -> float:
        """See ``Device``."""
        return drawn(self.drive.latency_s, self.drive.latency_p99_s, draw)

    @property
    def rate(self) -> float:
        """See ``Device``."""
        limit = self.drive.read_bandwidth
        if self.path is None or self.path.drive_bandwidth is None:
            return limit
        return min(limit, self.path.drive_bandwidth)

    @property
    def rewrite_s(self) -> float:
        """See ``Device``. The drive's memory takes it, as that of data centres is kept."""
        return self.drive.latency_s + 1 / self.drive.iops

    def read_s(self, nbytes: float, requests: int) -> float:
        """See ``Device``."""
        return max(nbytes / self.rate, self.drive.read_s(requests, nbytes))

    def attend_s(self, nbytes: float) -> float:
        """See ``Device``. Raises ConfigError: it does not attend."""
        raise ConfigError(f"drive {self.drive.name} does not attend; give one of near_storage")

    def write_s(self, nbytes: float, requests: int) -> float:
        """See ``Device``."""
        return self.drive.write_s(requests, nbytes)

    def prompt_s(self, nbytes: float) -> float:
        """See ``Device``."""
        return self.drive.write_s(0, nbytes)


@dataclass(frozen=True, slots=True)
class AttendingDrive:
    """A drive that attends, by the product's timing of it."""

    described: NearStorage

    @property
    def timing(self) -> DriveTiming:
        """The product's timing."""
        return self.described.drive

    @property
    def latency_s(self) -> float:
        """See ``Device``."""
        return self.timing.latency_s

    def latency(self, draw: str) -> float:
        """See ``Device``."""
        return drawn(self.latency_s, self.described.latency_p99_s, draw)

    @property
    def rate(self) -> float:
        """See ``Device``."""
        return self.timing.read_bandwidth

    @property
    def rewrite_s(self) -> float:
        """See ``Device``. The page is read, changed and programmed."""
        if self.described.flash is None:
            return self.latency_s + self.timing.write_s(1)
        return find(Flash, self.described.flash).rewrite_s

    def read_s(self, nbytes: float, requests: int) -> float:
        """See ``Device``. Whole pages of flash, at least one for each request."""
        return self.timing.attend_s(max(self.timing.flash_pages(int(nbytes)), requests))

    def attend_s(self, nbytes: float) -> float:
        """See ``Device``."""
        return self.timing.attend_s(self.timing.flash_pages(int(nbytes)))

    def write_s(self, nbytes: float, requests: int) -> float:
        """See ``Device``."""
        return self.timing.write_s(max(self.timing.flash_pages(int(nbytes)), requests))

    def prompt_s(self, nbytes: float) -> float:
        """See ``Device``."""
        return nbytes / (self.described.prefill_bandwidth or self.timing.write_bandwidth)


@dataclass(frozen=True, slots=True)
class NodeDrive:
    """A drive in a storage node, which its processor attends for. The host reads over a network.

    Example:
        NodeDrive.of(find(StorageNode, "ssd-node"), find(Network, "ethernet-25g"))

    Attributes:
        call_s: Seconds of a call beside the network's latency.
    """

    drive: PlainDrive
    network: Network
    attend_bandwidth: float
    call_s: float

    @classmethod
    def of(cls, node: StorageNode, network: Network) -> NodeDrive:
        """The drive of a node that is described with its flash and cores.

        Raises:
            ConfigError: it is not.
        """
        if node.flash is None or node.cores is None or node.core_attend_bandwidth is None:
            raise ConfigError(f"nodes: {node.name}: flash, cores, core_attend_bandwidth: missing")
        flash = find(Flash, node.flash)
        inside = flash.model_copy(update={"channels": node.channels}).as_drive(node.name)
        rate = node.cores * node.core_attend_bandwidth
        return cls(PlainDrive(inside), network, rate, node_costs("tcp").attend)

    @property
    def latency_s(self) -> float:
        """See ``Device``. There and back."""
        return self.drive.latency_s + 2 * self.network.latency_s + self.call_s

    def latency(self, draw: str) -> float:
        """See ``Device``."""
        return self.drive.latency(draw) + 2 * self.network.latency_s + self.call_s

    @property
    def rate(self) -> float:
        """See ``Device``."""
        return min(self.drive.rate, self.network.bandwidth)

    @property
    def rewrite_s(self) -> float:
        """See ``Device``."""
        return self.drive.rewrite_s + 2 * self.network.latency_s

    def read_s(self, nbytes: float, requests: int) -> float:
        """See ``Device``."""
        return max(self.drive.read_s(nbytes, requests), nbytes / self.network.bandwidth)

    def attend_s(self, nbytes: float) -> float:
        """See ``Device``. Cores attend to what the flash brings."""
        return max(self.drive.read_s(nbytes, 0), nbytes / self.attend_bandwidth)

    def write_s(self, nbytes: float, requests: int) -> float:
        """See ``Device``."""
        return max(self.drive.write_s(nbytes, requests), nbytes / self.network.bandwidth)

    def prompt_s(self, nbytes: float) -> float:
        """See ``Device``."""
        return self.write_s(nbytes, 0)


@dataclass(frozen=True, slots=True)
class Storage:
    """All drives that KV is spread over.

    Example:
        Storage.alike(PlainDrive(find(Drive, "pm9a3")), 4)

    Attributes:
        devices: The drives.
        shares: Part of a layer's bytes that each of them holds.
    """

    devices: tuple[Device, ...]
    shares: tuple[float, ...]

    @classmethod
    def of(cls, devices: Sequence[Device]) -> Storage:
        """Drives with shares by their rates, as the product's lanes make them.

        Raises:
            ConfigError: there are none.
        """
        if not devices:
            raise ConfigError("drives: none; give at least one")
        lanes = lanes_for([device.rate for device in devices])
        shares = tuple(lanes.count(index) / len(lanes) for index in range(len(devices)))
        return cls(tuple(devices), shares)

    @classmethod
    def alike(cls, device: Device, count: int) -> Storage:
        """So many drives of one kind. Raises ConfigError: see :meth:`of`."""
        return cls.of([device] * count)

    @property
    def count(self) -> int:
        """Number of drives."""
        return len(self.devices)
