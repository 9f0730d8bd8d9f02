"""Journal records: round trip, replay against a simple model, damage of every byte."""

from __future__ import annotations

import struct
from uuid import UUID

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_ssdkv._index import Replay
from vllm_ssdkv.base.errors import FormatError
from vllm_ssdkv.store.format.journal_record import (
    HEADER_BYTES,
    RECORD_BYTES,
    Kind,
    check_header,
    encode_header,
    encode_records,
)

STORE = UUID(int=5)
DIGEST = bytes(range(16))

Step = tuple[Kind, int, int, int]
"""Kind, slot, epoch, key number."""

steps = st.lists(
    st.tuples(
        st.sampled_from(list(Kind)), st.integers(0, 4), st.integers(0, 2**50), st.integers(0, 3)
    ),
    max_size=14,
)


def key(number: int) -> bytes:
    return number.to_bytes(2, "big") + bytes(30)


def encode(journal: list[Step], first: int = 1) -> bytes:
    parts = []
    for at, (kind, slot, epoch, number) in enumerate(journal, start=first):
        keys = [key(number)] if kind is Kind.PUT else None
        parts.append(encode_records(kind, np.array([slot]), np.array([epoch]), keys, at))
    return b"".join(parts)


def expected(journal: list[Step]) -> list[tuple[int, int, bytes]]:
    """Slot, epoch, key of what is live, oldest record first: one step after another."""
    by_slot: dict[int, tuple[int, bytes] | None] = {}
    for kind, slot, epoch, number in journal:
        by_slot.pop(slot, None)
        by_slot[slot] = (epoch, key(number)) if kind is Kind.PUT else None
    by_key: dict[bytes, tuple[int, int]] = {}
    for slot, value in by_slot.items():
        if value is not None:
            by_key.pop(value[1], None)
            by_key[value[1]] = (slot, value[0])
    return [(slot, epoch, k) for k, (slot, epoch) in by_key.items()]


def replay(data: bytes, num_slots: int = 5) -> Replay:
    found = Replay(num_slots)
    found.feed(data)
    return found


def live(data: bytes) -> list[tuple[int, int, bytes]]:
    found = replay(data)
    return list(zip(found.slots.tolist(), found.epochs.tolist(), found.keys, strict=True))


def test_record_layout() -> None:
    """Every field where docs/format.md has it."""
    data = encode_records(Kind.PUT, np.array([0x0102]), np.array([0x0304]), [key(7)], 0x0506)
    assert len(data) == RECORD_BYTES == 72
    numbers = struct.unpack_from("<2I3Q", data)
    assert numbers == (1, 0, 0x0102, 0x0304, 0x0506)
    assert data[32:64] == key(7)
    assert int.from_bytes(data[64:], "little") == xxhash.xxh3_64_intdigest(data[:64])
    gone = encode_records(Kind.DEL, np.array([1, 2]), np.array([3, 4]), None, 9)
    assert gone[32:64] == bytes(32)
    assert struct.unpack_from("<2I3Q", gone, RECORD_BYTES) == (2, 0, 2, 4, 10)


@given(steps)
def test_replay_keeps_the_newest_record_per_slot_and_key(journal: list[Step]) -> None:
    assert live(encode(journal)) == expected(journal)
    found = replay(encode(journal))
    assert found.corrupt == 0
    assert found.newest_epoch == max((e for _, _, e, _ in journal), default=0)
    assert found.newest_sequence == len(journal)


@given(steps, st.randoms(use_true_random=False))
def test_sequence_not_position_decides(journal: list[Step], random: object) -> None:
    data = encode(journal)
    pieces = [data[at : at + RECORD_BYTES] for at in range(0, len(data), RECORD_BYTES)]
    random.shuffle(pieces)  # type: ignore[attr-defined]  # random.Random
    assert live(b"".join(pieces)) == expected(journal)


FIXED: list[Step] = [
    (Kind.PUT, 0, 11, 0),
    (Kind.PUT, 1, 12, 1),
    (Kind.DEL, 0, 11, 0),
    (Kind.PUT, 0, 13, 2),
    (Kind.PUT, 2, 14, 3),
]


def test_torn_at_every_byte() -> None:
    data = encode(FIXED)
    for length in range(len(data) + 1):
        whole, rest = divmod(length, RECORD_BYTES)
        assert live(data[:length]) == expected(FIXED[:whole])
        assert replay(data[:length]).corrupt == int(rest > 0)


