"""Slot headers: what was written is read back, and anything else is refused by name."""

from __future__ import annotations

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

SHAPE = SlotGeometry("paged", 2, 3, 2, 5000)
DIGEST = bytes(range(16))
KEY = bytes(range(100, 132))


def header(pages: int = SHAPE.pages, key: bytes = KEY) -> SlotHeader:
    return SlotHeader(key, 7, 2**40 + 3, 1, np.arange(pages, dtype=np.uint64) + np.uint64(2**63))


def bytes_of(shape: SlotGeometry = SHAPE) -> bytearray:
    return bytearray(encoded(header(shape.pages), shape, DIGEST).tobytes() + b"\xaa" * 64)


@given(
    key=st.binary(min_size=32, max_size=32),
    slot=st.integers(0, 2**64 - 1),
    epoch=st.integers(0, 2**64 - 1),
    rank=st.integers(0, 2**32 - 1),
    digest=st.binary(min_size=16, max_size=16),
    shape=st.builds(
        SlotGeometry,
        st.just("paged"),
        st.integers(1, 30),
        st.integers(1, 30),
        st.integers(1, 3),
        st.sampled_from([1, 4096, 8192, 70_000]),
    ),
    seed=st.integers(0, 1000),
)
def test_round_trip(
    key: bytes, slot: int, epoch: int, rank: int, digest: bytes, shape: SlotGeometry, seed: int
) -> None:
    sums = np.random.default_rng(seed).integers(0, 2**64, shape.pages, dtype=np.uint64)
    buffer = encoded(SlotHeader(key, slot, epoch, rank, sums), shape, digest)
    found = decode(buffer, shape, digest, key=key, slot=slot, epoch=epoch, rank=rank)
    assert (found.key, found.slot, found.epoch, found.rank) == (key, slot, epoch, rank)
    assert np.array_equal(found.checksums, sums)
    buffer[:] = 0  # the decoded header is a copy
    assert np.array_equal(found.checksums, sums)


@settings(max_examples=300)
@given(st.integers(0, SHAPE.header_bytes - 1), st.integers(1, 255))
def test_any_changed_byte_is_detected(at: int, flip: int) -> None:
    buffer = bytes_of()
    buffer[at] ^= flip
    with pytest.raises(FormatError):
        decode(bytes(buffer), SHAPE, DIGEST)


def test_every_byte_of_the_fixed_part_and_sums_is_covered() -> None:
    good = bytes_of()
    for at in [*range(128 + 8 * SHAPE.pages + 8), *range(SHAPE.header_bytes - 16, len(good) - 64)]:
        bad = bytearray(good)
        bad[at] ^= 0x10
        with pytest.raises(FormatError, match=r"slot header: (magic|version|checksum)"):
            decode(bad, SHAPE, DIGEST)


@pytest.mark.parametrize(
    ("expected", "field"),
    [
        ({"key": bytes(32)}, "key"),
        ({"slot": 8}, "slot"),
        ({"epoch": 2**40 + 2}, "epoch"),
        ({"rank": 0}, "rank"),
    ],
)
def test_another_block_is_refused(expected: dict[str, int | bytes], field: str) -> None:
    with pytest.raises(FormatError, match=f"slot header: {field} is"):
        decode(bytes_of(), SHAPE, DIGEST, **expected)  # type: ignore[arg-type]  # one of four


@pytest.mark.parametrize(
    ("shape", "field"),
    [
        (SlotGeometry("paged", 200, 3, 2, 5000), "length"),
        (SlotGeometry("paged", 2, 3, 1, 5000), "pages"),
        (SlotGeometry("paged", 2, 3, 2, 5001), "payload_bytes"),
        (SlotGeometry("opaque", 12, 1, 1, 5000), "checksum"),
    ],
)
def test_another_geometry_is_refused(shape: SlotGeometry, field: str) -> None:
    with pytest.raises(FormatError, match=f"slot header: {field} is"):
        decode(bytes_of(), shape, DIGEST)


def test_another_fingerprint_is_refused() -> None:
    with pytest.raises(FormatError, match="slot header: fingerprint is"):
        decode(bytes_of(), SHAPE, bytes(16))


def test_another_version_is_refused_even_with_a_good_checksum() -> None:
    buffer = bytes_of()
    body = SHAPE.header_bytes - 8
    buffer[8] = 2
    buffer[body : body + 8] = checksum_bytes(buffer[:body]).to_bytes(8, "little")
    with pytest.raises(FormatError, match="slot header: version is 2, expected 1"):
        decode(buffer, SHAPE, DIGEST)


def test_unwritten_bytes_are_refused() -> None:
    with pytest.raises(FormatError, match="slot header: magic"):
        decode(bytes(SHAPE.header_bytes), SHAPE, DIGEST)
    with pytest.raises(FormatError, match="slot header: length is 100"):
        decode(bytes_of()[:100], SHAPE, DIGEST)


# ---- encrypted slots ----


def sealed(shape: SlotGeometry, seed: int) -> SlotHeader:
    random = np.random.default_rng(seed)
    sums = random.integers(0, 2**64, shape.pages, dtype=np.uint64)
    tags = random.integers(0, 256, (shape.pages, 16), dtype=np.uint8)
    return SlotHeader(KEY, 7, 3, 1, sums, random.bytes(32), tags)


@given(
    shape=st.builds(
        SlotGeometry,
        st.just("paged"),
        st.integers(1, 30),
        st.integers(1, 30),
        st.integers(1, 3),
        st.sampled_from([1, 4096, 8192, 70_000]),
        st.just(True),
    ),
    seed=st.integers(0, 1000),
)
def test_salt_and_tags_are_read_back(shape: SlotGeometry, seed: int) -> None:
    mine, seen = sealed(shape, seed), bytearray()

    def authenticate(data: NDArray[np.uint8]) -> NDArray[np.uint8]:
        seen.extend(data.tobytes())
        return np.frombuffer(b"authentic bytes!", dtype=np.uint8)[None, :]

    buffer = encoded(mine, shape, DIGEST, authenticate)
    # All that is used, but for the tag itself.
    assert bytes(seen) == buffer[: shape.header_used - 16].tobytes()
    found = decode(buffer, shape, DIGEST, key=KEY, slot=7, epoch=3, rank=1)
    assert (found.salt, found.tag) == (mine.salt, b"authentic bytes!")
    assert np.array_equal(found.checksums, mine.checksums)
    buffer[:] = 0  # the decoded header is a copy
    assert np.array_equal(found.tags, mine.tags)
