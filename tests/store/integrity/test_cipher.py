"""Encryption at rest: what lies on the devices, and that nothing else is ever taken for it."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.store.conftest import (
    DIGEST,
    OPAQUE_ENCRYPTED,
    PAGED,
    PAGED_ENCRYPTED,
    PATIENCE_S,
    RANK,
    SLOTS_KEY,
    MakeStore,
    StoreRig,
    array,
    key_of,
)
from vllm_ssdkv import _io
from vllm_ssdkv.base.checksum import checksum_bytes
from vllm_ssdkv.base.errors import UnsupportedError
from vllm_ssdkv.store.format.slot_geometry import SlotGeometry
from vllm_ssdkv.store.format.slot_header import decode
from vllm_ssdkv.store.format.slot_header_batch import key_rows
from vllm_ssdkv.store.integrity import cipher
from vllm_ssdkv.store.integrity.cipher import CipherCodec
from vllm_ssdkv.store.integrity.slot_codec import Digests
from vllm_ssdkv.store.memory.arena import Arena

U8 = NDArray[np.uint8]
U64 = NDArray[np.uint64]

SHAPE = SlotGeometry("paged", layers=2, heads=2, groups=1, payload_bytes=5000, encrypted=True)
ENCRYPTED = [PAGED_ENCRYPTED, OPAQUE_ENCRYPTED]


class Desk:
    """Two slots before (frames) and after (images) they are sealed, in one arena."""

    def __init__(self, shape: SlotGeometry = SHAPE, slots_key: bytes = SLOTS_KEY, rank: int = RANK):
        self.shape = shape
        self.arena = Arena(4 * shape.slot_bytes)
        self.codec = CipherCodec(shape, DIGEST, rank, self.arena, slots_key)
        places = np.arange(4, dtype=np.uint64) * np.uint64(shape.slot_bytes)
        self.frames, self.images = places[:2], places[2:]
        self.slots, self.epochs = array([4, 9]), array([70, 71])
        self.keys = [key_of(1), key_of(2)]
        self.arena.view(0, self.arena.nbytes)[:] = np.random.default_rng(3).integers(
            0, 256, self.arena.nbytes, dtype=np.uint8
        )

    def seal(self) -> Digests:
        keys = key_rows(self.keys)
        return self.codec.seal(self.slots, self.epochs, keys, self.frames, self.images)

    def image(self, i: int) -> U8:
        return self.arena.view(int(self.images[i]), self.shape.slot_bytes)

    def pages(self, at: U64) -> U8:
        """Payloads of both slots, [2, pages, payload_bytes], a copy."""
        shape = self.shape
        both = [self.arena.view(int(a), shape.slot_bytes)[shape.header_bytes :] for a in at]
        padded = np.stack(both).reshape(2, shape.pages, shape.page_bytes)
        return padded[:, :, : shape.payload_bytes].copy()

    def read_headers(self, at: U64 | None = None) -> tuple[Digests, list[bool]]:
        where = self.images if at is None else at
        seals, right = self.codec.read_headers(self.slots, self.epochs, key_rows(self.keys), where)
        return seals, right.tolist()

    def why_refused(self, i: int) -> str:
        slot, epoch, key = int(self.slots[i]), int(self.epochs[i]), self.keys[i]
        return self.codec.why_refused(slot, epoch, key, int(self.images[i]))

    def unseal(
        self, seals: Digests, first_page: int = 0, at: U64 | None = None
    ) -> list[list[bool]]:
        where = self.images if at is None else at
        offset = np.uint64(self.shape.page_offset(first_page))
        found: list[list[bool]] = self.codec.unseal(seals, first_page, where + offset).tolist()
        return found


def with_good_checksum(header: U8, shape: SlotGeometry) -> None:
    """What somebody does who changes a header on purpose."""
    body = shape.header_bytes - 8
    sum_of = checksum_bytes(header[:body]).to_bytes(8, "little")
    header[body : shape.header_bytes] = np.frombuffer(sum_of, dtype=np.uint8)


# ---- the native cipher ----


@given(
    slots=st.integers(0, 3),
    pages=st.integers(0, 4),
    nbytes=st.sampled_from([0, 1, 15, 16, 17, 4096, 70_000]),
    first=st.integers(0, 2**32 - 10),
    threads=st.integers(0, 3),
    in_place=st.booleans(),
    seed=st.integers(0, 99),
)
def test_it_is_aes_256_gcm(
    slots: int, pages: int, nbytes: int, first: int, threads: int, in_place: bool, seed: int
) -> None:
    random = np.random.default_rng(seed)
    keys, identities, plain = (
        random.integers(0, 256, shape, dtype=np.uint8)
        for shape in ((slots, 32), (slots, 72), (slots, pages, max(1, nbytes)))
    )
    work, other = plain.copy(), np.zeros_like(plain)
    steps = np.arange(slots * pages, dtype=np.uint64).reshape(slots, pages) * np.uint64(
        max(1, nbytes)
    )
    source = np.uint64(work.ctypes.data) + steps
    target = source if in_place else np.uint64(other.ctypes.data) + steps
    tags = _io.gcm_seal(keys, identities, first, source, target, nbytes, threads)
    stored = work if in_place else other
    for i in range(slots):
        for p in range(pages):
            number = (first + p).to_bytes(4, "little")
            data = identities[i].tobytes()
            expected = AESGCM(keys[i].tobytes()).encrypt(
                number + bytes(8), plain[i, p, :nbytes].tobytes(), data[:20] + number + data[24:]
            )
            at = 16 * (i * pages + p)
            assert stored[i, p, :nbytes].tobytes() + tags[at : at + 16].tobytes() == expected
    good = _io.gcm_open(
        keys, identities, first, target, nbytes, tags.reshape(slots, pages, 16), threads
    )
    assert good.tolist() == [1] * (slots * pages)
    np.testing.assert_array_equal(stored[:, :, :nbytes], plain[:, :, :nbytes])


def test_large_batches_are_shared_by_threads() -> None:
    slots, pages, nbytes = 3, 40, 100_000
    plain = np.random.default_rng(0).integers(0, 256, (slots, pages, nbytes), dtype=np.uint8)
    stored = np.zeros_like(plain)
    keys, identities = np.arange(96, dtype=np.uint8).reshape(3, 32), np.zeros((3, 72), np.uint8)
    steps = np.arange(slots * pages, dtype=np.uint64).reshape(slots, pages) * np.uint64(nbytes)
    addresses = [np.uint64(a.ctypes.data) + steps for a in (plain, stored)]
    one = _io.gcm_seal(keys, identities, 0, *addresses, nbytes, 1)
    alone = stored.copy()
    np.testing.assert_array_equal(one, _io.gcm_seal(keys, identities, 0, *addresses, nbytes, 4))
    np.testing.assert_array_equal(alone, stored)
    stored[1, 7, 99_999] ^= 1
    stored[2, 39, 0] ^= 128
    tags = one.reshape(slots, pages, 16)
    good = _io.gcm_open(keys, identities, 0, addresses[1], nbytes, tags, 4).reshape(slots, pages)
    assert np.argwhere(good == 0).tolist() == [[1, 7], [2, 39]]
    np.testing.assert_array_equal(stored[good == 1], plain[good == 1])
    assert not stored[good == 0].any()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"keys": np.zeros((2, 31), np.uint8)}, "keys have 32 bytes"),
        ({"identities": np.zeros((2, 71), np.uint8)}, "identities 72"),
        ({"keys": np.zeros((3, 32), np.uint8)}, "differ in length"),
        ({"target": np.zeros((2, 4), np.uint64)}, "differ in length"),
        ({"source": np.zeros((2, 3), np.uint64)}, "an address is zero"),
        ({"nbytes": 2**31}, "more bytes than libcrypto takes"),
        ({"first_page": 2**32 - 3}, "page numbers exceed 32 bits"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, object], text: str) -> None:
    arguments: dict[str, object] = {
        "keys": np.zeros((2, 32), np.uint8),
        "identities": np.zeros((2, 72), np.uint8),
        "first_page": 0,
        "source": np.ones((2, 3), np.uint64),
        "target": np.ones((2, 3), np.uint64),
        "nbytes": 8,
    }
    with pytest.raises(ValueError, match=text):
        _io.gcm_seal(**(arguments | change))  # type: ignore[arg-type]  # on purpose


def test_without_libcrypto_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cipher.libcrypto_version().startswith("OpenSSL ")
    monkeypatch.setattr(cipher._io, "libcrypto", lambda: ("", "libcrypto.so.3: no such file"))
    with pytest.raises(UnsupportedError, match=r"libcrypto.so.3: no such file.*libssl3"):
        Desk()


def test_plain_slots_have_no_room_for_tags() -> None:
    with pytest.raises(ValueError, match="not encrypted"):
        CipherCodec(PAGED, DIGEST, RANK, Arena(4096), SLOTS_KEY)


# ---- seals ----


def test_round_trip() -> None:
    desk = Desk()
    plain = desk.pages(desk.frames)
    seals = desk.seal()
    np.testing.assert_array_equal(desk.pages(desk.frames), plain)
    assert not (desk.pages(desk.images) == plain).all(axis=2).any()
    # The frame keeps a header of its own, from which its seal can be read later.
    for places in (desk.images, desk.frames):
        read, right = desk.read_headers(places)
        assert right == [True, True]
        np.testing.assert_array_equal(read.opening, seals.opening)
        np.testing.assert_array_equal(read.marks, seals.marks)
    assert desk.unseal(seals) == [[True] * 4] * 2
    np.testing.assert_array_equal(desk.pages(desk.images), plain)


def test_keys_of_slots_are_not_shown() -> None:
    desk = Desk()
    seals = desk.seal()
    for shown in (repr(seals), repr(desk.codec)):
        assert str(int(seals.opening[0, 0])) not in shown
        assert SLOTS_KEY.hex() not in shown
        assert repr(SLOTS_KEY)[2:-1] not in shown


def test_checksums_are_those_of_the_encrypted_bytes() -> None:
    """So that damage is found without the key."""
    desk = Desk()
    desk.seal()
    for i, pages in enumerate(desk.pages(desk.images)):
        header = decode(desk.image(i), SHAPE, DIGEST, slot=int(desk.slots[i]))
        assert header.checksums.tolist() == [checksum_bytes(page) for page in pages]


@given(
    page=st.integers(0, SHAPE.pages - 1),
    byte=st.integers(0, SHAPE.payload_bytes - 1),
    bit=st.integers(0, 7),
)
def test_a_flipped_bit_costs_its_page(page: int, byte: int, bit: int) -> None:
    desk = Desk()
    plain = desk.pages(desk.frames)
    seals = desk.seal()
    desk.image(1)[SHAPE.page_offset(page) + byte] ^= 1 << bit
    good = desk.unseal(seals)
    assert good == [[True] * 4, [p != page for p in range(4)]]
    after = desk.pages(desk.images)
    assert not after[1, page].any()
    np.testing.assert_array_equal(after[np.array(good)], plain[np.array(good)])


@given(word=st.integers(0, 1), page=st.integers(0, SHAPE.pages - 1), bit=st.integers(0, 63))
def test_a_flipped_bit_of_a_tag_costs_its_page(word: int, page: int, bit: int) -> None:
    desk = Desk()
    seals = desk.seal()
    seals.marks[0, page, word] ^= np.uint64(1 << bit)
    assert desk.unseal(seals) == [[p != page for p in range(4)], [True] * 4]


def test_pages_and_slots_cannot_change_places() -> None:
    desk = Desk()
    seals = desk.seal()
    # Pages 1 and 2 with their tags, in one slot.
    one, two = (slice(SHAPE.page_offset(p), SHAPE.page_offset(p + 1)) for p in (1, 2))
    image = desk.image(0)
    image[one], image[two] = image[two].copy(), image[one].copy()
    seals.marks[0, [1, 2]] = seals.marks[0, [2, 1]]
    # The same page of two slots, with its tag.
    here, there = desk.image(0)[SHAPE.page_offset(3) :], desk.image(1)[SHAPE.page_offset(3) :]
    here[:], there[:] = there.copy(), here.copy()
    seals.marks[[0, 1], 3] = seals.marks[[1, 0], 3]
    assert desk.unseal(seals) == [[True, False, False, False], [True, True, True, False]]


def test_pages_are_those_of_their_number() -> None:
    desk = Desk()
    seals = desk.seal()
    some = Digests(seals.opening, seals.marks[:, 1:3])
    assert desk.unseal(some, 1) == [[True, True]] * 2
    desk.seal()
    assert desk.unseal(replace(some, marks=seals.marks[:, 1:3]), 1) == [[False, False]] * 2


@pytest.mark.parametrize("field", [40, 63, 64, 95, 96, 127, 128, 160, 224, 239])
def test_a_header_changed_on_purpose_is_refused(field: int) -> None:
    """Epoch, fingerprint, key, salt, checksums, tags, and its own tag: all with a good checksum."""
    desk = Desk()
    desk.seal()
    assert SHAPE.header_used == 240
    header = desk.image(0)
    header[field] ^= 1
    with_good_checksum(header, SHAPE)
    assert desk.read_headers()[1] == [False, True]
    assert re.match(r"slot header: (tag|epoch|fingerprint|key) is", desk.why_refused(0))


@pytest.mark.parametrize("change", [{"slots_key": bytes(32)}, {"rank": RANK + 1}])
def test_another_key_opens_nothing(change: dict[str, object]) -> None:
    mine = Desk()
    seals = mine.seal()
    other = Desk(**change)  # type: ignore[arg-type]  # one of two
    other.arena.view(0, other.arena.nbytes)[:] = mine.arena.view(0, mine.arena.nbytes)
    assert other.read_headers()[1] == [False, False]
    assert re.match(r"slot header: (tag|rank) is", other.why_refused(0))
    # Even with a header that it takes: the keys of the slots are others.
    opening = other.seal().opening
    other.arena.view(0, other.arena.nbytes)[:] = mine.arena.view(0, mine.arena.nbytes)
    assert other.unseal(Digests(opening, seals.marks)) == [[False] * 4] * 2


class Used:
    """Every (key, nonce) that goes into the cipher."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.pairs: list[tuple[bytes, int]] = []
        seal, authenticate = _io.gcm_seal, _io.gcm_authenticate

        def spy_seal(keys: U8, identities: U8, first: int, source: U64, *rest: object) -> U8:
            for key in keys:
                self.pairs += [(key.tobytes(), first + p) for p in range(source.shape[1])]
            return seal(keys, identities, first, source, *rest)  # type: ignore[arg-type]

        def spy_authenticate(keys: U8, page: int, data: U8) -> U8:
            self.pairs += [(key.tobytes(), page) for key in keys]
            return authenticate(keys, page, data)

        monkeypatch.setattr(cipher._io, "gcm_seal", spy_seal)
        monkeypatch.setattr(cipher._io, "gcm_authenticate", spy_authenticate)


