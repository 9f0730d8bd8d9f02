"""Two copies of a slot: on two devices, written both, and read from the one that is right."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kit.waiting import until
from tests.store import chosen_pages
from tests.store.chosen_pages import bring, context, cross
from tests.store.conftest import (
    ALL,
    OPAQUE,
    PAGED,
    PAGED_ENCRYPTED,
    SHORT_S,
    SUMMED,
    MakeStore,
    StoreRig,
    array,
    content,
)
from tests.store.devices.test_queue_depths import Going
from vllm_ssdkv.base.metrics import Counters
from vllm_ssdkv.store.devices.health import DeviceHealth
from vllm_ssdkv.store.devices.throughput import ThroughputEstimator
from vllm_ssdkv.store.format import slot_geometry
from vllm_ssdkv.store.format.slot_geometry import SlotGeometry
from vllm_ssdkv.store.placement.lanes import lanes_for, partners
from vllm_ssdkv.store.placement.replica_selector import Replicas, runs, shared
from vllm_ssdkv.store.placement.stripe_map import Extents

LONG = SlotGeometry("opaque", layers=4, heads=1, groups=1, payload_bytes=8192)
LONG_ENCRYPTED = replace(LONG, encrypted=True)
NAMES = {slot: 100 + slot for slot in range(12)}
SLOTS = list(NAMES)


def assert_loaded(here: StoreRig, names: dict[int, int], epoch: int = 1) -> None:
    """All slots come from the devices, right, and nothing is blamed."""
    here.store.frames.forget(array(list(names)))
    here.hbm.clear()
    outcome = here.load(names, list(range(1, len(names) + 1)), epoch)
    assert outcome.complete
    assert outcome.bad == []
    for block, name in enumerate(names.values(), 1):
        np.testing.assert_array_equal(here.hbm[block], content(here.geometry, name))


def misses(here: StoreRig, slots: list[int]) -> set[int]:
    """Slots that a load of each of them blames."""
    found = set()
    for slot in slots:
        here.store.frames.forget(array([slot]))
        outcome = here.load({slot: NAMES[slot]}, [1])
        assert outcome.complete == (not outcome.bad)
        found |= {bad for bad, _ in outcome.bad}
    return found


# ---- which copy ----


@settings(max_examples=100, deadline=None)
@given(
    rates=st.lists(st.sampled_from([0.2, 1.0, 1.0, 3.0]), min_size=2, max_size=6),
    data=st.data(),
)
def test_devices_end_together(rates: list[float], data: st.DataObject) -> None:
    """No piece could go to its other device and end earlier there, but for rounding."""
    count = len(rates)
    pair = st.tuples(st.integers(0, count - 1), st.integers(1, count - 1)).map(
        lambda p: (p[0], (p[0] + p[1]) % count)
    )
    pairs = data.draw(st.lists(pair, min_size=1, max_size=60))
    first, second = (np.array(side, dtype=np.uint16) for side in zip(*pairs, strict=True))
    length = np.full(len(pairs), 4096, dtype=np.uint32)
    pace = np.array(rates)
    load = np.array(data.draw(st.lists(st.integers(0, 40), min_size=count, max_size=count))) * 4096

    def time_of(taken: np.ndarray) -> np.ndarray:
        device = np.where(taken, second, first)
        return (load + np.bincount(device, length, minlength=count)) / pace

    taken = shared(first, second, length, pace, load)
    # Never worse than reading the first copies, by more than one piece.
    slack = 4096 / pace.min()
    assert time_of(taken).max() <= time_of(np.zeros_like(taken)).max() + slack


def test_equal_devices_read_first_copies() -> None:
    first = np.arange(64, dtype=np.uint16) % 4
    length = np.full(64, 8192, dtype=np.uint32)
    taken = shared(first, (first + 1) % 4, length, np.ones(4), np.zeros(4, dtype=np.int64))
    assert not taken.any()


@pytest.mark.parametrize("devices", [2, 3, 4, 8])
def test_a_slow_device_is_spared_by_all_others(devices: int) -> None:
    """Not by its neighbours in the ring alone."""
    lanes = np.array(lanes_for([1.0] * devices, 2))
    other = np.array(partners(tuple(lanes.tolist())))
    lane = np.arange(1024) % len(lanes)
    first, second = (lanes[of].astype(np.uint16) for of in (lane, other[lane]))
    length = np.full(1024, 512 * 1024, dtype=np.uint32)
    rates = np.ones(devices)
    rates[1] = 0.2
    taken = shared(first, second, length, rates, np.zeros(devices, dtype=np.int64))
    moved = np.bincount(np.where(taken, second, first), length, devices)
    assert moved.sum() / rates.sum() / (moved / rates).max() >= 0.97


@pytest.mark.parametrize(("rate", "gets"), [(0.1, 0), (0.9, 1), (1.0, 1)])
def test_the_piece_between_two_goes_where_it_ends_sooner(rate: float, gets: int) -> None:
    first, second = np.array([0, 0], dtype=np.uint16), np.array([1, 1], dtype=np.uint16)
    length = np.full(2, 4096, dtype=np.uint32)
    load = np.zeros(2, dtype=np.int64)
    taken = shared(first, second, length, np.array([1.0, rate]), load)
    assert int(taken.sum()) == gets


def test_what_a_device_has_still_to_do_counts() -> None:
    """Before anybody knows its speed: what piles up on a device sends reads elsewhere."""
    health = DeviceHealth(["/a", "/b", "/c"], 1.0, Counters())
    replicas = Replicas(health, ThroughputEstimator(health.paths, [1.0] * 3), 64, [(0, 0)] * 3)
    slots = np.arange(60, dtype=np.int64)
    lane = (slots % 3).astype(np.uint16)
    empty, length = np.zeros(60, dtype=np.uint64), np.full(60, 4096, dtype=np.uint32)
    first = Extents(lane, empty, length, slots, empty)
    second = Extents((lane + 1) % 3, empty, length, slots, empty)

    def shares() -> list[int]:
        taken = replicas.choose(slots, first, second)
        return np.bincount(np.where(taken, second.device, first.device), minlength=3).tolist()

    assert shares() == [20, 20, 20]
    busy = Going(1)
    replicas.submitted(busy, np.array([1], dtype=np.uint16), np.array([30 * 4096], dtype=np.uint32))
    assert shares() == [30, 0, 30]
    busy.values[0] = 30 * 4096
    assert shares() == [20, 20, 20]


def test_a_lost_device_is_replaced_by_all_others() -> None:
    """Device 3 is out of use: its neighbour does not get all of its reads."""
    first = np.arange(400, dtype=np.uint16) % 4
    second = (first + 1) % 4
    fixed = (first == 3) | (second == 3)
    load = np.bincount(np.where(first == 3, second, first)[fixed], minlength=4) * 4096
    free = ~fixed
    length = np.full(int(free.sum()), 4096, dtype=np.uint32)
    taken = shared(first[free], second[free], length, np.ones(4), load)
    device = np.where(taken, second[free], first[free])
    total = load + np.bincount(device, length, minlength=4)
    np.testing.assert_allclose(total[:3] / 4096, 400 / 3, atol=2)


def test_doubt_and_trust() -> None:
    health = DeviceHealth(["a", "b", "c"], 1.0, Counters())
    replicas = Replicas(
        health, ThroughputEstimator(health.paths, [1.0] * 3), 10, [(0, 0), (2, 4), (0, 0)]
    )
    on_b = np.full(3, 1, dtype=np.uint16)
    slots = array([1, 2, 3])
    replicas.stored_in(slots, array([1 << 40, (2 << 40) + 5, (3 << 40) + 9]))
    assert replicas.suspect(slots, on_b).tolist() == [False, True, True]
    assert replicas.mark_suspect(slots, on_b).tolist() == [True, False, False]
    replicas.mark_valid(array([2]), on_b[:1])
    # It is known by now, whatever the epoch says.
    replicas.stored_in(slots, array([2 << 40] * 3))
    assert replicas.suspect(slots, on_b).tolist() == [True, False, True]
    assert replicas.suspects().tolist() == [1, 3]
    assert not replicas.suspect(slots, on_b + 1).any()


# ---- reads ----


@pytest.mark.parametrize("geometry", ALL)
@pytest.mark.parametrize("devices", [2, 3])
def test_each_copy_alone_is_the_slot(
    make_store: MakeStore, geometry: SlotGeometry, devices: int
) -> None:
    here = make_store(geometry, devices=devices, replicas=2)
    here.write(NAMES)
    assert_loaded(here, NAMES)
    written = sum(here.total("bytes_written", device=path) for path in here.paths)
    assert written == 2 * geometry.slot_bytes * len(NAMES)
    for slot in SLOTS:
        for offset in range(0, geometry.slot_bytes, 4096):
            assert here.place(slot, offset)[0] != here.place(slot, offset, copy=1)[0]


@pytest.mark.parametrize("geometry", ALL)
@pytest.mark.parametrize("where", ["header", "page"])
@pytest.mark.parametrize("copy", [0, 1])
def test_a_bad_copy_is_not_a_miss(
    make_store: MakeStore, geometry: SlotGeometry, where: str, copy: int
) -> None:
    here = make_store(geometry, devices=3, replicas=2)
    here.write(NAMES)
    offset = 70 if where == "header" else geometry.page_offset(geometry.pages - 1) + 9
    for slot in SLOTS[:5]:
        here.flip(slot, offset, copy=copy)
    for _ in range(3):
        assert_loaded(here, NAMES)
    # Which copy is read depends on what else is read. None that is known to be bad is read again.
    found = sum(here.total("bad_copies", device=path) for path in here.paths)
    assert copy == 1 or found > 0
    assert found <= 5
    assert here.total("checksum_failures") == here.total("header_mismatches") == 0


@pytest.mark.parametrize("geometry", ALL)
def test_both_copies_bad_is_a_miss(make_store: MakeStore, geometry: SlotGeometry) -> None:
    here = make_store(geometry, devices=3, replicas=2)
    here.write(NAMES)
    for copy in (0, 1):
        here.flip(4, geometry.page_offset(0) + 50, copy=copy)
        here.flip(7, 70, copy=copy)
    assert misses(here, SLOTS) == {4, 7}
    assert here.total("checksum_failures") == 1
    assert here.total("header_mismatches") == 1


def test_header_of_one_copy_and_page_of_the_other(make_store: MakeStore) -> None:
    """The slot is still whole, piece by piece."""
    geometry = SlotGeometry("paged", layers=3, heads=2, groups=1, payload_bytes=250_000)
    assert geometry.units_per_slot == 4
    here = make_store(geometry, devices=4, slots=12, replicas=2)
    here.write(NAMES)
    last = geometry.page_offset(geometry.pages - 1)
    for slot in SLOTS:
        here.flip(slot, 70)
        if here.place(slot, last, copy=1)[0] != here.place(slot, 0, copy=1)[0]:
            here.flip(slot, last, copy=1)
    assert_loaded(here, NAMES)


@pytest.mark.parametrize("pages", [(0, 1), (0, 3), (3, 1)])
@pytest.mark.parametrize("geometry", [PAGED, PAGED_ENCRYPTED, LONG, LONG_ENCRYPTED])
def test_pages_wrong_in_different_copies_are_read_from_the_others(
    make_store: MakeStore,
    geometry: SlotGeometry,
    pages: tuple[int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No device has all of the slot, and of every byte there is a good copy."""
    monkeypatch.setattr(slot_geometry, "STRIPE_UNIT", 16384)
    here = make_store(geometry, devices=2, replicas=2)
    here.write(NAMES)
    for slot in SLOTS[:5]:
        cross(here, slot, pages)
    for _ in range(3):
        assert_loaded(here, NAMES)
    assert here.total("checksum_failures") == here.total("header_mismatches") == 0


