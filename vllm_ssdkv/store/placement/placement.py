"""Placement: which slots a store has, and on which devices each of them lies.

A store is a list of *segments*, like a logical volume of LVM. A segment is a range of slot numbers
striped over some devices by a list of lanes of its own; on each of these devices it owns one
extent. Devices come and go, and change their speed, segment by segment: one that holds nothing is
striped anew over the devices of that day (``store/placement/rebalancer.py``), the others stay as
they are. What this file computes is the on-disk format (``docs/format.md``).

Inside a segment, slots are cut into units, which lie on its lanes in turn:
``store/placement/units.py`` and ``stripe_map.py``. With two copies,
``store/placement/replica_selector.py`` says which is read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vllm_ssdkv import _io
from vllm_ssdkv.base.errors import FormatError
from vllm_ssdkv.store.format.manifest import NAME, Manifest
from vllm_ssdkv.store.format.segment import Segment
from vllm_ssdkv.store.format.slot_geometry import I64, SUPERBLOCK_BYTES, SlotGeometry
from vllm_ssdkv.store.placement.stripe_map import Extents, StripeMap


@dataclass(frozen=True, slots=True, eq=False)
class _Tables:
    """Segments that have slots, by ascending number, as arrays."""

    segments: tuple[Segment, ...]
    maps: tuple[StripeMap, ...]
    first: I64
    """[segments]"""
    slots: I64
    """[segments]"""
    map_of: I64
    """[segments]: index of the map."""
    stripes: _io.Stripes
    """Placement for native code, with the bytes before each segment's first unit on each device."""
    numbers: int
    copies: int
    """The most that any slot has."""


