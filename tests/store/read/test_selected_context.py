"""Chosen pages: each comes from where it is, right, at most once, or poisons the rows it is for."""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.kit.waiting import until
from tests.store.chosen_pages import (
    BOTH,
    Wanted,
    assert_right,
    bring,
    context,
    read_ahead,
    read_requests,
    right,
)
from tests.store.conftest import (
    BLOCK_TOKENS,
    PATIENCE_S,
    SHORT_S,
    SUMMED,
    MakeStore,
    array,
    content,
)
from tests.store.tails import memory_at
from vllm_ssdkv.store.cache.selected_pages import Pages
from vllm_ssdkv.store.format.slot_geometry import SlotGeometry
from vllm_ssdkv.store.memory.device_memory import DeviceMemory
from vllm_ssdkv.store.memory.summary_rows import ChannelTier, with_summaries


@st.composite
def geometries(draw: st.DrawFn) -> SlotGeometry:
    layers, heads, groups = (draw(st.integers(1, most)) for most in (3, 3, 2))
    shape = (layers, heads, groups, draw(st.sampled_from([512, 5120, 8192])), draw(st.booleans()))
    return with_summaries(
        SlotGeometry("paged", *shape), BLOCK_TOKENS // groups, channels=draw(st.booleans())
    )


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    geometry=geometries(),
    places=st.integers(16, 40),
    contexts=st.lists(st.lists(st.integers(0, 15), min_size=1, max_size=9), min_size=1, max_size=4),
    in_dram=st.sets(st.integers(0, 15)),
    data=st.data(),
)
def test_every_page_comes_from_wherever_it_is(
    make_store: MakeStore,
    geometry: SlotGeometry,
    places: int,
    contexts: list[list[int]],
    in_dram: set[int],
    data: st.DataObject,
) -> None:
    """Rows share slots and pages; more may be wanted than there are places."""
    rig = make_store(geometry, slots=16, frames=16, places=places, summary_rows=40)
    names = context(rig, range(16))
    if in_dram:
        again = {slot: names[slot] for slot in sorted(in_dram)}
        assert rig.load(again, [], request="r").complete
    for _ in range(2):
        chosen = rig.store.choose([array(c) for c in contexts], range(len(contexts)))
        assert chosen.rows.tolist() == list(range(len(contexts)))
        for layer in range(geometry.layers):
            pages = st.integers(0, geometry.pages_per_layer - 1)
            wanted = {
                row: data.draw(st.lists(st.tuples(st.integers(0, len(c) - 1), pages), max_size=12))
                for row, c in enumerate(contexts)
            }
            found = bring(rig, chosen, layer, wanted)
            assert set(found) == {(r, b, p) for r, entries in wanted.items() for b, p in entries}
            assert_right(rig, found, contexts, names, layer)
        assert chosen.poisoned == set()
        assert chosen.bad == []
        chosen.close()
    rig.store.drop_context("r")
    rig.assert_no_leak()


@BOTH
def test_summaries_come_from_where_they_are_once(
    make_store: MakeStore, geometry: SlotGeometry
) -> None:
    rig = make_store(geometry)
    names = context(rig, range(6))
    assert rig.load({0: 700, 1: 701}, [], request="r").complete
    rig.write({20: 720})
    (slot,) = rig.hold({20: 721})
    rows = rig.store.summary_rows(array([slot]))
    assert rows is not None
    summary = content(geometry, 721)[geometry.kv_pages]
    memory_at(int(rows.address[0]), len(summary))[:] = summary
    rig.store.filled(array([slot]))
    names[20] = 721
    order = [3, 0, 20, 5]
    before = read_requests(rig)
    for turn in range(2):
        chosen = rig.store.choose([array(order), array([5, 3])], [0, 1])
        per_layer = geometry.kv_pages // geometry.layers * geometry.payload_bytes // 16
        for layer in range(geometry.layers):
            for at, slot in zip(chosen.page_records(layer).tolist(), [*order, 5, 3], strict=True):
                data = rig.store.arena.view(at - rig.store.arena.address, per_layer)
                summary = content(geometry, names[slot])[geometry.kv_pages]
                summary = summary[layer * per_layer :][:per_layer]
                np.testing.assert_array_equal(data, summary)
        # Slots 0 and 1 have frames; 3 and 5 are read, in the first turn.
        assert read_requests(rig) - before == 2, turn
        chosen.close()
    assert rig.store.gauges()["summaries_held"] == 4


