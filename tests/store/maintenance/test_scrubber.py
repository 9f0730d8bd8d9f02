"""The scrub: what has gone bad on a device is found, what is good or being used is left alone."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.kit.waiting import until
from tests.store.conftest import (
    OPAQUE,
    PAGED,
    PAGED_ENCRYPTED,
    PATIENCE_S,
    SHORT_S,
    MakeStore,
    StoreRig,
    array,
)
from vllm_ssdkv.store import tiered_store
from vllm_ssdkv.store.devices.health import CONDEMN_S, FAILURES_TO_CONDEMN
from vllm_ssdkv.store.format import slot_geometry
from vllm_ssdkv.store.format.slot_geometry import SlotGeometry
from vllm_ssdkv.store.io.buffer_pool import BufferPool
from vllm_ssdkv.store.io.verified_read import VerifiedRead
from vllm_ssdkv.store.maintenance import scrubber as scrubbing_module
from vllm_ssdkv.store.maintenance.scrubber import Scrubber
from vllm_ssdkv.store.memory.memory_plan import PIECES
from vllm_ssdkv.store.placement.segments import Striping, restriped

FAST = 1 << 40
FAULTS = ("scrub_bad_pages", "checksum_failures", "header_mismatches")
SLOTS = 16
NAMES = {slot: 100 + slot for slot in (0, 1, 5, 9, 15)}


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiered_store, "QUIET_S", 0.0)
    monkeypatch.setattr(scrubbing_module, "_LOOK_S", 0.001)


@pytest.fixture
def restless(monkeypatch: pytest.MonkeyPatch) -> None:
    """One pass follows the other."""
    monkeypatch.setattr(scrubbing_module, "PASS_S", 0.0)


@pytest.fixture
def rig(make_store: MakeStore) -> StoreRig:
    """A store with memory for a scrub, whose own one is at rest."""
    return filled(make_store)


def filled(make_store: MakeStore, geometry: SlotGeometry = PAGED) -> StoreRig:
    rig = make_store(geometry, slots=SLOTS, scrub_rate=1)
    assert rig.store._scrubber is not None
    rig.store._scrubber._stop.set()
    rig.store._scrubber._thread.join(PATIENCE_S)
    rig.write(NAMES)
    return rig


@contextmanager
def scrubbing(
    rig: StoreRig,
    *,
    slots: int = SLOTS,
    rate: float | None = FAST,
    idle: Callable[[], bool] = lambda: True,
    writing: Callable[[int], bool] = lambda _: False,
) -> Iterator[Scrubber]:
    plan = tiered_store.MemoryPlan(
        rig.geometry, rig.store.arena.nbytes, 8 * rig.geometry.layer_bytes, scrub=True
    )
    pieces = BufferPool(plan.scrub_offset, rig.geometry.slot_bytes, plan.scrub_pieces)
    scrubber = Scrubber(
        rig.files,
        rig.store.arena,
        pieces,
        slots,
        rate,
        idle=idle,
        writing=writing,
        visit=rig.store._writer.visit,
    )
    try:
        yield scrubber
    finally:
        assert scrubber.close(PATIENCE_S)
        assert len(pieces._free) == PIECES


def faults(rig: StoreRig) -> list[float]:
    return [rig.total(name) for name in FAULTS]


def pass_bytes(rig: StoreRig, wrong: int = 0) -> int:
    """Bytes of one pass: each header, each stored slot, and once more what is wrong."""
    whole = len(NAMES) + wrong
    return SLOTS * rig.geometry.header_bytes + whole * rig.geometry.slot_bytes


def one_pass(rig: StoreRig, wrong: int = 0, **options: object) -> list[tuple[int, int]]:
    before = rig.total("scrub_bytes")
    with scrubbing(rig, **options) as scrubber:  # type: ignore[arg-type]  # any of its options
        end = before + pass_bytes(rig, wrong)
        until(lambda: rig.total("scrub_bytes") >= end, "a pass of the scrub")
        time.sleep(0.01)
        assert rig.total("scrub_bytes") == end
        counted = faults(rig)
        bad = scrubber.take_bad()
        assert faults(rig) == counted, "nobody has said yet that they are stored"
        scrubber.confirm(bad)
        return bad


@pytest.mark.parametrize("geometry", [PAGED, OPAQUE, PAGED_ENCRYPTED])
def test_a_good_store_is_read_and_nothing_is_said(
    make_store: MakeStore, geometry: SlotGeometry
) -> None:
    rig = filled(make_store, geometry)
    assert one_pass(rig) == []
    assert rig.total("scrub_bad_pages") == rig.total("header_mismatches") == 0


@settings(max_examples=40, suppress_health_check=list(HealthCheck))
@given(
    slot=st.sampled_from(sorted(NAMES)),
    part=st.sampled_from(("header", "page")),
    position=st.integers(0, (1 << 20) - 1),
    bit=st.integers(0, 7),
)
def test_every_flipped_bit_is_reported_with_its_epoch(
    rig: StoreRig, slot: int, part: str, position: int, bit: int
) -> None:
    if part == "header":
        offset = position * rig.geometry.header_bytes // (1 << 20)
    else:
        page = position % rig.geometry.pages
        offset = rig.geometry.page_offset(page)
        offset += position * rig.geometry.payload_bytes // (1 << 20)
    rig.forgive()
    before = rig.total("scrub_bad_pages"), rig.total("header_mismatches")
    rig.flip(slot, offset, 1 << bit)
    # Without its magic or its number it is no header of that slot; a load finds that.
    unnamed = offset < 8 or 32 <= offset < 40
    try:
        if unnamed:
            start = rig.total("scrub_bytes")
            with scrubbing(rig) as scrubber:
                end = start + pass_bytes(rig, -1)
                until(lambda: rig.total("scrub_bytes") >= end, "a pass of the scrub")
                assert scrubber.take_bad() == []
            return
        ((bad, epoch),) = one_pass(rig, wrong=1)
    finally:
        rig.flip(slot, offset, 1 << bit)
    assert bad == slot
    assert (epoch == 1) == (not 40 <= offset < 48)  # a wrong epoch is nobody's
    found = rig.total("scrub_bad_pages") - before[0], rig.total("header_mismatches") - before[1]
    assert found == ((0, 1) if part == "header" else (1, 0))


def test_padding_may_hold_anything(make_store: MakeStore) -> None:
    rig = filled(make_store, OPAQUE)
    rig.flip(5, OPAQUE.page_offset(0) + OPAQUE.payload_bytes)
    assert one_pass(rig) == []


def test_the_scrub_needs_no_key(make_store: MakeStore) -> None:
    rig = filled(make_store, PAGED_ENCRYPTED)
    rig.flip(5, PAGED_ENCRYPTED.page_offset(1) + 3)
    rig.flip(9, PAGED_ENCRYPTED.header_used - 1)  # the header's own tag
    assert sorted(one_pass(rig, wrong=2)) == [(5, 1), (9, 1)]
    assert (rig.total("scrub_bad_pages"), rig.total("header_mismatches")) == (1, 1)


@pytest.mark.usefixtures("restless")
def test_a_bad_slot_is_said_once(rig: StoreRig) -> None:
    rig.flip(9, PAGED.page_offset(2))
    passes = 3
    with scrubbing(rig) as scrubber:
        until(lambda: rig.total("scrub_bytes") > passes * pass_bytes(rig), "three passes")
        bad = scrubber.take_bad()
        assert bad == [(9, 1)]
        assert scrubber.take_bad() == []
        scrubber.confirm([(9, 2), (8, 1)])
        assert faults(rig) == [0, 0, 0]
        scrubber.confirm(bad)
        scrubber.confirm(bad)
        assert rig.total("scrub_bad_pages") == 1
        assert rig.total("checksum_failures") == 1
        # The slot's next life is looked at again.
        rig.write({9: 777}, epoch=2)
        rig.flip(9, PAGED.page_offset(1))
        bad = []
        until(lambda: bool(bad.extend(scrubber.take_bad()) or bad), "the second report")
        assert bad == [(9, 2)]


def test_a_slot_that_is_being_written_proves_nothing(rig: StoreRig) -> None:
    rig.flip(5, PAGED.page_offset(0))
    asked: list[int] = []
    with scrubbing(rig, writing=lambda slot: asked.append(slot) is None) as scrubber:
        until(lambda: rig.total("scrub_bytes") >= pass_bytes(rig), "a pass of the scrub")
        assert scrubber.take_bad() == []
    assert asked == [5]


def test_a_slot_that_is_written_between_the_two_reads(rig: StoreRig) -> None:
    """The second read brings another life of the slot, which may be half there."""

    def rewrite(slot: int) -> bool:
        rig.write({slot: 4321}, epoch=2)
        rig.flip(slot, PAGED.page_offset(3))
        return False

    rig.flip(5, PAGED.page_offset(0))
    assert one_pass(rig, wrong=1, writing=rewrite) == []


def test_the_writer_knows_what_it_writes(make_store: MakeStore) -> None:
    rig = make_store()
    rig.faults({"kind": "stall", "op": "write"})
    rig.hold({3: 1, 4: 2})
    assert not rig.store._writer.writes(3)
    rig.commit({3: 1})
    until(lambda: rig.store._writer.writes(3), "the start of the write")
    assert not rig.store._writer.writes(4)
    rig.faults()
    assert rig.store.drain(PATIENCE_S)
    assert not rig.store._writer.writes(3)


@pytest.mark.parametrize("failures", [1, 2])
def test_unreadable_again_and_again_is_bad_and_once_is_not(
    rig: StoreRig, monkeypatch: pytest.MonkeyPatch, failures: int
) -> None:
    """Its header could be read: that says whose report it is."""
    health, slot = rig.files.health, array([5])
    if failures == 2:  # loads have tried it before, and long ago
        for _ in range(FAILURES_TO_CONDEMN):
            health.give_up(slot, array([0]), array([4096]))
        now = health.clock()
        # What fails below has arrived.
        monkeypatch.setattr(health, "readable", lambda *parts: None)
        monkeypatch.setattr(health, "clock", lambda: now + CONDEMN_S)
    left = failures
    finish = VerifiedRead.finish

    def unreadable(self: VerifiedRead, *, again: bool = True) -> NDArray[np.bool_]:
        nonlocal left
        good = finish(self, again=again)
        if self.extents.slots.tolist() == [5] and self.extents.pages and left:
            left -= 1
            self.good[:] = self.arrived[:] = False
        return good

    monkeypatch.setattr(VerifiedRead, "finish", unreadable)
    assert one_pass(rig, wrong=1) == ([] if failures == 1 else [(5, 1)])


@pytest.mark.usefixtures("restless")
def test_a_device_that_fails_is_given_up_and_nothing_is_reported(rig: StoreRig) -> None:
    """Nobody knows what the slots on it hold; the scheduler drops them when it hears of it."""
    rig.faults({"kind": "dead", "device": 2})
    with scrubbing(rig) as scrubber:
        until(lambda: 2 in rig.files.health.quarantined, "the end of the device")
        before = rig.total("scrub_bytes")
        until(lambda: rig.total("scrub_bytes") > before + 2 * pass_bytes(rig), "two passes")
        assert scrubber.take_bad() == []


@pytest.mark.usefixtures("restless")
def test_a_device_that_garbles_is_given_up(make_store: MakeStore) -> None:
    rig = make_store(slots=SLOTS, devices=1, scrub_rate=1)
    rig.write({slot: 500 + slot for slot in range(SLOTS)})
    rig.faults({"kind": "corrupt", "op": "read"})
    with scrubbing(rig) as scrubber:

        def believed() -> bool:
            scrubber.confirm(scrubber.take_bad())
            return 0 in rig.files.health.quarantined

        until(believed, "the end of the device")


def test_what_was_right_between_faults_counts(make_store: MakeStore) -> None:
    """A few flipped bits on a large drive do not condemn it, whenever somebody hears of them."""
    rig = make_store(slots=64, devices=1, scrub_rate=1)
    rig.write({slot: 500 + slot for slot in range(64)})
    bad = []
    with scrubbing(rig, slots=64) as scrubber:
        scrubber._stop.set()
        scrubber._thread.join(PATIENCE_S)
        for fault in range(12):
            slot = 5 * fault
            rig.flip(slot, PAGED.page_offset(1))
            for other in range(64):
                scrubber._scrub(other)
            rig.flip(slot, PAGED.page_offset(1))
        bad = scrubber.take_bad()
        assert len(bad) == 12
        scrubber.confirm(bad)
    assert rig.total("scrub_bad_pages") == 12
    assert not rig.files.health.quarantined


@pytest.mark.usefixtures("restless")
def test_it_rests_while_nobody_hears_what_it_found(
    make_store: MakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scrubbing_module, "_MOST_UNTOLD", 2)
    rig = make_store(slots=SLOTS, devices=1, scrub_rate=1)
    rig.write({slot: 500 + slot for slot in range(SLOTS)})
    for slot in range(0, SLOTS, 2):
        rig.flip(slot, PAGED.page_offset(1))
    with scrubbing(rig) as scrubber:
        until(lambda: scrubber._untold() == 2, "two reports")
        time.sleep(0.05)
        assert len(scrubber.take_bad()) == 2
        until(lambda: scrubber._untold() == 2, "two more")


@pytest.mark.usefixtures("restless")
def test_old_headers_of_free_slots_accuse_nobody(
    make_store: MakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A segment that was striped anew has headers where they were, and other bytes behind them."""
    monkeypatch.setattr(slot_geometry, "STRIPE_UNIT", 8192)
    geometry = SlotGeometry("paged", layers=4, heads=4, groups=2, payload_bytes=8000)
    rig = make_store(geometry, slots=SLOTS, frames=SLOTS, scrub_rate=1)
    assert rig.store._scrubber is not None
    rig.store._scrubber._stop.set()
    rig.write({slot: 500 + slot for slot in range(SLOTS)})
    (old,) = rig.files.placement.segments
    assert len(set(old.lanes)) == 4
    new = restriped(geometry, old, Striping((0, 1, 2), 1), 4)
    rig.files.placement.change([new])
    with scrubbing(rig, slots=new.slots) as scrubber:
        before = rig.total("scrub_bytes")
        until(lambda: rig.total("scrub_bytes") > before + 40 * geometry.slot_bytes, "some passes")
        assert scrubber.take_bad(), "the scheduler knows better"
    assert faults(rig) == [0, 0, 0]
    assert [device.wrong for device in rig.files.health._devices] == [0.0] * 4
    assert not rig.files.health.quarantined


