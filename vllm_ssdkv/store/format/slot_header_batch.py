"""Headers of many slots at once: made, and checked against what they should be.

The format is that of ``store/format/slot_header.py``, whose ``decode`` says what is wrong with one
header; here nothing is done in Python per slot.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from vllm_ssdkv import _io
from vllm_ssdkv.base.checksum import checksum_pages
from vllm_ssdkv.base.errors import FormatError
from vllm_ssdkv.store.format.fingerprint import DIGEST_BYTES
from vllm_ssdkv.store.format.slot_geometry import (
    CHECKSUM_BYTES,
    HEADER_FIXED_BYTES,
    HEADER_TAIL_BYTES,
    TAG_BYTES,
    SlotGeometry,
)
from vllm_ssdkv.store.format.slot_header import KEY_BYTES, MAGIC, SALT_BYTES, VERSION, decode

U8 = NDArray[np.uint8]
U64 = NDArray[np.uint64]
Numbers = NDArray[np.int64] | NDArray[np.uint64]

_FIXED = np.dtype(
    [
        ("magic", np.uint8, 8),
        ("version", "<u4"),
        ("header_bytes", "<u4"),
        ("pages", "<u4"),
        ("page_bytes", "<u4"),
        ("payload_bytes", "<u4"),
        ("rank", "<u4"),
        ("slot", "<u8"),
        ("epoch", "<u8"),
        ("fingerprint", np.uint8, DIGEST_BYTES),
        ("key", np.uint8, KEY_BYTES),
        ("salt", np.uint8, SALT_BYTES),
    ]
)


def key_rows(keys: Sequence[bytes]) -> U8:
    """Keys of n blocks as [n, 32].

    Raises:
        ValueError: they have not 32 bytes each.
    """
    if not {len(key) for key in keys} <= {KEY_BYTES}:
        raise ValueError(f"a block's key has {KEY_BYTES} bytes")
    return np.frombuffer(b"".join(keys), dtype=np.uint8).reshape(-1, KEY_BYTES)


class HeaderFormat:
    """Headers of one rank's slots. Immutable; safe from any thread."""

    def __init__(self, geometry: SlotGeometry, digest: bytes, rank: int):
        """``digest`` is :attr:`Fingerprint.digest`, ``rank`` that of tensor parallelism.

        Raises:
            ValueError: the digest has another length.
        """
        if len(digest) != DIGEST_BYTES:
            raise ValueError(f"a fingerprint of {len(digest)} bytes")
        self.geometry = geometry
        self.digest = digest
        self.rank = rank
        self._begin = HEADER_FIXED_BYTES + CHECKSUM_BYTES * geometry.pages
        """Of the tags."""
        self._used = geometry.header_used
        self.shape = _io.SlotShape(
            geometry.header_bytes,
            HEADER_FIXED_BYTES,
            self._used,
            geometry.kv_pages,
            geometry.page_bytes,
            geometry.payload_bytes,
        )
        """Of what frames hold of the slots, for native code."""
        self._same = np.zeros(1, dtype=_FIXED)
        """What the headers of all slots have in common."""
        self._same["magic"] = np.frombuffer(MAGIC, dtype=np.uint8)
        self._same["version"] = VERSION
        self._same["header_bytes"] = geometry.header_bytes
        self._same["pages"] = geometry.pages
        self._same["page_bytes"] = geometry.page_bytes
        self._same["payload_bytes"] = geometry.payload_bytes
        self._same["rank"] = rank
        self._same["fingerprint"] = np.frombuffer(digest, dtype=np.uint8)

    def encode(
        self,
        slots: Numbers,
        epochs: Numbers,
        keys: U8,
        checksums: U64,
        *,
        salts: U8 | None = None,
        tags: U8 | None = None,
        authenticate: Callable[[U8], U8] | None = None,
    ) -> U8:
        """Headers of n slots, [n, header_bytes].

        Args:
            slots: Slot numbers, [n].
            epochs: Of each slot's allocation, [n].
            keys: Of the blocks they hold, [n, 32].
            checksums: xxh3-64 of each page's payload on the device, [n, pages].
            salts: From which the slots' keys are derived, [n, 32]; for encrypted slots only, as
                ``tags``, those of the pages, [n, pages, 16], and ``authenticate``, which gives the
                tag, [n, 16], of the n rows of bytes before it.

        Raises:
            ValueError: an array does not fit the geometry, or a number its field.
        """
        geometry, count = self.geometry, len(slots)
        sealed = [part is not None for part in (salts, tags, authenticate)]
        if checksums.shape != (count, geometry.pages) or sealed != [geometry.encrypted] * 3:
            raise ValueError(
                f"checksums {checksums.shape} and salts, tags, authentication {sealed} for "
                f"{count} slots of {geometry.pages} pages, encrypted: {geometry.encrypted}"
            )
        data = np.zeros((count, geometry.header_bytes), dtype=np.uint8)
        data[:, :HEADER_FIXED_BYTES] = self.beginnings(slots, epochs, keys, salts)
        end = self._begin
        data[:, HEADER_FIXED_BYTES:end] = _bytes_of(checksums)
        if tags is not None and authenticate is not None:
            if tags.shape != (count, geometry.pages, TAG_BYTES):
                raise ValueError(f"tags {tags.shape} for {count} slots of {geometry.pages} pages")
            body = self._used - TAG_BYTES
            data[:, end:body] = tags.reshape(count, body - end)
            data[:, body : self._used] = authenticate(data[:, :body])
        data[:, -HEADER_TAIL_BYTES:] = _bytes_of(_own_checksums(data)[:, None])
        return data

    def right(self, data: U8, slots: Numbers, epochs: Numbers, keys: U8) -> NDArray[np.bool_]:
        """Mask of n headers, [n, header_bytes], that are whole and those of these slots, [n].

        The tags of encrypted slots are not checked here.
        """
        salts = self.salts(data) if self.geometry.encrypted else None
        fixed = self.beginnings(slots, epochs, keys, salts)
        found = _io.right_headers(_row_addresses(data), fixed.ravel(), self.shape)
        return found.view(np.bool_)

    def read(self, data: U8, slots: Numbers) -> tuple[NDArray[np.bool_], NDArray[np.int64], U8]:
        """Content of these slots, [n], by their headers, [n, header_bytes].

        Returns:
            Which headers are whole and those of their slots, [n]; epochs, int64 [n]; keys, [n, 32].
        """
        fixed = np.ascontiguousarray(data[:, :HEADER_FIXED_BYTES]).view(_FIXED)[:, 0]
        epochs = np.minimum(fixed["epoch"], np.uint64(np.iinfo(np.int64).max)).astype(np.int64)
        keys = np.ascontiguousarray(fixed["key"])
        return self.right(data, slots, epochs, keys), epochs, keys

    def what_is_wrong(self, data: U8, slot: int, epoch: int, key: bytes) -> str | None:
        """The field of one header, [header_bytes], that makes it not :meth:`right`, in words."""
        try:
            decode(
                data, self.geometry, self.digest, key=key, slot=slot, epoch=epoch, rank=self.rank
            )
        except FormatError as error:
            return str(error)
        return None

    def checksums(self, data: U8) -> U64:
        """The pages' checksums in n headers, [n, pages]; a copy."""
        return (
            np.ascontiguousarray(data[:, HEADER_FIXED_BYTES : self._begin])
            .view("<u8")
            .astype(np.uint64)
        )

    def salts(self, data: U8) -> U8:
        """The salts in n headers, [n, 32]; a copy."""
        return data[:, HEADER_FIXED_BYTES - SALT_BYTES : HEADER_FIXED_BYTES].copy()

    def tags(self, data: U8) -> U8:
        """The pages' tags in n headers of encrypted slots, [n, pages, 16]; a copy."""
        found = data[:, self._begin : self._used - TAG_BYTES]
        return found.reshape(len(data), self.geometry.pages, TAG_BYTES).copy()

    def authenticated(self, data: U8) -> tuple[U8, U8]:
        """Bytes under the tag of n headers of encrypted slots, and the tag, [n, 16]."""
        end = self._used - TAG_BYTES
        return data[:, :end], data[:, end : self._used]

    def beginnings(self, slots: Numbers, epochs: Numbers, keys: U8, salts: U8 | None = None) -> U8:
        """First bytes of the headers of n slots, [n, 128]; arguments as :meth:`encode`.

        Raises:
            ValueError: a number does not fit its field.
        """
        count = len(slots)
        if keys.shape != (count, KEY_BYTES):
            raise ValueError(f"keys {keys.shape} for {count} slots")
        if count and min(int(slots.min()), int(epochs.min())) < 0:
            raise ValueError("a slot or an epoch is below 0")
        fixed = np.repeat(self._same, count)
        fixed["slot"], fixed["epoch"], fixed["key"] = slots, epochs, keys
        if salts is not None:
            fixed["salt"] = salts
        return fixed.view(np.uint8).reshape(count, HEADER_FIXED_BYTES)


def _bytes_of(words: U64) -> U8:
    """Words [n, k] as little-endian bytes, [n, 8 k]."""
    return np.ascontiguousarray(words, dtype="<u8").view(np.uint8)


def _own_checksums(data: U8) -> U64:
    """xxh3-64 of each contiguous row but its last 8 bytes."""
    return checksum_pages(_row_addresses(data), data.shape[1] - HEADER_TAIL_BYTES)


def gather(addresses: U64, nbytes: int) -> U8:
    """Copy ``nbytes`` from each absolute address, [n], into rows, [n, nbytes]."""
    rows = np.empty((len(addresses), nbytes), dtype=np.uint8)
    _io.copy(addresses, _row_addresses(rows), nbytes)
    return rows


def scatter(rows: U8, addresses: U64) -> None:
    """Copy each contiguous row, [n, nbytes], to its absolute address, [n]."""
    _io.copy(_row_addresses(rows), addresses, rows.shape[1])


def _row_addresses(rows: U8) -> U64:
    steps = np.arange(len(rows), dtype=np.uint64) * np.uint64(rows.shape[1])
    found: U64 = np.uint64(rows.ctypes.data) + steps
    return found
