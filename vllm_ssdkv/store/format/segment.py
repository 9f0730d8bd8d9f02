"""Segments as the manifest holds them: ranges of slots striped over devices."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec
import numpy as np

from vllm_ssdkv.store.format.slot_geometry import (
    I64,
)

Rule: TypeAlias = Literal["heads"] | msgspec.UnsetType
"""Rule by which slots are cut into units: at KV heads, or, where it is left out, into equal ones.
See :mod:`vllm_ssdkv.store.placement.units`."""


class Extent(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Units ``[begin, begin + units)`` of a device's data file, counted behind the superblock; at
    least one."""

    device: int
    begin: int
    units: int

    @property
    def end(self) -> int:
        """First unit behind it."""
        return self.begin + self.units


class Segment(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Slots ``[first, first + slots)``, striped over devices by one list of lanes.

    Attributes:
        first: Number of the first slot.
        numbers: Slot numbers that belong to the segment; the first ``slots`` of them are in use.
        slots: Slots.
        lanes: Device of each lane.
        extents: What the segment owns of each device, at most one per device. It may own parts of
            devices on which it has no lane.
        copies: How often each slot is there, 1 or 2: a second one lies on other devices.
        since: Slot headers with a lower epoch are of an earlier segment here, or were given up.
        rule: How its slots are cut into units.
    """

    first: int
    numbers: int
    slots: int
    lanes: tuple[int, ...]
    extents: tuple[Extent, ...]
    copies: int = 1
    since: int = 0
    rule: Rule = msgspec.UNSET

    def __reduce__(self) -> tuple[type[Segment], tuple[object, ...]]:
        """Pickled form, without ``UNSET``: pickle would search every imported module for it."""
        values = tuple(getattr(self, name) for name in self.__struct_fields__)
        return Segment, values[:-1] if self.rule is msgspec.UNSET else values

    def rooms(self, devices: int) -> list[int]:
        """Units it owns of each device."""
        rooms = [0] * devices
        for extent in self.extents:
            rooms[extent.device] = extent.units
        return rooms

    def all_slots(self) -> I64:
        """Numbers of its slots, int64, shape [slots]."""
        return np.arange(self.first, self.first + self.slots, dtype=np.int64)
