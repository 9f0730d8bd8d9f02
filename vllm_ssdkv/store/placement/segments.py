"""Dividing devices into segments: new ones where there is room, and what becomes of old ones when
devices, sizes or speeds change. Pure arithmetic on units.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from itertools import pairwise
from math import ceil
from typing import NamedTuple

from msgspec import UNSET
from msgspec.structs import replace

from vllm_ssdkv.store.format.segment import Extent, Rule, Segment
from vllm_ssdkv.store.format.slot_geometry import SlotGeometry
from vllm_ssdkv.store.placement.lanes import lanes_for
from vllm_ssdkv.store.placement.stripe_map import StripeMap
from vllm_ssdkv.store.placement.units import rule_for

SEGMENTS = 32
"""Segments that a store of equal devices is made of: what is striped anew at a time, and so what
is given up at a time, is a thirty-second of it."""

MIN_SLOTS = 64
"""Slots of a segment at least, a row of the longest list of lanes: smaller ones would not use all
lanes alike."""

MIN_SHARE = 1 / 64
"""A further run of slots over the devices that have room left is made from this share of the store
on: less is not worth segments of its own."""


class _Space:
    """Free units of each device, as ranges."""

    def __init__(self, ends: Sequence[int], segments: Iterable[Segment]) -> None:
        self._free: list[list[tuple[int, int]]] = [[] for _ in ends]
        at = [0] * len(ends)
        taken = sorted((e for s in segments for e in s.extents), key=lambda e: e.begin)
        for extent in taken:
            self._free[extent.device].append((at[extent.device], extent.begin))
            at[extent.device] = extent.end
        for device, end in enumerate(ends):
            ranges = [*self._free[device], (at[device], end)]
            self._free[device] = [(low, high) for low, high in ranges if low < high]

    def largest(self, device: int) -> int:
        """Units of the largest range."""
        return max((high - low for low, high in self._free[device]), default=0)

    def take(self, device: int, units: int) -> int | None:
        """Take so many units: their beginning; None where no range is large enough."""
        for i, (low, high) in enumerate(self._free[device]):
            if high - low >= units:
                self._free[device][i : i + 1] = [(low + units, high)] if low + units < high else []
                return low
        return None


def lanes_over(
    devices: Sequence[int], weights: Sequence[float], copies: int = 1
) -> tuple[int, ...]:
    """Lanes over some of the devices, in proportion to their weights.

    Args:
        devices: Numbers of the devices.
        weights: Weight of every device of the store, by number.
        copies: Of each slot.

    Raises:
        ValueError: as :func:`lanes_for`.
    """
    return tuple(devices[i] for i in lanes_for([weights[d] for d in devices], copies))


class Striping(NamedTuple):
    """Lanes of a segment's slots on its devices."""

    lanes: tuple[int, ...]
    copies: int
    rule: Rule = UNSET


def best_striping(
    geometry: SlotGeometry, segment: Segment, weights: Sequence[float], replicas: int = 1
) -> Striping:
    """Best striping for the devices that a segment has room on; its own if that is as good.

    Args:
        geometry: Shape of the slots.
        segment: The segment.
        weights: By device; 0 for one that is not to be used.
        replicas: Copies that each slot shall have, where there are so many devices.
    """
    usable = sorted(e.device for e in segment.extents if weights[e.device] > 0)
    if not usable:
        return Striping(segment.lanes, segment.copies, segment.rule)
    copies = min(replicas, len(usable))
    lanes = lanes_over(usable, weights, copies)
    if copies == segment.copies and Counter(lanes) == Counter(segment.lanes):
        lanes = segment.lanes
    return Striping(lanes, copies, rule_for(geometry, lanes))


def speedup(segment: Segment, striping: Striping, weights: Sequence[float]) -> float:
    """Factor by which slots of the segment would be read faster if they were striped so.

    All devices are read from at once, and the one that ends last decides; of two copies each piece
    is read where there is less to do.

    Args:
        segment: As it is.
        striping: As it might be.
        weights: By device, what each is worth; 0 for one that is not there.
    """
    before, after = (
        _rate(lanes, copies, weights)
        for lanes, copies in ((segment.lanes, segment.copies), striping[:2])
    )
    return after / before if before > 0 else 1.0


def _rate(lanes: Sequence[int], copies: int, weights: Sequence[float]) -> float:
    """Slots per second, in the unit of the weights."""
    count = Counter(lanes)
    if copies > 1:
        return sum(weights[device] for device in count)
    return len(lanes) * min(weights[device] / n for device, n in count.items())


