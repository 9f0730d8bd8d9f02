"""Geometry of a slot: header, pages and tail, and their bytes.

Pure arithmetic: no I/O, no state after construction, safe from any thread. All sizes and offsets
are bytes. What this file computes is the on-disk format (``docs/format.md``): changing a formula
here needs a new format version.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from vllm_ssdkv.base.errors import FormatError

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
"""Checksum bytes of one page, in the header."""

TAG_BYTES = 16
"""Tag bytes of one page, and of the header itself, in an encrypted slot."""

MAX_SLOT_BYTES = 2**31 - PAGE_ALIGN
"""A slot's length, and so that of every request, fits the engines' signed 32-bit results."""


def round_up(value: int, multiple: int) -> int:
    """Smallest multiple of ``multiple`` that is at least ``value``."""
    return -(-value // multiple) * multiple


PageRecord: TypeAlias = Literal[
    "bounds", "spread", "spread_with_values", "codes_1", "codes_2", "codes_4"
]
"""Kind of a page's summary, see :attr:`SlotGeometry.record`."""

PAGE_RECORDS: tuple[PageRecord, ...] = (
    "bounds",
    "spread",
    "spread_with_values",
    "codes_1",
    "codes_2",
    "codes_4",
)
"""Kinds of summaries, in the order of their numbers in a superblock."""


GIVEN_UNITS = 7
"""Version of superblocks that name the number of units, see :attr:`SlotGeometry.units`."""


def format_version(summary_pages: int, record: PageRecord = "bounds", units: int = 0) -> int:
    """Version of superblock and manifest: 1; 4 where slots have a tail; 5 where summaries of pages
    are not bounds, 6 where they are codes, 7 where the number of units is given. The tail was
    before the pages of KV in version 1, and in 2 and 3, which had channel pages."""
    if units:
        return GIVEN_UNITS
    if record.startswith("codes"):
        return 6
    if record != "bounds":
        return 5
    return 4 if summary_pages else 1


def of_another_version(path: Path, version: str, known: str) -> FormatError:
    """Error for a file that another release made: it is not damaged, and not ours to replace."""
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
        kind: ``opaque``: one page holds one layer's block as vLLM laid it out, or, where layers are
            of several sizes, a stretch of them. ``paged``: one page holds K, then V, of
            ``page_tokens`` tokens of one KV head and layer.
        layers: Attention layers whose KV a slot holds; of stretches their number.
        heads: KV heads of this rank; 1 for ``opaque``.
        groups: Pages per head and layer, that is block size over page tokens; 1 for ``opaque``.
        payload_bytes: Bytes used in each page. The rest up to :attr:`page_bytes` is padding,
            neither checksummed nor looked at.
        encrypted: Whether pages are encrypted; headers then have their tags, too.
        summary_pages: Pages behind those of KV that hold what a sparse selector must know of them
            (:mod:`vllm_ssdkv.store.cache.summaries`); 0 where no selector needs it.
        channel_pages: Pages of each layer that hold its K once more, channel-major; 0 where no
            selector needs them.
        scaled_from: Bytes of a number of K where summary pages hold it as codes; 0 elsewhere.
        record: What summary pages hold of each page of KV, where there are no channel pages: of
            each channel of K the smallest and the largest number (``bounds``), or mean and variance
            (``spread``), and then of each layer and head the sum of V (``spread_with_values``); or
            of each layer and head codes of so many bits for each number of K (``codes_2``).
        units: Stripe units of a slot, where ranks have slots of several sizes and all as many units
            (:func:`with_equal_units`); 0: as many as its own size needs.

    What each step asks for every layer is computed once.

    Raises:
        ValueError: a number is not positive, ``opaque`` has heads, groups or summaries, there are
            channel pages without summary pages, pages have no summaries of this kind, or the slot
            would exceed :data:`MAX_SLOT_BYTES`.
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
    record: PageRecord = "bounds"
    units: int = 0

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
        if self.scaled_from not in ((2, 4) if self.code_bits else (0,)):
            raise ValueError(
                f"slot geometry: scaled_from is {self.scaled_from}, with {self.channel_pages} "
                f"channel pages and {self.record}"
            )
        if self.record not in PAGE_RECORDS or (
            self.record != "bounds" and (self.channel_pages or not self.summary_pages)
        ):
            raise ValueError(
                f"slot geometry: record is {self.record!r}, with {self.summary_pages} summary and "
                f"{self.channel_pages} channel pages"
            )
        if self.units and (self.kind != "opaque" or self.units < self._own_units):
            raise ValueError(f"slot geometry: units is {self.units}, of a {self.kind} slot")
        if self.slot_bytes > MAX_SLOT_BYTES:
            raise ValueError(f"slot of {self.slot_bytes} bytes exceeds {MAX_SLOT_BYTES}")

    @property
    def code_bits(self) -> int:
        """Bits of a number of K in codes; 0 where summaries are none."""
        return int(self.record[-1]) if self.record.startswith("codes") else 0

    @property
    def version(self) -> int:
        """Version of superblock and manifest."""
        return format_version(self.summary_pages, self.record, self.units)

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
    def _own_units(self) -> int:
        """The fewest stripe units for a slot of this size."""
        return -(-self.slot_bytes // (STRIPE_UNIT // self.quantum * self.quantum))

    @property
    def units_per_slot(self) -> int:
        """Stripe units a slot is cut into."""
        return self.units or self._own_units

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


def with_equal_units(geometries: Sequence[SlotGeometry]) -> tuple[SlotGeometry, ...]:
    """Geometries of a store's ranks, by rank, with as many units each: a segment is so many units
    of every rank's data file, however large these units are there.

    Example:
        >>> large, small = (SlotGeometry("opaque", n, 1, 1, 400_000) for n in (9, 2))
        >>> [one.units_per_slot for one in with_equal_units([large, small])]
        [7, 7]
        >>> with_equal_units([small, small]) == (small, small)
        True
    """
    if len(set(geometries)) == 1:
        return tuple(geometries)
    units = max(one.units_per_slot for one in geometries)
    return tuple(replace(one, units=units) for one in geometries)
