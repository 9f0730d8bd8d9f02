"""The table of summaries: who goes first, however many come at a time."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_ssdkv.store.cache.summaries import NO_ROW, SummaryTable
from vllm_ssdkv.store.format.slot_geometry import SlotGeometry
from vllm_ssdkv.store.memory.arena import Arena
from vllm_ssdkv.store.memory.summary_rows import row_bytes, with_summaries

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
