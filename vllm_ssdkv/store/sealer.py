"""What makes a slot's pages trustworthy, and where the store is encrypted, unreadable.

A *seal* is what must be known of a slot to accept its pages: a *mark* per page and an *opening* for
all of them. Without encryption a mark is the page's checksum and there is no opening
(:class:`ChecksumSealer`); with it a mark is the page's tag, and the opening is the slot's key and
identity (:mod:`vllm_ssdkv.store.cipher`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from vllm_ssdkv.store.arena import Arena
from vllm_ssdkv.store.checksum import checksum_pages
from vllm_ssdkv.store.header import SlotHeader, decode
from vllm_ssdkv.store.layout import SlotGeometry
from vllm_ssdkv.store.verify import PageSampler, wrong_pages

U64 = NDArray[np.uint64]


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Seals:
    """Seals of n slots, or of a range of their pages. Not shown: an opening holds a key.

    Attributes:
        opening: uint64, shape [n, opening words].
        marks: uint64, shape [n, pages, mark words].
    """

    opening: U64
    marks: U64

    def part(self, which: NDArray[np.int64]) -> Seals:
        """Those of some slots, indices [k]."""
        return Seals(self.opening[which], self.marks[which])

    @classmethod
    def of(cls, parts: Sequence[Seals]) -> Seals:
        """Several as one, at least one."""
        return cls(
            np.concatenate([part.opening for part in parts]),
            np.concatenate([part.marks for part in parts]),
        )


class Sealer(Protocol):
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
        keys: Sequence[bytes],
        frames: U64,
        images: U64,
    ) -> Seals:
        """Make n slots ready for the devices: images with header, and the header in the frame.

        Args:
            slots: Slot numbers, [n].
            epochs: Of each slot's allocation, [n].
            keys: Block each slot holds, n times 32 bytes.
            frames: Arena offset of each slot with its pages, [n].
            images: Arena offset at which to make what goes to the devices, [n]; that of the
                frame where nothing is encrypted.

        Raises:
            RuntimeError: libcrypto refuses.
        """

    def read_header(self, view: NDArray[np.uint8], *, slot: int, epoch: int, key: bytes) -> Seals:
        """The seal in a slot's header, which must be that of this block, slot and epoch.

        Args:
            view: Bytes of the header, at least ``geometry.header_bytes``.

        Raises:
            FormatError: it is not; the text names the field that does not match.
        """

    def unseal(
        self, seals: Seals, first_page: int, at: U64, *, final: bool = False
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


def page_addresses(arena: Arena, geometry: SlotGeometry, at: U64, pages: int) -> U64:
    """Absolute addresses, [n, pages], of pages that follow each of n arena offsets."""
    steps = np.arange(pages, dtype=np.uint64) * np.uint64(geometry.page_bytes)
    found: U64 = np.uint64(arena.address) + at[:, None] + steps[None, :]
    return found


@dataclass(frozen=True, slots=True, eq=False)
class ChecksumSealer:
    """Guards against faults of hardware and software: one xxh3-64 per page, nothing encrypted."""

    geometry: SlotGeometry
    digest: bytes
    rank: int
    arena: Arena
    sampler: PageSampler = field(default_factory=PageSampler)
    """Which pages of a read are checked; default: all."""
    opening_words: ClassVar[int] = 0
    mark_words: ClassVar[int] = 1

    def seal(
        self,
        slots: NDArray[np.int64],
        epochs: NDArray[np.int64],
        keys: Sequence[bytes],
        frames: U64,
        images: U64,
    ) -> Seals:
        """See :meth:`Sealer.seal`; ``images`` are ``frames``."""
        geometry = self.geometry
        first = frames + np.uint64(geometry.header_bytes)
        addresses = page_addresses(self.arena, geometry, first, geometry.pages)
        sums = checksum_pages(addresses.ravel(), geometry.payload_bytes).reshape(len(slots), -1)
        for slot, epoch, key, at, row in zip(
            slots.tolist(), epochs.tolist(), keys, frames.tolist(), sums, strict=True
        ):
            view = self.arena.view(at, geometry.header_bytes)
            SlotHeader(key, slot, epoch, self.rank, row).encode_into(view, geometry, self.digest)
        return _seals(sums)

    def read_header(self, view: NDArray[np.uint8], *, slot: int, epoch: int, key: bytes) -> Seals:
        """See :meth:`Sealer.read_header`."""
        header = decode(
            view, self.geometry, self.digest, key=key, slot=slot, epoch=epoch, rank=self.rank
        )
        return _seals(header.checksums[None, :])

    def unseal(
        self, seals: Seals, first_page: int, at: U64, *, final: bool = False
    ) -> NDArray[np.bool_]:
        """See :meth:`Sealer.unseal`."""
        expected = seals.marks[:, :, 0]
        same = np.ones(expected.shape, dtype=np.bool_)
        chosen = slice(None) if final else self.sampler.choose()
        base = np.uint64(self.arena.address) + at
        same[wrong_pages(self.geometry, base, expected, chosen)] = False
        return same


def _seals(sums: U64) -> Seals:
    return Seals(np.zeros((len(sums), 0), dtype=np.uint64), sums[:, :, None])
