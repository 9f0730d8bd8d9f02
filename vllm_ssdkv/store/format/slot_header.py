"""The slot header: what a slot holds, for which key and epoch, and a checksum per page.

Layout (little endian, ``docs/format.md``): 128 fixed bytes, ``uint64`` xxh3-64 per page, then, in
an encrypted store, a tag of 16 bytes per page and one of the header itself; zeros, and in the last
8 bytes the xxh3-64 of everything before them. Nothing here needs the store's key: checksums are
those of the bytes on the device, tags are made and checked in ``store/integrity/cipher.py``.
Headers are made in :mod:`vllm_ssdkv.store.format.slot_header_batch`.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from vllm_ssdkv.base.checksum import checksum_bytes
from vllm_ssdkv.base.errors import FormatError
from vllm_ssdkv.store.format.slot_geometry import (
    CHECKSUM_BYTES,
    HEADER_FIXED_BYTES,
    HEADER_TAIL_BYTES,
    TAG_BYTES,
    SlotGeometry,
)

SALT_BYTES: Final = 32


MAGIC = b"SSDKVSLT"
VERSION = 1
KEY_BYTES = 32

# magic, version, header_bytes, pages, page_bytes, payload_bytes, rank, slot, epoch, fingerprint,
# key, salt
_FIXED = struct.Struct("<8s6I2Q16s32s32s")
_TAIL = struct.Struct("<Q")


@dataclass(frozen=True, slots=True, eq=False)
class SlotHeader:
    """Contents of one slot's header.

    Attributes:
        key: Block hash, 32 bytes.
        slot: Slot number the header was written for.
        epoch: The allocation it was written in (:meth:`SlotIndex.epoch`).
        rank: Tensor-parallel rank.
        checksums: xxh3-64 of each page's payload bytes on the device, uint64, shape [pages].
        salt: 32 random bytes from which the slot's key is derived; zero without encryption.
        tags: Tag of each page, uint8, shape [pages, 16]; [0, 16] without encryption.
        tag: The header's own tag as it was read, 16 bytes; empty without encryption.
    """

    key: bytes
    slot: int
    epoch: int
    rank: int
    checksums: NDArray[np.uint64]
    salt: bytes = bytes(SALT_BYTES)
    tags: NDArray[np.uint8] = field(default_factory=lambda: np.zeros((0, TAG_BYTES), np.uint8))
    tag: bytes = b""


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

    An encrypted slot's tags are returned unchecked: who serves data checks them.

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
    *shape, found_rank, found_slot, found_epoch, found_digest, found_key, salt = shape
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
    if not geometry.encrypted:
        _expect("salt", salt, bytes(SALT_BYTES))
    if np.frombuffer(view[geometry.header_used : body], dtype=np.uint8).any():
        raise FormatError("slot header: bytes behind the checksums and tags are not zero")
    sums = np.frombuffer(view, dtype="<u8", count=geometry.pages, offset=HEADER_FIXED_BYTES)
    found = SlotHeader(found_key, found_slot, found_epoch, found_rank, sums.astype(np.uint64))
    if not geometry.encrypted:
        return found
    begin, end = HEADER_FIXED_BYTES + CHECKSUM_BYTES * geometry.pages, geometry.header_used
    tags = np.frombuffer(view[begin : end - TAG_BYTES], dtype=np.uint8).reshape(-1, TAG_BYTES)
    return replace(found, salt=salt, tags=tags.copy(), tag=bytes(view[end - TAG_BYTES : end]))


def epoch_of(buffer: memoryview | NDArray[np.uint8], slot: int) -> int | None:
    """Epoch that the first bytes of a slot name; None when they are no header of that slot.

    The header may be damaged, so that the epoch is what somebody else has to confirm.
    """
    view = np.frombuffer(buffer, dtype=np.uint8).data
    magic, *_, found, epoch, _, _, _ = _FIXED.unpack_from(view)
    return int(epoch) if (magic, found) == (MAGIC, slot) else None


def _expect(field: str, found: bytes | int, expected: bytes | int) -> None:
    if found != expected:
        shown = [v.hex() if isinstance(v, bytes) else v for v in (found, expected)]
        raise FormatError(f"slot header: {field} is {shown[0]}, expected {shown[1]}")
