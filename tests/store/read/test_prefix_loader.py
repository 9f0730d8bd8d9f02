"""The load path: right bytes in HBM or an honest failure, whatever DRAM and devices do."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.kit.waiting import until
from tests.store.conftest import (
    ALL,
    BLOCK_TOKENS,
    OPAQUE,
    PAGED,
    PAGED_ENCRYPTED,
    PATIENCE_S,
    SHORT_S,
    MakeStore,
    StoreRig,
    array,
    content,
)
from vllm_ssdkv import _io
from vllm_ssdkv.store.cache.frames import FrameState
from vllm_ssdkv.store.format.slot_geometry import SlotGeometry
from vllm_ssdkv.store.io import slot_request
from vllm_ssdkv.store.io.slot_io import SlotIO
from vllm_ssdkv.store.read import prefix_loader
from vllm_ssdkv.store.read.load_job import LoadOutcome
from vllm_ssdkv.store.read.prefix_loader import READ_AHEAD


def assert_hbm(rig: StoreRig, expected: dict[int, int]) -> None:
    """Blocks and the names of the keys they hold; nothing else was copied."""
    assert sorted(rig.hbm) == sorted(expected)
    for block, name in expected.items():
        np.testing.assert_array_equal(rig.hbm[block], content(rig.geometry, name))


def assert_right(
    rig: StoreRig, names: dict[int, int], first_block: int, but: Collection[int]
) -> None:
    """A load that failed may have copied slots, to blocks from ``first_block`` on, none of ``but``,
    and what it copied is right."""
    blocks = {first_block + i: name for i, name in enumerate(names.values())}
    wrong = {first_block + i for i, slot in enumerate(names) if slot in but}
    assert not wrong & rig.hbm.keys()
    assert_hbm(rig, {block: blocks[block] for block in rig.hbm})
    rig.hbm.clear()


def ok(outcome: LoadOutcome, dram: int, ssd: int) -> None:
    assert outcome.complete
    assert outcome.bad == []
    assert outcome.tokens_from_dram == dram * BLOCK_TOKENS
    assert outcome.tokens_from_ssd == ssd * BLOCK_TOKENS


@pytest.mark.parametrize("geometry", ALL)
def test_what_was_written_comes_back(make_store: MakeStore, geometry: SlotGeometry) -> None:
    rig = make_store(geometry)
    names = {slot: 100 + slot for slot in (9, 3, 4, 30)}
    rig.write(names)
    ok(rig.load(names, [11, 12, 13, 14]), dram=0, ssd=4)
    assert_hbm(rig, {11: 109, 12: 103, 13: 104, 14: 130})
    rig.hbm.clear()
    ok(rig.load(names, [21, 0, 23, 0]), dram=4, ssd=0)  # from DRAM, and 0 is no block
    assert_hbm(rig, {21: 109, 23: 104})
    kv_bytes = geometry.kv_pages * geometry.payload_bytes
    assert rig.counters.total("bytes_used") == 4 * kv_bytes
    rig.assert_no_leak()


def test_time_is_told_apart_by_where_the_bytes_were(make_store: MakeStore) -> None:
    rig = make_store(OPAQUE)
    rig.write({1: 101, 2: 102})
    rig.faults({"kind": "latency", "op": "read", "seconds": 0.2})

    def timed(names: dict[int, int], blocks: list[int]) -> LoadOutcome:
        begin = time.monotonic()
        outcome = rig.load(names, blocks)
        # What is copied while the rest is being read counts for both.
        longest = max(outcome.dram_s, outcome.ssd_s)
        assert outcome.queued_s + longest <= time.monotonic() - begin
        return outcome

    read = timed({1: 101}, [11])
    assert (read.dram_s, read.ssd_s >= 0.2) == (0.0, True)
    copied = timed({1: 101}, [12])
    assert (copied.ssd_s, copied.dram_s > 0) == (0.0, True)
    both = timed({1: 101, 2: 102}, [13, 14])
    assert both.dram_s > 0
    assert both.ssd_s >= 0.2


def test_jobs_wait_for_those_before_them(make_store: MakeStore) -> None:
    rig = make_store(OPAQUE)
    rig.write({1: 101, 2: 102})
    rig.faults({"kind": "stall", "op": "read"})
    outcomes: list[LoadOutcome] = []
    begin = time.monotonic()
    rig.start_load({1: 101}, [11], request="1")
    until(lambda: rig.store.frames.count(FrameState.LOADING) == 1, "the start of the read")
    rig.start_load({2: 102}, [12], request="2")
    time.sleep(0.05)
    rig.faults()
    until(lambda: bool(outcomes.extend(rig.store.take_load_outcomes()) or len(outcomes) == 2))
    elapsed = time.monotonic() - begin
    first, second = outcomes
    assert first.ssd_s >= 0.05
    assert first.queued_s + first.ssd_s <= elapsed
    assert 0.05 <= second.queued_s <= elapsed - second.ssd_s


@pytest.mark.parametrize("geometry", [PAGED, PAGED_ENCRYPTED])
def test_slots_that_are_still_being_written_are_read_from_their_frames(
    make_store: MakeStore, geometry: SlotGeometry
) -> None:
    rig = make_store(geometry)
    rig.faults({"kind": "stall", "op": "write"})
    rig.store.extend_context("r", 0, array([0, 1, 2]))
    rig.hold({0: 10, 1: 11, 2: 12})
    rig.commit({0: 10, 2: 12})
    until(lambda: rig.store.frames.count(FrameState.WRITING) == 2, "the start of the writes")
    ok(rig.load({0: 10, 1: 11, 2: 12}, [5, 6, 7]), dram=3, ssd=0)
    assert_hbm(rig, {5: 10, 6: 11, 7: 12})
    rig.faults()
    assert rig.store.drain(PATIENCE_S)
    rig.commit({1: 11})
    assert rig.store.drain(PATIENCE_S)
    # Their checksums are kept: the context may be streamed once the frames are gone.
    rig.store.frames.forget(array([0, 1, 2]))
    rig.assert_rows(rig.walk([0, 1, 2]), [10, 11, 12])


@pytest.mark.parametrize("geometry", [PAGED, PAGED_ENCRYPTED])
def test_what_is_still_being_written_when_its_first_request_ends_serves_the_next(
    make_store: MakeStore, geometry: SlotGeometry
) -> None:
    """The second request finds the slots in DRAM without a header, and reads their pages from the
    devices when the frames are gone."""
    rig = make_store(geometry)
    rig.faults({"kind": "stall", "op": "write"})
    rig.store.extend_context("first", 0, array([0, 1]))
    rig.hold({0: 10, 1: 11})
    rig.commit({0: 10, 1: 11})
    until(lambda: rig.store.frames.count(FrameState.WRITING) == 2, "the start of the writes")
    rig.store.drop_context("first")
    rig.store.extend_context("r", 0, array([0, 1]))
    ok(rig.load({0: 10, 1: 11}, []), dram=2, ssd=0)
    rig.faults()
    assert rig.store.drain(PATIENCE_S)
    rig.store.frames.forget(array([0, 1]))
    walk = rig.walk([0, 1])
    rig.assert_rows(walk, [10, 11])
    assert walk.bad == []
    rig.store.drop_context("r")
    rig.assert_no_leak()


@pytest.mark.parametrize("encrypted", [False, True])
def test_units_are_requests_of_their_own_where_native_code_looks_at_them(
    make_store: MakeStore, encrypted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Elsewhere nobody gains by seeing one before its neighbour: they are one request."""
    geometry = SlotGeometry("opaque", 4, 1, 1, 500_000, encrypted=encrypted)
    rig = make_store(geometry, slots=4, frames=8, devices=1)
    names = {slot: slot for slot in range(3)}
    rig.write(names)
    rig.store.frames.forget(array(range(3)))
    asked: list[int] = []
    submit = rig.files.engine.submit

    def count(op: Any, devices: NDArray[np.uint16], *rest: Any) -> Any:  # noqa: ANN401 - passed on
        asked.append(len(devices))
        return submit(op, devices, *rest)

    monkeypatch.setattr(rig.files.engine, "submit", count)
    ok(rig.load(names, [1, 2, 3]), dram=0, ssd=3)
    assert geometry.units_per_slot == 4
    assert sum(asked) == 3 * (1 if encrypted else 4)