def test_no_key_and_nonce_are_used_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even for the same slots and epochs: an old journal and store.json may be put back."""
    used = Used(monkeypatch)
    for _ in range(20):
        Desk().seal()
    assert len(used.pairs) == 20 * 2 * (SHAPE.pages + 1)
    assert len(set(used.pairs)) == len(used.pairs)


def test_a_slot_that_is_written_again_gets_a_new_salt(make_store: MakeStore) -> None:
    rig = make_store(PAGED_ENCRYPTED)
    salts = set()
    for _ in range(5):
        rig.write({3: 33})  # the same slot, epoch, key and content
        image = stored_slot(rig, 3)
        salts.add(decode(image, rig.geometry, DIGEST, slot=3).salt)
    assert len(salts) == 5


# ---- on the devices ----


def stored_slot(rig: StoreRig, slot: int) -> U8:
    device, offset = rig.place(slot, 0)
    data = rig.devices[device].path.read_bytes()[offset : offset + rig.geometry.slot_bytes]
    return np.frombuffer(data, dtype=np.uint8)


def change_header(rig: StoreRig, slot: int, change: Callable[[U8], None]) -> None:
    """Change a slot's header on its device on purpose, with a good checksum."""
    device, offset = rig.place(slot, 0)
    with open(rig.devices[device].path, "r+b") as file:
        file.seek(offset)
        header = np.frombuffer(file.read(rig.geometry.header_bytes), dtype=np.uint8).copy()
        change(header)
        with_good_checksum(header, rig.geometry)
        file.seek(offset)
        file.write(header.tobytes())