CHANNELS = SlotGeometry("paged", 2, 2, 3, 8192, summary_pages=1, channel_pages=3)


@pytest.mark.parametrize("encrypted", [False, True])
def test_channels_and_sums_come_with_the_summaries(make_store: MakeStore, encrypted: bool) -> None:
    """Two heads of three groups of 16 tokens: all of a layer's K is three pages."""
    geometry = replace(CHANNELS, encrypted=encrypted)
    rig = make_store(geometry, block_tokens=48)
    names = context(rig, range(4))
    before = read_requests(rig)
    for _ in range(2):
        chosen = rig.store.choose([array([3, 1])], [0])
        for layer in range(geometry.layers):
            for block, (at, slot) in enumerate(
                zip(chosen.channels(layer).tolist(), (3, 1), strict=True)
            ):
                pages = content(geometry, names[slot])[geometry.kv_pages :]
                wanted = pages[1 + 3 * layer : 4 + 3 * layer].ravel()
                np.testing.assert_array_equal(memory_at(at, 3 * 8192), wanted)
                # Records of 512 bytes, of which sums take what the head size needs.
                records = pages[0].reshape(16, 512)[2 * layer : 2 * layer + 2]
                sums = chosen.values(layer, 0, 32)[block].view(np.uint8)
                np.testing.assert_array_equal(sums, records[:, :128])
        # What a slot has on a device is neighbours there, not in memory: two slots, three devices.
        assert read_requests(rig) - before == 6
        chosen.close()


def test_a_table_without_channels_brings_sums_only(make_store: MakeStore) -> None:
    rig = make_store(CHANNELS, block_tokens=48, channels="ssd", devices=1)
    names = context(rig, range(4))
    before = rig.total("bytes_read", device=rig.paths[0])
    chosen = rig.store.choose([array([2])], [0])
    assert rig.total("bytes_read", device=rig.paths[0]) - before == CHANNELS.page_bytes
    sums = chosen.values(1, 0, 32)[0].view(np.uint8)
    records = content(CHANNELS, names[2])[CHANNELS.kv_pages].reshape(16, 512)
    np.testing.assert_array_equal(sums, records[2:4, :128])
    chosen.close()


def test_summaries_that_have_no_room_leave_their_rows_out(make_store: MakeStore) -> None:
    rig = make_store(summary_rows=8, geometry=SUMMED)
    names = context(rig, range(16))
    rows = [list(range(7)), list(range(7, 16)), [7], [8, 9]]
    chosen = rig.store.choose([array(row) for row in rows], range(4))
    assert chosen.left_out == {1, 3}
    assert chosen.rows.tolist() == [0, 2]
    found = bring(rig, chosen, 1, {0: [(6, 2)], 2: [(0, 3)]})
    assert_right(rig, found, rows, names, 1)
    assert len(found) == 2
    chosen.close()
    # Rows that are not in use make room.
    chosen = rig.store.choose([array(rows[3]), array(rows[0][:6])], [0, 1])
    assert chosen.left_out == set()
    assert chosen.poisoned == set()
    chosen.close()


def test_slots_without_summaries_cannot_choose(make_store: MakeStore) -> None:
    with pytest.raises(ValueError, match="without summaries"):
        make_store().store.choose([array([1])], [0])


@given(data=st.data(), lists=st.integers(1, 6), together=st.sampled_from([1, 3, 8, 40]))
@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_turns_are_cut_by_pages_that_take_places(
    make_store: MakeStore, data: st.DataObject, lists: int, together: int
) -> None:
    chosen = make_store(SUMMED, places=16).store.choose([], [])
    drawn = [
        sorted(data.draw(st.sets(st.integers(0, 59), max_size=50), label="list"))
        for _ in range(lists)
    ]
    begin = np.cumsum([0, *map(len, drawn)]).astype(np.int32)
    slots = array([slot for one in drawn for slot in one])
    framed = np.isin(slots, sorted(data.draw(st.sets(st.integers(0, 59)), label="framed")))
    pages = Pages(slots, slots * 0, framed.astype(np.uint64))
    turns = chosen.turns(pages, begin, together)
    outside = {*slots[~framed].tolist()}
    assert (len(turns) <= 1) == (len(outside) <= chosen.room == 8)
    positions = [np.arange(len(slots))[turn] for turn in turns]
    assert sorted(np.concatenate([*positions, slots[:0]]).tolist()) == list(range(len(slots)))
    of_page = np.zeros(len(slots), dtype=np.int64)
    for number, turn in enumerate(positions):
        of_page[turn] = number
        assert len({*slots[turn][~framed[turn]].tolist()}) <= chosen.room
    for first, last in pairwise(begin.tolist()):
        assert (np.diff(of_page[first:last]) >= 0).all()
        size = min(together, chosen.room)
        for piece in range(first, last, size):
            assert len({*of_page[piece : min(piece + size, last)].tolist()}) == 1
    chosen.close()