@pytest.mark.parametrize("geometry", ALL)
def test_a_load_larger_than_dram_goes_through_it_in_parts(
    make_store: MakeStore, geometry: SlotGeometry
) -> None:
    rig = make_store(geometry, slots=150, frames=8)
    names = {slot: 1000 + slot for slot in range(140)}
    rig.write(names)
    ok(rig.load(names, range(1, 141)), dram=0, ssd=140)
    assert_hbm(rig, {slot + 1: name for slot, name in names.items()})
    rig.assert_no_leak()


@pytest.mark.parametrize("geometry", ALL)
@pytest.mark.parametrize("count", [1, 140], ids=["in DRAM", "from devices"])
def test_a_block_to_compare_comes_with_the_outcome(
    make_store: MakeStore, geometry: SlotGeometry, count: int
) -> None:
    """Its frame may be gone: of a load larger than DRAM it is read first."""
    rig = make_store(geometry, slots=150, frames=8)
    names = {slot: 1000 + slot for slot in range(count)}
    rig.write(names)
    assert rig.load(names, range(1, count + 1)).copy is None
    outcome = rig.load(names, [*range(1, count), 0], compared=True)
    assert outcome.copy is not None
    slot, epoch, frame = outcome.copy
    assert (slot, epoch) == (count - 1, 1)
    pages = frame[geometry.header_bytes :].reshape(-1, geometry.page_bytes)
    held = pages[: geometry.kv_pages, : geometry.payload_bytes]
    np.testing.assert_array_equal(held.reshape(-1), content(geometry, 1000 + slot).reshape(-1))
    rig.assert_no_leak()


