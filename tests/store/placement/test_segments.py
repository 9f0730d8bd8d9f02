"""Dividing devices: no overlap, no byte beyond a capacity, and what can stay stays."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from vllm_ssdkv.store.format.segment import Extent, Segment
from vllm_ssdkv.store.format.slot_geometry import I64, SlotGeometry
from vllm_ssdkv.store.placement import segments as dividing
from vllm_ssdkv.store.placement.placement import Placement
from vllm_ssdkv.store.placement.segments import (
    MIN_SHARE,
    SEGMENTS,
    arrange,
    best_striping,
    lanes_over,
    restriped,
    speedup,
)
from vllm_ssdkv.store.placement.stripe_map import StripeMap

ONE = SlotGeometry("opaque", 1, 1, 1, 60_000)
FIVE = SlotGeometry("opaque", 9, 1, 1, 250_000)
DEVICES = 4

SPARSE = SlotGeometry("paged", 3, 4, 2, 4096, summary_pages=1)
ROUNDED = replace(SPARSE, payload_bytes=100_000)
"""Of several units, which a slot does not fill: by heads, rows end inside of one."""
geometries = st.sampled_from([ONE, FIVE, SPARSE, ROUNDED])
replicas = st.sampled_from([1, 1, 2])
situations = st.tuples(
    st.lists(st.sampled_from([0.0, 1.0, 1.0, 2.0, 0.2]), min_size=DEVICES, max_size=DEVICES),
    st.lists(st.integers(0, 700), min_size=DEVICES, max_size=DEVICES),
).map(lambda both: (both[0], [end if w else 0 for w, end in zip(*both, strict=True)]))


@pytest.fixture(autouse=True)
def _small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dividing, "MIN_SLOTS", 16)


def places(placement: Placement, slots: I64) -> list[NDArray[np.generic]]:
    """Devices and offsets of both copies; of the only one, twice."""
    first, second = placement.copies(slots, 0, placement.geometry.slot_bytes)
    second = second or first
    return [first.device, first.offset, second.device, second.offset]


def check_inside(
    geometry: SlotGeometry, segments: list[Segment], weights: list[float], ends: list[int]
) -> Placement:
    """A placement refuses what overlaps; none of it may be beyond the end of its device."""
    placement = Placement(geometry, segments, DEVICES)
    for segment in segments:
        for extent in segment.extents:
            assert extent.end <= ends[extent.device] or not weights[extent.device]
    return placement


@given(geometries, st.lists(st.tuples(situations, replicas), min_size=1, max_size=6))
def test_devices_come_and_go(
    geometry: SlotGeometry, history: list[tuple[tuple[list[float], list[int]], int]]
) -> None:
    segments: list[Segment] = []
    there: set[int] = set()
    for (weights, ends), wanted in history:
        before = {s.first: s for s in segments}
        old = Placement(geometry, segments, DEVICES)
        added = [d for d, weight in enumerate(weights) if weight and d not in there]
        there = {d for d, weight in enumerate(weights) if weight}
        found = arrange(geometry, segments, weights, ends, added, wanted)
        segments = found.segments
        assert {s.copies for s in found.made} <= {min(wanted, len(there))}
        placement = check_inside(geometry, segments, weights, ends)
        assert placement.numbers <= found.numbers
        # A slot stays, where it was, unless its segment had to be cut before it.
        for first, segment in before.items():
            after = next((s for s in found.kept if s.first == first), None)
            kept = after.slots if after is not None else 0
            stripes = StripeMap(geometry, segment.lanes, DEVICES, segment.copies, segment.rule)
            rooms = segment.rooms(DEVICES)
            for extent in segment.extents:
                if weights[extent.device]:
                    free = max(0, ends[extent.device] - extent.begin)
                    rooms[extent.device] = min(extent.units, free)
            assert kept == min(segment.slots, stripes.max_slots(rooms))
            slots = segment.all_slots()[:kept]
            if kept:
                for one, other in zip(places(placement, slots), places(old, slots), strict=True):
                    assert np.array_equal(one, other)
        assert {s.first for s in found.kept} <= before.keys()
        # On the same devices nothing changes any more.
        again = arrange(geometry, segments, weights, ends, (), wanted)
        assert again == (segments, [], found.numbers)


@given(geometries, situations, replicas)
def test_a_new_store_uses_its_devices(
    geometry: SlotGeometry, situation: tuple[list[float], list[int]], wanted: int
) -> None:
    weights, ends = situation
    _, segments, numbers = arrange(geometry, [], weights, ends, (), wanted)
    check_inside(geometry, segments, weights, ends)
    assert numbers == sum(s.slots for s in segments)
    assert all(a.first + a.slots == b.first for a, b in pairwise(segments))
    assert all(
        best_striping(geometry, s, weights, wanted) == (s.lanes, s.copies, s.rule) for s in segments
    )
    usable = [d for d, weight in enumerate(weights) if weight]
    left = list(ends)
    for segment in segments:
        for extent in segment.extents:
            left[extent.device] -= extent.units
    # No device has room left for what would be worth a segment of its own. With two copies, there
    # may be room on one.
    for device in usable if wanted == 1 else ():
        assert left[device] // geometry.units_per_slot <= max(
            1 + MIN_SHARE * numbers, len(lanes_over(usable, weights))
        )


def test_equal_devices_are_all_used_and_divided_into_whole_rows() -> None:
    weights, ends = [1.0] * 4, [1000] * 4
    _, segments, numbers = arrange(FIVE, [], weights, ends)
    stripes = StripeMap(FIVE, (0, 1, 2, 3), 4)
    assert numbers == stripes.max_slots(ends) == 1000 * 4 // stripes.geometry.units_per_slot
    assert {s.lanes for s in segments} == {(0, 1, 2, 3)}
    assert all(s.slots % 4 == 0 for s in segments[:-1])
    assert SEGMENTS // 2 < len(segments) <= SEGMENTS


def test_unequal_capacities_are_used_by_further_segments() -> None:
    _, segments, numbers = arrange(ONE, [], [1.0] * 3, [100, 100, 400])
    used = [0, 0, 0]
    for segment in segments:
        for extent in segment.extents:
            used[extent.device] += extent.units
    assert used == [100, 100, 400]
    assert numbers == 600
    assert {s.lanes for s in segments} == {(0, 1, 2), (2,)}


def test_an_added_device_gets_its_share_of_every_segment() -> None:
    _, segments, numbers = arrange(ONE, [], [1.0, 1.0, 0.0, 0.0], [320, 320, 0, 0])
    weights, ends = [1.0, 1.0, 1.0, 0.0], [320, 320, 320, 0]
    wider, made, more = arrange(ONE, segments, weights, ends, [2])
    assert [s.first for s in wider] == [s.first for s in segments]
    assert [s.slots for s in wider] == [s.slots for s in segments]
    anew = [restriped(ONE, s, best_striping(ONE, s, weights), DEVICES) for s in wider]
    assert {frozenset(s.lanes) for s in anew} == {frozenset({0, 1, 2})}
    assert sum(s.slots for s in anew) == 960
    assert made == []
    assert more >= numbers + 320


def test_a_removed_device_leaves_what_does_not_touch_it() -> None:
    _, segments, numbers = arrange(ONE, [], [1.0] * 3, [300] * 3)
    after, made, same = arrange(ONE, segments, [1.0, 0.0, 1.0], [300, 0, 300])
    assert (after, made, same) == (segments, [], numbers)
    narrower = [restriped(ONE, s, best_striping(ONE, s, [1.0, 0.0, 1.0]), 3) for s in after]
    assert sum(s.slots for s in narrower) == 600


def test_lanes_that_are_as_good_are_left() -> None:
    """Devices listed in another order are the same devices."""
    segments = arrange(ONE, [], [1.0, 2.0], [30, 60]).made
    segment = segments[0]
    assert segment.lanes == (1, 0, 1)
    turned = Segment(0, 9, 9, (1, 1, 0), segment.extents)
    assert best_striping(ONE, turned, [1.0, 2.0]).lanes == turned.lanes
    assert best_striping(ONE, turned, [1.0, 1.0]).lanes == (0, 1)
    assert best_striping(ONE, turned, [0.0, 0.0]).lanes == turned.lanes
    with pytest.raises(ValueError, match="weights"):
        lanes_over([0], [0.0])


@pytest.mark.parametrize(
    ("lanes", "copies", "weights", "expected"),
    [
        ((0, 1, 2, 3), 1, (1.0, 1.0, 1.0, 1.0), 1.0),
        ((0, 1, 2, 3), 1, (1.0, 1.0, 1.0, 0.2), 4.0),  # of 0.2, 3.2
        ((0, 1, 2, 3), 2, (1.0, 1.0, 1.0, 0.2), 1.0),  # reads avoid it already
        ((0, 1), 1, (1.0, 1.0, 1.0, 1.0), 2.0),
        ((0, 1), 2, (1.0, 1.0, 1.0, 1.0), 2.0),
        ((0, 1, 2, 3), 1, (1.0, 1.0, 1.0, 0.0), 1.0),  # it cannot be read at all
        ((0, 1, 2), 1, (1.0, 1.0, 1.0, 1.0), 4 / 3),
        ((0, 1, 2, 0, 1, 2, 3), 1, (1.0, 1.0, 1.0, 1.0), 8 / 7),
    ],
)
def test_what_a_segment_would_gain(
    lanes: tuple[int, ...], copies: int, weights: tuple[float, ...], expected: float
) -> None:
    extents = tuple(Extent(device, 0, 100) for device in range(DEVICES))
    segment = Segment(0, 10, 10, lanes, extents, copies)
    striping = best_striping(ONE, segment, weights, copies)
    assert speedup(segment, striping, weights) == pytest.approx(expected, rel=0.05)