@pytest.mark.parametrize("encrypted", [False, True])
def test_chosen_pages_and_streams_find_them_too(
    make_store: MakeStore, encrypted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slot_geometry, "STRIPE_UNIT", 16384)
    geometry = replace(SUMMED, encrypted=encrypted)
    here = make_store(geometry, devices=2, replicas=2)
    names = context(here, SLOTS)
    for slot in SLOTS[:3]:
        cross(here, slot, (0, 1))
        cross(here, slot, (4, 6))
    here.assert_rows(here.walk(SLOTS), list(names.values()))
    here.store.choose([array(SLOTS)], [0]).close()
    chosen = here.store.choose([array(SLOTS)], [0])
    for layer in range(2):
        wanted = {0: [(block, page) for block in SLOTS for page in range(4)]}
        found = bring(here, chosen, layer, wanted)
        assert len(found) == len(SLOTS) * 4
        chosen_pages.assert_right(here, found, [SLOTS], names, layer)
    assert (chosen.poisoned, chosen.bad) == (set(), [])
    chosen.close()
    assert here.total("checksum_failures") == 0
    here.store.drop_context("r")
    here.assert_no_leak()


@pytest.mark.parametrize("geometry", ALL)
@pytest.mark.parametrize("devices", [2, 3])
def test_a_device_without_what_it_should_have(
    make_store: MakeStore, geometry: SlotGeometry, devices: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody said so, and it has parts of both copies of each slot; pages lie on two devices."""
    monkeypatch.setattr(slot_geometry, "STRIPE_UNIT", 20480)
    here = make_store(geometry, devices=devices, replicas=2)
    empty = Path(here.devices[1].path).read_bytes()
    here.write(NAMES)
    Path(here.devices[1].path).write_bytes(empty)
    assert_loaded(here, NAMES)
    assert here.total("bad_copies", device=here.paths[1]) > 0
    assert here.total("bad_copies", device=here.paths[0]) == 0
    assert here.total("checksum_failures") == here.total("header_mismatches") == 0


@pytest.mark.parametrize("geometry", ALL)
@pytest.mark.parametrize("kind", ["eio", "dead", "short"])
def test_a_device_that_fails_costs_nothing(
    make_store: MakeStore, geometry: SlotGeometry, kind: str
) -> None:
    here = make_store(geometry, devices=3, replicas=2)
    here.write(NAMES)
    here.faults({"kind": kind, "device": 1})
    for _ in range(4):
        assert_loaded(here, NAMES)
    assert sum(here.total("bad_copies", device=path) for path in here.paths) == 0


def test_a_device_that_hangs_costs_nothing(make_store: MakeStore) -> None:
    here = make_store(PAGED, devices=3, replicas=2, frames=32)
    here.write(NAMES)
    here.faults({"kind": "stall", "device": 1, "op": "read"})
    done = here.files.engine.statistics()["read_requests.0"]
    here.start_load(NAMES, list(range(1, len(NAMES) + 1)))
    until(lambda: here.files.engine.statistics()["read_requests.0"] > done, "a read elsewhere")
    here.files.health.quarantine(1, "a test")  # as after a deadline
    assert here.finish_load().complete
    for block, name in enumerate(NAMES.values(), 1):
        np.testing.assert_array_equal(here.hbm[block], content(PAGED, name))
    assert here.total("io_errors", device=here.paths[1], kind="deadline") > 0
    here.faults()
    here.assert_no_leak()


def test_a_device_that_garbles_is_found(make_store: MakeStore) -> None:
    here = make_store(PAGED, devices=3, slots=48, replicas=2)
    names = {slot: slot + 1 for slot in range(48)}
    here.write(names)
    for slot in names:
        for copy in (0, 1):
            if here.place(slot, PAGED.page_offset(3), copy)[0] == 2:
                here.flip(slot, PAGED.page_offset(3), copy=copy)
    assert_loaded(here, names)
    assert here.total("device_lost", device=here.paths[2]) == 1


@pytest.mark.parametrize("kind", ["eio", "flip", "out of use"])
def test_streams_read_the_other_copy(make_store: MakeStore, kind: str) -> None:
    here = make_store(PAGED, devices=3, replicas=2, frames=8)
    here.write(NAMES)
    here.store.extend_context("row", 0, array(SLOTS))
    outcome = here.load(NAMES, [])  # the headers; some slots whole
    assert outcome.complete
    here.store.frames.forget(array(SLOTS))
    if kind == "eio":
        here.faults({"kind": "eio", "device": 0})
    elif kind == "out of use":
        here.files.health.quarantine(0, "a test")
    else:
        for slot in SLOTS:
            here.flip(slot, PAGED.page_offset(5) + 1)
    walk = here.walk(SLOTS)
    here.assert_rows(walk, list(NAMES.values()))
    assert walk.bad == []
    assert here.total("checksum_failures") == 0
    here.store.drop_context("row")


@pytest.mark.parametrize("geometry", [PAGED, PAGED_ENCRYPTED], ids=["plain", "encrypted"])
@pytest.mark.parametrize("staging", [8, 64])
def test_a_stream_goes_on_when_a_device_hangs(
    make_store: MakeStore, monkeypatch: pytest.MonkeyPatch, geometry: SlotGeometry, staging: int
) -> None:
    """Its late blocks come from the other copies, whole layers after they were wanted or not."""
    here = make_store(geometry, devices=3, slots=48, replicas=2, frames=8, staging=staging)
    names = {slot: 100 + slot for slot in range(40)}
    here.write(names)
    here.store.extend_context("row", 0, array(list(names)))
    assert here.load(names, []).complete
    here.store.frames.forget(array(list(names)))
    here.one_deadline(monkeypatch)
    here.faults({"kind": "stall", "op": "read", "device": 1})
    rows = [list(names), list(names)[::-3], [7]]
    for _ in range(2):
        walk = here.walk(*rows)
        here.assert_rows(walk, *[[names[slot] for slot in row] for row in rows])
        assert walk.bad == []
    assert here.total("io_deadline_exceeded") == 1
    assert here.files.health.quarantined == {1}
    assert 0 < here.store._staging.usable() < staging  # what the device may still write to
    here.faults()
    here.store.drop_context("row")
    here.assert_no_leak()


def test_a_stream_waits_once_for_each_device_that_hangs(make_store: MakeStore) -> None:
    """With both devices of a slot, the rows that need it are poisoned, and no others."""
    here = make_store(PAGED, devices=4, slots=48, replicas=2, frames=8, staging=64)
    names = {slot: 100 + slot for slot in range(40)}
    here.write(names)
    here.store.extend_context("row", 0, array(list(names)))
    assert here.load(names, []).complete
    here.store.frames.forget(array(list(names)))
    out = np.array([True, True, False, False])
    gone = here.files.placement.lost(out, array(list(names)))
    lost = array(list(names))[gone].tolist()
    rest = sorted(set(names) - set(lost))
    assert lost
    here.deadline(SHORT_S)
    here.faults(*({"kind": "stall", "op": "read", "device": device} for device in (0, 1)))
    walk = here.walk(rest, [rest[0], lost[0]], rest[::2])
    here.assert_rows(walk, [names[s] for s in rest], None, [names[s] for s in rest[::2]])
    assert walk.bad == []
    assert here.files.health.quarantined == {0, 1}
    assert here.total("io_deadline_exceeded") == 2
    here.faults()
    here.store.drop_context("row")
    here.assert_no_leak()


def test_a_second_try_that_hangs_is_not_the_last(make_store: MakeStore) -> None:
    """The first copy fails once, the other one hangs: by then the first one can be read."""
    here = make_store(PAGED, devices=2, replicas=2, frames=8, staging=64)
    here.write(NAMES)
    here.store.extend_context("row", 0, array(SLOTS))
    assert here.load(NAMES, []).complete
    here.store.frames.forget(array(SLOTS))
    here.deadline(SHORT_S)
    here.files.replicas.mark_suspect(array(SLOTS), np.full(len(SLOTS), 1, dtype=np.uint16))
    here.faults(
        {"kind": "eio", "op": "read", "device": 0, "count": 2},
        {"kind": "stall", "op": "read", "device": 1},
    )
    walk = here.walk(SLOTS)
    here.assert_rows(walk, list(NAMES.values()))
    assert walk.bad == []
    assert here.files.health.quarantined == {1}
    assert here.total("io_errors", device=here.paths[0], kind="eio") == 2
    here.faults()
    here.store.drop_context("row")
    here.assert_no_leak()


def test_streams_with_both_copies_bad(make_store: MakeStore) -> None:
    here = make_store(PAGED, devices=3, replicas=2, frames=8)
    here.write(NAMES)
    here.store.extend_context("row", 0, array(SLOTS))
    assert here.load(NAMES, []).complete
    here.store.frames.forget(array(SLOTS))
    for copy in (0, 1):
        here.flip(5, PAGED.page_offset(5) + 1, copy=copy)
    walk = here.walk(SLOTS)
    assert walk.poisoned == {0}
    assert walk.bad == [5]
    here.store.drop_context("row")


def test_what_was_stored_while_a_device_was_away(make_store: MakeStore) -> None:
    """Its old copies are not asked, so it is not taken for a device that garbles."""
    here = make_store(PAGED, devices=3, replicas=2, gaps=[(0, 0), (4, 6), (0, 0)])
    epoch = (5 << 40) + 1
    here.write(NAMES, epoch)
    here.files.replicas.mark_suspect(array(SLOTS), np.full(len(SLOTS), 1, dtype=np.uint16))
    for slot in SLOTS:
        for copy in (0, 1):
            for offset in (70, PAGED.page_offset(2)):
                if here.place(slot, offset, copy)[0] == 1:
                    here.flip(slot, offset, copy=copy)
    assert_loaded(here, NAMES, epoch)
    assert sum(here.total("bad_copies", device=path) for path in here.paths) == 0


# ---- writes ----


@pytest.mark.parametrize("geometry", ALL)
@pytest.mark.parametrize("kind", ["eio", "dead", "out of use"])
def test_one_copy_is_enough(make_store: MakeStore, geometry: SlotGeometry, kind: str) -> None:
    here = make_store(geometry, devices=3, replicas=2)
    if kind == "out of use":
        here.files.health.quarantine(2, "a test")
    else:
        here.faults({"kind": kind, "device": 2, **({"op": "write"} if kind == "eio" else {})})
    here.write(NAMES)
    touched = [s for s in SLOTS if here.files.placement.touches(2, array([s]))[0]]
    assert here.total("single_copies") == len(touched) > 0
    here.faults()
    assert_loaded(here, NAMES)


def test_no_copy_is_not_enough(make_store: MakeStore) -> None:
    here = make_store(OPAQUE, devices=2, replicas=2)
    here.faults({"kind": "eio", "op": "write"})
    here.hold(NAMES)
    here.commit(NAMES)
    assert here.store.drain(30.0)
    durable, failed = here.store.take_write_results()
    assert durable == []
    assert sorted(failed) == [(slot, 1) for slot in SLOTS]
    assert here.total("single_copies") == 0
    here.faults()
    here.assert_no_leak()


@pytest.mark.parametrize("geometry", ALL)
def test_a_write_that_hangs(make_store: MakeStore, geometry: SlotGeometry) -> None:
    here = make_store(geometry, devices=2, replicas=2, frames=16)
    here.faults({"kind": "stall", "device": 1, "op": "write"})
    names = {slot: NAMES[slot] for slot in SLOTS[:4]}
    here.hold(names)
    here.commit(names)
    until(lambda: here.files.engine.statistics()["write_requests.0"] > 0, "a write elsewhere")
    here.files.health.quarantine(1, "a test")  # as after a deadline
    assert here.store.drain(30.0)
    durable, failed = here.store.take_write_results()
    assert sorted(durable) == [(slot, 1) for slot in names]
    assert failed == []
    assert here.total("single_copies") == 4
    here.faults()
    until(lambda: not any(here.store._writer.writes(slot) for slot in names), "the late writes")
    assert_loaded(here, names)
    here.assert_no_leak()


def test_neighbours_choose_their_copy_together() -> None:
    """They are one request; apart they would be many."""
    page = 8192
    device = np.array([0, 1, 0, 0, 0, 0], dtype=np.uint16)
    offset = np.array([0, 8, 2, 1, 3, 64], dtype=np.uint64) * page
    place = np.array([4, 9, 6, 5, 8, 65], dtype=np.uint64) * page
    length = np.full(6, page, dtype=np.uint32)
    slots = np.zeros(6, dtype=np.int64)
    first = Extents(device, offset, length, slots, offset)
    second = Extents((device + 1) % 3, place, length, slots, offset)
    found = runs(first, second, np.arange(6))
    # 0, 3 and 2 follow each other in both copies; 4 only in the first, 5 nowhere.
    assert found.tolist() == [0, 3, 0, 0, 1, 2]
    many = np.arange(200, dtype=np.uint64) * page
    ones = np.ones(200, dtype=np.uint16)
    long = Extents(ones, many, np.full(200, page, dtype=np.uint32), np.zeros(200, np.int64), many)
    limited = runs(long, replace(long, device=ones + 1), np.arange(200))
    assert np.bincount(limited).max() * page == slot_geometry.STRIPE_UNIT
