"""Tails of slots: made from frames when they are written, right on the devices, and read there by
nobody but selectors."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.store.chosen_pages import bring, context
from tests.store.conftest import (
    PAGED,
    PATIENCE_S,
    MakeStore,
    StoreRig,
    array,
    content,
    key_of,
    striped,
)
from tests.store.write.test_flusher import on_disk, results, started
from vllm_ssdkv.base.checksum import checksum_bytes
from vllm_ssdkv.store.format.slot_geometry import STRIPE_UNIT, SlotGeometry
from vllm_ssdkv.store.format.slot_header_batch import key_rows
from vllm_ssdkv.store.memory.summary_rows import with_summaries

BOUNDS = with_summaries(PAGED, 16, channels=False)
CHANNELS = with_summaries(PAGED, 16, channels=True)
LARGE = with_summaries(replace(PAGED, layers=40, payload_bytes=8000), 16, channels=True)
"""Of several units, with padding."""
SHAPES = [BOUNDS, CHANNELS, LARGE, replace(CHANNELS, encrypted=True)]
EVERY_SHAPE = pytest.mark.parametrize("geometry", SHAPES, ids=str)


def assert_on_devices(rig: StoreRig, names: dict[int, int], epoch: int = 1) -> None:
    """Slots are there whole, of each copy, by what their headers say."""
    geometry, arena = rig.geometry, rig.store.arena
    size = geometry.slot_bytes
    for slot, name in names.items():
        for copy in range(rig.files.placement.most_copies):
            extents = rig.files.placement.copies(array([slot]), 0, size)[copy]
            assert extents is not None
            whole = arena.view(0, size)
            inside = extents.buffer.tolist()
            for i, device in enumerate(extents.device.tolist()):
                with rig.devices[device].path.open("rb") as file:
                    file.seek(int(extents.offset[i]))
                    data = file.read(int(extents.length[i]))
                whole[inside[i] : inside[i] + len(data)] = np.frombuffer(data, np.uint8)
            at, one = np.zeros(1, dtype=np.uint64), array([slot])
            codec = rig.files.codec
            seals, right = codec.read_headers(one, array([epoch]), key_rows([key_of(name)]), at)
            assert right.all()
            first = at + np.uint64(geometry.header_bytes)
            assert codec.unseal(seals, 0, first, final=True).all()
            pages = whole[geometry.header_bytes :].reshape(geometry.pages, -1)
            wanted = content(geometry, name)
            np.testing.assert_array_equal(pages[:, : geometry.payload_bytes], wanted)


@pytest.mark.parametrize("replicas", [1, 2])
@EVERY_SHAPE
def test_they_are_written_behind_what_frames_hold(
    make_store: MakeStore, geometry: SlotGeometry, replicas: int
) -> None:
    """More slots than images can be made of at a time."""
    # Beside staging, which this test reads to.
    rig = make_store(geometry, slots=16, frames=16, staging=160, replicas=replicas)
    names = {slot: 300 + slot for slot in range(16)}
    rig.write(names)
    written = sum(rig.total("bytes_written", device=path) for path in rig.paths)
    assert written == 16 * replicas * geometry.slot_bytes
    assert_on_devices(rig, names)
    rig.assert_no_leak()


@EVERY_SHAPE
def test_a_hit_reads_what_frames_hold_and_no_more(
    make_store: MakeStore, geometry: SlotGeometry
) -> None:
    rig = make_store(geometry)
    names = {slot: 300 + slot for slot in range(6)}
    rig.write(names)
    before = sum(rig.total("bytes_read", device=path) for path in rig.paths)
    assert rig.load(names, list(range(1, 7))).complete
    read = sum(rig.total("bytes_read", device=path) for path in rig.paths) - before
    assert read == 6 * geometry.frame_bytes
    for block, name in enumerate(names.values(), 1):
        np.testing.assert_array_equal(rig.hbm[block], rig.kv(name))


def test_a_hit_survives_a_tail_that_is_wrong(make_store: MakeStore) -> None:
    """Who does not choose does not look at it."""
    rig = make_store(BOUNDS)
    rig.write({3: 33})
    rig.flip(3, BOUNDS.page_offset(BOUNDS.kv_pages) + 5)
    assert rig.load({3: 33}, [1]).complete
    np.testing.assert_array_equal(rig.hbm[1], rig.kv(33))
    assert rig.total("checksum_failures") == 0


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("geometry", [CHANNELS, replace(CHANNELS, encrypted=True)], ids=str)
def test_a_rewritten_block_has_its_own(
    make_store: MakeStore, geometry: SlotGeometry, replicas: int
) -> None:
    rig = make_store(geometry, staging=160, replicas=replicas)
    names = {slot: 300 + slot for slot in range(3)}
    rig.write(names)
    assert rig.load(names, [1, 2, 3]).complete
    keys = tuple(map(key_of, names.values()))
    copied, _ = rig.store.copy(array([0, 1, 2]), array([1] * 3), array([20, 21, 22]), keys)
    assert copied.all()
    moved = {20 + slot: name for slot, name in names.items()}
    rig.commit(moved, epoch=2)
    assert results(rig, 3) == ({(slot, 2) for slot in moved}, set())
    assert_on_devices(rig, moved, epoch=2)
    assert_on_devices(rig, names)


def test_the_summary_of_what_is_being_written_is_made_from_its_frame(
    make_store: MakeStore,
) -> None:
    """Its tail is on no device yet, and its row has gone to another block."""
    rig = make_store(CHANNELS, staging=160)
    names = context(rig, range(3))
    # Writes alone: a stall stops all of a device, and the tail of slot 2 is read from each.
    rig.faults({"kind": "latency", "seconds": PATIENCE_S, "op": "write"})
    rig.hold({9: 99})
    rig.commit({9: 99})
    started(rig, len(rig.paths), "latency")
    chosen = rig.store.choose([array([2, 9])], [0])
    assert chosen.poisoned == set()
    assert chosen.framed.tolist() == [False, True]
    assert chosen.fetched_summaries.frame == chosen.fetched_summaries.ssd == CHANNELS.tail_pages
    size = CHANNELS.channel_pages * CHANNELS.payload_bytes
    for layer in range(CHANNELS.layers):
        for at, name in zip(chosen.channels(layer).tolist(), (names[2], 99), strict=True):
            first = CHANNELS.first_channel_page(layer)
            wanted = content(CHANNELS, name)[first : first + CHANNELS.channel_pages].ravel()
            held = rig.store.arena.view(at - rig.store.arena.address, size)
            np.testing.assert_array_equal(held, wanted)
    found = bring(rig, chosen, 1, {0: [(1, 2)]})
    assert found[0, 1, 2] == content(CHANNELS, 99)[CHANNELS.first_page(1) + 2].tobytes()
    chosen.close()
    rig.faults()
    assert results(rig, 1) == ({(9, 1)}, set())


@pytest.mark.parametrize("kind", ["eio", "short"])
def test_a_write_that_fails_once_is_made_again(make_store: MakeStore, kind: str) -> None:
    rig = make_store(CHANNELS, staging=160)
    rig.faults({"kind": kind, "op": "write", "count": 2})
    rig.hold({1: 11, 2: 22})
    rig.commit({1: 11, 2: 22})
    assert results(rig, 2) == ({(1, 1), (2, 1)}, set())
    rig.faults()
    assert_on_devices(rig, {1: 11, 2: 22})
    rig.store.frames.forget(array([1, 2]))
    rig.assert_no_leak()


def test_padding_of_tails_is_nobodys_bytes(make_store: MakeStore) -> None:
    """It goes to the devices as it lies in the images."""
    geometry = with_summaries(replace(PAGED, payload_bytes=8000), 16, channels=True)
    rig = make_store(geometry)
    rig.write({slot: 300 + slot for slot in range(16)})
    for slot in range(16):
        tail = on_disk(rig, slot)[geometry.frame_bytes :].reshape(geometry.tail_pages, -1)
        assert not tail[:, geometry.payload_bytes :].any()
        wanted = content(geometry, 300 + slot)[geometry.kv_pages :]
        sums = [checksum_bytes(page) for page in tail[:, : geometry.payload_bytes]]
        assert sums == [checksum_bytes(page) for page in wanted]


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(
    layers=st.integers(1, 90),
    copies=st.integers(1, 2),
    merged=st.booleans(),
    data=st.data(),
)
def test_pieces_are_cut_where_the_tail_begins(
    layers: int, copies: int, merged: bool, data: st.DataObject
) -> None:
    geometry = with_summaries(replace(PAGED, layers=layers), 16, channels=True)
    placement = striped(geometry, [1.0, 2.0, 1.0], 31, copies)
    slots = array(data.draw(st.lists(st.integers(0, 30), min_size=1, max_size=5, unique=True)))
    size, at = geometry.slot_bytes, geometry.frame_bytes
    found = placement.copies(slots, 0, size, merged=merged)[copies - 1]
    cut = placement.copies(slots, 0, size, merged=merged, cut=at)[copies - 1]
    assert found is not None
    assert cut is not None
    inside = cut.buffer.astype(np.int64) - cut.slot_index * size
    assert not ((inside < at) & (inside + cut.length > at)).any()
    assert (cut.length > 0).all()
    assert len(cut.device) - len(found.device) <= len(slots)
    unit = geometry.page_bytes
    assert unit <= STRIPE_UNIT

    def bytes_of(extents: object) -> list[tuple[int, int, int, int]]:
        """Slot, place, device and offset of each page's worth."""
        pages = []
        for device, offset, length, slot, buffer in zip(
            *(getattr(extents, name).tolist() for name in NAMES), strict=True
        ):
            pages += [(slot, buffer + i, device, offset + i) for i in range(0, length, unit)]
        return pages

    assert bytes_of(cut) == bytes_of(found)


NAMES = ("device", "offset", "length", "slot_index", "buffer")
