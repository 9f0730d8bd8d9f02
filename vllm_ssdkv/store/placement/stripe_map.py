"""Striping of slots over devices: which bytes of which data file hold a slot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from msgspec import UNSET
from numpy.typing import NDArray

from vllm_ssdkv import _io
from vllm_ssdkv.store.format.segment import Rule
from vllm_ssdkv.store.format.slot_geometry import (
    I64,
    MERGE_BYTES,
    SUPERBLOCK_BYTES,
    U16,
    U32,
    U64,
    SlotGeometry,
)
from vllm_ssdkv.store.placement.lanes import partners
from vllm_ssdkv.store.placement.units import units_of


@dataclass(frozen=True, slots=True)
class Extents:
    """Requests that cover one piece of each of some slots; all arrays have shape [m].

    Attributes:
        device: Index of the device, uint16.
        offset: Byte offset on that device, uint64.
        length: Bytes, uint32.
        slot_index: Which of the given slots the request belongs to, int64.
        buffer: Byte offset in a buffer that holds the pieces back to back, uint64.
    """

    device: U16
    offset: U64
    length: U32
    slot_index: I64
    buffer: U64


class StripeMap:
    """Maps (slot, byte) to (device, byte). Immutable; safe from any thread.

    A slot is cut into units by a rule; unit u of slot s lies on lane ``(s + turn[u]) mod n_lanes``,
    so that the same piece of many slots spreads over all devices. By the first rule units are equal
    and ``turn[u]`` is u; by the rule of heads each is the run of a layer's KV head, and ``turn`` is
    layer plus head, so that the heads of one slot spread as well
    (:mod:`vllm_ssdkv.store.placement.units`). ``n_lanes`` consecutive slots form a row. Rows follow
    each other without gaps, and inside a row a device holds its units ordered by slot, then copy,
    then unit: one slot's share of a device is one contiguous range. A store has one such map per
    rule and list of lanes in use; where the rows of each begin on a device is told by
    ``Placement``.

    With two copies, the second one of a unit lies on the partner of its lane
    (:func:`vllm_ssdkv.store.placement.lanes.partners`), which is on another device.

    Attributes:
        geometry: The slot's shape.
        lanes: Device of each lane.
        devices: Number of devices; some may have no lane.
        copies: How often each slot is there: 1 or 2.
        rule: How slots are cut into units.
        table: The same for native code.

    Raises:
        ValueError: no lanes, a lane on no device, more than 65535 devices, copies other than 1 and
            2, or two copies where a device has more than half of the lanes.
    """

    def __init__(
        self,
        geometry: SlotGeometry,
        lanes: Sequence[int],
        devices: int,
        copies: int = 1,
        rule: Rule = UNSET,
    ) -> None:
        self.geometry = geometry
        self.lanes = tuple(lanes)
        self.devices = devices
        self.copies = copies
        self.rule: Rule = rule
        if self.devices > 0xFFFF:
            raise ValueError(f"{self.devices} devices; at most 65535")
        if not lanes or not all(0 <= device < devices for device in lanes):
            raise ValueError(f"lanes {list(lanes)} on {devices} devices")
        if copies not in (1, 2):
            raise ValueError(f"{copies} copies")
        units = units_of(geometry, rule)
        sizes = np.diff(units.start)
        n = len(self.lanes)
        lane_devices = np.asarray(self.lanes, dtype=np.int64)
        phase = np.arange(n, dtype=np.int64)[:, None]
        lane = (phase + units.turn[None, :]) % n
        found = [lane_devices[lane]]
        if copies > 1:
            found.append(lane_devices[np.asarray(partners(self.lanes), dtype=np.int64)[lane]])
        # [phase, copy, unit]: the device, and the bytes of the row before it there.
        self._device: I64 = np.stack(found, axis=1)
        place: I64 = np.empty(self._device.shape, dtype=np.int64)
        # [phase + 1, device]: bytes of the row's first `phase` slots on the device.
        self._before: I64 = np.zeros((n + 1, self.devices), dtype=np.int64)
        for device in range(self.devices):
            here = self._device == device
            nbytes = np.where(here, sizes, 0)
            place[here] = np.cumsum(nbytes[here]) - nbytes[here]
            self._before[1:, device] = np.cumsum(nbytes.sum(axis=(1, 2)))
        self._row_bytes: I64 = self._before[n].copy()
        self._touches: NDArray[np.bool_] = np.diff(self._before, axis=0) > 0
        # Pieces of both copies are cut alike, at every unit: either may be read in place of the
        # other. Neighbours are rare there, since a device has at most half of the lanes. So they
        # are where heads follow each other on different lanes: the engine joins what is left.
        alone = copies > 1 or rule is not UNSET
        merge_units = 1 if alone else max(1, MERGE_BYTES // geometry.unit_bytes)
        self.table = _io.StripeTable(
            units.start,
            self._device.ravel(),
            place.ravel(),
            self._row_bytes,
            n,
            copies,
            geometry.slot_bytes,
            SUPERBLOCK_BYTES,
            merge_units,
        )
        zero = np.zeros(1, dtype=np.int64)
        most = np.array([np.iinfo(np.int64).max], dtype=np.int64)
        begin = np.zeros(devices, dtype=np.int64)
        self._alone = _io.Stripes([self.table], zero, most, zero, begin, devices)

    def extents(
        self,
        slots: I64,
        offset: int | I64,
        length: int,
        copy: int = 0,
        *,
        merged: bool = True,
    ) -> Extents:
        """Requests that cover bytes ``[offset, offset + length)`` of each slot.

        Pieces are split at unit borders; neighbours that are contiguous on one device may be merged
        up to :data:`MERGE_BYTES`. Ordered by slot index, then position. One native call.

        Args:
            slots: Slot numbers, int64, shape [n]; repeats are allowed.
            offset: Byte offset inside the slot, one for all or one per slot (int64, shape [n]).
            length: Bytes of each piece.
            copy: Which copy of them, 0 or 1; of a map with one copy, either is that one. The
                requests for both are alike but for device and offset.
            merged: Whether neighbours are merged; else each unit is a request, whose end is seen
                before those of its neighbours.

        Raises:
            ValueError: the range is empty or leaves the slot, a slot is negative, or shapes differ.
        """
        return Extents(
            *self._alone.extents(
                np.ascontiguousarray(slots, dtype=np.int64),
                np.atleast_1d(np.asarray(offset, dtype=np.int64)),
                length,
                copy,
                merged,
            )
        )

    def touches(self, device: int, slots: I64) -> NDArray[np.bool_]:
        """Per slot (int64, shape [n]) whether any byte of it lies on the device; bool, [n].

        Raises:
            ValueError: there is no such device.
        """
        self._check_device(device)
        column: NDArray[np.bool_] = self._touches[:, device]
        return column[np.asarray(slots, dtype=np.int64) % len(self.lanes)]

    def lost(self, out: NDArray[np.bool_], slots: I64) -> NDArray[np.bool_]:
        """Mask of slots that cannot be had without some devices: a piece has no copy elsewhere.

        Args:
            out: Whether each device is away, bool, [devices].
            slots: int64, shape [n].

        Returns:
            bool, [n].

        Raises:
            ValueError: not one entry of ``out`` per device.
        """
        if out.shape != (self.devices,):
            raise ValueError(f"{out.shape} of {self.devices} devices")
        nowhere: NDArray[np.bool_] = np.all(out[self._device], axis=1)
        by_phase: NDArray[np.bool_] = np.any(nowhere, axis=1)
        return by_phase[np.asarray(slots, dtype=np.int64) % len(self.lanes)]

    def device_units(self, device: int, num_slots: int) -> int:
        """Room that slots ``[0, num_slots)`` take on a device, in units of
        :attr:`SlotGeometry.unit_bytes`.

        Raises:
            ValueError: there is no such device, or ``num_slots`` is negative.
        """
        self._check_device(device)
        if num_slots < 0:
            raise ValueError(f"num_slots is {num_slots}")
        rows, rest = divmod(num_slots, len(self.lanes))
        nbytes = rows * int(self._row_bytes[device]) + int(self._before[rest, device])
        return -(-nbytes // self.geometry.unit_bytes)

    def max_slots(self, rooms: Sequence[int]) -> int:
        """Largest ``num_slots`` that fit the room of every device that has a lane, in units as
        above.

        Raises:
            ValueError: not one room per device.
        """
        if len(rooms) != self.devices:
            raise ValueError(f"rooms of {len(rooms)} of {self.devices} devices")
        used = np.flatnonzero(self._row_bytes)
        have = np.asarray(rooms, dtype=np.int64)[used] * self.geometry.unit_bytes
        if int(have.min()) < 0:
            return 0
        rows = int((have // self._row_bytes[used]).min())
        fits = np.all(self._before[:, used] <= have - rows * self._row_bytes[used], axis=1)
        return rows * len(self.lanes) + int(np.flatnonzero(fits)[-1])

    def _check_device(self, device: int) -> None:
        if not 0 <= device < self.devices:
            raise ValueError(f"device {device} of {self.devices}")
