"""Channels by their pages: which pages are read, and what is kept of them."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.store.conftest import MakeStore, StoreRig, array, content
from tests.store.read.test_selected_context import context
from vllm_ssdkv.store.format.slot_geometry import SlotGeometry
from vllm_ssdkv.store.read.channel_reader import ChannelReader
from vllm_ssdkv.store.read.selected_context import SelectedContexts

HEADS, HEAD_SIZE, BLOCK, RUN = 2, 32, 128, 256
SHAPE = SlotGeometry("paged", 2, HEADS, 8, 2048, summary_pages=1, channel_pages=8)
"""Pages of 8 channels of 128 tokens in 16 bit, four for each head and layer."""


def zeros(nbytes: int) -> NDArray[np.uint8]:
    return np.zeros(nbytes, dtype=np.uint8)


def store(make_store: MakeStore, places: int = 64) -> tuple[StoreRig, dict[int, int]]:
    rig = make_store(
        SHAPE, block_tokens=BLOCK, channels="ssd", devices=1, places=places, slots=12, frames=12
    )
    return rig, context(rig, range(8))


def kept(base: NDArray[np.uint64], block: int, shape: tuple[int, int]) -> NDArray[np.uint8]:
    """What was brought of a block, a copy."""
    size = shape[0] * shape[1] * RUN
    memory = (ctypes.c_uint8 * size).from_address(int(base[block]))
    return np.frombuffer(memory, np.uint8).copy().reshape(*shape, RUN)


def wanted(name: int, layer: int, channels: NDArray[np.int32]) -> NDArray[np.uint8]:
    """``channels [kv_heads, count]`` of one block."""
    first = SHAPE.first_channel_page(layer)
    whole = content(SHAPE, name)[first : first + 8].reshape(HEADS, HEAD_SIZE, RUN)
    return np.stack([whole[head, chosen] for head, chosen in enumerate(channels)])


def choose(rig: StoreRig, rows: list[list[int]]) -> tuple[SelectedContexts, ChannelReader]:
    chosen = rig.store.choose([array(slots) for slots in rows], range(len(rows)))
    return chosen, ChannelReader(chosen, HEAD_SIZE, RUN)


@pytest.mark.parametrize("places", [16, 64])
def test_pages_with_a_chosen_channel_are_read_and_the_rest_of_them_is_dropped(
    make_store: MakeStore, places: int
) -> None:
    """With 16 places, the least there are, they come in turns."""
    rig, names = store(make_store, places)
    rows = [[0, 3, 5, 1], [3, 7]]
    chosen, reader = choose(rig, rows)
    before = rig.total("bytes_read", device=rig.paths[0])
    # Row 0: two pages of head 0, one of head 1. Row 1: one and two, another of which is its own.
    channels = np.array([[[1, 7, 9], [24, 25, 31]], [[0, 2, 4], [15, 16, 17]]], np.int32)
    for turn in range(2):
        for layer in range(2):
            base = reader.bring(layer, np.array([0, 1]), channels, zeros)
            blocks = [(row, slot) for row, slots in enumerate(rows) for slot in slots]
            for block, (row, slot) in enumerate(blocks):
                np.testing.assert_array_equal(
                    kept(base, block, (HEADS, 3)), wanted(names[slot], layer, channels[row])
                )
        if turn == 0:
            # Slot 3 is in both rows, and its page of head 0's first channels wanted twice.
            counts = chosen.fetched_channels
            assert (counts.frame, counts.ssd) == (0, 2 * (4 * 3 + 2 * 3 - 1))
            read = rig.total("bytes_read", device=rig.paths[0]) - before
            assert read == counts.ssd * SHAPE.page_bytes
    assert chosen.fetched.ssd == 0
    assert chosen.poisoned == set()
    chosen.close()
    rig.store.drop_context("r")
    rig.assert_no_leak()


@pytest.mark.parametrize("places", [16, 64])
def test_rows_that_share_their_context_read_its_channels_once(
    make_store: MakeStore, places: int
) -> None:
    rig, names = store(make_store, places)
    rows = [list(range(8))] * 4
    chosen, reader = choose(rig, rows)
    before = rig.total("bytes_read", device=rig.paths[0])
    channels = np.tile(np.array([[0, 9], [24, 31]], np.int32), (4, 1, 1))
    base = reader.bring(0, np.arange(4), channels, zeros)
    for block, slot in enumerate(slot for slots in rows for slot in slots):
        got = kept(base, block, (HEADS, 2))
        np.testing.assert_array_equal(got, wanted(names[slot], 0, channels[0]))
    # Two pages of head 0 and one of head 1.
    read = rig.total("bytes_read", device=rig.paths[0]) - before
    assert read == 8 * 3 * SHAPE.page_bytes
    chosen.close()


def test_all_channels_are_all_of_k(make_store: MakeStore) -> None:
    rig, names = store(make_store)
    assert rig.load({0: names[0]}, [], request="r").complete  # in a frame
    chosen, reader = choose(rig, [[1, 0]])
    every = np.tile(np.arange(HEAD_SIZE, dtype=np.int32), (1, HEADS, 1))
    base = reader.bring(1, np.array([0]), every, zeros)
    for block, slot in enumerate((1, 0)):
        got = kept(base, block, (HEADS, HEAD_SIZE))
        np.testing.assert_array_equal(got, wanted(names[slot], 1, every[0]))
    assert (chosen.fetched_channels.frame, chosen.fetched_channels.ssd) == (8, 8)
    chosen.close()


def test_a_bad_page_poisons_its_row_and_no_other(make_store: MakeStore) -> None:
    rig, names = store(make_store)
    chosen, reader = choose(rig, [[0, 1], [2]])
    rig.flip(1, SHAPE.page_offset(SHAPE.first_channel_page(0)) + 3)
    channels = np.zeros((2, HEADS, 1), np.int32)
    base = reader.bring(0, np.array([0, 1]), channels, zeros)
    assert chosen.poisoned == {0}
    assert chosen.bad == [1]
    assert not kept(base, 1, (HEADS, 1))[0].any()
    np.testing.assert_array_equal(kept(base, 2, (HEADS, 1)), wanted(names[2], 0, channels[1]))
    chosen.close()
