"""Pauses of writes, as the workers tell them: whether the store takes new blocks now."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from vllm_ssdkv.store.device_weights import DeviceWeights
from vllm_ssdkv.store.devices.health import WriteState
from vllm_ssdkv.store.format.segment import Segment
from vllm_ssdkv.store.format.slot_geometry import I64


class WrittenPlacement(Protocol):
    """Places of slots on devices."""

    devices: int

    @property
    def segments(self) -> tuple[Segment, ...]:
        """Segments; another tuple after each change."""

    @property
    def numbers(self) -> int:
        """Slot numbers are below this."""

    def holds(self, slots: I64) -> NDArray[np.bool_]:
        """Mask of the numbers, [n], that have a slot."""

    def lost(self, out: NDArray[np.bool_], slots: I64) -> NDArray[np.bool_]:
        """Mask of slots, [n], that cannot be had without some devices."""


class WritePauses:
    """State of the writes of all ranks. Used by the scheduler's thread; takes time that grows with
    the store once after a change, and none otherwise.

    Example:
        pauses = WritePauses(rebalancer.placement, weights, whole=False)
        pauses.told(0, [(1, 2.0)])
        pauses.state
    """

    def __init__(
        self,
        placement: WrittenPlacement,
        weights: DeviceWeights,
        *,
        whole: bool,
        clock: Callable[[], float] = time.monotonic,
    ):
        """
        Args:
            placement: Of the slots.
            weights: Says which devices are out of use: nothing is to be written to these.
            whole: Whether writes count as paused where any slot cannot be written, as for contexts,
                which need all of theirs; else where none can.
            clock: Monotonic seconds.
        """
        self._placement, self._weights = placement, weights
        self._whole, self._clock = whole, clock
        self._until: dict[tuple[int, int], float] = {}
        """When writes are tried again, by rank and device."""
        self._known: dict[bytes, bool] = {}
        """True where writes are paused, by the mask of devices."""
        self._known_of: tuple[Segment, ...] = ()

    def told(self, rank: int, news: Sequence[tuple[int, float]]) -> None:
        """A rank tells of its devices, as :meth:`DeviceHealth.drain_writing` does."""
        for device, seconds in news:
            self._until.pop((rank, device), None)
            if seconds:
                self._until[rank, device] = self._clock() + seconds

    @property
    def devices(self) -> frozenset[int]:
        """Devices in use whose writes are paused, or on trial."""
        return frozenset(device for _, device in self._until) - self._weights.lost

    @property
    def state(self) -> WriteState:
        """``PAUSED``: no new block can be written; ``TRIAL``: one is to show whether any can."""
        if not self._until:
            return WriteState.OPEN
        now = self._clock()
        if self._stops({device for (_, device), until in self._until.items() if until > now}):
            return WriteState.PAUSED
        return WriteState.TRIAL if self._stops(set(self.devices)) else WriteState.OPEN

    def _stops(self, devices: set[int]) -> bool:
        """Check whether writes are paused because they are for these devices."""
        placement, devices = self._placement, devices - self._weights.lost
        if not devices:
            return False
        if self._known_of is not placement.segments:
            self._known, self._known_of = {}, placement.segments
        out = np.zeros(placement.devices, dtype=np.bool_)
        out[list(devices)] = True
        if out.tobytes() not in self._known:
            slots = np.arange(placement.numbers, dtype=np.int64)
            lost = placement.lost(out, slots[placement.holds(slots)])
            self._known[out.tobytes()] = bool(lost.any() if self._whole else lost.all())
        return self._known[out.tobytes()]
