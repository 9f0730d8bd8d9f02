"""Pages in a device's memory, which is a tensor here: the same bytes, whatever is where."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.store.chosen_pages import BOTH, context, read_ahead, read_requests, right
from tests.store.conftest import PAGED, SUMMED, MakeStore, StoreRig, array
from vllm_ssdkv.connector.worker.device_memory import hot_memory
from vllm_ssdkv.kernels.operands.block_layout import BlockLayout
from vllm_ssdkv.store.format.slot_geometry import SlotGeometry
from vllm_ssdkv.store.memory.device_memory import DeviceMemory
from vllm_ssdkv.store.read.gpu_pages import GpuFetch
from vllm_ssdkv.store.read.selected_context import SelectedContexts

BLOCKS, LAYER = 6, 1
LAYOUT = BlockLayout.unpadded(32, 16, SUMMED.heads, 64, torch.float32)
EACH = SUMMED.pages_per_layer

Page = tuple[int, int]
"""Block and page in the layer."""


@dataclass
class Hot:
    rig: StoreRig
    names: dict[int, int]
    memory: DeviceMemory
    copied: list[int] = field(default_factory=list)
    """Pages of each copy."""

    def choose(self) -> SelectedContexts:
        return self.rig.store.choose([array(range(BLOCKS))], [0])

    def start(self, chosen: SelectedContexts, pages: Sequence[Page]) -> GpuFetch:
        blocks, numbers = (array(part) for part in zip(*pages, strict=True))
        fetch = chosen.fetch_hot(chosen.pages(LAYER, blocks, numbers))
        assert isinstance(fetch, GpuFetch)
        return fetch

    def bring(self, chosen: SelectedContexts, pages: Sequence[Page]) -> list[bool]:
        """Which of the pages came; of these, which are in the device's memory."""
        fetch = self.start(chosen, pages)
        good = chosen.complete(fetch, array([block for block, _ in pages]))
        inside = []
        for (block, page), ok, address in zip(
            pages, good.tolist(), fetch.address.tolist(), strict=True
        ):
            assert (address != 0) == ok
            if ok:
                data = ctypes.string_at(address, SUMMED.payload_bytes)
                assert data == right(self.rig.geometry, self.names[block], LAYER, page)
                end = self.memory.address + self.memory.places * self.rig.geometry.page_bytes
                inside.append(self.memory.address <= address < end)
        chosen.release(fetch)
        return inside

    def end(self, chosen: SelectedContexts) -> None:
        chosen.close()
        hot = self.rig.store._hot
        assert hot is not None
        assert hot._cache.taken() == 0
        assert hot.held() <= hot.places
        self.rig.store.drop_context("r")
        self.rig.assert_no_leak()


def make(make_store: MakeStore, places: int, geometry: SlotGeometry = SUMMED) -> Hot:
    rig = make_store(geometry, slots=16, frames=16)
    memory = hot_memory(places * geometry.page_bytes, LAYOUT, geometry, torch.device("cpu"))
    copied: list[int] = []

    def copy(source: NDArray[np.uint64], to: NDArray[np.int32]) -> None:
        copied.append(len(to))
        memory.copy(source, to)

    counted = DeviceMemory(memory.address, memory.places, copy)
    rig.store.keep_hot_pages(counted)
    return Hot(rig, context(rig, range(BLOCKS)), counted, copied)


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    places=st.integers(1, 20),
    in_dram=st.sets(st.integers(0, BLOCKS - 1)),
    steps=st.lists(
        st.lists(
            st.tuples(st.integers(0, BLOCKS - 1), st.integers(0, EACH - 1)),
            min_size=1,
            max_size=12,
        ),
        min_size=1,
        max_size=5,
    ),
)
def test_every_page_is_right_wherever_it_is(
    make_store: MakeStore, places: int, in_dram: set[int], steps: list[list[Page]]
) -> None:
    """Pages repeat; a step may want more than there are places."""
    hot = make(make_store, places)
    if in_dram:
        again = {slot: hot.names[slot] for slot in sorted(in_dram)}
        assert hot.rig.load(again, [], request="r").complete
    last: set[Page] = set()
    for pages in steps:
        chosen = hot.choose()
        inside = hot.bring(chosen, pages)
        assert len({p for p, i in zip(pages, inside, strict=True) if i}) == min(
            places, len(set(pages))
        )
        found = chosen.fetched
        assert found.hot + found.frame + found.cache + found.ssd == len(set(pages))
        if len(last) <= places:
            assert found.hot >= len(last & set(pages))
        last = set(pages)
        chosen.close()
    hot.end(hot.choose())


