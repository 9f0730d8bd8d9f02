"""Extents of a verified read, and the sources of the digests that check it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from vllm_ssdkv.store.format.slot_geometry import SlotGeometry
from vllm_ssdkv.store.integrity.checksum_table import ChecksumTable
from vllm_ssdkv.store.integrity.slot_codec import Digests, SlotCodec
from vllm_ssdkv.store.io.engines.protocol import U64

Which = NDArray[np.intp]
"""Extents, by their place in the read."""


@dataclass(frozen=True, slots=True, eq=False)
class SlotExtents:
    """Runs of pages of slots, all arrays [n].

    Attributes:
        slots: Slot of each, int64; slots may repeat.
        first: Number in the slot of its first page, int64, one for all or one each.
        pages: How many pages follow.
        at: Arena offset to which it is read.
        headed: Whether each begins with the header of its slot; ``first`` is 0 then.
    """

    slots: NDArray[np.int64]
    first: int | NDArray[np.int64]
    pages: int
    at: U64
    headed: bool = False

    def offset(self, geometry: SlotGeometry) -> int | NDArray[np.int64]:
        """Bytes of the slot before each."""
        if self.headed:
            return 0
        return geometry.header_bytes + self.first * geometry.page_bytes

    def nbytes(self, geometry: SlotGeometry) -> int:
        """Bytes of each."""
        return self.before_pages(geometry) + self.pages * geometry.page_bytes

    def before_pages(self, geometry: SlotGeometry) -> int:
        """Bytes of each before its first page."""
        return geometry.header_bytes if self.headed else 0

    def numbers(self, which: Which | slice) -> int | NDArray[np.int64]:
        """Number of the first page of some of them."""
        return self.first if isinstance(self.first, int) else self.first[which]


class PageCodec(Protocol):
    """Checks pages where they lie. Any thread."""

    def unseal(
        self, seals: Digests, first_page: int, at: U64, *, final: bool = False
    ) -> NDArray[np.bool_]:
        """See :meth:`SlotCodec.unseal`."""


class DigestSource(Protocol):
    """Source of the digests of a read's extents, by which its pages are checked. Any thread."""

    @property
    def codec(self) -> PageCodec:
        """Check of pages by them."""

    def digests(self, which: Which | slice) -> tuple[Digests, NDArray[np.bool_]]:
        """Digests of the pages of some extents that have arrived, [k], and which are known."""

    def why_refused(self, which: int) -> str:
        """Reason why the digests of an extent are not known."""


class TableDigests:
    """Digests of slots of running contexts, which memory has."""

    def __init__(self, codec: PageCodec, table: ChecksumTable, extents: SlotExtents):
        self.codec = codec
        self._table = table
        self._extents = extents

    def digests(self, which: Which | slice) -> tuple[Digests, NDArray[np.bool_]]:
        """See :class:`DigestSource`."""
        extents = self._extents
        first, slots = extents.numbers(which), extents.slots[which]
        if isinstance(first, int):
            return self._table.get(slots, first, extents.pages)
        return self._table.get_pages(slots, first)

    def why_refused(self, which: int) -> str:
        """See :class:`DigestSource`."""
        return "its checksums are not known"


class HeaderDigests:
    """Digests in the headers that extents begin with, if these are of the blocks that are meant."""

    def __init__(
        self,
        codec: SlotCodec,
        extents: SlotExtents,
        epochs: NDArray[np.int64],
        keys: NDArray[np.uint8],
        keep: Callable[[NDArray[np.int64], Digests], None],
    ):
        """``epochs`` [n] and ``keys`` [n, 32] are those of the slots' blocks. ``keep`` gets slots
        and digests, of all their pages, that were found right; any thread."""
        self.codec = codec
        self._extents = extents
        self.epochs = epochs
        self.keys = keys
        self._keep = keep

    def digests(self, which: Which | slice) -> tuple[Digests, NDArray[np.bool_]]:
        """See :class:`DigestSource`."""
        extents = self._extents
        slots = extents.slots[which]
        found, right = self.codec.read_headers(
            slots, self.epochs[which], self.keys[which], extents.at[which]
        )
        self._keep(slots[right], found.part(right))
        return Digests(found.opening, found.marks[:, : extents.pages]), right

    def why_refused(self, which: int) -> str:
        """See :class:`DigestSource`."""
        extents, key = self._extents, self.keys[which].tobytes()
        slot, epoch = int(extents.slots[which]), int(self.epochs[which])
        return self.codec.why_refused(slot, epoch, key, int(extents.at[which]))
