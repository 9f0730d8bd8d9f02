"""Units: by either rule every byte of every slot has one place on each of its lanes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import UNSET

from tests.store.conftest import OPAQUE, PAGED, SUMMED
from vllm_ssdkv.store.format.segment import Rule
from vllm_ssdkv.store.format.slot_geometry import STRIPE_UNIT, SUPERBLOCK_BYTES, SlotGeometry
from vllm_ssdkv.store.placement.lanes import lanes_for
from vllm_ssdkv.store.placement.stripe_map import StripeMap
from vllm_ssdkv.store.placement.units import rule_for, units_of

RULES: tuple[Rule, ...] = (UNSET, "heads")
SPARSE = st.builds(
    SlotGeometry,
    st.just("paged"),
    layers=st.integers(1, 5),
    heads=st.integers(1, 5),
    groups=st.integers(1, 4),
    payload_bytes=st.sampled_from([1000, 4096, 20_000, 300_000]),
    summary_pages=st.integers(1, 4),
    channel_pages=st.integers(0, 4),
)


@st.composite
def stripe_maps(draw: st.DrawFn) -> StripeMap:
    copies = draw(st.integers(1, 2))
    weights = draw(st.lists(st.sampled_from([1.0, 2.0, 3.0]), min_size=copies, max_size=5))
    lanes = lanes_for(weights, copies)
    return StripeMap(draw(SPARSE), lanes, len(weights), copies, draw(st.sampled_from(RULES)))


@settings(max_examples=150, deadline=None)
@given(stripe_maps(), st.integers(1, 12))
def test_places_do_not_overlap_and_copies_share_no_device(stripes: StripeMap, slots: int) -> None:
    every = np.arange(slots, dtype=np.int64)
    size = stripes.geometry.slot_bytes
    found = [stripes.extents(every, 0, size, copy) for copy in range(stripes.copies)]
    for copy in found:
        ends = copy.buffer + copy.length
        assert (copy.buffer[0], int(ends[-1])) == (0, slots * size)
        assert np.array_equal(copy.buffer[1:], ends[:-1])
    if stripes.copies == 2:
        first, second = found
        assert np.array_equal(first.length, second.length)
        assert (first.device != second.device).all()
    device, offset, length = (
        np.concatenate([getattr(copy, name) for copy in found]).astype(np.int64)
        for name in ("device", "offset", "length")
    )
    for number in range(stripes.devices):
        order = np.argsort(offset[device == number])
        begin = offset[device == number][order]
        end = begin + length[device == number][order]
        assert (begin[1:] >= end[:-1]).all()
        room = stripes.device_units(number, slots) * stripes.geometry.unit_bytes
        assert begin.min(initial=SUPERBLOCK_BYTES) >= SUPERBLOCK_BYTES
        assert end.max(initial=0) <= SUPERBLOCK_BYTES + room
        touched = np.isin(every, np.concatenate([c.slot_index[c.device == number] for c in found]))
        assert np.array_equal(stripes.touches(number, every), touched)


@settings(max_examples=150, deadline=None)
@given(SPARSE, st.integers(2, 6), st.integers(0, 20), st.integers(1, 2))
def test_the_stretch_of_a_slot_on_a_device_is_contiguous(
    geometry: SlotGeometry, devices: int, slot: int, copies: int
) -> None:
    stripes = StripeMap(geometry, range(devices), devices, copies, "heads")
    for copy in range(copies):
        found = stripes.extents(np.array([slot]), 0, geometry.slot_bytes, copy)
        for device in range(devices):
            mine = found.device == device
            end = found.offset[mine] + found.length[mine]
            assert np.array_equal(found.offset[mine][1:], end[:-1])


@settings(max_examples=150, deadline=None)
@given(SPARSE, st.integers(2, 6), st.integers(0, 20))
def test_heads_go_round_the_lanes(geometry: SlotGeometry, lanes: int, slot: int) -> None:
    stripes = StripeMap(geometry, range(lanes), lanes, rule="heads")

    def device(page: int) -> int:
        at = geometry.page_offset(page)
        found = stripes.extents(np.array([slot]), at, geometry.page_bytes)
        assert len(found.device) == 1
        return int(found.device[0])

    for layer in range(geometry.layers):
        for head in range(geometry.heads):
            for group in range(geometry.groups):
                page = geometry.first_page(layer) + head * geometry.groups + group
                assert device(page) == (slot + layer + head) % lanes
        for page in range(geometry.channel_pages):
            head = page * geometry.heads // geometry.channel_pages
            assert (
                device(geometry.first_channel_page(layer) + page) == (slot + layer + head) % lanes
            )
    found = stripes.extents(np.array([slot]), 0, geometry.header_bytes)
    assert (found.device == slot % lanes).all()


@settings(max_examples=100, deadline=None)
@given(SPARSE, st.sampled_from(RULES))
def test_no_page_is_cut_and_no_unit_too_large(geometry: SlotGeometry, rule: Rule) -> None:
    units = units_of(geometry, rule)
    most = max(STRIPE_UNIT, geometry.header_bytes, geometry.page_bytes)
    assert (np.diff(units.start) <= most).all()
    assert ((units.start - geometry.header_bytes) % geometry.page_bytes == 0)[1:-1].all()


@settings(max_examples=100, deadline=None)
@given(stripe_maps(), st.data())
def test_as_many_slots_as_fit(stripes: StripeMap, data: st.DataObject) -> None:
    rooms = [data.draw(st.integers(0, 60)) for _ in range(stripes.devices)]
    slots = stripes.max_slots(rooms)
    used = sorted(set(stripes.lanes))
    assert all(stripes.device_units(d, slots) <= rooms[d] for d in used)
    assert any(stripes.device_units(d, slots + 1) > rooms[d] for d in used)


@pytest.mark.parametrize(
    ("geometry", "lanes", "rule"),
    [
        (SUMMED, (0, 1), "heads"),
        (SUMMED, (1, 1), UNSET),  # nowhere to go
        (replace(SUMMED, heads=1), (0, 1), UNSET),
        (PAGED, (0, 1), UNSET),  # all pages are read
        (OPAQUE, (0, 1), UNSET),
    ],
)
def test_rule_of_new_segments(geometry: SlotGeometry, lanes: tuple[int, ...], rule: Rule) -> None:
    assert rule_for(geometry, lanes) == rule
