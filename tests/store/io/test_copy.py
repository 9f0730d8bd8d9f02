"""Slots written anew from the frames of others: the same block, sealed for its own place."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from tests.store.conftest import (
    ALL,
    OPAQUE,
    PAGED,
    PAGED_ENCRYPTED,
    PATIENCE_S,
    PLAIN,
    SUMMED,
    MakeStore,
    StoreRig,
    array,
    content,
    key_of,
)
from vllm_ssdkv.store.cache.frames import NO_FRAME, FrameState
from vllm_ssdkv.store.format.slot_geometry import SlotGeometry

NAMES = {0: 10, 1: 11, 2: 12}
NEW = [20, 21, 22]
NEW_NAMES = dict(zip(NEW, NAMES.values(), strict=True))


def copy(
    rig: StoreRig, old: dict[int, int], new: Sequence[int], epoch: int = 1
) -> tuple[list[bool], list[bool]]:
    epochs, keys = array([epoch] * len(old)), tuple(map(key_of, old.values()))
    copied, wrong = rig.store.copy(array(list(old)), epochs, array(new), keys)
    return copied.tolist(), wrong.tolist()


def in_dram(rig: StoreRig, names: dict[int, int] = NAMES) -> None:
    """The blocks are written, and a hit has just read them."""
    rig.write(names)
    assert rig.load(names, list(range(1, len(names) + 1))).complete


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("geometry", [*ALL, SUMMED], ids=str)
def test_a_copy_is_read_from_its_own_slot(
    make_store: MakeStore, geometry: SlotGeometry, replicas: int
) -> None:
    rig = make_store(geometry, replicas=replicas)
    in_dram(rig)
    before = rig.total("bytes_read", device=rig.paths[0])
    assert copy(rig, NAMES, NEW) == ([True] * 3, [False] * 3)
    rig.commit(NEW_NAMES, epoch=2)
    assert rig.store.drain(PATIENCE_S)
    durable, failed = rig.store.take_write_results()
    assert (sorted(durable), failed) == ([(slot, 2) for slot in NEW], [])
    assert rig.total("bytes_read", device=rig.paths[0]) == before, "from DRAM"
    for slots, epoch in ((NEW_NAMES, 2), (NAMES, 1)):
        for cold in (False, True):
            if cold:
                rig.store.frames.forget(array(list(slots)))
            rig.hbm.clear()
            outcome = rig.load(slots, [1, 2, 3], epoch)
            assert outcome.complete
            assert (outcome.tokens_from_ssd > 0) is cold
            for block, name in enumerate(NAMES.values(), 1):
                np.testing.assert_array_equal(rig.hbm[block], rig.kv(name))
    rig.assert_no_leak()


def test_an_encrypted_copy_has_a_key_of_its_own(make_store: MakeStore) -> None:
    """One salt for two places would be one key for them."""
    geometry = PAGED_ENCRYPTED
    rig = make_store(geometry, devices=1)
    in_dram(rig)
    assert copy(rig, NAMES, NEW)[0] == [True] * 3
    rig.commit(NEW_NAMES, epoch=2)
    assert rig.store.drain(PATIENCE_S)
    data = rig.devices[0].path.read_bytes()
    offset = geometry.page_offset(0)
    pages = [data[rig.place(slot, offset)[1] :][: geometry.payload_bytes] for slot in (0, NEW[0])]
    assert pages[0] != pages[1]
    assert content(geometry, NAMES[0])[0].tobytes() not in pages


def test_what_is_not_in_dram_or_not_written_is_not_copied(make_store: MakeStore) -> None:
    rig = make_store()
    in_dram(rig)
    rig.store.frames.forget(array([1]))
    rig.hold({5: 15})
    assert copy(rig, {**NAMES, 5: 15}, [*NEW, 23]) == ([True, False, True, False], [False] * 4)
    assert rig.store.frames.frame_of(21) == NO_FRAME
    rig.store.abandon(array([5, *NEW]))
    rig.assert_no_leak()


def test_what_dram_had_of_the_new_slot_is_forgotten(make_store: MakeStore) -> None:
    rig = make_store()
    in_dram(rig, {**NAMES, 20: 99})
    assert copy(rig, {0: 10}, [20]) == ([True], [False])
    rig.commit({20: 10}, epoch=2)
    assert rig.store.drain(PATIENCE_S)
    assert rig.load({20: 10}, [1], 2).complete
    np.testing.assert_array_equal(rig.hbm[1], content(PAGED, 10))


def test_no_frame_of_a_running_context_is_taken(make_store: MakeStore) -> None:
    rig = make_store(frames=8)
    names = {slot: 100 + slot for slot in range(8)}
    in_dram(rig, names)
    rig.store.extend_context("r", 0, array([1, 2, 3, 4, 5, 6, 7]))
    # The only other frame is the one that is copied from.
    assert copy(rig, {0: 100}, [20]) == ([False], [False])
    assert copy(rig, {1: 101}, [20]) == ([True], [False])
    assert rig.store.frames.state(rig.store.frames.frame_of(20)) is FrameState.HELD
    assert (rig.store.frames.frames_of(array(range(1, 8))) != NO_FRAME).all()
    rig.store.abandon(array([20]))
    rig.store.drop_context("r")
    rig.assert_no_leak()


@pytest.mark.parametrize("geometry", PLAIN, ids=str)
def test_wrong_bytes_get_no_checksum_that_says_they_are_right(
    make_store: MakeStore, geometry: SlotGeometry
) -> None:
    """As where a load checks a sample of the pages only."""
    rig = make_store(geometry, verify="sampled")
    rig.write(NAMES)
    page = geometry.pages - 1
    rig.flip(1, geometry.page_offset(page) + 7)
    while True:  # until the sample leaves that page out
        rig.store.frames.forget(array(list(NAMES)))
        if rig.load(NAMES, [1, 2, 3]).complete:
            break
    assert copy(rig, NAMES, NEW) == ([True, False, True], [False, True, False])
    rig.store.abandon(array(NEW))


@pytest.mark.parametrize("what", ["epoch", "key"])
def test_a_frame_of_another_block_is_not_copied(make_store: MakeStore, what: str) -> None:
    rig = make_store(OPAQUE)
    in_dram(rig)
    old = {0: 10 if what == "epoch" else 11}
    epoch = 2 if what == "epoch" else 1
    assert copy(rig, old, [20], epoch) == ([False], [True])
    rig.assert_no_leak()