@BOTH
def test_what_was_chosen_lately_does_not_come_again(
    make_store: MakeStore, geometry: SlotGeometry
) -> None:
    hot = make(make_store, 8, geometry)
    pages = [(0, 1), (3, 2), (5, 0), (3, 2)]
    chosen = hot.choose()
    assert all(hot.bring(chosen, pages))
    before = read_requests(hot.rig)
    assert all(hot.bring(chosen, [(3, 2), (0, 1), (0, 1)]))
    assert read_requests(hot.rig) == before
    assert (chosen.fetched.ssd, chosen.fetched.cache, chosen.fetched.hot) == (3, 0, 2)
    assert hot.copied == [3]
    # The page cache knows more; what comes from there is copied.
    hot.rig.store._hot.forget(array([3]))  # type: ignore[union-attr]
    assert all(hot.bring(chosen, [(3, 2)]))
    assert (chosen.fetched.cache, hot.copied) == (1, [3, 1])
    gauges = hot.rig.store.gauges()
    assert (gauges["hot_pages_places"], gauges["hot_pages_held"]) == (8, 3)
    hot.end(chosen)


def test_the_page_that_was_chosen_longest_ago_makes_room(make_store: MakeStore) -> None:
    hot = make(make_store, 3)
    chosen = hot.choose()
    for page in ((0, 0), (0, 1), (0, 2), (0, 0), (0, 3)):
        hot.bring(chosen, [page])
    assert chosen.fetched.hot == 1
    hot.bring(chosen, [(0, 0), (0, 2), (0, 3)])
    assert chosen.fetched.hot == 4
    hot.bring(chosen, [(0, 1)])
    assert chosen.fetched.hot == 4
    hot.end(chosen)


def test_new_content_of_a_slot_is_not_mistaken(make_store: MakeStore) -> None:
    hot = make(make_store, 8)
    chosen = hot.choose()
    assert all(hot.bring(chosen, [(2, 1), (4, 1)]))
    chosen.close()
    hot.rig.write({2: 799})
    hot.names[2] = 799
    chosen = hot.choose()
    assert all(hot.bring(chosen, [(2, 1), (4, 1)]))
    assert (chosen.fetched.hot, chosen.fetched.ssd) == (1, 1)
    hot.end(chosen)


def test_a_wrong_page_is_not_kept(make_store: MakeStore) -> None:
    hot = make(make_store, 8)
    page = SUMMED.first_page(LAYER) + 1
    hot.rig.flip(2, SUMMED.header_bytes + page * SUMMED.page_bytes + 9)
    chosen = hot.choose()
    assert hot.bring(chosen, [(2, 1), (4, 1)]) == [True]
    assert (chosen.poisoned, chosen.bad) == ({0}, [2])
    assert hot.copied == [1]
    assert hot.rig.store.gauges()["hot_pages_held"] == 1
    hot.end(chosen)


def test_a_fetch_that_nobody_waits_for_leaves_nothing(make_store: MakeStore) -> None:
    hot = make(make_store, 8)
    chosen = hot.choose()
    chosen.release(hot.start(chosen, [(2, 1), (4, 1)]))
    assert hot.copied == []
    assert all(hot.bring(chosen, [(2, 1), (4, 1)]))
    assert chosen.fetched.hot == 0
    hot.end(chosen)


def test_what_the_device_has_is_not_read_ahead(make_store: MakeStore) -> None:
    hot = make(make_store, 8)
    chosen = hot.choose()
    assert all(hot.bring(chosen, [(0, 0), (1, 0)]))
    hot.rig.forget_pages(array(range(BLOCKS)))
    read_ahead(chosen, LAYER, 4)
    assert chosen.fetched.ahead == 2
    assert all(hot.bring(chosen, [(0, 0), (1, 0), (2, 0), (3, 0)]))
    assert (chosen.fetched.hot, chosen.fetched.hits) == (2, 2)
    hot.end(chosen)


def test_slots_of_which_nothing_is_chosen_have_no_hot_pages(make_store: MakeStore) -> None:
    memory = hot_memory(1, LAYOUT, SUMMED, torch.device("cpu"))
    assert memory.places == 1
    with pytest.raises(ValueError, match="nothing can be chosen"):
        make_store(PAGED).store.keep_hot_pages(memory)