def restriped(
    geometry: SlotGeometry, segment: Segment, striping: Striping, devices: int
) -> Segment:
    """The segment striped otherwise, with as many slots as fit; its numbers are yet to be found."""
    stripes = StripeMap(geometry, striping.lanes, devices, striping.copies, striping.rule)
    slots = stripes.max_slots(segment.rooms(devices))
    return Segment(
        segment.first,
        slots,
        slots,
        striping.lanes,
        segment.extents,
        striping.copies,
        rule=striping.rule,
    )


class Arrangement(NamedTuple):
    """The segments of a store on today's devices."""

    kept: list[Segment]
    """Segments that it had, as far as they could stay; the rest of their slots is where it was."""
    made: list[Segment]
    """New ones, without content. Their numbers may have been those of segments that are gone."""
    numbers: int
    """Slot numbers it needs, also when all segments are striped anew."""

    @property
    def segments(self) -> list[Segment]:
        """All of them."""
        return [*self.kept, *self.made]


def arrange(
    geometry: SlotGeometry,
    segments: Sequence[Segment],
    weights: Sequence[float],
    ends: Sequence[int],
    added: Collection[int] = (),
    replicas: int = 1,
) -> Arrangement:
    """The segments of a store on today's devices.

    What fits stays where it is. Segments are cut where a device has become smaller; get a part of
    added devices, for the time when they are striped anew; and new ones fill the room that is
    left, first over all devices, then over those that are larger than others. With two replicas,
    room that one device alone has left is not used.

    Args:
        geometry: Shape of the slots.
        segments: As they were; extents on devices with weight 0 are kept.
        weights: By device; 0 for one that is not there.
        ends: Units of each device; of one that is not there, 0.
        added: Devices that are there again, or for the first time.
        replicas: Copies that each new slot shall have; one where there is one device.
    """
    kept = [s for s in (_cut(geometry, s, weights, ends) for s in segments) if s.slots]
    space = _Space(ends, kept)
    kept = [_widened(s, weights, added, space) for s in kept]
    top = max((s.first + s.numbers for s in kept), default=0)
    made = _fill(geometry, weights, space, top, sum(s.slots for s in kept), replicas)
    numbers = top + sum(s.slots for s in made)
    wanted = [
        max(s.numbers, restriped(geometry, s, striping, len(ends)).slots)
        for s in (*kept, *made)
        for striping in (best_striping(geometry, s, weights, replicas),)
    ]
    if sum(wanted) > sum(s.numbers for s in (*kept, *made)):
        # Room for their new numbers; that of the largest once more, since ranges must be whole.
        numbers = max(numbers, sum(wanted) + max(wanted))
    return Arrangement(kept, made, numbers)


def _cut(
    geometry: SlotGeometry, segment: Segment, weights: Sequence[float], ends: Sequence[int]
) -> Segment:
    def inside(extent: Extent) -> Extent:
        if not weights[extent.device] or extent.end <= ends[extent.device]:
            return extent
        begin = min(extent.begin, ends[extent.device])
        return Extent(extent.device, begin, ends[extent.device] - begin)

    extents = tuple(e for e in map(inside, segment.extents) if e.units)
    if extents == segment.extents:
        return segment
    cut = replace(segment, extents=extents)
    as_it_was = Striping(segment.lanes, segment.copies, segment.rule)
    fitting = restriped(geometry, cut, as_it_was, len(ends)).slots
    slots = min(segment.slots, fitting)
    return replace(cut, numbers=slots, slots=slots)


def _widened(
    segment: Segment, weights: Sequence[float], added: Collection[int], space: _Space
) -> Segment:
    """The segment with an extent on every added device that has room for its share."""
    mine = [e for e in segment.extents if weights[e.device]]
    if not mine:
        return segment
    level = min(e.units / weights[e.device] for e in mine)
    extents = [e for e in segment.extents if weights[e.device] or e.device in segment.lanes]
    for device in sorted(added):
        if any(e.device == device for e in extents):
            continue
        units = ceil(level * weights[device])
        begin = space.take(device, units)
        if begin is not None:
            extents.append(Extent(device, begin, units))
    return replace(segment, extents=tuple(extents))


