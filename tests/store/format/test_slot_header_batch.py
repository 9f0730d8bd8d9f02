"""Headers of many slots: the same bytes and the same verdict as one by one."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.store.headers import encoded
from vllm_ssdkv.base.checksum import checksum_bytes
from vllm_ssdkv.base.errors import FormatError
from vllm_ssdkv.store.format.slot_geometry import SlotGeometry
from vllm_ssdkv.store.format.slot_header import SlotHeader, decode
from vllm_ssdkv.store.format.slot_header_batch import HeaderFormat, gather, key_rows, scatter

U8 = NDArray[np.uint8]

SHAPE = SlotGeometry("paged", 2, 3, 2, 5000)
SEALED = replace(SHAPE, encrypted=True)
DIGEST = bytes(range(16))
SLOTS, EPOCHS = np.array([7, 2**40, 0]), np.array([2**40 + 3, 0, 9])
KEYS = key_rows([bytes([k]) * 32 for k in (1, 2, 3)])
FORMAT = HeaderFormat(SHAPE, DIGEST, 5)


def sums(shape: SlotGeometry = SHAPE) -> NDArray[np.uint64]:
    random = np.random.default_rng(3)
    return random.integers(0, 2**64, (len(SLOTS), shape.pages), dtype=np.uint64)


def authenticate(data: U8) -> U8:
    return np.array([[row[:60].sum() % 256] * 16 for row in data], dtype=np.uint8)


def sealed_parts() -> dict[str, U8]:
    random = np.random.default_rng(4)
    return {
        "salts": random.integers(0, 256, (3, 32), dtype=np.uint8),
        "tags": random.integers(0, 256, (3, SEALED.pages, 16), dtype=np.uint8),
    }


def test_each_is_the_header_of_its_slot() -> None:
    data = FORMAT.encode(SLOTS, EPOCHS, KEYS, sums())
    for i, row in enumerate(data):
        found = decode(
            row,
            SHAPE,
            DIGEST,
            key=KEYS[i].tobytes(),
            slot=int(SLOTS[i]),
            epoch=int(EPOCHS[i]),
            rank=5,
        )
        assert np.array_equal(found.checksums, sums()[i])
    assert FORMAT.right(data, SLOTS, EPOCHS, KEYS).all()
    assert np.array_equal(FORMAT.checksums(data), sums())


def test_salts_and_tags_are_read_back() -> None:
    made, parts = HeaderFormat(SEALED, DIGEST, 5), sealed_parts()
    data = made.encode(SLOTS, EPOCHS, KEYS, sums(), **parts, authenticate=authenticate)
    assert made.right(data, SLOTS, EPOCHS, KEYS).all()
    assert np.array_equal(made.salts(data), parts["salts"])
    assert np.array_equal(made.tags(data), parts["tags"])
    text, tags = made.authenticated(data)
    assert np.array_equal(tags, authenticate(text))
    for i, row in enumerate(data):
        found = decode(row, SEALED, DIGEST)
        assert (found.salt, found.tag) == (parts["salts"][i].tobytes(), tags[i].tobytes())


@settings(max_examples=300)
@given(
    shape=st.sampled_from([SHAPE, SEALED]),
    row=st.integers(0, 2),
    at=st.one_of(st.integers(0, SEALED.header_used + 8), st.integers(0, SHAPE.header_bytes - 1)),
    flip=st.integers(1, 255),
    mend=st.booleans(),
)
def test_the_verdict_is_that_of_decoding_one_by_one(
    shape: SlotGeometry, row: int, at: int, flip: int, mend: bool
) -> None:
    """Also where somebody made the checksum right again."""
    made = HeaderFormat(shape, DIGEST, 5)
    if shape.encrypted:
        data = made.encode(SLOTS, EPOCHS, KEYS, sums(), **sealed_parts(), authenticate=authenticate)
    else:
        data = made.encode(SLOTS, EPOCHS, KEYS, sums())
    data[row, at] ^= flip
    if mend:
        body = shape.header_bytes - 8
        own = checksum_bytes(data[row, :body]).to_bytes(8, "little")
        data[row, body:] = np.frombuffer(own, dtype=np.uint8)
    expected = []
    for i in range(3):
        slot, epoch, key = int(SLOTS[i]), int(EPOCHS[i]), KEYS[i].tobytes()
        refused: str | None = None
        try:
            decode(data[i], shape, DIGEST, key=key, slot=slot, epoch=epoch, rank=5)
        except FormatError as error:
            refused = str(error)
        assert made.what_is_wrong(data[i], slot, epoch, key) == refused
        expected.append(refused is None)
    assert made.right(data, SLOTS, EPOCHS, KEYS).tolist() == expected
    assert all(expected[i] for i in range(3) if i != row)


def test_other_slots_epochs_and_blocks_are_told_apart() -> None:
    data = FORMAT.encode(SLOTS, EPOCHS, KEYS, sums())
    assert FORMAT.right(data, SLOTS + np.array([0, 1, 0]), EPOCHS, KEYS).tolist() == [
        True,
        False,
        True,
    ]
    assert FORMAT.right(data, SLOTS, EPOCHS + np.array([1, 0, 0]), KEYS).tolist() == [
        False,
        True,
        True,
    ]
    assert FORMAT.right(data, SLOTS, EPOCHS, KEYS[[0, 1, 1]]).tolist() == [True, True, False]
    assert not HeaderFormat(SHAPE, DIGEST, 4).right(data, SLOTS, EPOCHS, KEYS).any()
    assert not HeaderFormat(SHAPE, bytes(16), 5).right(data, SLOTS, EPOCHS, KEYS).any()


def test_no_headers_are_no_headers() -> None:
    none = np.zeros(0, dtype=np.int64)
    data = FORMAT.encode(none, none, key_rows([]), np.zeros((0, SHAPE.pages), dtype=np.uint64))
    assert data.shape == (0, SHAPE.header_bytes)
    assert FORMAT.right(data, none, none, key_rows([])).shape == (0,)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="checksums"):
        FORMAT.encode(SLOTS, EPOCHS, KEYS, sums()[:, 1:])
    with pytest.raises(ValueError, match="keys"):
        FORMAT.encode(SLOTS, EPOCHS, KEYS[:2], sums())
    with pytest.raises(ValueError, match="a block's key has 32 bytes"):
        key_rows([bytes(31), bytes(33)])
    with pytest.raises(ValueError, match="fingerprint of 15"):
        HeaderFormat(SHAPE, bytes(15), 5)
    with pytest.raises(ValueError, match="below 0"):
        FORMAT.encode(-SLOTS, EPOCHS, KEYS, sums())
    with pytest.raises(ValueError, match="authentication"):
        HeaderFormat(SEALED, DIGEST, 5).encode(SLOTS, EPOCHS, KEYS, sums())
    with pytest.raises(ValueError, match="authentication"):
        FORMAT.encode(SLOTS, EPOCHS, KEYS, sums(), **sealed_parts(), authenticate=authenticate)
    wrong = sealed_parts()
    wrong["tags"] = wrong["tags"][:, 1:]
    with pytest.raises(ValueError, match="tags"):
        HeaderFormat(SEALED, DIGEST, 5).encode(
            SLOTS, EPOCHS, KEYS, sums(), **wrong, authenticate=authenticate
        )


def test_rows_go_to_addresses_and_come_back() -> None:
    memory = np.zeros((6, 4096), dtype=np.uint8)
    rows = np.random.default_rng(1).integers(0, 256, (3, 4096), dtype=np.uint8)
    places = np.uint64(memory.ctypes.data) + np.array([4, 0, 2], dtype=np.uint64) * np.uint64(4096)
    scatter(rows, places)
    assert np.array_equal(memory[[4, 0, 2]], rows)
    assert not memory[[1, 3, 5]].any()
    assert np.array_equal(gather(places, 4096), rows)


def test_one_header_is_one_row() -> None:
    one = SlotHeader(KEYS[1].tobytes(), int(SLOTS[1]), int(EPOCHS[1]), 5, sums()[1])
    assert np.array_equal(
        encoded(one, SHAPE, DIGEST), FORMAT.encode(SLOTS, EPOCHS, KEYS, sums())[1]
    )
