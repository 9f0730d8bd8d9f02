"""Codecs of slots: checksums that make pages trustworthy, and encryption where the store has it.

A *seal* is what must be known of a slot to accept its pages: a *mark* per page and an *opening* for
all of them. Without encryption a mark is the page's checksum and there is no opening
(:class:`ChecksumCodec`); with it a mark is the page's tag, and the opening is the slot's key and
identity (:mod:`vllm_ssdkv.store.integrity.cipher`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from vllm_ssdkv import _io
from vllm_ssdkv.base.checksum import checksum_pages
from vllm_ssdkv.store.format.slot_geometry import SlotGeometry
from vllm_ssdkv.store.format.slot_header_batch import HeaderFormat, gather, scatter
from vllm_ssdkv.store.integrity.page_verification import PageSampler, wrong_pages
from vllm_ssdkv.store.memory.arena import Arena

U8 = NDArray[np.uint8]
U64 = NDArray[np.uint64]

CHANGED = "slot header: it changed while it was looked at"
"""Reason for refusing a header in which no field is wrong."""


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Digests:
    """Seals of n slots, or of a range of their pages. Not shown: an opening holds a key.

    Attributes:
        opening: uint64, shape [n, opening words].
        marks: uint64, shape [n, pages, mark words].
    """

    opening: U64
    marks: U64

    def part(self, which: NDArray[np.bool_] | NDArray[np.intp]) -> Digests:
        """The seals of some of the slots."""
        return Digests(self.opening[which], self.marks[which])

    def of_frames(self, geometry: SlotGeometry) -> Digests:
        """The seals of the pages that frames hold, where these are of all pages."""
        return Digests(self.opening, self.marks[:, : geometry.kv_pages])


@dataclass(frozen=True, slots=True, eq=False)
class PlainCheck:
    """Arguments by which native code checks n slots, where checksums alone do: the first ones of
    :class:`vllm_ssdkv._io.ArrivalVerifier`, and its last ones."""

    shape: _io.SlotShape
    beginnings: U8
    """Beginnings of the headers, [n, 128]."""
    first: int
    step: int


class SlotCodec(Protocol):
    """Seals and unseals slots of one rank that lie in the arena. Any thread may call any method.

    The native calls release the GIL.
    """

    @property
    def opening_words(self) -> int:
        """Words of a slot's opening."""

    @property
    def mark_words(self) -> int:
        """Words of a page's mark."""

    def seal(
        self,
        slots: NDArray[np.int64],
        epochs: NDArray[np.int64],
        keys: U8,
        frames: U64,
        images: U64,
        tails: U64 | None = None,
    ) -> Digests:
        """Make n slots ready for the devices: images with header, and the header in the frame.

        Args:
            slots: Slot numbers, [n].
            epochs: Of each slot's allocation, [n].
            keys: Block each slot holds, [n, 32].
            frames: Arena offset of each slot with its pages, [n].
            images: Arena offset at which to make what goes to the devices, [n]; that of the
                frame where nothing is encrypted.
            tails: Arena offset of each slot's tail, [n], where slots have any: behind the image
                where they are encrypted, which happens to it where it lies.

        Raises:
            RuntimeError: libcrypto refuses.
        """

    def read_headers(
        self, slots: NDArray[np.int64], epochs: NDArray[np.int64], keys: U8, at: U64
    ) -> tuple[Digests, NDArray[np.bool_]]:
        """The seals in n headers, and which are those of these slots, epochs and blocks, [n].

        The seal of a header that is not right means nothing.

        Args:
            slots: Slot numbers, [n].
            epochs: Of each slot's allocation, [n].
            keys: Block each slot holds, [n, 32].
            at: Arena offset of each header, [n].
        """

    def plain_check(
        self, slots: NDArray[np.int64], epochs: NDArray[np.int64], keys: U8
    ) -> PlainCheck | None:
        """Arguments for native code to check these slots of one read by itself; None: it takes
        :meth:`read_headers` and :meth:`unseal`. Arguments as there."""

    def why_refused(self, slot: int, epoch: int, key: bytes, at: int) -> str:
        """Fault of a header that :meth:`read_headers` refused, naming the field."""

    def intact(
        self, slots: NDArray[np.int64], epochs: NDArray[np.int64], keys: U8, at: U64
    ) -> NDArray[np.bool_]:
        """Mask of n readable frames, header included, that are what was written, [n].

        Encrypted pages were all found right when they were decrypted, and have nothing left to be
        checked by: there the header decides.

        Args:
            slots: Slot numbers, [n].
            epochs: Of each slot's allocation, [n].
            keys: Block each slot holds, [n, 32].
            at: Arena offset of each frame, [n].
        """

    def unseal(
        self, seals: Digests, first_page: int, at: U64, *, final: bool = False
    ) -> NDArray[np.bool_]:
        """Check pages that came from a device, and make them readable where they lie.

        Args:
            seals: Of n slots and p pages from ``first_page`` on.
            at: Arena offset of each slot's page ``first_page``, [n].
            final: A second read, after which slots are accused: every page is checked, also where
                a sample of them would do.

        Returns:
            Which pages may be used, [n, p]. The others' content is undefined.
        """


