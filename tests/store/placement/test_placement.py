"""Segments: every byte of every slot has one place, whatever segments there are."""

from __future__ import annotations

import pickle
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import UNSET
from msgspec.structs import replace

from tests.store.conftest import PAGED, SUMMED, array
from vllm_ssdkv.store.format.segment import Extent, Rule, Segment
from vllm_ssdkv.store.format.slot_geometry import SUPERBLOCK_BYTES, SlotGeometry
from vllm_ssdkv.store.placement.placement import Placement
from vllm_ssdkv.store.placement.stripe_map import StripeMap

TWO_UNITS = SlotGeometry("opaque", 3, 1, 1, 204_000)
RULES: tuple[Rule, ...] = (UNSET, "heads")
THREE_UNITS = SlotGeometry("opaque", 5, 1, 1, 280_000)


@st.composite
def placements(draw: st.DrawFn) -> Placement:
    """Segments of several sizes and lane lists, with gaps between their numbers and extents."""
    geometry = draw(st.sampled_from([PAGED, TWO_UNITS, THREE_UNITS, SUMMED]))
    devices = draw(st.integers(1, 4))
    at = [0] * devices
    first = 0
    segments: list[Segment] = []
    for _ in range(draw(st.integers(1, 4))):
        lanes = tuple(draw(st.lists(st.integers(0, devices - 1), min_size=1, max_size=5)))
        slots = draw(st.integers(0, 12))
        first += draw(st.integers(0, 3))
        rule = draw(st.sampled_from(RULES))
        stripes = StripeMap(geometry, lanes, devices, rule=rule)
        extents = []
        for device in range(devices):
            units = stripes.device_units(device, slots) + draw(st.integers(0, 2))
            begin = at[device] + draw(st.integers(0, 2))
            at[device] = begin + units
            if not units:
                continue
            extents.append(Extent(device, begin, units))
        numbers = slots + draw(st.integers(0, 2))
        segments.append(Segment(first, numbers, slots, lanes, tuple(extents), rule=rule))
        first += numbers
    return Placement(geometry, draw(st.permutations(segments)), devices)


def numbers_of(placement: Placement) -> list[int]:
    return sorted(n for s in placement.segments for n in s.all_slots().tolist())


@settings(max_examples=100, deadline=None)
@given(placements())
def test_slots_never_overlap_and_stay_in_their_extents(placement: Placement) -> None:
    slots = array(numbers_of(placement))
    assert placement.slots == len(slots)
    unit = placement.geometry.unit_bytes
    found = placement.extents(slots, 0, placement.geometry.slot_bytes)
    assert int(found.length.sum()) == len(slots) * placement.geometry.slot_bytes
    for device in range(placement.devices):
        mine = found.device == device
        order = np.argsort(found.offset[mine])
        begin = found.offset[mine][order].astype(np.int64)
        end = begin + found.length[mine][order].astype(np.int64)
        assert bool((begin[1:] >= end[:-1]).all())
        assert bool((end <= placement.device_bytes(device)).all())
        for slot, low, high in zip(
            found.slot_index[mine][order].tolist(), begin.tolist(), end.tolist(), strict=True
        ):
            (segment,) = [
                s for s in placement.segments if s.first <= slots[slot] < s.first + s.slots
            ]
            (extent,) = [e for e in segment.extents if e.device == device]
            assert SUPERBLOCK_BYTES + extent.begin * unit <= low
            assert high <= SUPERBLOCK_BYTES + extent.end * unit


