"""The slot header: what a slot holds, for which key and epoch, and a checksum per page.

Layout (little endian, ``docs/format.md``): 128 fixed bytes, ``uint64`` xxh3-64 per page, zeros,
and in the last 8 bytes the xxh3-64 of everything before them.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vllm_ssdkv.errors import FormatError
from vllm_ssdkv.store.checksum import checksum_bytes
from vllm_ssdkv.store.fingerprint import DIGEST_BYTES
from vllm_ssdkv.store.layout import HEADER_FIXED_BYTES, HEADER_TAIL_BYTES, SlotGeometry

MAGIC = b"SSDKVSLT"
VERSION = 1
KEY_BYTES = 32

# magic, version, header_bytes, pages, page_bytes, payload_bytes, rank, slot, epoch, fingerprint,
# key, reserved
_FIXED = struct.Struct("<8s6I2Q16s32s32s")
_TAIL = struct.Struct("<Q")
_RESERVED = bytes(32)


@dataclass(frozen=True, slots=True, eq=False)
class SlotHeader:
    """Contents of one slot's header.

    Attributes:
        key: Block hash, 32 bytes.
        slot: Slot number the header was written for.
        epoch: The allocation it was written in (:meth:`SlotIndex.epoch`).
        rank: Tensor-parallel rank.
        checksums: xxh3-64 of each page's payload bytes, uint64, shape [pages].
    """

    key: bytes
    slot: int
    epoch: int
    rank: int
    checksums: NDArray[np.uint64]

    def encode_into(
        self, buffer: memoryview | NDArray[np.uint8], geometry: SlotGeometry, digest: bytes
    ) -> None:
        """Write the header into the first ``geometry.header_bytes`` of a contiguous buffer.

        Args:
            buffer: Writable bytes, at least ``geometry.header_bytes`` long.
            geometry: Shape of the slot.
            digest: :attr:`Fingerprint.digest`.

        Raises:
            ValueError: a length does not fit the geometry, or a number its field.
        """
        if len(self.key) != KEY_BYTES or len(digest) != DIGEST_BYTES:
            raise ValueError(f"key of {len(self.key)} bytes, fingerprint of {len(digest)} bytes")
        if self.checksums.shape != (geometry.pages,):
            raise ValueError(f"checksums {self.checksums.shape} for {geometry.pages} pages")
        size = geometry.header_bytes
        view = np.frombuffer(buffer, dtype=np.uint8)[:size].data
        if len(view) != size:
            raise ValueError(f"buffer of {len(view)} bytes for a header of {size}")
        try:
            _FIXED.pack_into(
                view,
                0,
                MAGIC,
                VERSION,
                size,
                geometry.pages,
                geometry.page_bytes,
                geometry.payload_bytes,
                self.rank,
                self.slot,
                self.epoch,
                digest,
                self.key,
                _RESERVED,
            )
        except struct.error as exc:
            raise ValueError(f"slot header: {exc}") from exc
        sums_end = HEADER_FIXED_BYTES + 8 * geometry.pages
        view[HEADER_FIXED_BYTES:sums_end] = self.checksums.astype("<u8").tobytes()
        body = size - HEADER_TAIL_BYTES
        view[sums_end:body] = bytes(body - sums_end)
        _TAIL.pack_into(view, body, checksum_bytes(view[:body]))


def decode(
    buffer: bytes | memoryview | NDArray[np.uint8],
    geometry: SlotGeometry,
    digest: bytes,
    *,
    key: bytes | None = None,
    slot: int | None = None,
    epoch: int | None = None,
    rank: int | None = None,
) -> SlotHeader:
    """Read a header and check that it belongs to this store and, as given, to this block.

    Callers that serve data pass all four of ``key``, ``slot``, ``epoch`` and ``rank``: a header
    of another block, of an older life of the slot, or read from the wrong place is refused.

    Args:
        buffer: Contiguous bytes, at least ``geometry.header_bytes`` long.
        geometry: Shape of the slot.
        digest: :attr:`Fingerprint.digest`.
        key: Expected key, or None for any; likewise ``slot``, ``epoch`` and ``rank``.

    Raises:
        FormatError: the text names the field that does not match.
    """
    size = geometry.header_bytes
    view = np.frombuffer(buffer, dtype=np.uint8)[:size].data
    if len(view) != size:
        raise FormatError(f"slot header: length is {len(view)}, expected {size}")
    magic, version, *shape = _FIXED.unpack_from(view)
    *shape, found_rank, found_slot, found_epoch, found_digest, found_key, reserved = shape
    _expect("magic", magic, MAGIC)
    _expect("version", version, VERSION)
    body = size - HEADER_TAIL_BYTES
    _expect("checksum", checksum_bytes(view[:body]), _TAIL.unpack_from(view, body)[0])
    expected_shape = (size, geometry.pages, geometry.page_bytes, geometry.payload_bytes)
    names = ("header_bytes", "pages", "page_bytes", "payload_bytes")
    for name, found, expected in zip(names, shape, expected_shape, strict=True):
        _expect(name, found, expected)
    _expect("fingerprint", found_digest, digest)
    for name, found, wanted in (
        ("rank", found_rank, rank),
        ("slot", found_slot, slot),
        ("epoch", found_epoch, epoch),
        ("key", found_key, key),
    ):
        if wanted is not None:
            _expect(name, found, wanted)
    _expect("reserved", reserved, _RESERVED)
    sums_end = HEADER_FIXED_BYTES + 8 * geometry.pages
    if np.frombuffer(view[sums_end:body], dtype=np.uint8).any():
        raise FormatError("slot header: bytes behind the checksums are not zero")
    sums = np.frombuffer(view, dtype="<u8", count=geometry.pages, offset=HEADER_FIXED_BYTES)
    return SlotHeader(found_key, found_slot, found_epoch, found_rank, sums.astype(np.uint64))


def epoch_of(buffer: memoryview | NDArray[np.uint8], slot: int) -> int | None:
    """Epoch that the first bytes of a slot name; None when they are no header of that slot.

    The header may be damaged, so that the epoch is what somebody else has to confirm.
    """
    view = np.frombuffer(buffer, dtype=np.uint8).data
    magic, *_, found, epoch, _, _ = _FIXED.unpack_from(view)
    return int(epoch) if (magic, found) == (MAGIC, slot) else None


def _expect(field: str, found: bytes | int, expected: bytes | int) -> None:
    if found != expected:
        shown = [v.hex() if isinstance(v, bytes) else v for v in (found, expected)]
        raise FormatError(f"slot header: {field} is {shown[0]}, expected {shown[1]}")