@pytest.mark.usefixtures("restless")
def test_a_read_that_hangs_ends_with_the_store(make_store: MakeStore) -> None:
    rig = make_store(slots=SLOTS, scrub_rate=1 << 30)
    rig.write(NAMES)
    rig.deadline(SHORT_S)
    rig.faults({"kind": "stall", "op": "read"})
    until(lambda: bool(rig.files.health.quarantined), "a deadline")
    scrubber = rig.store._scrubber
    assert scrubber is not None
    assert not scrubber.close(SHORT_S)
    later = threading.Timer(SHORT_S, rig.faults)
    later.start()
    assert scrubber.close(PATIENCE_S), "it waits for the end of the read"
    later.join()


@pytest.mark.usefixtures("restless")
def test_it_never_reads_while_others_do(make_store: MakeStore) -> None:
    rig = make_store(slots=SLOTS, scrub_rate=FAST)
    rig.write(NAMES)
    assert rig.store._scrubber is not None
    until(rig.store.idle)
    until(lambda: rig.total("scrub_bytes") > 0, "the scrub")
    refused = 0

    def idle() -> bool:
        nonlocal refused
        found = rig.store.idle()
        refused += not found
        return found

    rig.store._scrubber._idle = idle

    def rests() -> None:
        assert not rig.store.idle()
        asked = refused
        until(lambda: refused > asked, "the end of what was in flight")
        before = rig.total("scrub_bytes")
        until(lambda: refused > asked + 20, "a rest")
        assert rig.total("scrub_bytes") == before

    release = threading.Event()
    rig.before_copy = lambda: release.wait(PATIENCE_S) and None
    rig.start_load(NAMES, range(1, len(NAMES) + 1))
    rests()
    release.set()
    assert rig.finish_load().complete
    stream = rig.store.stream([array([0, 1])])
    rests()
    stream.close()
    # A stall would hold the scrub's own last read as well.
    rig.faults({"kind": "latency", "op": "write", "seconds": PATIENCE_S})
    rig.hold({3: 1})
    rig.commit({3: 1})
    rests()
    rig.faults()
    assert rig.store.drain(PATIENCE_S)
    before = rig.total("scrub_bytes")
    until(lambda: rig.total("scrub_bytes") > before, "the scrub")


