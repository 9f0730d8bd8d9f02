"""Encryption at rest: AES-256-GCM per page, done by OpenSSL's libcrypto without the GIL.

Every writing of a slot has a key of its own, derived from the rank's key and a random salt in the
slot's header, and under that key a page's nonce is its number. Nothing has to be remembered to
never use a nonce twice: not the epochs, which repeat when an old journal and ``store.json`` are
put back, and not how much was ever written. ``docs/format.md`` has the bytes, ``docs/security.md``
what it protects from.
"""

from __future__ import annotations

import hmac
import os
import struct
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from vllm_ssdkv import _io
from vllm_ssdkv.errors import FormatError, UnsupportedError
from vllm_ssdkv.store.arena import Arena
from vllm_ssdkv.store.checksum import checksum_pages
from vllm_ssdkv.store.header import SlotHeader, decode
from vllm_ssdkv.store.layout import TAG_BYTES, SlotGeometry
from vllm_ssdkv.store.sealer import U64, Seals, page_addresses
from vllm_ssdkv.store.store_key import KEY_BYTES, SALT_BYTES, slot_key

HEADER_PAGE: Final = 0xFFFFFFFF
"""Page number of the header in its nonce; no page has it."""

# fingerprint, rank, page (set by the native code), slot, epoch, block key
_IDENTITY = struct.Struct("<16sI4xQQ32s")
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


class CipherSealer:
    """Encrypts what goes to the devices, and accepts from them only what was encrypted so."""

    opening_words = _KEY_WORDS + _IDENTITY.size // 8
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
        self._digest = digest
        self._rank = rank
        self._arena = arena
        self._slots_key = slots_key

    def _opening(self, salt: bytes, slot: int, epoch: int, key: bytes) -> bytes:
        return slot_key(self._slots_key, salt) + _IDENTITY.pack(
            self._digest, self._rank, slot, epoch, key
        )

    def seal(
        self,
        slots: NDArray[np.int64],
        epochs: NDArray[np.int64],
        keys: Sequence[bytes],
        frames: U64,
        images: U64,
    ) -> Seals:
        """See :meth:`Sealer.seal`; ``images`` are other places than ``frames``."""
        geometry, count = self._geometry, len(slots)
        salts = [os.urandom(SALT_BYTES) for _ in range(count)]
        openings = [
            self._opening(salt, slot, epoch, key)
            for salt, slot, epoch, key in zip(
                salts, slots.tolist(), epochs.tolist(), keys, strict=True
            )
        ]
        opening = np.frombuffer(b"".join(openings), dtype=np.uint64).reshape(count, -1)
        pages, header_bytes = geometry.pages, np.uint64(geometry.header_bytes)
        target = page_addresses(self._arena, geometry, images + header_bytes, pages)
        tags = _io.gcm_seal(
            *_keys_and_identities(opening),
            0,
            page_addresses(self._arena, geometry, frames + header_bytes, pages),
            target,
            geometry.payload_bytes,
        ).reshape(count, pages, TAG_BYTES)
        sums = checksum_pages(target.ravel(), geometry.payload_bytes).reshape(count, pages)
        for i in range(count):
            header = SlotHeader(
                keys[i],
                int(slots[i]),
                int(epochs[i]),
                self._rank,
                sums[i],
                salt=salts[i],
                tags=tags[i],
            )
            image = self._arena.view(int(images[i]), geometry.header_bytes)
            header.encode_into(image, geometry, self._digest, _Authentication(opening[i]))
            self._arena.view(int(frames[i]), geometry.header_bytes)[:] = image
        return Seals(opening, tags.view(np.uint64))

    def read_header(self, view: NDArray[np.uint8], *, slot: int, epoch: int, key: bytes) -> Seals:
        """See :meth:`Sealer.read_header`."""
        geometry = self._geometry
        header = decode(
            view, geometry, self._digest, key=key, slot=slot, epoch=epoch, rank=self._rank
        )
        packed = self._opening(header.salt, slot, epoch, key)
        opening = np.frombuffer(packed, dtype=np.uint64)
        authentic = _Authentication(opening)(view[: geometry.header_used - TAG_BYTES].data)
        if not hmac.compare_digest(authentic, header.tag):
            raise FormatError("slot header: tag is not that of this store's key")
        return Seals(opening[None, :], header.tags.view(np.uint64)[None, :, :])

    def unseal(
        self, seals: Seals, first_page: int, at: U64, *, final: bool = False
    ) -> NDArray[np.bool_]:
        """See :meth:`Sealer.unseal`. A page that may not be used is zeroed; all are checked."""
        count, pages, _ = seals.marks.shape
        good = _io.gcm_open(
            *_keys_and_identities(seals.opening),
            first_page,
            page_addresses(self._arena, self._geometry, at, pages),
            self._geometry.payload_bytes,
            np.ascontiguousarray(seals.marks).view(np.uint8),
        )
        return good.astype(np.bool_).reshape(count, pages)


class _Authentication:
    """Gives a header's tag under the slot's key."""

    def __init__(self, opening: U64):
        self._key = opening[:_KEY_WORDS].view(np.uint8)

    def __call__(self, data: memoryview) -> bytes:
        return _io.gcm_authenticate(
            self._key, HEADER_PAGE, np.frombuffer(data, dtype=np.uint8)
        ).tobytes()


def _keys_and_identities(opening: U64) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    keys = np.ascontiguousarray(opening[:, :_KEY_WORDS])
    identities = np.ascontiguousarray(opening[:, _KEY_WORDS:])
    return keys.view(np.uint8), identities.view(np.uint8)