@pytest.mark.parametrize("geometry", ALL)
def test_frames_that_a_load_uses_are_not_given_to_its_own_reads(
    make_store: MakeStore, geometry: SlotGeometry
) -> None:
    """Half of the hit is in DRAM, and the other half needs its frames."""
    rig = make_store(geometry, frames=8)
    names = {slot: 500 + slot for slot in range(16)}
    rig.write(names)
    some = {slot: names[slot] for slot in range(1, 16, 2)}
    ok(rig.load(some, range(1, 9)), dram=0, ssd=8)
    rig.hbm.clear()
    ok(rig.load(names, range(1, 17)), dram=8, ssd=8)
    assert_hbm(rig, {slot + 1: name for slot, name in names.items()})


def test_frames_that_are_copied_to_hbm_cannot_be_taken(make_store: MakeStore) -> None:
    """Meanwhile the forward pass wants frames for new blocks."""
    rig = make_store(frames=8)
    names = {slot: 500 + slot for slot in range(8)}
    rig.write(names)
    rig.load(names, range(1, 9))
    rig.hbm.clear()
    stolen: list[int] = []

    def steal() -> None:
        for frame in rig.store.reserve_frames(array(range(20, 32)), wait=False).tolist():
            rig.store.frames.view(frame)[:] = 0x55
            stolen.append(frame)

    rig.before_copy = steal
    ok(rig.load(names, range(1, 9)), dram=8, ssd=0)
    assert_hbm(rig, {slot + 1: name for slot, name in names.items()})
    assert stolen == []
    steal()
    assert len(stolen) == 8


def test_a_load_that_waits_for_frames_gets_them_from_writes(make_store: MakeStore) -> None:
    rig = make_store(frames=8)
    rig.write({0: 1, 1: 2})
    rig.faults({"kind": "stall", "op": "write"})
    rest = {slot: slot for slot in range(2, 10)}
    rig.hold(rest)
    rig.commit(rest)
    threading.Timer(0.05, rig.faults).start()
    ok(rig.load({0: 1, 1: 2}, [3, 4]), dram=0, ssd=2)
    assert_hbm(rig, {3: 1, 4: 2})


def test_a_load_without_frames_fails_in_time(
    make_store: MakeStore, caplog: pytest.LogCaptureFixture
) -> None:
    rig = make_store(frames=8)
    rig.write({0: 1})
    rig.deadline(SHORT_S)
    rig.hold({slot: slot for slot in range(2, 10)})
    outcome = rig.load({0: 1}, [3])
    assert not outcome.complete
    assert outcome.bad == []
    assert rig.hbm == {}
    assert "no DRAM frame for request r" in caplog.text


# ---- page mode: slots that stay outside HBM ----


@pytest.mark.parametrize("geometry", [PAGED, PAGED_ENCRYPTED])
def test_contexts_are_read_whole_while_frames_last_then_only_their_headers(
    make_store: MakeStore, geometry: SlotGeometry
) -> None:
    rig = make_store(geometry, frames=8)
    names = {slot: 300 + slot for slot in range(30)}
    rig.write(names)
    rig.store.extend_context("r", 0, array(list(names)))
    evictions = rig.store.frames.evictions
    ok(rig.load(names, [5, 6]), dram=0, ssd=30)
    assert_hbm(rig, {5: 328, 6: 329})
    # The newest frames are the ones in DRAM, and all of it belongs to the context.
    frames = rig.store.frames
    assert frames.count(FrameState.CLEAN) == 8
    assert frames.frame_of(29) >= 0
    assert frames.evictions == evictions
    read = sum(rig.total("bytes_read", device=path) for path in rig.paths)
    assert read == 8 * geometry.slot_bytes + 22 * geometry.header_bytes
    # The headers are what streaming needs.
    rig.assert_rows(rig.walk(list(names)), list(names.values()))
    rig.store.drop_context("r")
    rig.assert_no_leak()


