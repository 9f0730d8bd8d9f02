"""The table of summaries: who goes first, however many come at a time."""

import ctypes

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_ssdkv.connector.worker.device_memory import summary_memory
from vllm_ssdkv.kernels.operands.block_layout import BlockLayout
from vllm_ssdkv.store.cache.summaries import NO_ROW, SummaryTable
from vllm_ssdkv.store.format.slot_geometry import PageRecord, SlotGeometry
from vllm_ssdkv.store.memory.arena import Arena
from vllm_ssdkv.store.memory.device_memory import DeviceMemory
from vllm_ssdkv.store.memory.summary_rows import device_row_bytes, row_bytes, with_summaries

SLOTS, ROWS, PAGE_TOKENS = 120, 60, 4
GEOMETRY = with_summaries(SlotGeometry("paged", 1, 1, 2, 64), PAGE_TOKENS, channels=False)


@pytest.fixture(scope="module")
def arena() -> Arena:
    return Arena(1 << 20)


def table_in(arena: Arena) -> SummaryTable:
    assert ROWS * row_bytes(GEOMETRY, PAGE_TOKENS, channels=False) <= arena.nbytes
    return SummaryTable(arena, 0, GEOMETRY, PAGE_TOKENS, ROWS, SLOTS, channels=False)


def put(table: SummaryTable, slots: list[int]) -> None:
    pages = np.full((len(slots), len(table.pages)), table.address(np.array([0], np.int32), 0)[0])
    table.put(np.array(slots, dtype=np.int64), pages)


@given(
    turns=st.lists(
        st.tuples(
            st.sets(st.integers(0, SLOTS - 1), min_size=1, max_size=40),
            st.sets(st.integers(0, SLOTS - 1), max_size=8),
        ),
        max_size=12,
    )
)
@settings(max_examples=60, deadline=None)
def test_what_was_used_longest_ago_goes_first(
    arena: Arena, turns: list[tuple[set[int], set[int]]]
) -> None:
    """But what is pinned stays, and empty rows are taken before any other."""
    table = table_in(arena)
    used: dict[int, int] = {}
    there: set[int] = set()
    for turn, (slots, pinned) in enumerate(turns):
        rows = table.pin(np.array(sorted(pinned), dtype=np.int64))
        used |= dict.fromkeys(pinned & there, 2 * turn)
        put(table, sorted(slots))
        used |= dict.fromkeys(slots, 2 * turn + 1)
        table.unpin(rows)
        now = set(np.flatnonzero(table._row_of != NO_ROW).tolist())
        gone = there - now
        assert slots <= now
        assert not gone & pinned
        assert len(now) == min(ROWS, len(there | slots))
        kept = [used[slot] for slot in now - slots - pinned]
        assert not gone or not kept or max(used[slot] for slot in gone) <= min(kept)
        there = now


@pytest.mark.parametrize("record", ["bounds", "spread"])
def test_records_on_a_device_are_those_of_dram(arena: Arena, record: PageRecord) -> None:
    """Layers' records begin in the middle of a page, and the last page is not full."""
    shape = SlotGeometry("paged", 5, 3, 2, 128)
    geometry = with_summaries(shape, PAGE_TOKENS, channels=False, record=record)
    assert geometry.summary_pages > 1
    used = geometry.layers * geometry.heads * geometry.groups * geometry.payload_bytes
    assert used % (PAGE_TOKENS * geometry.payload_bytes)
    tails = np.random.default_rng(1).integers(0, 256, (9, geometry.tail_bytes), np.uint8)
    places = np.arange(9, dtype=np.uint64) * np.uint64(geometry.tail_bytes)
    layout = BlockLayout.unpadded(8, PAGE_TOKENS, 3, 8, torch.float16)
    found = []
    for on_device in (False, True):
        table = SummaryTable(
            arena, 0, geometry, PAGE_TOKENS, 7, 20, channels=False, records_on_device=on_device
        )
        held = torch.zeros(7 * device_row_bytes(geometry), dtype=torch.uint8)
        assert table.device_places == on_device * 7 * geometry.summary_pages
        if on_device:
            arena.view(0, arena.nbytes)[:] = 0
            table.keep_on_device(summary_memory(held, table.device_places, layout, geometry))
        slots = np.array([3, 19, 7, 0, 11, 4, 8], dtype=np.int64)
        table.put_tails(slots, tails.ctypes.data + places[:7])
        table.put_tails(slots[:2], tails.ctypes.data + places[7:])
        rows = table.pin(slots)
        size = used // PAGE_TOKENS // geometry.layers
        found.append(
            [
                ctypes.string_at(int(address), size)
                for layer in range(geometry.layers)
                for address in table.address(rows, layer)
            ]
        )
        assert arena.view(0, arena.nbytes).any() != on_device
    assert found[0] == found[1]
    assert len(set(found[0])) == 7 * geometry.layers


def test_rows_that_are_being_written_are_nobodys_until_they_are_kept(arena: Arena) -> None:
    table = SummaryTable(arena, 0, GEOMETRY, PAGE_TOKENS, ROWS, SLOTS, channels=False)
    everyone = np.arange(ROWS + 1, dtype=np.int64)
    rows = table.reserve(everyone)
    base, size = arena.address, row_bytes(GEOMETRY, PAGE_TOKENS, channels=False)
    assert sorted(rows.address[:ROWS].tolist()) == [base + row * size for row in range(ROWS)]
    assert rows.address[ROWS] == 0, "there is no room"
    assert rows.channels == -1
    assert table.held() == 0
    assert table.pinned() == ROWS
    assert (table.reserve(everyone[-1:]).address == 0).all()
    table.forget(everyone[:2])
    table.keep(everyone)
    assert table.pinned() == 0
    kept = table.pin(everyone)
    assert (kept[[0, 1, ROWS]] == NO_ROW).all()
    assert table.address(kept[2:ROWS], 0).tolist() == rows.address[2:ROWS].tolist()
    # Two rows have nothing, the others are in use.
    again = table.reserve(everyone[:3])
    assert np.count_nonzero(again.address) == 2
    table.unpin(kept)
    assert np.count_nonzero(table.reserve(everyone[:3]).address) == 3
    table.keep(everyone[:3])
    assert table.held() == ROWS
    put(table, [ROWS])
    table.reserve(everyone[ROWS:])
    table.keep(everyone[ROWS:])
    assert table.held() == ROWS - 1, "its row of before holds nothing"


def test_a_table_on_a_device_says_when_it_has_no_memory(arena: Arena) -> None:
    table = SummaryTable(
        arena, 0, GEOMETRY, PAGE_TOKENS, ROWS, SLOTS, channels=False, records_on_device=True
    )
    with pytest.raises(ValueError, match="no memory yet"):
        table.address(np.zeros(1, np.int32), 0)
    few = DeviceMemory(4096, table.device_places - 1, lambda source, to: None)
    with pytest.raises(ValueError, match="places for summaries"):
        table.keep_on_device(few)