def _fill(
    geometry: SlotGeometry,
    weights: Sequence[float],
    space: _Space,
    first: int,
    known: int,
    replicas: int,
) -> list[Segment]:
    """New segments in the free space, with numbers from ``first`` on."""
    made: list[Segment] = []
    present = [d for d, weight in enumerate(weights) if weight]
    copies = min(replicas, len(present))
    devices = list(present)
    while len(devices) >= max(1, copies):
        rooms = [space.largest(d) if d in devices else 0 for d in range(len(weights))]
        lanes = lanes_over(devices, weights, copies)
        stripes = StripeMap(geometry, lanes, len(weights), copies, rule_for(geometry, lanes))
        slots = _divisible(stripes, rooms)
        total = known + sum(s.slots for s in made)
        if slots < max(len(stripes.lanes), MIN_SHARE * total):
            # Not even a row, or not worth it: the device that ends first is in the others' way.
            devices.remove(min(devices, key=lambda d: (rooms[d] / weights[d], d)))
            continue
        made += _divided(stripes, slots, space, first + sum(s.slots for s in made))
        devices = list(present)
    return made


def segment_slots(slots: int, lanes: int) -> int:
    """Slots of each segment of so many, on so many lanes: whole rows."""
    each = max(ceil(slots / SEGMENTS), MIN_SLOTS)
    return ceil(each / lanes) * lanes


def next_segment(
    geometry: SlotGeometry,
    segments: Sequence[Segment],
    weights: Sequence[float],
    ends: Sequence[int],
    slots: int,
    replicas: int = 1,
) -> Segment | None:
    """The segment that a store grows by, over all its devices; None: it is as large as it may be.

    Args:
        geometry: Shape of the slots.
        segments: Those there are.
        weights: By device; 0 for one that is not there.
        ends: Units that each device may have.
        slots: As many as there is room for, of so many.
        replicas: Copies of each slot; one where there is one device.
    """
    present = [device for device, weight in enumerate(weights) if weight]
    space = _Space(ends, segments)
    rooms = [space.largest(device) if weights[device] else 0 for device in range(len(weights))]
    copies = min(replicas, len(present))
    lanes = lanes_over(present, weights, copies)
    stripes = StripeMap(geometry, lanes, len(weights), copies, rule_for(geometry, lanes))
    count = min(ceil(slots / len(lanes)) * len(lanes), stripes.max_slots(rooms))
    if count < len(lanes):
        return None
    extents: list[Extent] = []
    for device in sorted(set(lanes)):
        units = stripes.device_units(device, count)
        begin = space.take(device, units)
        if begin is None:
            return None
        extents.append(Extent(device, begin, units))
    first = max((segment.first + segment.numbers for segment in segments), default=0)
    return Segment(first, count, count, lanes, tuple(extents), copies, rule=stripes.rule)


def _parts(stripes: StripeMap, slots: int) -> list[int]:
    """Slots of each segment of a run of slots: whole rows, but for the end of the last one."""
    each = segment_slots(slots, len(stripes.lanes))
    ends = [*range(each, slots - each + 1, each), slots]
    return [end - at for at, end in pairwise([0, *ends])]


def _divisible(stripes: StripeMap, rooms: Sequence[int]) -> int:
    """Most slots that fit the rooms when they are divided: each segment begins at a whole unit."""
    slots = stripes.max_slots(rooms)
    while slots > 0:
        parts = _parts(stripes, slots)
        needed = {d: sum(stripes.device_units(d, n) for n in parts) for d in set(stripes.lanes)}
        if all(units <= rooms[device] for device, units in needed.items()):
            break
        slots -= len(stripes.lanes)
    return max(slots, 0)


def _divided(stripes: StripeMap, slots: int, space: _Space, first: int) -> list[Segment]:
    """A run of slots as segments."""
    parts = _parts(stripes, slots)
    at: dict[int, int] = {}
    for device in sorted(set(stripes.lanes)):
        start = space.take(device, sum(stripes.device_units(device, n) for n in parts))
        if start is None:
            raise ValueError(f"device {device} has no room for {slots} slots")
        at[device] = start
    made: list[Segment] = []
    for count in parts:
        extents = []
        for device, begin in at.items():
            extents.append(Extent(device, begin, stripes.device_units(device, count)))
        at = {extent.device: extent.end for extent in extents}
        made.append(
            Segment(
                first,
                count,
                count,
                stripes.lanes,
                tuple(extents),
                stripes.copies,
                rule=stripes.rule,
            )
        )
        first += count
    return made