def slot_pages(arena: Arena, geometry: SlotGeometry, frames: U64, tails: U64 | None) -> U64:
    """Absolute addresses, [n, pages], of the pages of n slots in frames and tails at these arena
    offsets."""
    first = frames + np.uint64(geometry.header_bytes)
    kv = page_addresses(arena, geometry, first, geometry.kv_pages)
    if tails is None:
        return kv
    return np.concatenate([kv, page_addresses(arena, geometry, tails, geometry.tail_pages)], axis=1)


def page_addresses(arena: Arena, geometry: SlotGeometry, at: U64, pages: int) -> U64:
    """Absolute addresses, [n, pages], of pages that follow each of n arena offsets."""
    steps = np.arange(pages, dtype=np.uint64) * np.uint64(geometry.page_bytes)
    found: U64 = np.uint64(arena.address) + at[:, None] + steps[None, :]
    return found


class ChecksumCodec:
    """Guards against faults of hardware and software: one xxh3-64 per page, nothing encrypted."""

    opening_words = 0
    mark_words = 1

    def __init__(
        self,
        geometry: SlotGeometry,
        digest: bytes,
        rank: int,
        arena: Arena,
        sampler: PageSampler | None = None,
    ):
        """``sampler``: which pages of a read are checked; default: all."""
        self._geometry = geometry
        self._headers = HeaderFormat(geometry, digest, rank)
        self._arena = arena
        self._sampler = sampler or PageSampler()

    def seal(
        self,
        slots: NDArray[np.int64],
        epochs: NDArray[np.int64],
        keys: U8,
        frames: U64,
        images: U64,
        tails: U64 | None = None,
    ) -> Digests:
        """See :meth:`SlotCodec.seal`; ``images`` are ``frames``."""
        geometry = self._geometry
        addresses = slot_pages(self._arena, geometry, frames, tails)
        sums = checksum_pages(addresses.ravel(), geometry.payload_bytes)
        sums = sums.reshape(len(slots), geometry.pages)
        headers = self._headers.encode(slots, epochs, keys, sums)
        scatter(headers, np.uint64(self._arena.address) + frames)
        return _seals(sums)

    def read_headers(
        self, slots: NDArray[np.int64], epochs: NDArray[np.int64], keys: U8, at: U64
    ) -> tuple[Digests, NDArray[np.bool_]]:
        """See :meth:`SlotCodec.read_headers`."""
        found = gather(np.uint64(self._arena.address) + at, self._geometry.header_bytes)
        right = self._headers.right(found, slots, epochs, keys)
        return _seals(self._headers.checksums(found)), right

    def plain_check(
        self, slots: NDArray[np.int64], epochs: NDArray[np.int64], keys: U8
    ) -> PlainCheck | None:
        """See :meth:`SlotCodec.plain_check`."""
        chosen = self._sampler.choose()
        beginnings = self._headers.beginnings(slots, epochs, keys)
        return PlainCheck(self._headers.shape, beginnings, chosen.start or 0, chosen.step or 1)

    def why_refused(self, slot: int, epoch: int, key: bytes, at: int) -> str:
        """See :meth:`SlotCodec.why_refused`."""
        data = self._arena.view(at, self._geometry.header_bytes)
        return self._headers.what_is_wrong(data, slot, epoch, key) or CHANGED

    def intact(
        self, slots: NDArray[np.int64], epochs: NDArray[np.int64], keys: U8, at: U64
    ) -> NDArray[np.bool_]:
        """See :meth:`SlotCodec.intact`."""
        seals, right = self.read_headers(slots, epochs, keys, at)
        first = at + np.uint64(self._geometry.header_bytes)
        pages = self.unseal(seals.of_frames(self._geometry), 0, first, final=True)
        return right & pages.all(axis=1)

    def unseal(
        self, seals: Digests, first_page: int, at: U64, *, final: bool = False
    ) -> NDArray[np.bool_]:
        """See :meth:`SlotCodec.unseal`."""
        expected = seals.marks[:, :, 0]
        same = np.ones(expected.shape, dtype=np.bool_)
        chosen = slice(None) if final else self._sampler.choose()
        base = np.uint64(self._arena.address) + at
        same[wrong_pages(self._geometry, base, expected, chosen)] = False
        return same


def _seals(sums: U64) -> Digests:
    return Digests(np.zeros((len(sums), 0), dtype=np.uint64), sums[:, :, None])
