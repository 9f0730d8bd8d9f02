"""Case of a measurement: one direction, size, queue depth and number of devices, and its result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from vllm_ssdkv.base.sizes import MIB, format_size
from vllm_ssdkv.store.io.engines.protocol import Op

MEMORY_BYTES = 256 * MIB
"""Buffers of one measurement: a case whose requests in flight need more is left out."""

BATCH_BYTES = 64 * MIB
"""Upper bound of one batch of ours, where a batch is more than the requests in flight."""


@dataclass(frozen=True, slots=True)
class Case:
    """One point of the plan; all offsets are random multiples of ``nbytes``.

    Attributes:
        op: Direction.
        nbytes: Size of one I/O in bytes.
        depth: Requests in flight per device.
        devices: Devices in use, the first ones of the list.
    """

    op: Op
    nbytes: int
    depth: int
    devices: int

    @property
    def in_flight(self) -> int:
        """Requests in flight over all devices."""
        return self.depth * self.devices

    @property
    def memory_bytes(self) -> int:
        """Buffers: each request in flight has its own, and the next one reuses it, as in fio."""
        return self.in_flight * self.nbytes

    @property
    def batch_requests(self) -> int:
        """Requests of one batch, a multiple of the devices: the queues never run empty."""
        rounds = min(16, max(1, BATCH_BYTES // self.memory_bytes))
        return self.in_flight * rounds

    def __str__(self) -> str:
        return (
            f"{self.op.name.lower()} {format_size(self.nbytes)} depth {self.depth} "
            f"on {self.devices} device(s)"
        )


@dataclass(frozen=True, slots=True)
class Sample:
    """One run of one case.

    Attributes:
        seconds: Wall time from the first submission to the last completion.
        requests: I/Os that ended well. An I/O that does not is an exception, never a sample.
        nbytes: Bytes moved.
        cpu_s: CPU seconds of all threads that took part, user and system.
    """

    seconds: float
    requests: int
    nbytes: int
    cpu_s: float

    @property
    def bytes_per_s(self) -> float:
        """Throughput."""
        return self.nbytes / self.seconds

    @property
    def iops(self) -> float:
        """I/Os per second."""
        return self.requests / self.seconds

    @property
    def cpu_s_per_gb(self) -> float:
        """CPU seconds per 10^9 bytes."""
        return self.cpu_s / (self.nbytes / 1e9)

    @property
    def cpu_us_per_io(self) -> float:
        """CPU microseconds per I/O."""
        return self.cpu_s / self.requests * 1e6


class Contender(Protocol):
    """One way to do the I/O. Used by one thread; may have threads of its own."""

    @property
    def name(self) -> str:
        """Short and unique, for tables and JSON."""

    @property
    def detail(self) -> str:
        """Details of what runs: version, kind of memory, number of threads."""

    def refuses(self, case: Case) -> str | None:
        """Reason for it not to run this case, or None."""

    def check(self, case: Case) -> None:
        """Do a few I/Os of the case and compare every byte that identifies a page.

        Raises:
            BenchError: it read or wrote something else.
        """

    def run(self, case: Case, seconds: float) -> Sample:
        """Keep the case's requests in flight for about ``seconds``; blocks that long.

        Raises:
            BenchError: an I/O failed, or the contender itself.
        """


def device_counts(devices: int) -> list[int]:
    """1, 2, 4, ... and the number itself."""
    counts = [1]
    while counts[-1] * 2 <= devices:
        counts.append(counts[-1] * 2)
    return counts if counts[-1] == devices else [*counts, devices]


def plan(
    ops: Sequence[Op], sizes: Sequence[int], depths: Sequence[int], devices: int
) -> tuple[list[Case], list[Case]]:
    """Cases to run, and those left out because their buffers exceed :data:`MEMORY_BYTES`."""
    every = [
        Case(op, nbytes, depth, count)
        for op in ops
        for count in device_counts(devices)
        for nbytes in sorted(set(sizes))
        for depth in sorted(set(depths))
    ]
    return (
        [case for case in every if case.memory_bytes <= MEMORY_BYTES],
        [case for case in every if case.memory_bytes > MEMORY_BYTES],
    )