def test_a_page_is_read_once_for_all_who_want_it(make_store: MakeStore) -> None:
    rig = make_store(SUMMED, devices=1)
    context(rig, range(4))
    chosen = rig.store.choose([array([0, 1]), array([1, 2])], [0, 1])
    before = rig.total("bytes_read", device=rig.paths[0])
    wanted: Wanted = {0: [(1, 3), (0, 0), (1, 3)], 1: [(0, 3), (0, 0)]}
    assert len(bring(rig, chosen, 2, wanted)) == 4
    read = rig.total("bytes_read", device=rig.paths[0]) - before
    assert read == 3 * SUMMED.page_bytes
    assert (chosen.fetched.frame, chosen.fetched.cache, chosen.fetched.ssd) == (0, 0, 3)
    bring(rig, chosen, 2, {1: [(0, 3), (1, 1)]})
    assert (chosen.fetched.frame, chosen.fetched.cache, chosen.fetched.ssd) == (0, 1, 4)
    assert rig.total("bytes_read", device=rig.paths[0]) - before == 4 * SUMMED.page_bytes
    chosen.close()


def test_neighbours_are_one_request(make_store: MakeStore) -> None:
    rig = make_store(SUMMED, devices=1)
    names = context(rig, range(4))
    chosen = rig.store.choose([array([0, 1])], [0])
    before = read_requests(rig)
    found = bring(rig, chosen, 0, {0: [(0, page) for page in range(4)] + [(1, 0), (1, 2), (1, 3)]})
    assert_right(rig, found, [[0, 1]], names, 0)
    assert len(found) == 7
    assert read_requests(rig) - before == 3
    chosen.close()


def test_the_pages_used_longest_ago_make_room(make_store: MakeStore) -> None:
    rig = make_store(SUMMED, places=16)
    context(rig, range(12))
    for _ in range(2):  # summaries are pages, too
        chosen = rig.store.choose([array(range(12))], [0])
        for layer, blocks in enumerate([range(8), range(4), range(4, 12)]):
            bring(rig, chosen, layer, {0: [(block, 0) for block in blocks]})
        chosen.close()
    chosen = rig.store.choose([array(range(12))], [0])
    bring(rig, chosen, 1, {0: [(block, 0) for block in range(4)]})
    bring(rig, chosen, 2, {0: [(block, 0) for block in range(4, 12)]})
    assert (chosen.fetched.cache, chosen.fetched.ssd) == (12, 0)
    bring(rig, chosen, 0, {0: [(0, 1), (1, 1), (2, 1), (3, 1), (4, 1)]})
    bring(rig, chosen, 2, {0: [(block, 0) for block in range(4, 12)]})
    assert (chosen.fetched.cache, chosen.fetched.ssd) == (20, 5)
    chosen.close()


@BOTH
def test_what_a_slot_held_before_is_not_served(
    make_store: MakeStore, geometry: SlotGeometry
) -> None:
    rig = make_store(geometry)
    context(rig, range(4))
    wanted: Wanted = {0: [(0, 1), (1, 1)]}
    chosen = rig.store.choose([array([1, 2])], [0])
    bring(rig, chosen, 0, wanted)
    chosen.close()
    rig.store.drop_context("r")
    rig.write({2: 999}, epoch=2)
    rig.store.extend_context("s", 0, array([2]))
    assert rig.load({2: 999}, [], epoch=2, request="s").complete
    rig.store.frames.forget(array([2]))
    chosen = rig.store.choose([array([2])], [0])
    found = bring(rig, chosen, 0, {0: [(0, 1)]})
    assert found[(0, 0, 1)] == right(geometry, 999, 0, 1)
    summary = rig.store.arena.view(int(chosen.page_records(0)[0]) - rig.store.arena.address, 512)
    np.testing.assert_array_equal(summary, content(geometry, 999)[geometry.kv_pages][:512])
    chosen.close()


