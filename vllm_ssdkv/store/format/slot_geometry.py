"""Where the bytes of a slot lie: geometry of one slot, and striping of slots over devices.

Pure arithmetic: no I/O, no state after construction, safe from any thread. All sizes and offsets
are bytes. What this file computes is the on-disk format (``docs/format.md``): changing a formula
here needs a new format version.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from vllm_ssdkv import _io
from vllm_ssdkv.base.errors import FormatError
from vllm_ssdkv.store.placement.lanes import partners

U16: TypeAlias = NDArray[np.uint16]
U32: TypeAlias = NDArray[np.uint32]
U64: TypeAlias = NDArray[np.uint64]
I64: TypeAlias = NDArray[np.int64]

PAGE_ALIGN = 4096
"""Every offset and length handed to an engine is a multiple of this (O_DIRECT on any drive)."""

STRIPE_UNIT = 512 * 1024
"""Upper bound of a stripe unit."""

MERGE_BYTES = 4 * 1024 * 1024
"""Upper bound of one request made of adjacent units, so that one failure costs little."""

SUPERBLOCK_BYTES = 1024 * 1024
"""Bytes before the first slot of every data file; the superblock copies lie inside."""

HEADER_FIXED_BYTES = 128
"""Slot header before the page checksums."""

HEADER_TAIL_BYTES = 8
"""The header's own checksum, its last bytes."""

CHECKSUM_BYTES = 8
"""Of one page, in the header."""

TAG_BYTES = 16
"""Of one page, and of the header itself, where slots are encrypted."""

MAX_SLOT_BYTES = 2**31 - PAGE_ALIGN
"""A slot's length, and so that of every request, fits the engines' signed 32-bit results."""


