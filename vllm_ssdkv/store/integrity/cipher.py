"""Encryption at rest: AES-256-GCM per page, done by OpenSSL's libcrypto without the GIL.

Every writing of a slot has a key of its own, derived from the rank's key and a random salt in the
slot's header, and under that key a page's nonce is its number. Nothing has to be remembered to
never use a nonce twice: not the epochs, which repeat when an old journal and ``store.json`` are
put back, and not how much was ever written. ``docs/format.md`` has the bytes, ``docs/security.md``
what it protects from.
"""

from __future__ import annotations

import os
from typing import Final

import numpy as np
from numpy.typing import NDArray

from vllm_ssdkv import _io
from vllm_ssdkv.base.checksum import checksum_pages
from vllm_ssdkv.base.errors import UnsupportedError
from vllm_ssdkv.store.format.fingerprint import DIGEST_BYTES
from vllm_ssdkv.store.format.slot_geometry import TAG_BYTES, SlotGeometry
from vllm_ssdkv.store.format.slot_header import KEY_BYTES as BLOCK_KEY_BYTES
from vllm_ssdkv.store.format.slot_header import SALT_BYTES
from vllm_ssdkv.store.format.slot_header_batch import HeaderFormat, gather, scatter
from vllm_ssdkv.store.integrity.slot_codec import (
    U8,
    U64,
    Digests,
    PlainCheck,
    page_addresses,
    slot_pages,
)
from vllm_ssdkv.store.integrity.store_key import KEY_BYTES, slot_keys
from vllm_ssdkv.store.memory.arena import Arena

HEADER_PAGE: Final = 0xFFFFFFFF
"""Page number of the header in its nonce; no page has it."""

_OPENING = np.dtype(
    [
        ("slot_key", np.uint8, KEY_BYTES),
        ("fingerprint", np.uint8, DIGEST_BYTES),
        ("rank", "<u4"),
        ("page", "<u4"),  # set by the native code
        ("slot", "<u8"),
        ("epoch", "<u8"),
        ("key", np.uint8, BLOCK_KEY_BYTES),
    ]
)
"""Key of a slot, and from the fingerprint on its identity."""

_KEY_WORDS: Final = KEY_BYTES // 8


def libcrypto_version() -> str:
    """The OpenSSL library in use, as it names itself.

    Raises:
        UnsupportedError: there is none that can be used.
    """
    version, error = _io.libcrypto()
    if error:
        raise UnsupportedError(
            f"encryption needs OpenSSL 3, whose libcrypto cannot be used: {error}. Install it "
            "(package libssl3 on Debian and Ubuntu, openssl-libs on Fedora and Red Hat), or leave "
            "the option encryption out"
        )
    return version


