"""Drives of a machine: times of reads, attention and writes, and the share of each.

Rates of drives that attend are the product's own
(:mod:`vllm_ssdkv.offload.testing.drive_timing`), and so is the share of each drive: lanes of
:mod:`vllm_ssdkv.store.placement.lanes`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from vllm_ssdkv.base.errors import ConfigError
from vllm_ssdkv.offload.testing.drive_timing import DriveTiming
from vllm_ssdkv.profiling.simulation.hardware import Drive, Flash, IoPath, NearStorage, find
from vllm_ssdkv.store.placement.lanes import lanes_for


class Device(Protocol):
    """Times for which work occupies one drive, in seconds."""

    @property
    def latency_s(self) -> float:
        """Seconds to the first byte, beside others."""
        ...

    @property
    def rate(self) -> float:
        """Bytes/s that it reads at best."""
        ...

    @property
    def job_s(self) -> float:
        """Seconds that attention of one KV head costs beside its bytes."""
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

    @property
    def rate(self) -> float:
        """See ``Device``."""
        limit = self.drive.read_bandwidth
        return limit if self.path is None else min(limit, self.path.drive_bandwidth)

    @property
    def job_s(self) -> float:
        """See ``Device``. None: it does not attend."""
        return 0.0

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

    @property
    def rate(self) -> float:
        """See ``Device``."""
        return self.timing.read_bandwidth

    @property
    def job_s(self) -> float:
        """See ``Device``."""
        return self.described.job_s

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
class Storage:
    """All drives that KV is spread over.

    Example:
        Storage.alike(PlainDrive(find(Drive, "pm9a3")), 4)

    Attributes:
        devices: The drives.
        shares: Of the bytes of a layer that each of them has.
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
