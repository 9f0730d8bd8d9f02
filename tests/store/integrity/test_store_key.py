"""The user's key: what is derived from it, and that it is never shown."""

from __future__ import annotations

import copy
import pickle
import traceback
from uuid import UUID

import numpy as np
import pytest
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from hypothesis import given
from hypothesis import strategies as st

from vllm_ssdkv.store.integrity.store_key import StoreKey, block_name, derive, expand, slot_keys

SECRET = bytes(range(200, 232))
SECRETS = st.binary(min_size=32, max_size=32)
A, B = UUID(int=1), UUID(int=2)


def test_derivation_is_that_of_rfc_5869() -> None:
    """Test cases 1 and 3, whose output is longer than one hash."""
    first = derive(b"\x0b" * 22, bytes(range(13)), bytes(range(0xF0, 0xFA)))
    assert first.hex() == "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf"
    third = derive(b"\x0b" * 22, b"", b"")
    assert third.hex() == "8da4e775a563c18f715f802a063c5a31b8a11f5c5ee1879ec3454e5f3c738d2d"


@given(
    key=st.binary(min_size=32, max_size=32),
    salt=st.binary(max_size=80),
    info=st.binary(max_size=80),
    length=st.integers(1, 32),
)
def test_derivation_is_that_of_another_implementation(
    key: bytes, salt: bytes, info: bytes, length: int
) -> None:
    assert derive(key, salt, info, length) == HKDF(SHA256(), length, salt, info).derive(key)


@given(
    slots=st.binary(min_size=32, max_size=32), salts=st.lists(st.binary(min_size=32, max_size=32))
)
def test_keys_of_slots_are_derived_together(slots: bytes, salts: list[bytes]) -> None:
    rows = np.frombuffer(b"".join(salts), dtype=np.uint8).reshape(len(salts), 32)
    expected = [expand(slots, b"vllm-ssdkv slot" + salt) for salt in salts]
    assert [row.tobytes() for row in slot_keys(slots, rows)] == expected


def test_no_two_purposes_share_a_key() -> None:
    key, other = StoreKey(SECRET), StoreKey(SECRET[::-1])
    salts = np.repeat(np.arange(3, dtype=np.uint8), 32).reshape(3, 32)
    derived = [
        SECRET,
        key.key_id,
        *(one.names(store) for one in (key, other) for store in (A, B)),
        *(
            one.slots(store, rank)
            for one in (key, other)
            for store in (A, B)
            for rank in (0, 1, 11)
        ),
        *(row.tobytes() for row in slot_keys(key.slots(A, 0), salts)),
    ]
    assert len({value[:16] for value in derived}) == len(derived)
    assert key.key_id == StoreKey(SECRET).key_id != other.key_id


def test_a_name_needs_the_key() -> None:
    block = bytes(32)
    assert block_name(b"", block) != block_name(StoreKey(SECRET).names(A), block)
    assert block_name(StoreKey(SECRET).names(A), block) != block_name(
        StoreKey(SECRET).names(B), block
    )


def test_what_is_no_key_is_refused() -> None:
    for size in (0, 16, 31, 33, 64):
        with pytest.raises(ValueError, match=f"a key has 32 bytes, not {size}"):
            StoreKey(bytes(size))
    with pytest.raises(ValueError, match="33 bytes"):
        expand(SECRET, b"", 33)


def test_the_bytes_are_never_shown() -> None:
    key = StoreKey(SECRET)
    error = RuntimeError(f"{key} {key!r} {[key]}")
    text = "".join(traceback.format_exception(error))
    assert key.key_id.hex() in text
    for shown in (SECRET.hex(), repr(SECRET), repr(list(SECRET))[1:-1]):
        assert shown not in text
    for leave in (pickle.dumps, copy.copy):
        with pytest.raises(TypeError, match="does not leave its process"):
            leave(key)