class CipherCodec:
    """Encrypts what goes to the devices, and accepts from them only what was encrypted so."""

    opening_words = _OPENING.itemsize // 8
    mark_words = TAG_BYTES // 8

    def __init__(
        self, geometry: SlotGeometry, digest: bytes, rank: int, arena: Arena, slots_key: bytes
    ):
        """``slots_key`` is :meth:`StoreKey.slots` of this rank.

        Raises:
            UnsupportedError: there is no libcrypto.
            ValueError: the slots have no room for tags.
        """
        libcrypto_version()
        if not geometry.encrypted:
            raise ValueError("the geometry is that of slots that are not encrypted")
        self._geometry = geometry
        self._headers = HeaderFormat(geometry, digest, rank)
        self._arena = arena
        self._slots_key = slots_key

    def _openings(
        self, salts: U8, slots: NDArray[np.int64], epochs: NDArray[np.int64], keys: U8
    ) -> U64:
        """Key and identity of each slot, [n, opening words]."""
        found = np.zeros(len(slots), dtype=_OPENING)
        found["slot_key"] = slot_keys(self._slots_key, salts)
        found["fingerprint"] = np.frombuffer(self._headers.digest, dtype=np.uint8)
        found["rank"] = self._headers.rank
        found["slot"], found["epoch"], found["key"] = slots, epochs, keys
        return found.view(np.uint64).reshape(len(slots), self.opening_words)

    def seal(
        self,
        slots: NDArray[np.int64],
        epochs: NDArray[np.int64],
        keys: U8,
        frames: U64,
        images: U64,
        tails: U64 | None = None,
    ) -> Digests:
        """See :meth:`SlotCodec.seal`; ``images`` are other places than ``frames``."""
        geometry, count, start = self._geometry, len(slots), np.uint64(self._arena.address)
        random = np.frombuffer(os.urandom(SALT_BYTES * count), dtype=np.uint8)
        salts = random.reshape(count, SALT_BYTES)
        opening = self._openings(salts, slots, epochs, keys)
        pages, source = geometry.pages, slot_pages(self._arena, geometry, frames, tails)
        target = slot_pages(self._arena, geometry, images, tails)
        tags = _io.gcm_seal(
            *_keys_and_identities(opening),
            0,
            source,
            target,
            geometry.payload_bytes,
        ).reshape(count, pages, TAG_BYTES)
        sums = checksum_pages(target.ravel(), geometry.payload_bytes).reshape(count, pages)
        headers = self._headers.encode(
            slots,
            epochs,
            keys,
            sums,
            salts=salts,
            tags=tags,
            authenticate=lambda data: _header_tags(opening, data),
        )
        scatter(headers, start + images)
        scatter(headers, start + frames)
        return Digests(opening, tags.view(np.uint64))

    def read_headers(
        self, slots: NDArray[np.int64], epochs: NDArray[np.int64], keys: U8, at: U64
    ) -> tuple[Digests, NDArray[np.bool_]]:
        """See :meth:`SlotCodec.read_headers`."""
        found = gather(np.uint64(self._arena.address) + at, self._geometry.header_bytes)
        right = self._headers.right(found, slots, epochs, keys)
        opening = self._openings(self._headers.salts(found), slots, epochs, keys)
        data, tags = self._headers.authenticated(found)
        right &= (_header_tags(opening, data) == tags).all(axis=1)
        return Digests(opening, self._headers.tags(found).view(np.uint64)), right

    def plain_check(
        self, slots: NDArray[np.int64], epochs: NDArray[np.int64], keys: U8
    ) -> PlainCheck | None:
        """See :meth:`SlotCodec.plain_check`: pages must be decrypted."""
        return None

    def why_refused(self, slot: int, epoch: int, key: bytes, at: int) -> str:
        """See :meth:`SlotCodec.why_refused`."""
        data = self._arena.view(at, self._geometry.header_bytes)
        wrong = self._headers.what_is_wrong(data, slot, epoch, key)
        return wrong or "slot header: tag is not that of this store's key"

    def intact(
        self, slots: NDArray[np.int64], epochs: NDArray[np.int64], keys: U8, at: U64
    ) -> NDArray[np.bool_]:
        """See :meth:`SlotCodec.intact`."""
        return self.read_headers(slots, epochs, keys, at)[1]

    def unseal(
        self, seals: Digests, first_page: int, at: U64, *, final: bool = False
    ) -> NDArray[np.bool_]:
        """See :meth:`SlotCodec.unseal`. A page that may not be used is zeroed; all are checked."""
        count, pages, _ = seals.marks.shape
        good = _io.gcm_open(
            *_keys_and_identities(seals.opening),
            first_page,
            page_addresses(self._arena, self._geometry, at, pages),
            self._geometry.payload_bytes,
            np.ascontiguousarray(seals.marks).view(np.uint8),
        )
        return good.astype(np.bool_).reshape(count, pages)


def _header_tags(opening: U64, data: U8) -> U8:
    """Tags, [n, 16], of the headers' bytes, [n, m], under the slots' keys."""
    keys, _ = _keys_and_identities(opening)
    tags = _io.gcm_authenticate(keys, HEADER_PAGE, np.ascontiguousarray(data))
    return tags.reshape(len(data), TAG_BYTES)


def _keys_and_identities(opening: U64) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    keys = np.ascontiguousarray(opening[:, :_KEY_WORDS])
    identities = np.ascontiguousarray(opening[:, _KEY_WORDS:])
    return keys.view(np.uint8), identities.view(np.uint8)
