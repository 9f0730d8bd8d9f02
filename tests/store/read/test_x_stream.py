"""Contexts that hold X beside those of K and V: two walks of one step, each by its own thread."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from tests.store.conftest import PAGED, PAGED_ENCRYPTED, MakeStore, StoreRig, array
from vllm_ssdkv.store.format.slot_geometry import SlotGeometry
from vllm_ssdkv.store.read.context_stream import ContextStream

SLOTS, PAGES = 30, 2
"""Slots of each walk, and pages of a layer that hold X: half of them."""


def rig_of(make_store: MakeStore, geometry: SlotGeometry, frames: int) -> StoreRig:
    rig = make_store(geometry, slots=2 * SLOTS, frames=frames, staging=8)
    names = {slot: 700 + slot for slot in range(2 * SLOTS)}
    rig.write(names)
    rig.store.extend_context("r", 0, array(list(names)))
    assert rig.load(names, [], request="r").complete
    rig.store.divide_staging(PAGES)
    return rig


def walk(rig: StoreRig, stream: ContextStream, pages: int) -> dict[int, list[np.ndarray]]:
    """Pages of each block of the stream's one row, layer after layer."""
    found: dict[int, list[np.ndarray]] = {}
    geometry, start = rig.geometry, rig.store.arena.address
    for layer in range(geometry.layers):
        for piece in stream.pieces(layer):
            for base, index in zip(piece.base.tolist(), piece.index.tolist(), strict=True):
                data = rig.store.arena.view(base - start, pages * geometry.page_bytes)
                kept = data.reshape(pages, -1)[:, : geometry.payload_bytes].copy()
                found.setdefault(index, []).extend(kept)
    return found


@pytest.mark.parametrize("geometry", [PAGED, PAGED_ENCRYPTED], ids=["plain", "encrypted"])
@pytest.mark.parametrize("in_dram", [0, 10])
def test_two_threads_walk_at_once_and_read_what_they_need(
    make_store: MakeStore, geometry: SlotGeometry, in_dram: int
) -> None:
    rig = rig_of(make_store, geometry, frames=64)
    away = [*range(in_dram, SLOTS), *range(SLOTS + in_dram, 2 * SLOTS)]
    rig.store.frames.forget(array(away))
    before = sum(rig.total("bytes_read", device=path) for path in rig.files.health.paths)
    layers, per_layer = range(geometry.layers), geometry.pages_per_layer
    x = rig.store.stream_x([array(range(SLOTS, 2 * SLOTS))], layers)
    kv = rig.store.stream([array(range(SLOTS))])
    found: dict[int, list[np.ndarray]] = {}
    thread = threading.Thread(target=lambda: found.update(walk(rig, kv, per_layer)))
    thread.start()
    theirs = walk(rig, x, PAGES)
    thread.join()
    assert not kv.poisoned | x.poisoned
    for block in range(SLOTS):
        np.testing.assert_array_equal(np.stack(found[block]), rig.kv(700 + block))
        of_x = rig.kv(700 + SLOTS + block).reshape(geometry.layers, per_layer, -1)[:, :PAGES]
        stacked = np.stack(theirs[block]).reshape(of_x.shape)
        np.testing.assert_array_equal(stacked, of_x)
    assert x.pages_used == x.pages_on_ssd == (SLOTS - in_dram) * geometry.layers * PAGES
    read = sum(rig.total("bytes_read", device=path) for path in rig.files.health.paths) - before
    pages = (SLOTS - in_dram) * geometry.layers * (per_layer + PAGES)
    assert read == pages * geometry.page_bytes
    for stream in (x, kv):
        stream.close()
    rig.store.drop_context("r")
    rig.assert_no_leak()


def test_the_store_is_not_idle_while_x_is_read(make_store: MakeStore) -> None:
    rig = rig_of(make_store, PAGED, frames=64)
    x = rig.store.stream_x([array(range(4))], range(PAGED.layers))
    assert not rig.store.idle()
    x.close()
    rig.store.drop_context("r")
    rig.assert_no_leak()


def test_a_staging_buffer_that_was_not_divided_has_none_for_x(make_store: MakeStore) -> None:
    rig = make_store()
    with pytest.raises(ValueError, match="was not divided"):
        rig.store.stream_x([array([0])], range(PAGED.layers))