# ---- what fails ----


@BOTH
@pytest.mark.parametrize("page", [4, 12])
def test_wrong_bytes_poison_the_rows_that_need_them(
    make_store: MakeStore, geometry: SlotGeometry, page: int
) -> None:
    """The last page, number 12, is the summary."""
    rig = make_store(geometry)
    summary = page == geometry.kv_pages
    names = context(rig, range(6))
    rig.flip(2, geometry.page_offset(page) + 77)
    rows = [[0, 1], [3, 2], [4, 2]]
    chosen = rig.store.choose([array(row) for row in rows], range(3))
    wanted: Wanted = {0: [(0, 0)], 1: [(1, 0), (0, 0)], 2: [(0, 0)]}
    found = bring(rig, chosen, 1, wanted)
    assert_right(rig, found, rows, names, 1)
    # A page that was not asked for harms nobody, a summary everybody.
    assert chosen.poisoned == ({1, 2} if summary else {1})
    assert set(chosen.bad) == {2}
    assert chosen.rows[chosen.alive()].tolist() == ([0] if summary else [0, 2])
    assert rig.total("checksum_failures") == 1
    chosen.close()
    rig.store.drop_context("r")
    rig.assert_no_leak()


@BOTH
@pytest.mark.parametrize("kind", ["eio", "short", "corrupt"])
def test_a_read_that_fails_once_is_tried_again(
    make_store: MakeStore, geometry: SlotGeometry, kind: str
) -> None:
    rig = make_store(geometry)
    names = context(rig, range(8))
    rig.store.choose([array(range(8))], [0]).close()
    rig.faults({"kind": kind, "op": "read", "count": 3})
    chosen = rig.store.choose([array(range(8))], [0])
    found = bring(rig, chosen, 0, {0: [(block, block % 4) for block in range(8)]})
    assert len(found) == 8
    assert_right(rig, found, [list(range(8))], names, 0)
    assert (chosen.poisoned, chosen.bad) == (set(), [])
    assert rig.total("checksum_failures") == 0
    chosen.close()


@pytest.mark.parametrize("kind", ["eio", "dead"])
def test_a_device_that_fails_poisons_the_rows_that_need_it(
    make_store: MakeStore, kind: str
) -> None:
    rig = make_store(SUMMED)
    names = context(rig, range(16))
    rig.store.choose([array(range(16))], [0]).close()
    offset = SUMMED.layer_offset(0)
    device = rig.place(3, offset)[0]
    mine = [slot for slot in names if rig.place(slot, offset)[0] == device]
    rest = [slot for slot in names if slot not in mine]
    rig.faults({"kind": kind, "device": device})
    rows = [mine, rest, [rest[0], mine[0]]]
    chosen = rig.store.choose([array(row) for row in rows], range(3))
    wanted = {r: [(block, 0) for block in range(len(row))] for r, row in enumerate(rows)}
    found = bring(rig, chosen, 0, wanted)
    assert_right(rig, found, rows, names, 0)
    assert chosen.poisoned == {0, 2}
    assert chosen.bad == [], "it may be read again"
    assert chosen.unread
    assert set(chosen.unread) <= set(mine)
    chosen.close()
    rig.faults()
    rig.store.drop_context("r")
    rig.assert_no_leak()