@pytest.mark.parametrize("geometry", ENCRYPTED)
def test_nothing_readable_lies_on_the_devices(
    make_store: MakeStore, geometry: SlotGeometry
) -> None:
    rig = make_store(geometry)
    marker = os.urandom(24)
    slots = array([2, 5, 11])
    for frame in rig.store.reserve_frames(slots, wait=True).tolist():
        view = rig.store.frames.view(frame)  # pages and their padding
        view[:] = np.frombuffer(marker * (view.size // 24 + 1), dtype=np.uint8)[: view.size]
    rig.store.flush(slots, array([1, 1, 1]), [key_of(1)] * 3)
    assert rig.store.drain(PATIENCE_S)
    assert rig.store.take_write_results()[1] == []
    everything = b"".join(device.path.read_bytes() for device in rig.devices)
    assert everything.count(b"SSDKVSLT") == 3
    for shift in range(24):
        assert (marker * 2)[shift : shift + 12] not in everything
    assert SLOTS_KEY not in everything


def test_a_tag_changed_on_the_device_is_a_miss(make_store: MakeStore) -> None:
    rig = make_store(PAGED_ENCRYPTED)
    names = {0: 10, 1: 11, 2: 12}
    rig.write(names)
    first_tag = 128 + 8 * rig.geometry.pages

    def flip(header: U8) -> None:
        header[first_tag] ^= 1

    change_header(rig, 1, flip)
    outcome = rig.load(names, [5, 6, 7])
    assert (outcome.complete, outcome.bad, 6 in rig.hbm) == (False, [(1, 1)], False)
    assert rig.total("header_mismatches") == 1
    # Without the key nobody can tell.
    assert decode(stored_slot(rig, 1), rig.geometry, DIGEST, slot=1).slot == 1


def test_a_page_changed_with_its_checksum_is_a_miss(make_store: MakeStore) -> None:
    """The checksum fits, so only the tag can tell; the header is left to say what it said."""
    rig = make_store(PAGED_ENCRYPTED)
    rig.write({0: 10, 1: 11})
    rig.flip(1, rig.geometry.page_offset(3) + 77)
    page = stored_slot(rig, 1)[rig.geometry.page_offset(3) :][: rig.geometry.payload_bytes]

    def fit(header: U8) -> None:
        sum_of = checksum_bytes(page.copy()).to_bytes(8, "little")
        header[128 + 24 : 128 + 32] = np.frombuffer(sum_of, dtype=np.uint8)

    change_header(rig, 1, fit)
    outcome = rig.load({0: 10, 1: 11}, [5, 6])
    assert (outcome.complete, outcome.bad, 6 in rig.hbm) == (False, [(1, 1)], False)
    assert rig.total("header_mismatches") == 1
    rig.write({1: 11})
    rig.flip(1, rig.geometry.page_offset(3) + 77)
    assert rig.load({0: 10, 1: 11}, [5, 6]).bad == [(1, 1)]
    assert rig.total("checksum_failures") == 1


def test_slots_that_changed_places_are_misses(make_store: MakeStore) -> None:
    """Whole slots, their headers made to name the new place."""
    rig = make_store(PAGED_ENCRYPTED, devices=1)
    rig.write({1: 11, 2: 11})  # the same block twice
    path = rig.devices[0].path
    data, size = bytearray(path.read_bytes()), rig.geometry.slot_bytes
    one, two = (rig.place(slot, 0)[1] for slot in (1, 2))
    data[one : one + size], data[two : two + size] = data[two : two + size], data[one : one + size]
    with open(path, "r+b") as file:
        file.write(data)
    for slot in (1, 2):

        def name(header: U8, slot: int = slot) -> None:
            header[32] = slot

        change_header(rig, slot, name)
        assert rig.load({slot: 11}, [5]).bad == [(slot, 1)]
    assert rig.hbm == {}
    assert rig.total("header_mismatches") == 2


def test_contexts_larger_than_dram_are_streamed(make_store: MakeStore) -> None:
    rig = make_store(PAGED_ENCRYPTED, slots=64, frames=8)
    names = {slot: 300 + slot for slot in range(40)}
    rig.write(names)
    rig.store.extend_context("r", 0, array(list(names)))
    assert rig.load(names, []).complete
    for _ in range(2):
        walk = rig.walk(list(names))
        rig.assert_rows(walk, list(names.values()))
    rig.store.drop_context("r")
    rig.assert_no_leak()
