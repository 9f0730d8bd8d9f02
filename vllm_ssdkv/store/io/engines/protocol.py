"""Interface of every I/O engine: batches of reads or writes given as flat arrays.

The protocol is fixed: callers submit one array entry per request (device, device offset,
length, buffer offset) and get a handle. Nothing in it knows about slots, pages or vLLM.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Final, Protocol, TypeAlias, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from vllm_ssdkv.base.metric import DEPTH_BUCKETS, LATENCY_BUCKETS
from vllm_ssdkv.store.memory.arena import Arena

U16: TypeAlias = NDArray[np.uint16]
U32: TypeAlias = NDArray[np.uint32]
U64: TypeAlias = NDArray[np.uint64]
I32: TypeAlias = NDArray[np.int32]

PENDING = int(np.iinfo(np.int32).min)
"""Result of a request that has not completed yet."""


_LATENCY_NS: Final = tuple(round(bound * 1e9) for bound in LATENCY_BUCKETS)
LATENCY_BOUNDS: Final = (*map(str, _LATENCY_NS), "inf")
"""Nanoseconds, as the statistics name them."""
DEPTH_BOUNDS: Final = (*(str(int(bound)) for bound in DEPTH_BUCKETS), "inf")
"""Requests, as the statistics name them."""


class Op(IntEnum):
    """Direction of a batch."""

    READ = 0
    WRITE = 1


@runtime_checkable
class Batch(Protocol):
    """Handle of one submitted batch. Any thread may use it; no method raises on I/O errors."""

    def done(self) -> bool:
        """Check whether every request has completed (well or badly). Never blocks."""

    def wait(self, timeout_s: float) -> bool:
        """Block, without the GIL, until all is complete or the time is over; returns ``done()``.

        A batch that is not done after its deadline still owns its buffer: the caller must keep
        that memory out of use until ``done()``.
        """

    def results(self) -> I32:
        """Per request the bytes transferred, ``-errno``, or :data:`PENDING`. A copy."""


class IoEngine(Protocol):
    """Moves bytes between devices and one arena. Thread-safe; ``submit`` does not block on I/O.

    Requests of a batch may complete in any order. Offsets, lengths and buffer offsets are
    multiples of 4096. A request that is cut short by the device is continued by the engine; it
    reports fewer bytes than asked only at the end of the file.
    """

    @property
    def name(self) -> str:
        """Name for logs and the info metric, e.g. ``threads`` or ``faulty(threads)``."""

    def submit(self, op: Op, device: U16, offset: U64, length: U32, buffer: U64) -> Batch:
        """Queue one request per array entry. Arrays are copied.

        Args:
            op: Direction of all requests.
            device: Index into the devices the engine was opened with, shape [n].
            offset: Byte offset on that device, shape [n].
            length: Bytes, shape [n].
            buffer: Byte offset into the arena, shape [n].

        Raises:
            ValueError: shapes differ, an index or range is out of bounds, or the engine is closed.
        """

    def statistics(self) -> Mapping[str, int]:
        """Counters since the start: those of :func:`zero_totals`, and what else there is."""

    def close(self, timeout_s: float) -> bool:
        """Wait for requests in flight, then release threads. False when some never ended.

        The engine never closes the device descriptors: they belong to the caller.
        """


class EngineClass(IoEngine, Protocol):
    """Class of an engine as the option ``io.engine`` names it."""

    def __init__(self, fds: Sequence[int], arena: Arena, queue_depth: int) -> None:
        """Open one for the devices with these descriptors, which stay the caller's.

        Args:
            fds: Open descriptors, one per device.
            arena: Memory of all requests.
            queue_depth: Requests in flight per device.

        Raises:
            EngineUnavailableError: the engine cannot run here.
        """


def zero_totals(devices: int) -> dict[str, int]:
    """The counters that every engine has, before the first request.

    ``<read|write>_<submitted|requests|bytes|errors|nanoseconds>.<device>``; how many requests took
    at most so many nanoseconds and more than the bound before, ``<read|write>_latency_<bound>``;
    how many found a device with so many requests, themselves included, ``depth_<bound>``, and the
    sum of these numbers, ``depth_sum``. The last bound is ``inf``.
    """
    per_direction = [
        *("submitted", "requests", "bytes", "errors", "nanoseconds"),
        *(f"latency_{bound}" for bound in LATENCY_BOUNDS),
    ]
    names = [f"{op.name.lower()}_{what}" for op in Op for what in per_direction]
    names += ["depth_sum", *(f"depth_{bound}" for bound in DEPTH_BOUNDS)]
    return {f"{name}.{device}": 0 for device in range(devices) for name in names}


def latency_bound(nanoseconds: int) -> str:
    """The one of :data:`LATENCY_BOUNDS` under which a request that took so long is counted."""
    return LATENCY_BOUNDS[bisect.bisect_left(_LATENCY_NS, nanoseconds)]


def depth_bound(in_flight: int) -> str:
    """The one of :data:`DEPTH_BOUNDS` under which a request is counted."""
    return DEPTH_BOUNDS[bisect.bisect_left(DEPTH_BUCKETS, in_flight)]