@settings(max_examples=100, deadline=None)
@given(placements(), st.data())
def test_a_part_of_many_slots_is_where_the_whole_of_each_is(
    placement: Placement, data: st.DataObject
) -> None:
    known = numbers_of(placement)
    if not known:
        return
    slots = array(data.draw(st.lists(st.sampled_from(known), min_size=1, max_size=10)))
    size = placement.geometry.slot_bytes
    length = data.draw(st.integers(1, size))
    offsets = array([data.draw(st.integers(0, size - length)) for _ in slots])
    found = placement.extents(slots, offsets, length)
    assert np.array_equal(np.sort(found.buffer), found.buffer)
    ends = found.buffer + found.length.astype(np.uint64)
    assert np.array_equal(ends[:-1], found.buffer[1:])
    assert int(ends[-1]) == len(slots) * length
    assert np.array_equal(found.buffer // length, found.slot_index.astype(np.uint64))
    for i, slot in enumerate(slots.tolist()):
        alone = placement.extents(array([slot]), int(offsets[i]), length)
        mine = found.slot_index == i
        for name in ("device", "offset", "length"):
            assert np.array_equal(getattr(found, name)[mine], getattr(alone, name))
        whole = placement.extents(array([slot]), 0, size)
        at = int(np.searchsorted(whole.buffer, offsets[i], side="right")) - 1
        inside = int(offsets[i]) - int(whole.buffer[at])
        assert int(alone.device[0]) == int(whole.device[at])
        assert int(alone.offset[0]) == int(whole.offset[at]) + inside


@settings(max_examples=60, deadline=None)
@given(placements())
def test_numbers_without_a_slot_are_known_as_such(placement: Placement) -> None:
    everything = np.arange(placement.numbers + 3, dtype=np.int64)
    holds = placement.holds(everything)
    assert np.flatnonzero(holds).tolist() == numbers_of(placement)
    found = placement.extents(everything[holds], 0, placement.geometry.slot_bytes)
    for device in range(placement.devices):
        touched = np.zeros(everything.size, dtype=np.bool_)
        touched[everything[holds][found.slot_index[found.device == device]]] = True
        assert np.array_equal(placement.touches(device, everything), touched)
    for missing in everything[~holds].tolist():
        with pytest.raises(ValueError, match=f"no slot {missing}"):
            placement.extents(array([missing]), 0, 1)


def test_impossible_segments_are_refused_and_change_nothing() -> None:
    extents = (Extent(0, 0, 2), Extent(1, 0, 2))
    good = Segment(0, 4, 4, (0, 1), extents)
    placement = Placement(PAGED, [good], 2)
    for segments, text in (
        ([good, Segment(3, 2, 2, (0,), (Extent(0, 2, 2),))], "numbers overlap"),
        ([Segment(0, 3, 4, (0, 1), extents)], "numbers overlap"),
        ([Segment(0, 5, 5, (0, 1), extents)], "exceed its extent on device 0"),
        ([Segment(0, 4, 4, (0, 2), extents)], "lanes"),
        ([good, Segment(4, 2, 2, (0,), (Extent(0, 1, 2),))], "extents overlap on device 0"),
        ([Segment(0, 1, 1, (0,), (Extent(0, 0, 1), Extent(0, 1, 1)))], "two extents"),
    ):
        with pytest.raises(ValueError, match=text):
            placement.change(segments)
        assert placement.segments == (good,)
    with pytest.raises(ValueError, match="device 2 of 2"):
        placement.touches(2, array([0]))


def test_a_store_without_slots() -> None:
    placement = Placement(PAGED, [], 1)
    assert (placement.slots, placement.numbers) == (0, 0)
    assert placement.extents(array([]), 0, 1).device.shape == (0,)
    assert placement.holds(array([0])).tolist() == [False]
    assert placement.device_bytes(0) == SUPERBLOCK_BYTES
    with pytest.raises(ValueError, match="no slot 0"):
        placement.extents(array([0]), 0, 1)


def test_segments_travel_between_processes() -> None:
    segment = Segment(0, 4, 4, (0, 1), (Extent(0, 0, 2), Extent(1, 0, 2)))
    both = (segment, replace(segment, rule="heads"))
    assert pickle.loads(pickle.dumps(both)) == both


def test_a_reader_sees_the_segments_of_one_moment() -> None:
    """The writer's thread asks while the scheduler's message is taken in."""
    wide = Segment(0, 64, 64, (0, 1), (Extent(0, 0, 32), Extent(1, 0, 32)))
    narrow = Segment(0, 64, 32, (1,), (Extent(0, 0, 32), Extent(1, 0, 32)))
    placement = Placement(PAGED, [wide], 2)
    slots = np.arange(32, dtype=np.int64)
    expected = []
    for segment in (wide, narrow):
        placement.change([segment])
        expected.append(placement.extents(slots, 0, 4096).device.tolist())
    stop = threading.Event()

    def change() -> None:
        while not stop.is_set():
            placement.change([wide])
            placement.change([narrow])

    thread = threading.Thread(target=change)
    thread.start()
    try:
        for _ in range(300):
            assert placement.extents(slots, 0, 4096).device.tolist() in expected
    finally:
        stop.set()
        thread.join()
