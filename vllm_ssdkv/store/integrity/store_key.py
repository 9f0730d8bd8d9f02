"""The key of an encrypted store, and the keys that are derived from it.

All derivations are HKDF-SHA256 (RFC 5869); ``docs/format.md`` has their parameters.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import Final, NoReturn
from uuid import UUID

import numpy as np
from numpy.typing import NDArray

from vllm_ssdkv import _io
from vllm_ssdkv.store.format.slot_header import SALT_BYTES
from vllm_ssdkv.store.format.superblock import KEY_ID_BYTES

KEY_BYTES: Final = 32
_HASH_BYTES: Final = 32

_KEY_ID: Final = b"vllm-ssdkv key id"
_NAMES: Final = b"vllm-ssdkv block names"
_SLOTS: Final = b"vllm-ssdkv slots of rank "
_SLOT: Final = b"vllm-ssdkv slot"


def expand(key: bytes, info: bytes, length: int = KEY_BYTES) -> bytes:
    """HKDF-Expand with SHA-256, for at most 32 bytes.

    Raises:
        ValueError: more are asked for.
    """
    if not 0 < length <= _HASH_BYTES:
        raise ValueError(f"{length} bytes of one SHA-256")
    return hmac.digest(key, info + b"\x01", hashlib.sha256)[:length]


def derive(key: bytes, salt: bytes, info: bytes, length: int = KEY_BYTES) -> bytes:
    """HKDF with SHA-256: extract, then :func:`expand`."""
    return expand(hmac.digest(salt or bytes(_HASH_BYTES), key, hashlib.sha256), info, length)


class StoreKey:
    """The user's key. Its text never shows the bytes, and it cannot be pickled."""

    __slots__ = ("_secret",)

    def __init__(self, secret: bytes):
        """
        Raises:
            ValueError: not 32 bytes.
        """
        if len(secret) != KEY_BYTES:
            raise ValueError(f"a key has {KEY_BYTES} bytes, not {len(secret)}")
        self._secret = secret

    def __repr__(self) -> str:
        return f"StoreKey(key_id={self.key_id.hex()})"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a key does not leave its process")

    @property
    def key_id(self) -> bytes:
        """Names the key without telling anything about it; 16 bytes."""
        return derive(self._secret, b"", _KEY_ID, KEY_ID_BYTES)

    def names(self, store: UUID) -> bytes:
        """Key of the function that turns block hashes into the names that a store holds."""
        return derive(self._secret, store.bytes, _NAMES)

    def slots(self, store: UUID, rank: int) -> bytes:
        """Key from which those of one rank's slots are derived (:func:`slot_key`)."""
        return derive(self._secret, store.bytes, _SLOTS + str(rank).encode("ascii"))


def block_name(names: bytes, block: bytes) -> bytes:
    """Name of a block in a store, in place of its hash, so that a guessed prompt cannot be looked
    for.

    Args:
        names: :meth:`StoreKey.names`, or empty for a hash that anybody can compute.
        block: vLLM's block hash, with what else names the block before it.
    """
    return hashlib.blake2b(block, key=names, digest_size=KEY_BYTES).digest()


def slot_keys(slots: bytes, salts: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Key of each writing of a slot, [n, 32], from the rank's key and the headers' random salts.

    :func:`expand` for n slots at once. Releases the GIL.

    Args:
        slots: :meth:`StoreKey.slots`.
        salts: Of each slot, [n, 32].
    """
    count = len(salts)
    data = np.empty((count, len(_SLOT) + SALT_BYTES + 1), dtype=np.uint8)
    data[:, : len(_SLOT)] = np.frombuffer(_SLOT, dtype=np.uint8)
    data[:, len(_SLOT) : -1] = salts
    data[:, -1] = 1
    return _io.hmac_sha256(np.frombuffer(slots, dtype=np.uint8), data).reshape(count, KEY_BYTES)
