"""Geometry and striping: every byte has one place, no two bytes share one, nothing is wasted."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_ssdkv.store.format.slot_geometry import (
    MAX_SLOT_BYTES,
    MERGE_BYTES,
    PAGE_ALIGN,
    STRIPE_UNIT,
    SUPERBLOCK_BYTES,
    SlotGeometry,
)
from vllm_ssdkv.store.placement.lanes import lanes_for
from vllm_ssdkv.store.placement.stripe_map import StripeMap


@st.composite
def geometries(draw: st.DrawFn) -> SlotGeometry:
    kind = draw(st.sampled_from(["opaque", "paged"]))
    layers = draw(st.integers(1, 40))
    encrypted = draw(st.booleans())
    if kind == "opaque":
        return SlotGeometry("opaque", layers, 1, 1, draw(st.integers(1, 200_000)), encrypted)
    payload = draw(st.one_of(st.sampled_from([4096, 8192, 12288, 700_000]), st.integers(1, 20_000)))
    heads, groups = draw(st.integers(1, 8)), draw(st.integers(1, 4))
    summaries = draw(st.integers(0, 9))
    channels = draw(st.integers(0, 9)) if summaries else 0
    return SlotGeometry("paged", layers, heads, groups, payload, encrypted, summaries, channels)


weight_lists = st.one_of(
    st.integers(1, 9).map(lambda n: [1.0] * n),
    st.lists(st.sampled_from([1.0, 2.0, 3.0, 5.5, 7.0]), min_size=1, max_size=6),
)


def striped(geometry: SlotGeometry, weights: list[float]) -> StripeMap:
    return StripeMap(geometry, lanes_for(weights), len(weights))


maps = st.builds(striped, geometries(), weight_lists)


@given(geometries())
def test_pages_follow_the_header_without_gaps(shape: SlotGeometry) -> None:
    assert shape.page_bytes % PAGE_ALIGN == 0
    assert 0 <= shape.page_bytes - shape.payload_bytes < PAGE_ALIGN
    assert shape.header_bytes % PAGE_ALIGN == 0
    tags = 16 * (shape.pages + 1) if shape.encrypted else 0
    assert shape.header_used == 128 + 8 * shape.pages + tags
    assert 0 <= shape.header_bytes - shape.header_used - 8 < shape.quantum
    assert shape.page_offset(0) == shape.header_bytes
    assert shape.page_offset(shape.pages) == shape.slot_bytes
    tail = shape.summary_pages + shape.layers * shape.channel_pages
    assert (shape.tail_pages, shape.pages) == (tail, shape.kv_pages + tail)
    assert shape.tail_bytes == tail * shape.page_bytes
    assert shape.frame_bytes == shape.page_offset(shape.kv_pages)
    for layer in range(shape.layers + 1):
        first = layer * shape.pages_per_layer
        assert shape.first_page(layer) == first
        assert shape.layer_offset(layer) == shape.page_offset(first)
        behind = shape.kv_pages + shape.summary_pages
        assert shape.first_channel_page(layer) == behind + layer * shape.channel_pages
    assert shape.first_page(shape.layers) == shape.kv_pages
    assert shape.first_channel_page(shape.layers) == shape.pages


@pytest.mark.parametrize(
    ("kind", "layers", "heads", "groups", "payload", "text"),
    [
        ("other", 1, 1, 1, 1, "kind"),
        ("opaque", 0, 1, 1, 1, "layers"),
        ("opaque", 1, 2, 1, 1, "opaque"),
        ("opaque", 1, 1, 2, 1, "opaque"),
        ("paged", 1, 0, 1, 1, "heads"),
        ("paged", 1, 1, -1, 1, "groups"),
        ("paged", 1, 1, 1, 0, "payload_bytes"),
        ("opaque", 1, 1, 1, MAX_SLOT_BYTES, "exceeds"),
    ],
)
def test_impossible_geometry_is_refused(
    kind: str, layers: int, heads: int, groups: int, payload: int, text: str
) -> None:
    with pytest.raises(ValueError, match=text):
        SlotGeometry(kind, layers, heads, groups, payload)  # type: ignore[arg-type]  # on purpose


@pytest.mark.parametrize(("kind", "summaries"), [("opaque", 1), ("paged", -1)])
def test_impossible_summaries_are_refused(kind: str, summaries: int) -> None:
    with pytest.raises(ValueError, match="summar"):
        SlotGeometry(kind, 1, 1, 1, 4096, summary_pages=summaries)  # type: ignore[arg-type]


@pytest.mark.parametrize(("summaries", "channels"), [(0, 1), (1, -1)])
def test_impossible_channel_pages_are_refused(summaries: int, channels: int) -> None:
    with pytest.raises(ValueError, match="channel_pages"):
        SlotGeometry("paged", 1, 1, 1, 4096, False, summaries, channels)


@pytest.mark.parametrize(
    ("summaries", "channels", "record"),
    [(0, 0, "spread"), (1, 1, "spread"), (1, 0, "means"), (1, 0, "codes_2"), (0, 0, "codes_1")],
)
def test_impossible_records_are_refused(summaries: int, channels: int, record: str) -> None:
    with pytest.raises(ValueError, match=record):
        SlotGeometry("paged", 1, 1, 1, 4096, False, summaries, channels, 0, record)  # type: ignore[arg-type]


@pytest.mark.parametrize(("channels", "scaled_from"), [(0, 2), (1, 2), (1, 3), (1, -2)])
def test_impossible_scales_are_refused(channels: int, scaled_from: int) -> None:
    with pytest.raises(ValueError, match="scaled_from"):
        SlotGeometry("paged", 1, 1, 1, 4096, False, 1, channels, scaled_from)


@settings(max_examples=60, deadline=None)
@given(maps, st.data())
def test_extents_cover_exactly_the_requested_bytes(stripes: StripeMap, data: st.DataObject) -> None:
    slot_bytes = stripes.geometry.slot_bytes
    length = data.draw(st.integers(1, slot_bytes))
    slots = np.array(data.draw(st.lists(st.integers(0, 10_000), max_size=12)), dtype=np.int64)
    if data.draw(st.booleans()):
        offset: int | np.ndarray = data.draw(st.integers(0, slot_bytes - length))
    else:
        offset = np.array(
            [data.draw(st.integers(0, slot_bytes - length)) for _ in slots], dtype=np.int64
        )
    merged = data.draw(st.booleans())
    extents = stripes.extents(slots, offset, length, merged=merged)
    # The pieces are back to back in the buffer, in order, without hole or overlap.
    ends = extents.buffer + extents.length.astype(np.uint64)
    assert ends[-1:].tolist() == ([slots.size * length] if slots.size else [])
    assert extents.buffer[:1].tolist() == ([0] if slots.size else [])
    assert np.array_equal(extents.buffer[1:], ends[:-1])
    assert np.array_equal(extents.buffer // length, extents.slot_index.astype(np.uint64))
    assert bool((extents.length > 0).all())
    most = max(MERGE_BYTES, stripes.geometry.unit_bytes) if merged else stripes.geometry.unit_bytes
    assert bool((extents.length <= most).all())


def place_of(stripes: StripeMap, slot: int, byte: int) -> tuple[int, int]:
    """Device and offset of one byte, by the definition: count the units that precede it."""
    n, units = len(stripes.lanes), stripes.geometry.units_per_slot
    unit = byte // stripes.geometry.unit_bytes
    device = stripes.lanes[(slot + unit) % n]
    row = slot // n
    per_row = sum(stripes.lanes[(s + u) % n] == device for s in range(n) for u in range(units))
    before = row * per_row + sum(
        stripes.lanes[(s + u) % n] == device
        for s in range(slot % n + 1)
        for u in range(units if s < slot % n else unit)
    )
    return (
        device,
        SUPERBLOCK_BYTES
        + before * stripes.geometry.unit_bytes
        + byte % stripes.geometry.unit_bytes,
    )


@settings(max_examples=60, deadline=None)
@given(maps, st.integers(0, 500), st.data())
def test_every_byte_lies_where_the_definition_says(
    stripes: StripeMap, slot: int, data: st.DataObject
) -> None:
    slot_bytes = stripes.geometry.slot_bytes
    whole = stripes.extents(np.array([slot]), 0, slot_bytes, merged=data.draw(st.booleans()))
    for byte in data.draw(st.lists(st.integers(0, slot_bytes - 1), min_size=1, max_size=4)):
        which = int(np.searchsorted(whole.buffer, byte, side="right")) - 1
        within = byte - int(whole.buffer[which])
        found = int(whole.device[which]), int(whole.offset[which]) + within
        assert found == place_of(stripes, slot, byte)
        single = stripes.extents(np.array([slot]), byte, 1)
        assert (int(single.device[0]), int(single.offset[0])) == found


@settings(max_examples=60, deadline=None)
@given(maps, st.integers(1, 40))
def test_slots_never_overlap_and_fill_the_device(stripes: StripeMap, num_slots: int) -> None:
    extents = stripes.extents(np.arange(num_slots, dtype=np.int64), 0, stripes.geometry.slot_bytes)
    slack = (
        stripes.geometry.units_per_slot * stripes.geometry.unit_bytes - stripes.geometry.slot_bytes
    )
    assert 0 <= slack < stripes.geometry.units_per_slot * stripes.geometry.quantum
    for device in range(stripes.devices):
        mine = extents.device == device
        order = np.argsort(extents.offset[mine])
        begin = extents.offset[mine][order].astype(np.int64)
        end = begin + extents.length[mine][order].astype(np.int64)
        size = (
            SUPERBLOCK_BYTES + stripes.device_units(device, num_slots) * stripes.geometry.unit_bytes
        )
        assert bool((begin[1:] >= end[:-1]).all())
        assert bool((begin >= SUPERBLOCK_BYTES).all())
        assert bool((end <= size).all())
        # Only slot tails (the unused end of a last unit) separate neighbours.
        used = SUPERBLOCK_BYTES + int((end - begin).sum())
        assert size - used <= slack * num_slots
        gaps = begin[1:] - end[:-1]
        assert gaps.size == 0 or int(gaps.max()) <= slack
    total = sum(stripes.device_units(d, num_slots) for d in range(stripes.devices))
    assert total == num_slots * stripes.geometry.units_per_slot


@settings(max_examples=60, deadline=None)
@given(maps)
def test_units_are_aligned_and_no_page_straddles_two(stripes: StripeMap) -> None:
    shape = stripes.geometry
    assert stripes.geometry.unit_bytes <= STRIPE_UNIT
    assert stripes.geometry.unit_bytes % PAGE_ALIGN == 0
    if shape.slot_bytes <= STRIPE_UNIT // shape.quantum * shape.quantum:
        assert (stripes.geometry.units_per_slot, stripes.geometry.unit_bytes) == (
            1,
            shape.slot_bytes,
        )
    if shape.kind == "paged" and shape.page_bytes <= STRIPE_UNIT:
        for page in range(shape.pages):
            assert len(stripes.extents(np.array([3]), shape.page_offset(page), 1).device) == 1
            piece = stripes.extents(np.array([3]), shape.page_offset(page), shape.page_bytes)
            assert len(piece.device) == 1


@settings(max_examples=60, deadline=None)
@given(maps, st.integers(0, 100))
def test_touches_agrees_with_extents(stripes: StripeMap, first: int) -> None:
    slots = np.arange(first, first + 2 * len(stripes.lanes), dtype=np.int64)
    extents = stripes.extents(slots, 0, stripes.geometry.slot_bytes)
    for device in range(stripes.devices):
        touched = np.zeros(slots.size, dtype=np.bool_)
        touched[extents.slot_index[extents.device == device]] = True
        assert np.array_equal(stripes.touches(device, slots), touched)


@settings(max_examples=60, deadline=None)
@given(maps, st.data())
def test_max_slots_is_the_largest_that_fits(stripes: StripeMap, data: st.DataObject) -> None:
    span = 30 * stripes.geometry.units_per_slot
    rooms = [data.draw(st.integers(0, span)) for _ in range(stripes.devices)]

    def fits(num_slots: int) -> bool:
        return all(stripes.device_units(d, num_slots) <= room for d, room in enumerate(rooms))

    most = stripes.max_slots(rooms)
    assert most == 0 or fits(most)
    assert not fits(most + 1)


def test_one_layer_of_many_slots_loads_all_devices_equally() -> None:
    shape = SlotGeometry("paged", 32, 8, 1, 8192)
    stripes = striped(shape, [1.0] * 8)
    layer = stripes.extents(np.arange(800), shape.layer_offset(7), shape.layer_bytes)
    load = np.bincount(layer.device, weights=layer.length, minlength=8)
    assert load.tolist() == [load[0]] * 8


def test_a_slow_device_gets_its_share_only() -> None:
    shape = SlotGeometry("opaque", 32, 1, 1, 65536)
    stripes = striped(shape, [1.0, 1.0, 1.0, 0.2])
    load = [stripes.device_units(d, 16_000) for d in range(4)]
    assert load[3] / load[0] == pytest.approx(0.2, rel=0.03)


def test_a_single_device_reads_a_slot_in_few_requests() -> None:
    stripes = striped(SlotGeometry("opaque", 32, 1, 1, 262_144), [1.0])
    whole = stripes.extents(np.arange(2), 0, stripes.geometry.slot_bytes)
    assert stripes.geometry.units_per_slot == 17
    assert whole.slot_index.tolist() == [0, 0, 0, 1, 1, 1]


def test_impossible_requests_are_refused() -> None:
    stripes = striped(SlotGeometry("opaque", 1, 1, 1, 4096), [1.0, 1.0])
    slot_bytes = stripes.geometry.slot_bytes
    with pytest.raises(ValueError, match="leave the slot"):
        stripes.extents(np.array([0]), 1, slot_bytes)
    with pytest.raises(ValueError, match="leave the slot"):
        stripes.extents(np.array([0, 1]), np.array([0, -1]), 1)
    with pytest.raises(ValueError, match="no slot -1"):
        stripes.extents(np.array([-1]), 0, 1)
    with pytest.raises(ValueError, match="0 bytes"):
        stripes.extents(np.array([0]), 0, 0)
    with pytest.raises(ValueError, match="device 2"):
        stripes.touches(2, np.array([0]))
    with pytest.raises(ValueError, match="device -1"):
        stripes.device_units(-1, 1)
    with pytest.raises(ValueError, match="num_slots"):
        stripes.device_units(0, -1)
    with pytest.raises(ValueError, match="rooms"):
        stripes.max_slots([1])
    for lanes in ([], [0, 2], [-1]):
        with pytest.raises(ValueError, match="lanes"):
            StripeMap(stripes.geometry, lanes, 2)
    assert stripes.extents(np.empty(0, dtype=np.int64), 0, 1).device.shape == (0,)


# ---- two copies ----


@settings(max_examples=60, deadline=None)
@given(
    geometries(),
    st.lists(st.sampled_from([1.0, 2.0, 3.0, 5.5]), min_size=2, max_size=6),
    st.data(),
)
def test_two_copies_share_nothing(
    geometry: SlotGeometry, weights: list[float], data: st.DataObject
) -> None:
    """They are cut alike, on different devices, and no unit is there twice."""
    stripes = StripeMap(geometry, lanes_for(weights, copies=2), len(weights), copies=2)
    count = data.draw(st.integers(1, 2 * len(stripes.lanes)))
    slots = np.arange(count, dtype=np.int64)
    first, second = (
        stripes.extents(slots, 0, geometry.slot_bytes, copy) for copy in range(stripes.copies)
    )
    for name in ("length", "slot_index", "buffer"):
        np.testing.assert_array_equal(getattr(first, name), getattr(second, name))
    assert (first.device != second.device).all()
    device = np.concatenate([first.device, second.device])
    offset = np.concatenate([first.offset, second.offset]).astype(np.int64)
    place = (offset - SUPERBLOCK_BYTES) // stripes.geometry.unit_bytes
    for number in range(len(weights)):
        mine = np.sort(place[device == number])
        np.testing.assert_array_equal(mine, np.arange(stripes.device_units(number, count)))
        one = np.arange(len(weights)) == number
        assert not stripes.lost(one, slots).any()
    assert stripes.lost(np.full(len(weights), True), slots).all()
    away = data.draw(st.sets(st.integers(0, len(weights) - 1)))
    out = np.isin(np.arange(len(weights)), list(away))
    gone = np.zeros(count, dtype=np.bool_)
    gone[first.slot_index[out[first.device] & out[second.device]]] = True
    np.testing.assert_array_equal(stripes.lost(out, slots), gone)