class Placement:
    """Maps (slot, byte) to (device, byte). Any thread may use it while another one changes it:
    each call sees the segments as they were at one moment.

    Attributes:
        geometry: The slots' shape.
        devices: Number of devices that segments may name.
    """

    def __init__(self, geometry: SlotGeometry, segments: Sequence[Segment], devices: int) -> None:
        """Raises:
        ValueError: segments overlap, name another device, or exceed their extents.
        """
        self.geometry = geometry
        self.devices = devices
        self._tables = self._build(segments)

    def change(self, segments: Sequence[Segment]) -> None:
        """Have these segments from now on.

        Raises:
            ValueError: as the constructor; nothing is changed.
        """
        self._tables = self._build(segments)

    @property
    def segments(self) -> tuple[Segment, ...]:
        """As they were given."""
        return self._tables.segments

    @property
    def numbers(self) -> int:
        """Slot numbers are below this; not every number has a slot."""
        return self._tables.numbers

    @property
    def slots(self) -> int:
        """Slots there are."""
        return int(self._tables.slots.sum())

    def _build(self, segments: Sequence[Segment]) -> _Tables:
        live = sorted((s for s in segments if s.slots), key=lambda s: s.first)
        maps = dict.fromkeys((s.lanes, s.copies, s.rule) for s in live)
        stripes = tuple(
            StripeMap(self.geometry, lanes, self.devices, copies, rule)
            for lanes, copies, rule in maps
        )
        index = {kind: i for i, kind in enumerate(maps)}
        first = np.array([s.first for s in live], dtype=np.int64)
        slots = np.array([s.slots for s in live], dtype=np.int64)
        map_of = np.array([index[s.lanes, s.copies, s.rule] for s in live], dtype=np.int64)
        self._check(segments, live, [stripes[i] for i in map_of.tolist()])
        begin = np.zeros((len(live), self.devices), dtype=np.int64)
        for i, segment in enumerate(live):
            for extent in segment.extents:
                begin[i, extent.device] = extent.begin * self.geometry.unit_bytes
        native = _io.Stripes(
            [one.table for one in stripes], first, slots, map_of, begin.ravel(), self.devices
        )
        numbers = max((s.first + s.numbers for s in segments), default=0)
        copies = max((one.copies for one in stripes), default=1)
        return _Tables(tuple(segments), stripes, first, slots, map_of, native, numbers, copies)

    def _check(
        self, segments: Sequence[Segment], live: Sequence[Segment], maps: Sequence[StripeMap]
    ) -> None:
        """``maps`` are those of the segments that have slots, ``live``."""
        end = 0
        for segment in sorted(segments, key=lambda s: (s.first, s.numbers)):
            if segment.first < end or not 0 <= segment.slots <= segment.numbers:
                raise ValueError(f"segment at slot {segment.first}: numbers overlap")
            end = segment.first + segment.numbers
            if len({e.device for e in segment.extents}) < len(segment.extents):
                raise ValueError(f"segment at slot {segment.first}: two extents on one device")
        for segment, stripes in zip(live, maps, strict=True):
            rooms = segment.rooms(self.devices)
            for device in set(segment.lanes):
                if stripes.device_units(device, segment.slots) > rooms[device]:
                    raise ValueError(
                        f"segment at slot {segment.first}: {segment.slots} slots exceed its "
                        f"extent on device {device}"
                    )
        ends = [0] * self.devices
        for extent in sorted((e for s in segments for e in s.extents), key=lambda e: e.begin):
            if extent.units < 1 or extent.begin < ends[extent.device]:
                raise ValueError(f"extents overlap on device {extent.device} at {extent.begin}")
            ends[extent.device] = extent.end

    @property
    def stripes(self) -> _io.Stripes:
        """Placement for native code, as it is now."""
        return self._tables.stripes

    # ---- where ----

    def extents(
        self, slots: I64, offset: int | I64, length: int, *, merged: bool = True
    ) -> Extents:
        """Requests that cover bytes ``[offset, offset + length)`` of each slot, of its first copy.

        As :meth:`StripeMap.extents`, ordered by slot index, then position.

        Raises:
            ValueError: a slot does not exist, the range leaves the slot, or shapes differ.
        """
        return self._extents(self._tables, slots, offset, length, 0, merged, 0)

    def copies(
        self, slots: I64, offset: int | I64, length: int, *, merged: bool = True, cut: int = 0
    ) -> tuple[Extents, Extents | None]:
        """As :meth:`extents`, and the same for the second copies. No request has byte ``cut`` of a
        slot but as its first.

        The two differ in devices and offsets alone; pieces without a second copy are the same in
        both. None: there is no second copy of any slot.

        Raises:
            ValueError: as there.
        """
        tables = self._tables
        first = self._extents(tables, slots, offset, length, 0, merged, cut)
        if tables.copies == 1:
            return first, None
        return first, self._extents(tables, slots, offset, length, 1, merged, cut)

    def pieces(
        self,
        slots: I64,
        offset: int | I64,
        length: int,
        places: NDArray[np.uint64],
        *,
        merged: bool,
        most: int,
        tails: NDArray[np.uint64] | None = None,
        cut: int = 0,
    ) -> _io.StripedExtents | None:
        """As :meth:`extents`, with arena offsets, [n], to which the bytes of each slot belong, and
        up to ``most`` neighbours as one request. What is from byte ``cut`` of a slot on belongs to
        ``tails``, [n]. None: a slot has a second copy.

        Raises:
            ValueError: as there.
        """
        tables = self._tables
        if tables.copies > 1:
            return None
        offsets = np.atleast_1d(np.asarray(offset, dtype=np.int64))
        slots = np.ascontiguousarray(slots, dtype=np.int64)
        places = np.ascontiguousarray(places)
        tails = places[:0] if tails is None else np.ascontiguousarray(tails)
        return _io.StripedExtents(
            tables.stripes, slots, offsets, length, places, merged, most, tails, cut
        )

    def _extents(
        self,
        tables: _Tables,
        slots: I64,
        offset: int | I64,
        length: int,
        copy: int,
        merged: bool,
        cut: int,
    ) -> Extents:
        offsets = np.atleast_1d(np.asarray(offset, dtype=np.int64))
        slots = np.ascontiguousarray(slots, dtype=np.int64)
        return Extents(*tables.stripes.extents(slots, offsets, length, copy, merged, cut))

    def touches(self, device: int, slots: I64) -> NDArray[np.bool_]:
        """Per slot (int64, shape [n]) whether any byte of it lies on the device; bool, [n].

        A number without a slot touches nothing.

        Raises:
            ValueError: there is no such device.
        """
        if not 0 <= device < self.devices:
            raise ValueError(f"device {device} of {self.devices}")
        return self._asked(slots, lambda stripes, inside: stripes.touches(device, inside))

    def lost(self, out: NDArray[np.bool_], slots: I64) -> NDArray[np.bool_]:
        """Mask of slots that cannot be had without some devices: a piece has no copy elsewhere.

        A number without a slot has lost nothing.

        Args:
            out: Whether each device is away, bool, [devices].
            slots: int64, shape [n].

        Returns:
            bool, [n].

        Raises:
            ValueError: not one entry of ``out`` per device.
        """
        return self._asked(slots, lambda stripes, inside: stripes.lost(out, inside))

    def _asked(
        self, slots: I64, ask: Callable[[StripeMap, I64], NDArray[np.bool_]]
    ) -> NDArray[np.bool_]:
        """Answers of the stripe map of each slot's segment; False where there is none."""
        tables = self._tables
        segment, inside = _find(tables, np.asarray(slots, dtype=np.int64))
        answers = np.zeros(len(inside), dtype=np.bool_)
        for number, stripes in enumerate(tables.maps):
            mine = np.flatnonzero((inside >= 0) & (tables.map_of[segment] == number))
            answers[mine] = ask(stripes, inside[mine])
        return answers

    def doubled(self, slots: I64) -> NDArray[np.bool_]:
        """Mask of slots, int64, [n], that have two copies; bool, [n]."""
        tables = self._tables
        segment, inside = _find(tables, np.asarray(slots, dtype=np.int64))
        if not tables.maps:
            return np.zeros(len(inside), dtype=np.bool_)
        copies = np.array([stripes.copies for stripes in tables.maps])
        return (inside >= 0) & (copies[tables.map_of[segment]] > 1)

    @property
    def most_copies(self) -> int:
        """2 when any slot has two copies, else 1."""
        return self._tables.copies

    def holds(self, slots: I64) -> NDArray[np.bool_]:
        """Mask of the numbers (int64, [n]) that are slots; bool, [n]."""
        _, inside = _find(self._tables, np.asarray(slots, dtype=np.int64))
        return inside >= 0

    def device_bytes(self, device: int) -> int:
        """File size that the segments need on a device, superblock area included."""
        ends = [
            extent.end
            for segment in self._tables.segments
            for extent in segment.extents
            if extent.device == device
        ]
        return SUPERBLOCK_BYTES + max(ends, default=0) * self.geometry.unit_bytes


def _find(tables: _Tables, slots: I64) -> tuple[I64, I64]:
    """Segment of each slot, and its index inside, or -1 where there is no such slot."""
    if tables.first.size == 0:
        return np.zeros_like(slots), np.full_like(slots, -1)
    segment = np.maximum(np.searchsorted(tables.first, slots, side="right") - 1, 0)
    inside = slots - tables.first[segment]
    return segment, np.where((inside >= 0) & (inside < tables.slots[segment]), inside, -1)


def placement_of(manifest: Manifest, rank: int = 0) -> Placement:
    """Placement of a store, from its manifest, in a rank's data files. Which devices have a slot is
    the same for every rank.

    Raises:
        FormatError: segments overlap.
    """
    try:
        return Placement(manifest.geometries[rank], manifest.segments, len(manifest.devices))
    except ValueError as error:
        paths = ", ".join(device.path for device in manifest.devices)
        raise FormatError(f"{NAME} of the store on {paths}: segments: {error}") from error