def round_up(value: int, multiple: int) -> int:
    """Smallest multiple of ``multiple`` that is at least ``value``."""
    return -(-value // multiple) * multiple


def format_version(summary_pages: int) -> int:
    """Of superblock and manifest: 1; 4 where slots have a tail. It was before the pages of KV in
    version 1, and in 2 and 3, which had channel pages."""
    return 4 if summary_pages else 1


def of_another_version(path: Path, version: str, known: str) -> FormatError:
    """What refuses a file that another release made: it is not damaged, and not ours to replace."""
    return FormatError(
        f"{path} has format version {version}, this release reads {known}: use another directory "
        "or the release that made it, or delete this one's content"
    )


@dataclass(frozen=True)
class SlotGeometry:
    """Shape of one slot on one rank: header, pages of KV ordered layer, head, group, and the
    *tail*, which is summary pages, then channel pages ordered layer.

    What is before the tail is what a frame in DRAM holds: the tail can be made from it.

    Attributes:
        kind: ``opaque``: one page holds one layer's block as vLLM laid it out. ``paged``: one page
            holds K, then V, of ``page_tokens`` tokens of one KV head and layer.
        layers: Attention layers whose KV a slot holds.
        heads: KV heads of this rank; 1 for ``opaque``.
        groups: Pages per head and layer, that is block size over page tokens; 1 for ``opaque``.
        payload_bytes: Bytes used in each page. The rest up to :attr:`page_bytes` is padding,
            neither checksummed nor looked at.
        encrypted: Whether pages are encrypted; headers then have their tags, too.
        summary_pages: Pages behind those of KV that hold what a sparse selector must know of them
            (:mod:`vllm_ssdkv.store.cache.summaries`); 0 where no selector needs it.
        channel_pages: Pages of each layer that hold its K once more, channel-major; 0 where no
            selector needs them.
        scaled_from: Bytes of a number of K where channel pages hold it as int8, with scales in the
            summary pages; 0 where they hold K as it is.

    What each step asks for every layer is computed once.

    Raises:
        ValueError: a number is not positive, ``opaque`` has heads, groups or summaries, there are
            channel pages without summary pages or scales without channel pages, or the slot would
            exceed :data:`MAX_SLOT_BYTES`.
    """

    kind: Literal["opaque", "paged"]
    layers: int
    heads: int
    groups: int
    payload_bytes: int
    encrypted: bool = False
    summary_pages: int = 0
    channel_pages: int = 0
    scaled_from: int = 0

    def __post_init__(self) -> None:
        if self.kind not in ("opaque", "paged"):
            raise ValueError(f"slot kind is {self.kind!r}, not 'opaque' or 'paged'")
        for name in ("layers", "heads", "groups", "payload_bytes"):
            if getattr(self, name) <= 0:
                raise ValueError(f"slot geometry: {name} is {getattr(self, name)}, must be > 0")
        if self.kind == "opaque" and (self.heads, self.groups, self.summary_pages) != (1, 1, 0):
            raise ValueError("slot geometry: an opaque slot has heads = groups = 1, no summaries")
        if self.summary_pages < 0:
            raise ValueError(f"slot geometry: summary_pages is {self.summary_pages}")
        if self.channel_pages < 0 or (self.channel_pages and not self.summary_pages):
            raise ValueError(
                f"slot geometry: channel_pages is {self.channel_pages}, with {self.summary_pages} "
                "summary pages"
            )
        if self.scaled_from and (self.scaled_from not in (2, 4) or not self.channel_pages):
            raise ValueError(
                f"slot geometry: scaled_from is {self.scaled_from}, with {self.channel_pages} "
                "channel pages"
            )
        if self.slot_bytes > MAX_SLOT_BYTES:
            raise ValueError(f"slot of {self.slot_bytes} bytes exceeds {MAX_SLOT_BYTES}")

    @property
    def version(self) -> int:
        """Of superblock and manifest."""
        return format_version(self.summary_pages)

    @functools.cached_property
    def page_bytes(self) -> int:
        """Bytes from one page to the next: the payload padded to 4096."""
        return round_up(self.payload_bytes, PAGE_ALIGN)

    @property
    def pages_per_layer(self) -> int:
        """Pages of one layer."""
        return self.heads * self.groups

    @property
    def kv_pages(self) -> int:
        """Pages of one slot that hold KV."""
        return self.layers * self.pages_per_layer

    @property
    def tail_pages(self) -> int:
        """Summary and channel pages of one slot."""
        return self.summary_pages + self.layers * self.channel_pages

    @property
    def pages(self) -> int:
        """Pages of one slot, summaries and channel pages included."""
        return self.kv_pages + self.tail_pages

    @functools.cached_property
    def layer_bytes(self) -> int:
        """Bytes of one layer's pages; they are contiguous in the slot."""
        return self.pages_per_layer * self.page_bytes

    @property
    def quantum(self) -> int:
        """Header and stripe units are multiples of this.

        A page size for small pages, so that no page straddles two units and reading one page is
        one request; 4096 for opaque slots (read whole) and for pages larger than a unit.
        """
        if self.kind == "paged" and self.page_bytes <= STRIPE_UNIT:
            return self.page_bytes
        return PAGE_ALIGN

    @functools.cached_property
    def header_bytes(self) -> int:
        """Bytes of the header: fixed part, marks, own checksum, padded."""
        return round_up(self.header_used + HEADER_TAIL_BYTES, self.quantum)

    @property
    def header_used(self) -> int:
        """Bytes of the header's fixed part, checksums and tags."""
        tags = TAG_BYTES * (self.pages + 1) if self.encrypted else 0
        return HEADER_FIXED_BYTES + CHECKSUM_BYTES * self.pages + tags

    @functools.cached_property
    def frame_bytes(self) -> int:
        """Bytes of header and pages of KV, with which the slot begins."""
        return self.header_bytes + self.kv_pages * self.page_bytes

    @functools.cached_property
    def tail_bytes(self) -> int:
        """Bytes of the summary and channel pages, with which the slot ends."""
        return self.tail_pages * self.page_bytes

    @property
    def slot_bytes(self) -> int:
        """Bytes of header and pages."""
        return self.frame_bytes + self.tail_bytes

    @property
    def units_per_slot(self) -> int:
        """Stripe units a slot is cut into."""
        return -(-self.slot_bytes // (STRIPE_UNIT // self.quantum * self.quantum))

    @property
    def unit_bytes(self) -> int:
        """Bytes of a stripe unit; the last of a slot may be partly unused."""
        return round_up(-(-self.slot_bytes // self.units_per_slot), self.quantum)

    def first_page(self, layer: int) -> int:
        """Number of a layer's first page of KV."""
        return layer * self.pages_per_layer

    def first_channel_page(self, layer: int) -> int:
        """Number of a layer's first channel page."""
        return self.kv_pages + self.summary_pages + layer * self.channel_pages

    def layer_offset(self, layer: int) -> int:
        """Offset of a layer's first page of KV inside the slot."""
        return self.page_offset(self.first_page(layer))

    def page_offset(self, page: int) -> int:
        """Offset of a page inside the slot; of KV, ``page = first_page(layer) + head * groups +
        group``."""
        return self.header_bytes + page * self.page_bytes


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

    A slot is cut into units; unit u of slot s lies on lane ``(s + u) mod n_lanes``, so that the
    same piece of many slots spreads over all devices. ``n_lanes`` consecutive slots form a row.
    A row takes the same number of bytes on every lane, rows follow each other without gaps, and
    inside a row a device holds its units ordered by slot, then copy, then unit: one slot's share of
    a device is one contiguous range. A store has one such map per list of lanes in use; where the
    rows of each begin on a device is told by ``Placement``.

    With two copies, the second one of a unit lies on the partner of its lane
    (:func:`vllm_ssdkv.store.placement.lanes.partners`), which is on another device.

    Attributes:
        geometry: The slot's shape.
        lanes: Device of each lane.
        devices: Number of devices; some may have no lane.
        copies: How often each slot is there: 1 or 2.
        table: The same for native code.
        units_per_slot: Units a slot is cut into.
        unit_bytes: Bytes of a unit, a multiple of 4096 and at most :data:`STRIPE_UNIT`, except
            that every unit of a slot has the same size, so that the last may be partly unused
            (less than one quantum per unit).

    Raises:
        ValueError: no lanes, a lane on no device, more than 65535 devices, copies other than 1 and
            2, or two copies where a device has more than half of the lanes.
    """

    def __init__(
        self, geometry: SlotGeometry, lanes: Sequence[int], devices: int, copies: int = 1
    ) -> None:
        self.geometry = geometry
        self.lanes = tuple(lanes)
        self.devices = devices
        self.copies = copies
        if self.devices > 0xFFFF:
            raise ValueError(f"{self.devices} devices; at most 65535")
        if not lanes or not all(0 <= device < devices for device in lanes):
            raise ValueError(f"lanes {list(lanes)} on {devices} devices")
        if copies not in (1, 2):
            raise ValueError(f"{copies} copies")
        self.units_per_slot = geometry.units_per_slot
        self.unit_bytes = geometry.unit_bytes

        n, units = len(self.lanes), self.units_per_slot
        lane_devices = np.asarray(self.lanes, dtype=np.int64)
        phase = np.arange(n, dtype=np.int64)[:, None]
        unit = np.arange(units, dtype=np.int64)[None, :]
        lane = (phase + unit) % n
        found = [lane_devices[lane]]
        if copies > 1:
            found.append(lane_devices[np.asarray(partners(self.lanes), dtype=np.int64)[lane]])
        # [phase, copy, unit]: the device, and the unit's place among its device's in the row.
        self._device: I64 = np.stack(found, axis=1)
        self._place: I64 = np.empty((n, copies, units), dtype=np.int64)
        # [phase + 1, device]: units of the row's first `phase` slots on the device.
        self._before: I64 = np.zeros((n + 1, self.devices), dtype=np.int64)
        for device in range(self.devices):
            here = self._device == device
            self._place[here] = np.arange(int(here.sum()), dtype=np.int64)
            self._before[1:, device] = np.cumsum(here.sum(axis=(1, 2)))
        self._row_units: I64 = self._before[n].copy()
        self._touches: NDArray[np.bool_] = np.diff(self._before, axis=0) > 0
        # Pieces of both copies are cut alike, at every unit: either may be read in place of the
        # other. Neighbours are rare there, since a device has at most half of the lanes.
        merge_units = max(1, MERGE_BYTES // self.unit_bytes) if copies == 1 else 1
        self.table = _io.StripeTable(
            self._device.ravel(),
            self._place.ravel(),
            self._row_units,
            n,
            copies,
            self.unit_bytes,
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
        """Which slots cannot be had without some devices: a piece has no copy elsewhere.

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
        """Units that slots ``[0, num_slots)`` take on a device.

        Raises:
            ValueError: there is no such device, or ``num_slots`` is negative.
        """
        self._check_device(device)
        if num_slots < 0:
            raise ValueError(f"num_slots is {num_slots}")
        rows, rest = divmod(num_slots, len(self.lanes))
        return rows * int(self._row_units[device]) + int(self._before[rest, device])

    def max_slots(self, rooms: Sequence[int]) -> int:
        """Largest ``num_slots`` whose units fit the room (units) of every device that has a lane.

        Raises:
            ValueError: not one room per device.
        """
        if len(rooms) != self.devices:
            raise ValueError(f"rooms of {len(rooms)} of {self.devices} devices")
        used = np.flatnonzero(self._row_units)
        have = np.asarray(rooms, dtype=np.int64)[used]
        if int(have.min()) < 0:
            return 0
        rows = int((have // self._row_units[used]).min())
        fits = np.all(self._before[:, used] <= have - rows * self._row_units[used], axis=1)
        return rows * len(self.lanes) + int(np.flatnonzero(fits)[-1])

    def _check_device(self, device: int) -> None:
        if not 0 <= device < self.devices:
            raise ValueError(f"device {device} of {self.devices}")