def test_every_changed_byte_loses_its_record_only() -> None:
    data = encode(FIXED)
    for at in range(len(data)):
        bad = bytearray(data)
        bad[at] ^= 1 << (at % 8)
        without = FIXED[: at // RECORD_BYTES] + FIXED[at // RECORD_BYTES + 1 :]
        assert live(bytes(bad)) == expected(without)
        assert replay(bytes(bad)).corrupt == 1


@given(steps, st.lists(st.integers(1, 200), max_size=8))
def test_pieces_may_end_anywhere(journal: list[Step], sizes: list[int]) -> None:
    data = encode(journal)[: -20 if len(journal) % 3 == 2 else None]
    found, at = Replay(5), 0
    for size in [*sizes, len(data)]:
        found.feed(data[at : at + size])
        at += size
    whole = replay(data)
    assert (found.slots.tolist(), found.epochs.tolist(), found.keys) == (
        whole.slots.tolist(),
        whole.epochs.tolist(),
        whole.keys,
    )
    assert (found.records, found.corrupt) == (whole.records, whole.corrupt)
    with pytest.raises(ValueError, match="ended"):
        found.feed(b"x")


def test_damage_is_what_valid_records_follow() -> None:
    data = encode(FIXED)
    for at in range(len(FIXED)):
        bad = bytearray(data)
        bad[at * RECORD_BYTES] ^= 1
        assert replay(bytes(bad)).damaged == int(at < len(FIXED) - 1)
    assert replay(data[:-1]).damaged == 0
    assert replay(bytes(2 * RECORD_BYTES) + data).damaged == 2


def test_slots_beyond_the_store_are_counted() -> None:
    found = replay(encode(FIXED), num_slots=1)
    assert list(zip(found.slots.tolist(), found.keys, strict=True)) == [(0, key(2))]
    assert (found.out_of_range, found.records, found.newest_epoch) == (2, 5, 14)
    with pytest.raises(ValueError, match="too many slots"):
        Replay(2**31)


@settings(max_examples=50)
@given(st.binary(max_size=500))
def test_noise_is_counted_and_yields_nothing(data: bytes) -> None:
    found = replay(data)
    assert found.keys == []
    assert found.corrupt == -(-len(data) // RECORD_BYTES)


def test_valid_checksum_does_not_excuse_impossible_values() -> None:
    found = replay(
        encode_records(Kind.PUT, np.array([-1]), np.array([1]), [key(0)], 1)
        + encode_records(Kind.PUT, np.array([1]), np.array([-1]), [key(0)], 2)
        + encode_records(3, np.array([1]), np.array([1]), None, 3)  # type: ignore[arg-type]  # bad
        + encode_records(Kind.PUT, np.array([1]), np.array([1]), [key(0)], 2**63)
    )
    assert (found.keys, found.corrupt, found.records) == ([], 4, 0)


def test_keys_must_have_32_bytes() -> None:
    two = np.array([1, 2])
    with pytest.raises(ValueError, match="key of 31 bytes"):
        encode_records(Kind.PUT, two, two, [bytes(32), bytes(31)], 1)
    with pytest.raises(ValueError, match="differ in length"):
        encode_records(Kind.PUT, two, two, [bytes(32)], 1)
    with pytest.raises(ValueError, match="differ in length"):
        encode_records(Kind.DEL, two, two[:1], None, 1)
    with pytest.raises(TypeError, match="not bytes"):
        encode_records(Kind.PUT, two, two, [bytes(32), "x" * 32], 1)  # type: ignore[list-item]  # bad


def test_header_round_trip_and_every_changed_byte() -> None:
    good = encode_header(STORE, DIGEST)
    assert len(good) == HEADER_BYTES
    check_header(good, STORE, DIGEST)
    for at in range(HEADER_BYTES):
        bad = bytearray(good)
        bad[at] ^= 0x20
        with pytest.raises(FormatError, match="journal: "):
            check_header(bytes(bad), STORE, DIGEST)
    for length in range(HEADER_BYTES):
        with pytest.raises(FormatError, match=f"header has {length} bytes"):
            check_header(good[:length], STORE, DIGEST)
    with pytest.raises(FormatError, match="journal: store is"):
        check_header(good, UUID(int=6), DIGEST)
    with pytest.raises(FormatError, match="journal: fingerprint is"):
        check_header(good, STORE, bytes(16))
    with pytest.raises(ValueError, match="digest of 3 bytes"):
        encode_header(STORE, b"abc")