def test_a_load_spares_the_frames_of_running_contexts(make_store: MakeStore) -> None:
    rig = make_store(frames=8)
    names = {slot: 300 + slot for slot in range(24)}
    rig.write(names)
    mine = array(range(8))
    rig.store.extend_context("a", 0, mine)
    rig.load({slot: names[slot] for slot in range(8)}, [], request="a")
    rig.store.extend_context("b", 0, array(range(8, 24)))
    ok(rig.load({s: names[s] for s in range(8, 24)}, [], request="b"), dram=0, ssd=16)
    assert all(rig.store.frames.frame_of(slot) >= 0 for slot in range(8))
    walk = rig.walk(range(8), range(8, 24))
    rig.assert_rows(walk, [300 + s for s in range(8)], [300 + s for s in range(8, 24)])


# ---- wrong bytes ----


def slot_byte(geometry: SlotGeometry) -> st.SearchStrategy[int]:
    """Of the header, or of a page but its padding."""
    return st.one_of(st.integers(0, geometry.header_bytes - 1), payload_byte(geometry))


def payload_byte(geometry: SlotGeometry) -> st.SearchStrategy[int]:
    return st.builds(
        lambda page, byte: geometry.page_offset(page) + byte,
        st.integers(0, geometry.pages - 1),
        st.integers(0, geometry.payload_bytes - 1),
    )


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(offset=slot_byte(PAGED), bit=st.integers(0, 7))
@example(offset=0, bit=0)
@example(offset=PAGED.header_bytes - 1, bit=7)
@example(offset=PAGED.slot_bytes - 1, bit=3)
def test_every_flipped_bit_is_found(shared_store: StoreRig, offset: int, bit: int) -> None:
    rig = shared_store
    rig.forgive()
    names = {0: 10, 1: 11, 2: 12}
    before = rig.total("checksum_failures") + rig.total("header_mismatches")
    rig.store.frames.forget(array([0, 1, 2]))
    rig.hbm.clear()
    rig.flip(1, offset, 1 << bit)
    try:
        outcome = rig.load(names, [5, 6, 7])
        assert not outcome.complete
        assert outcome.bad == [(1, 1)]
        assert outcome.tokens_from_ssd == 0
        assert_right(rig, names, 5, but=[1])
        assert rig.total("checksum_failures") + rig.total("header_mismatches") == before + 1
        # Read as a part of a context that stays outside HBM: the same.
        rig.store.frames.forget(array([0, 1, 2]))
        assert rig.load(names, []).bad == [(1, 1)]
    finally:
        rig.flip(1, offset, 1 << bit)
    rig.store.frames.forget(array([0, 1, 2]))
    ok(rig.load(names, [5, 6, 7]), dram=0, ssd=3)
    assert_hbm(rig, {5: 10, 6: 11, 7: 12})


@pytest.fixture(params=[PAGED, PAGED_ENCRYPTED], ids=["plain", "encrypted"])
def shared_store(make_store: MakeStore, request: pytest.FixtureRequest) -> StoreRig:
    """Three slots that every example of a property may spoil and mend."""
    rig = make_store(request.param, slots=8, frames=8)
    rig.write({0: 10, 1: 11, 2: 12})
    return rig


def test_padding_may_hold_anything(make_store: MakeStore) -> None:
    rig = make_store(OPAQUE)
    rig.write({1: 11})
    rig.flip(1, OPAQUE.header_bytes + OPAQUE.payload_bytes)
    ok(rig.load({1: 11}, [5]), dram=0, ssd=1)
    assert_hbm(rig, {5: 11})


def test_wrong_headers_are_found_where_only_headers_are_read(make_store: MakeStore) -> None:
    rig = make_store(frames=8)
    names = {slot: 300 + slot for slot in range(30)}
    rig.write(names)
    rig.store.extend_context("r", 0, array(list(names)))
    rig.flip(4, 40)
    outcome = rig.load(names, [])
    assert not outcome.complete
    assert outcome.bad == [(4, 1)]
    assert rig.total("header_mismatches") == 1
    rig.store.drop_context("r")
    rig.assert_no_leak()


