"""Division of the devices' capacity: how many bytes data files may take, and which segments fit."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from vllm_ssdkv.store.format.segment import Segment
from vllm_ssdkv.store.format.slot_geometry import SUPERBLOCK_BYTES, SlotGeometry
from vllm_ssdkv.store.index.journal import journal_bytes
from vllm_ssdkv.store.placement.segments import Arrangement, arrange

STATE_SLACK = 128 * 1024
"""Room for store.json or its copy, directories and the file system's own rounding."""


@dataclass(frozen=True, slots=True)
class Room:
    """Room of a store on one device.

    Attributes:
        capacity: Bytes, all ranks together; 0 for a device that is not there.
        journal: Whether the journal, and while it is rewritten its successor, share them.
    """

    capacity: int
    journal: bool = False


@dataclass(frozen=True, slots=True)
class Division:
    """A store on today's devices.

    Attributes:
        arrangement: Its segments, when it has all the room it may have.
        ends: Units that each device may have.
    """

    arrangement: Arrangement
    ends: tuple[int, ...]

    @property
    def slots(self) -> int:
        """Slots of all segments."""
        return sum(segment.slots for segment in self.arrangement.segments)


def divide(
    geometries: Sequence[SlotGeometry],
    segments: Sequence[Segment],
    weights: Sequence[float],
    rooms: Sequence[Room],
    added: Collection[int] = (),
    replicas: int = 1,
) -> Division:
    """Give the devices' room to segments, see :func:`arrange`.

    Args:
        geometries: Shape of the slots of each rank, which has a data file on every device.
        segments: As they were.
        weights: By device; 0 for one that is not there.
        rooms: By device.
        added: Devices that are there again, or for the first time.
        replicas: Copies that each new slot shall have.
    """
    journal = 0
    for _ in range(2):  # how large the journal may become is known only after the first time
        ends = [
            _units(geometries, room, journal if room.journal else 0, _end(segments, device))
            for device, room in enumerate(rooms)
        ]
        found = arrange(geometries[0], segments, weights, ends, added, replicas)
        journal = 2 * journal_bytes(found.numbers)
    return Division(found, tuple(ends))


def _units(geometries: Sequence[SlotGeometry], room: Room, journal: int, end: int) -> int:
    """Units that each rank's data file may have; ``end``: those it has now."""
    before = len(geometries) * SUPERBLOCK_BYTES
    of_all = sum(one.unit_bytes for one in geometries)

    def fitting(nbytes: int) -> int:
        return max(0, nbytes - before) // of_all

    inside = fitting(room.capacity - journal - STATE_SLACK)
    # What is stored stays: the journal may have come here since, from a device that was lost, and
    # before version 5 of the manifest only the state directory had that slack.
    return max(inside, end) if end <= fitting(room.capacity) else inside


def _end(segments: Sequence[Segment], device: int) -> int:
    extents = (e for segment in segments for e in segment.extents if e.device == device)
    return max((extent.end for extent in extents), default=0)