def test_a_hung_device_costs_one_deadline_and_its_places(
    make_store: MakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make_store(SUMMED, places=16)
    names = context(rig, range(12))
    rig.store.choose([array(range(12))], [0]).close()
    offset = SUMMED.layer_offset(0)
    device = rig.place(3, offset)[0]
    mine = [slot for slot in names if rig.place(slot, offset)[0] == device]
    rest = [slot for slot in names if slot not in mine]
    rig.one_deadline(monkeypatch)
    rig.faults({"kind": "stall", "device": device})
    rows = [mine, rest]
    begin = time.monotonic()
    for turn in range(3):
        chosen = rig.store.choose([array(row) for row in rows], range(2))
        wanted = {r: [(block, 0) for block in range(len(row))] for r, row in enumerate(rows)}
        found = bring(rig, chosen, 0, wanted)
        assert {row for row, _, _ in found} == {1}, turn
        assert_right(rig, found, rows, names, 0)
        assert chosen.poisoned == {0}
        assert chosen.bad == []
        chosen.close()
    assert time.monotonic() - begin < PATIENCE_S
    assert rig.total("device_lost", device=rig.paths[device]) == 1
    cache = rig.store._pages
    assert cache is not None
    assert cache.usable() == 16 - len(mine)
    rig.faults()
    until(lambda: cache.usable() == 16, "the return of the places")
    rig.store.drop_context("r")
    rig.assert_no_leak()


@pytest.mark.parametrize("page", [0, 5])
def test_of_two_copies_one_may_be_wrong(make_store: MakeStore, page: int) -> None:
    """Whichever copies are read first."""
    rig = make_store(SUMMED, replicas=2)
    names = context(rig, range(6))
    for slot in names:
        rig.flip(slot, SUMMED.page_offset(page) + 99)
    chosen = rig.store.choose([array(range(6))], [0])
    found = bring(rig, chosen, 1, {0: [(block, 0) for block in range(6)]})
    assert len(found) == 6
    assert_right(rig, found, [list(names)], names, 1)
    assert (chosen.poisoned, chosen.bad) == (set(), [])
    chosen.close()
    rig.store.drop_context("r")
    rig.assert_no_leak()


@BOTH
@pytest.mark.parametrize("first", ["summaries", "asked", "guessed"])
def test_a_hung_device_costs_nothing_but_time_where_there_are_two_copies(
    make_store: MakeStore, monkeypatch: pytest.MonkeyPatch, geometry: SlotGeometry, first: str
) -> None:
    """Whatever is read from it first."""
    rig = make_store(geometry, devices=2, replicas=2, places=48)
    names = context(rig, range(16))
    if first != "summaries":
        rig.store.choose([array(range(16))], [0]).close()
    rig.one_deadline(monkeypatch)
    rig.faults({"kind": "stall", "op": "read", "device": 1})
    for _ in range(2):
        chosen = rig.store.choose([array(range(16))], [0])
        for layer in range(geometry.layers):
            if first == "guessed":
                read_ahead(chosen, layer, 12)
            wanted: Wanted = {0: [(block, 0) for block in range(16)] + [(3, 0), (2, 1)]}
            found = bring(rig, chosen, layer, wanted)
            assert len(found) == 17
            assert_right(rig, found, [list(names)], names, layer)
        assert (chosen.poisoned, chosen.bad) == (set(), [])
        chosen.close()
    assert rig.files.health.quarantined == {1}
    assert rig.total("io_deadline_exceeded") == 1
    cache = rig.store._pages
    assert cache is not None
    assert cache.usable() < 48  # what the device may still write to
    rig.faults()
    rig.store.drop_context("r")
    rig.assert_no_leak()


def test_pages_that_are_late_find_room_beside_guesses(make_store: MakeStore) -> None:
    """Half of all places are for what was asked for; late reads hold up to half of both halves."""
    rig = make_store(SUMMED, devices=2, replicas=2, places=32)
    names = context(rig, range(16))
    rig.store.choose([array(range(16))], [0]).close()
    rig.deadline(SHORT_S)
    rig.faults({"kind": "stall", "op": "read", "device": 1})
    chosen = rig.store.choose([array(range(16))], [0])
    blocks = array(range(16))
    fetch = chosen.fetch(chosen.pages(0, blocks, array([0] * 16)))
    read_ahead(chosen, 1, 16)
    assert chosen.complete(fetch, blocks).all()
    cache = rig.store._pages
    assert cache is not None
    assert 16 <= cache.usable() < 32
    chosen.release(fetch)
    found = bring(rig, chosen, 1, {0: [(block, 0) for block in range(16)]})
    assert len(found) == 16
    assert_right(rig, found, [list(names)], names, 1)
    assert chosen.poisoned == set()
    chosen.close()
    rig.faults()
    rig.store.drop_context("r")
    rig.assert_no_leak()


def test_a_fetch_waits_once_for_each_device_that_hangs(make_store: MakeStore) -> None:
    """A page of which both copies hang poisons the rows that asked for it, and no others."""
    rig = make_store(SUMMED, devices=4, replicas=2, places=48)
    names = context(rig, range(16))
    rig.store.choose([array(range(16))], [0]).close()
    offset = SUMMED.layer_offset(0)
    where = {slot: {rig.place(slot, offset, copy)[0] for copy in (0, 1)} for slot in names}
    lost = [slot for slot in names if where[slot] == {0, 1}]
    rest = [slot for slot in names if slot not in lost]
    assert lost
    rig.deadline(SHORT_S)
    rig.faults(*({"kind": "stall", "op": "read", "device": device} for device in (0, 1)))
    rows = [rest, [rest[0], lost[0]]]
    chosen = rig.store.choose([array(row) for row in rows], range(2))
    wanted = {r: [(block, 0) for block in range(len(row))] for r, row in enumerate(rows)}
    found = bring(rig, chosen, 0, wanted)
    assert_right(rig, found, rows, names, 0)
    assert sorted(block for row, block, _ in found if row == 0) == list(range(len(rest)))
    assert (chosen.poisoned, chosen.bad) == ({1}, [])
    assert rig.files.health.quarantined == {0, 1}
    assert rig.total("io_deadline_exceeded") == 2
    chosen.close()
    rig.faults()
    rig.store.drop_context("r")
    rig.assert_no_leak()


def test_a_fetch_that_nobody_waits_for_leaks_nothing(make_store: MakeStore) -> None:
    rig = make_store(SUMMED)
    context(rig, range(6))
    rig.store.choose([array(range(6))], [0]).close()
    rig.faults({"kind": "latency", "op": "read", "seconds": 0.05})
    chosen = rig.store.choose([array(range(6))], [0])
    chosen.release(chosen.fetch(chosen.pages(0, array([0, 1, 2]), array([0, 1, 2]))))
    chosen.close()
    rig.faults()
    rig.store.drop_context("r")
    rig.assert_no_leak()


# ---- rows that choose, in the stream ----


@pytest.mark.parametrize("layers", [None, [1, 2], [2], []])
@pytest.mark.parametrize("dense_layers", [0, 1, 3])
def test_rows_that_choose_are_streamed_in_dense_layers_only(
    make_store: MakeStore, dense_layers: int, layers: list[int] | None
) -> None:
    """And nobody in layers that do not attend to contexts."""
    rig = make_store(SUMMED, staging=6)
    context(rig, range(12))
    assert rig.load({5: 705, 6: 706}, [], request="r").complete
    rows = [[0, 5, 1], [6, 2, 3], list(range(4, 12))]
    stream = rig.store.stream([array(row) for row in rows], [0, 2], dense_layers, layers)
    got: dict[int, list[list[int]]] = {}
    for layer in range(SUMMED.layers):
        seen: list[list[int]] = [[] for _ in rows]
        for piece in stream.pieces(layer):
            for row in range(len(rows)):
                span = slice(int(piece.row_begin[row]), int(piece.row_end[row]))
                seen[row] += piece.index[span].tolist()
        got[layer] = [sorted(blocks) for blocks in seen]
    whole = [list(range(len(row))) for row in rows]
    reaching = list(range(SUMMED.layers)) if layers is None else layers
    dense = reaching[:dense_layers]
    for layer, blocks in got.items():
        takes_part = [layer in (reaching if row == 1 else dense) for row in range(len(rows))]
        assert blocks == [b if w else [] for w, b in zip(takes_part, whole, strict=True)], layer
    pages = [len(rows[1]) + (layer in dense) * 9 for layer in reaching]  # 12 slots, some shared
    assert stream.pages_in_dram + stream.pages_on_ssd == sum(pages) * SUMMED.pages_per_layer
    assert stream.poisoned == set()
    stream.close()
    rig.store.drop_context("r")
    rig.assert_no_leak()


@pytest.mark.parametrize(
    ("geometry", "tier", "places"),
    [(CHANNELS, "dram", 999), (SUMMED, "dram", 999), (CHANNELS, "ssd", 1)],
)
def test_memory_of_a_device_that_cannot_be_used_is_refused(
    make_store: MakeStore, geometry: SlotGeometry, tier: ChannelTier, places: int
) -> None:
    rig = make_store(geometry, block_tokens=48, channels=tier)
    memory = DeviceMemory(4096, places, lambda source, to: None)
    with pytest.raises(ValueError, match=f"{places} places for summaries"):
        rig.store.keep_on_device(memory)