@pytest.mark.parametrize(
    ("name", "epoch", "what"),
    [(12, 1, "key"), (11, 2, "epoch")],
)
def test_another_life_of_the_slot_is_refused(
    make_store: MakeStore,
    name: int,
    epoch: int,
    what: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    rig = make_store()
    rig.write({1: 11}, epoch=1)
    with caplog.at_level(logging.ERROR):
        outcome = rig.load({1: name}, [5], epoch=epoch)
    assert (outcome.complete, outcome.bad, rig.hbm) == (False, [(1, epoch)], {})
    assert f"slot 1 is dropped: slot header: {what}" in caplog.text
    assert rig.total("header_mismatches") == 1


@pytest.mark.parametrize("geometry", [PAGED, PAGED_ENCRYPTED])
def test_bytes_read_from_the_wrong_place_are_refused(
    make_store: MakeStore, geometry: SlotGeometry
) -> None:
    rig = make_store(geometry, devices=1)
    rig.write({1: 11, 2: 11})
    path = rig.devices[0].path
    data = bytearray(path.read_bytes())
    (one, two), size = (rig.place(slot, 0)[1] for slot in (1, 2)), geometry.slot_bytes
    data[one : one + size] = data[two : two + size]
    with open(path, "r+b") as file:
        file.write(data)
    assert rig.load({1: 11}, [5]).bad == [(1, 1)]


# ---- devices that fail ----


@pytest.mark.parametrize("geometry", [PAGED, PAGED_ENCRYPTED])
@pytest.mark.parametrize("kind", ["eio", "short", "corrupt"])
def test_a_read_that_fails_once_is_tried_again(
    make_store: MakeStore, kind: str, geometry: SlotGeometry
) -> None:
    rig = make_store(geometry)
    names = {slot: slot + 40 for slot in range(6)}
    rig.write(names)
    rig.faults({"kind": kind, "op": "read", "count": 1})
    ok(rig.load(names, range(1, 7)), dram=0, ssd=6)
    assert_hbm(rig, {slot + 1: name for slot, name in names.items()})
    rig.faults({"kind": kind, "op": "read", "count": 1, "seed": 1})
    rig.store.frames.forget(array(range(6)))
    rig.store.extend_context("r", 0, array(range(6)))
    rig.hold(dict.fromkeys(range(16, 32), 0))  # no frame is left: headers only
    ok(rig.load(names, []), dram=0, ssd=6)


@pytest.mark.parametrize("kind", ["eio", "short", "dead"])
@pytest.mark.parametrize("headers_only", [False, True])
def test_a_device_that_fails_costs_nothing_but_the_hit(
    make_store: MakeStore, kind: str, headers_only: bool
) -> None:
    rig = make_store()
    names = {slot: slot + 40 for slot in range(8)}
    rig.write(names)
    device = rig.device_of(2)
    mine = [slot for slot in names if rig.device_of(slot) == device]
    rig.faults({"kind": kind, "device": device})
    if headers_only:
        rig.hold(dict.fromkeys(range(16, 32), 0))
    outcome = rig.load(names, [] if headers_only else range(1, 9))
    assert not outcome.complete
    assert outcome.bad == [], "it may be read again"
    assert_right(rig, names, 1, but=names if headers_only else mine)
    label = kind if kind in {"eio", "short"} else "other"
    assert rig.total("io_errors", device=rig.paths[device], kind=label) >= 2
    rest = {slot: name for slot, name in names.items() if slot not in mine}
    if not headers_only:
        ok(rig.load(rest, range(1, 7)), dram=6, ssd=0)
        assert_hbm(rig, dict(zip(range(1, 7), rest.values(), strict=True)))
    rig.faults()
    again = {slot: names[slot] for slot in mine}
    assert rig.load(again, [] if headers_only else range(1, 1 + len(mine))).complete
    rig.assert_no_leak()


@pytest.mark.parametrize("headers_only", [False, True])
def test_a_hung_device_costs_one_deadline_and_its_memory_comes_back(
    make_store: MakeStore, monkeypatch: pytest.MonkeyPatch, headers_only: bool
) -> None:
    rig = make_store(slots=64)
    names = {slot: slot + 40 for slot in range(12)}
    rig.write(names)
    device = rig.device_of(2)
    mine = [slot for slot in names if rig.device_of(slot) == device]
    rest = {slot: name for slot, name in names.items() if slot not in mine}
    if headers_only:
        rig.hold(dict.fromkeys(range(40, 56), 0))
        rig.store.extend_context("x", 0, array(list(names)))
    rig.one_deadline(monkeypatch)
    rig.faults({"kind": "stall", "device": device})
    outcome = rig.load(names, [] if headers_only else range(1, 13))
    assert not outcome.complete
    assert outcome.bad == []  # nobody knows
    assert_right(rig, names, 1, but=names if headers_only else mine)
    assert rig.total("io_deadline_exceeded") == 1
    frames = rig.store.frames
    assert frames.count(FrameState.LOST) == (0 if headers_only else len(mine))
    for _ in range(3):
        assert not rig.load(names, [] if headers_only else range(1, 13)).complete
        rig.hbm.clear()
        assert rig.load(rest, [] if headers_only else range(1, len(rest) + 1)).complete
    if not headers_only:
        assert_hbm(rig, dict(zip(range(1, len(rest) + 1), rest.values(), strict=True)))
        assert frames.count(FrameState.LOST) == len(mine)
    rig.faults()
    until(lambda: frames.count(FrameState.LOST) == 0, "the return of the frames")
    rig.assert_no_leak()


def test_a_device_that_garbles_what_it_returns_is_found(make_store: MakeStore) -> None:
    rig = make_store(slots=64, frames=64)
    names = {slot: slot + 40 for slot in range(48)}
    rig.write(names)
    device = rig.device_of(2)
    mine = [slot for slot in names if rig.device_of(slot) == device]
    rig.faults({"kind": "corrupt", "device": device})
    outcome = rig.load(names, range(1, 49))
    assert not outcome.complete
    assert {slot for slot, _ in outcome.bad} <= set(mine)
    assert len(outcome.bad) >= 8
    assert rig.files.health.quarantined == {device}
    rest = {slot: name for slot, name in names.items() if slot not in mine}
    assert rig.load(rest, range(1, len(rest) + 1)).complete


def test_an_error_while_copying_fails_the_load_and_leaks_nothing(
    make_store: MakeStore, caplog: pytest.LogCaptureFixture
) -> None:
    rig = make_store()
    rig.write({0: 1, 1: 2})

    def fail() -> None:
        raise RuntimeError("HBM is on fire")

    rig.before_copy = fail
    for _ in range(2):  # from SSD, then from DRAM
        assert not rig.load({0: 1, 1: 2}, [5, 6]).complete
    assert "HBM is on fire" in caplog.text
    rig.before_copy = lambda: None
    ok(rig.load({0: 1, 1: 2}, [5, 6]), dram=2, ssd=0)
    rig.assert_no_leak()


def test_a_slot_forgotten_while_it_is_loaded_stays_forgotten(make_store: MakeStore) -> None:
    rig = make_store()
    rig.write({0: 1})
    rig.faults({"kind": "stall", "op": "read"})
    rig.start_load({0: 1}, [5])
    until(lambda: rig.store.frames.count(FrameState.LOADING) == 1, "the start of the read")
    rig.store.abandon(array([0]))
    rig.hold({0: 2})
    rig.faults()
    rig.finish_load()
    np.testing.assert_array_equal(
        rig.page_view(rig.store.frames.frame_of(0)), content(rig.geometry, 2)
    )
    rig.assert_no_leak()


def test_closing_does_not_wait_for_queued_jobs(make_store: MakeStore) -> None:
    rig = make_store()
    rig.write({0: 1})
    rig.faults({"kind": "latency", "op": "read", "seconds": 1.0})
    for number in range(100):  # a second each, which is more than the bound below
        rig.store.frames.forget(array([0]))
        rig.start_load({0: 1}, [5], request=str(number))
    begin = time.monotonic()
    rig.store.close()
    assert time.monotonic() - begin < PATIENCE_S


@settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_random_loads_while_frames_are_scarce(make_store: MakeStore, data: st.DataObject) -> None:
    """Loads, new blocks and their writes at once: never a wrong byte in HBM, never a lost frame."""
    geometry = data.draw(st.sampled_from(ALL))
    rig = make_store(geometry, slots=40, frames=data.draw(st.integers(8, 14)))
    names = {slot: 100 + slot for slot in range(20)}
    rig.write(names)
    rig.faults(
        {"kind": "latency", "probability": 0.4, "seconds": 0.002},
        {"kind": "corrupt", "probability": 0.05, "seed": data.draw(st.integers(0, 99))},
    )
    for number in range(data.draw(st.integers(1, 6))):
        chosen = data.draw(st.lists(st.integers(0, 19), min_size=1, max_size=20, unique=True))
        rig.hbm.clear()
        rig.start_load({slot: names[slot] for slot in chosen}, range(1, len(chosen) + 1))
        fresh = data.draw(st.sets(st.integers(20, 39), max_size=8))
        held = rig.hold({slot: 1000 * number + slot for slot in sorted(fresh)}, wait=False)
        rig.commit({slot: 1000 * number + slot for slot in held}, epoch=number + 2)
        outcome = rig.finish_load()
        if outcome.complete:
            assert_hbm(rig, {i + 1: names[slot] for i, slot in enumerate(chosen)})
        else:
            assert {slot for slot, _ in outcome.bad} <= set(chosen)
            for block, data_in_hbm in rig.hbm.items():  # copied before another part failed
                np.testing.assert_array_equal(
                    data_in_hbm, content(geometry, names[chosen[block - 1]])
                )
        assert rig.store.drain(PATIENCE_S)
    rig.faults()
    rig.assert_no_leak()


# ---- loads in pieces ----


def submitted(rig: StoreRig) -> int:
    """Reads that the engine was given so far."""
    totals = rig.files.engine.statistics()
    return sum(n for name, n in totals.items() if name.startswith("read_submitted."))


@pytest.mark.parametrize("geometry", [g for g in ALL if g is not OPAQUE])
def test_the_next_pieces_are_being_read_while_one_is_copied(
    make_store: MakeStore, geometry: SlotGeometry
) -> None:
    rig = make_store(geometry, frames=READ_AHEAD * 4)
    names = {slot: 100 + slot for slot in range(30)}
    rig.write(names)
    before = submitted(rig)
    seen: list[int] = []
    rig.before_copy = lambda: seen.append(submitted(rig) - before)
    ok(rig.load(names, range(1, 31)), dram=0, ssd=30)
    assert_hbm(rig, {slot + 1: name for slot, name in names.items()})
    whole = submitted(rig) - before
    # Pieces of four slots; of the first one nothing is copied before four are on their way.
    assert len(seen) >= 8
    assert seen[0] >= whole * 16 // 30
    assert seen[-1] == whole
    rig.assert_no_leak()


def test_two_pieces_are_being_read_however_large_a_slot_is(
    make_store: MakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slot of more than all that is to be read ahead: the next one is read beside its copy."""
    monkeypatch.setattr(prefix_loader, "GROUP_BYTES", 1)
    rig = make_store(PAGED, frames=READ_AHEAD * 4)
    names = {slot: 100 + slot for slot in range(6)}
    rig.write(names)
    before = submitted(rig)
    seen: list[int] = []
    rig.before_copy = lambda: seen.append(submitted(rig) - before)
    ok(rig.load(names, range(1, 7)), dram=0, ssd=6)
    whole = submitted(rig) - before
    assert whole % 6 == 0
    assert seen[0] == 2 * whole // 6


def test_what_has_arrived_is_copied_while_the_rest_of_its_piece_is_read(
    make_store: MakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slot_request, "PART_BYTES", 1)
    rig = make_store(OPAQUE, frames=64)
    names = {slot: 100 + slot for slot in range(16)}
    rig.write(names)
    late = rig.files.placement.touches(0, array(list(names)))
    early = {slot + 1: names[slot] for slot in range(16) if not late[slot]}
    assert 0 < len(early) < 16
    rig.faults({"kind": "stall", "op": "read", "device": 0})
    rig.start_load(names, range(1, 17))
    until(lambda: len(rig.hbm) == len(early), "the copy of what has arrived")
    assert_hbm(rig, early)
    rig.faults()
    ok(rig.finish_load(), dram=0, ssd=16)
    assert_hbm(rig, {slot + 1: name for slot, name in names.items()})
    rig.assert_no_leak()


def test_the_next_pieces_are_being_read_while_native_code_copies_one(
    make_store: MakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make_store(OPAQUE, frames=READ_AHEAD * 4)
    names = {slot: 100 + slot for slot in range(30)}
    rig.write(names)
    before = submitted(rig)
    seen: list[int] = []
    feed = slot_request.SlotRequest.feed

    def fed(
        batch: slot_request.SlotRequest,
        verifier: _io.ArrivalVerifier,
        beside: Sequence[slot_request.SlotRequest] = (),
    ) -> None:
        seen.append(submitted(rig) - before)
        feed(batch, verifier, beside)

    monkeypatch.setattr(slot_request.SlotRequest, "feed", fed)
    ok(rig.load(names, range(1, 31)), dram=0, ssd=30)
    assert_hbm(rig, {slot + 1: name for slot, name in names.items()})
    whole = submitted(rig) - before
    assert len(seen) >= 8
    assert seen[0] >= whole * 16 // 30
    assert seen[-1] == whole
    rig.assert_no_leak()


def test_what_is_found_is_not_evicted_by_what_is_read(make_store: MakeStore) -> None:
    """More is read than DRAM has room for, and what is there is the oldest of the hit."""
    rig = make_store(frames=8)
    names = {slot: 500 + slot for slot in range(30)}
    rig.write(names)
    ok(rig.load({slot: names[slot] for slot in range(6)}, range(1, 7)), dram=0, ssd=6)
    rig.hbm.clear()
    ok(rig.load(names, range(1, 31)), dram=6, ssd=24)
    assert_hbm(rig, {slot + 1: name for slot, name in names.items()})
    rig.assert_no_leak()


def test_an_error_while_others_are_being_read_leaks_nothing(
    make_store: MakeStore, caplog: pytest.LogCaptureFixture
) -> None:
    rig = make_store(frames=16)
    names = {slot: 500 + slot for slot in range(30)}
    rig.write(names)

    def fail() -> None:
        raise RuntimeError("HBM is on fire")

    rig.before_copy = fail
    assert not rig.load(names, range(1, 31)).complete
    assert caplog.text.count("load of request r failed") == 1  # nothing is copied after it
    assert rig.hbm == {}
    rig.before_copy = lambda: None
    assert rig.load(names, range(1, 31)).complete
    rig.assert_no_leak()


@pytest.mark.parametrize("geometry", [PAGED, PAGED_ENCRYPTED])
def test_headers_of_long_contexts_pass_through_little_memory(
    make_store: MakeStore, geometry: SlotGeometry
) -> None:
    rig = make_store(geometry, slots=420, frames=8)
    names = {slot: slot for slot in range(400)}
    rig.write(names)
    rig.store.extend_context("r", 0, array(list(names)))
    ok(rig.load(names, [5]), dram=0, ssd=400)
    read = sum(rig.total("bytes_read", device=path) for path in rig.paths)
    assert read == 8 * geometry.slot_bytes + 392 * geometry.header_bytes
    rig.assert_rows(rig.walk(range(150, 160)), list(range(150, 160)))
    rig.store.drop_context("r")
    rig.assert_no_leak()


def test_who_waits_for_a_load_gets_it_when_it_ends(make_store: MakeStore) -> None:
    rig = make_store()
    rig.write({0: 10})
    assert rig.store.take_load_outcomes(PATIENCE_S) == []  # at once: none is under way
    rig.start_load({0: 10}, [1])
    (outcome,) = rig.store.take_load_outcomes(PATIENCE_S)
    ok(outcome, dram=0, ssd=1)
    assert_hbm(rig, {1: 10})


# ---- start of a load by who asks for it, where the loader's thread has nothing else to do ----


NAMES = {slot: 100 + slot for slot in range(6)}


def begun(rig: StoreRig, first: int, request: str) -> int:
    """Slots that are being read when the call that asks for a load of three has returned."""
    names = {slot: NAMES[slot] for slot in range(first, first + 3)}
    before = rig.store.frames.count(FrameState.LOADING)
    rig.start_load(names, range(first + 1, first + 4), request=request)
    return rig.store.frames.count(FrameState.LOADING) - before


def ended(rig: StoreRig, count: int) -> list[LoadOutcome]:
    outcomes: list[LoadOutcome] = []
    until(lambda: bool(outcomes.extend(rig.store.take_load_outcomes()) or len(outcomes) == count))
    return outcomes


@pytest.mark.parametrize("geometry", ALL)
def test_devices_begin_before_the_call_returns(
    make_store: MakeStore, geometry: SlotGeometry
) -> None:
    rig = make_store(geometry)
    rig.write(NAMES)
    rig.faults({"kind": "stall", "op": "read"})
    assert begun(rig, 0, "first") == 3
    # The loader's thread is at work by now: the next one waits for its turn.
    assert begun(rig, 3, "second") == 0
    rig.faults()
    first, second = ended(rig, 2)
    assert (first.request_id, second.request_id) == ("first", "second")
    ok(first, dram=0, ssd=3)
    ok(second, dram=0, ssd=3)
    assert first.queued_s <= second.queued_s
    assert_hbm(rig, {slot + 1: name for slot, name in NAMES.items()})
    rig.assert_no_leak()


def test_what_is_in_dram_is_copied_by_the_thread(make_store: MakeStore) -> None:
    rig = make_store(OPAQUE)
    rig.write(NAMES)
    ok(rig.load(NAMES, range(1, 7)), dram=0, ssd=6)
    assert begun(rig, 0, "r") == 0
    ok(rig.finish_load(), dram=3, ssd=0)
    rig.assert_no_leak()


@pytest.mark.parametrize("geometry", [OPAQUE, PAGED])
def test_an_error_at_the_start_ends_the_load_and_leaks_nothing(
    make_store: MakeStore, geometry: SlotGeometry, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make_store(geometry)
    rig.write(NAMES)

    def refused(*_: object, **__: object) -> None:
        raise ValueError("refused")

    with monkeypatch.context() as patch:
        patch.setattr(SlotIO, "submit", refused)
        rig.start_load(NAMES, range(1, 7))
        outcome = rig.finish_load()
    assert not outcome.complete
    assert outcome.bad == []
    assert outcome.tokens_from_ssd == 0
    rig.assert_no_leak()
    ok(rig.load(NAMES, range(1, 7)), dram=0, ssd=6)
    rig.assert_no_leak()


@pytest.mark.parametrize("geometry", ALL)
def test_an_engine_without_twins_loads_and_finds_what_is_wrong(
    make_store: MakeStore, geometry: SlotGeometry
) -> None:
    rig = make_store(geometry, faulty=False)
    rig.write(NAMES)
    ok(rig.load(NAMES, range(1, 7)), dram=0, ssd=6)
    assert_hbm(rig, {slot + 1: name for slot, name in NAMES.items()})
    rig.store.frames.forget(array(list(NAMES)))
    rig.flip(4, geometry.header_bytes + 5)
    outcome = rig.load(NAMES, range(1, 7))
    assert not outcome.complete
    assert outcome.bad == [(4, 1)]
    rig.assert_no_leak()