def test_it_waits_for_a_while_after_the_last_request(
    make_store: MakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make_store(slots=SLOTS)
    monkeypatch.setattr(tiered_store, "QUIET_S", 3600.0)
    rig.store.reserve_frames(array([1]), wait=False)
    assert not rig.store.idle()
    monkeypatch.setattr(tiered_store, "QUIET_S", 0.0)
    assert rig.store.idle()


@pytest.mark.usefixtures("restless")
def test_the_rate_is_kept(rig: StoreRig) -> None:
    rate = 2 << 20
    start = time.monotonic()
    with scrubbing(rig, rate=rate):
        until(lambda: rig.total("scrub_bytes") > 4 * PAGED.slot_bytes, "some reads")
        read, elapsed = rig.total("scrub_bytes"), time.monotonic() - start
    # The last slot, its header and a second look at it may be ahead of their time.
    assert read <= rate * elapsed + PAGED.header_bytes + 2 * PAGED.slot_bytes


@pytest.mark.usefixtures("restless")
def test_the_store_reports_and_ends_it(make_store: MakeStore) -> None:
    rig = make_store(slots=SLOTS, scrub_rate=FAST)
    rig.write(NAMES)
    assert rig.store._scrubber is not None
    rig.flip(5, PAGED.page_offset(0))
    bad: list[tuple[int, int]] = []
    until(lambda: bool(bad.extend(rig.store.take_scrubbed()) or bad), "the report")
    assert bad == [(5, 1)]
    rig.store.close()
    assert not rig.store._scrubber._thread.is_alive()


def test_an_error_ends_the_scrub_alone(rig: StoreRig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scrubbing_module, "epoch_of", None)
    with scrubbing(rig):
        until(lambda: rig.total("scrub_failures") == 1, "the end of the scrub")
    assert rig.load(NAMES, range(1, len(NAMES) + 1)).complete


def test_without_the_option_there_is_no_scrub(make_store: MakeStore) -> None:
    rig = make_store()
    rig.write({0: 1})
    assert rig.store.take_scrubbed() == []
    assert rig.store._scrubber is None
    assert rig.total("scrub_bytes") == 0
