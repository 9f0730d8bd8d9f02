"""The write path: what is reported, what stays held, and what a write in flight protects."""

from __future__ import annotations

import itertools
import logging
import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.kit.waiting import until
from tests.store.conftest import (
    ALL,
    DIGEST,
    PAGED,
    PAGED_ENCRYPTED,
    PATIENCE_S,
    RANK,
    SHORT_S,
    SUMMED,
    MakeStore,
    StoreRig,
    array,
    content,
    key_of,
)
from vllm_ssdkv.base.checksum import checksum_bytes
from vllm_ssdkv.store.cache.frames import FrameState
from vllm_ssdkv.store.devices.health import WriteState
from vllm_ssdkv.store.format.slot_geometry import SlotGeometry
from vllm_ssdkv.store.format.slot_header import decode
from vllm_ssdkv.store.io.engines.protocol import Op
from vllm_ssdkv.store.write.flusher import Pending


def results(rig: StoreRig, count: int) -> tuple[set[tuple[int, int]], set[tuple[int, int]]]:
    """Durable and failed (slot, epoch), once ``count`` have been reported; never one twice."""
    durable: list[tuple[int, int]] = []
    failed: list[tuple[int, int]] = []

    def enough() -> bool:
        new = rig.store.take_write_results()
        durable.extend(new[0])
        failed.extend(new[1])
        return len(durable) + len(failed) >= count

    until(enough, f"{count} write results")
    assert len(durable) + len(failed) == count == len({*durable, *failed})
    return set(durable), set(failed)


def state_of(rig: StoreRig, slot: int) -> FrameState | None:
    frame = rig.store.frames.frame_of(slot)
    return None if frame < 0 else rig.store.frames.state(frame)


def on_disk(rig: StoreRig, slot: int) -> np.ndarray:
    """A slot's bytes, read past the engine."""
    geometry, image = rig.geometry, bytearray()
    extents = rig.files.placement.extents(array([slot]), 0, geometry.slot_bytes)
    for device, offset, length in zip(extents.device, extents.offset, extents.length, strict=True):
        with open(rig.devices[int(device)].path, "rb") as file:
            file.seek(int(offset))
            image += file.read(int(length))
    return np.frombuffer(bytes(image), dtype=np.uint8)


@pytest.mark.parametrize("geometry", ALL)
def test_a_written_slot_is_as_the_format_says(
    make_store: MakeStore, geometry: SlotGeometry
) -> None:
    rig = make_store(geometry, slots=8, frames=8)
    rig.hold({5: 50, 2: 20})
    rig.commit({5: 50, 2: 20}, epoch=7)
    assert results(rig, 2) == ({(5, 7), (2, 7)}, set())
    assert state_of(rig, 5) is FrameState.CLEAN
    image = on_disk(rig, 5)
    header = decode(image, geometry, DIGEST, key=key_of(50), slot=5, epoch=7, rank=RANK)
    for page, payload in enumerate(content(geometry, 50)):
        at = geometry.page_offset(page)
        stored = image[at : at + payload.size]
        assert np.array_equal(stored, payload) != geometry.encrypted
        assert header.checksums[page] == checksum_bytes(stored)
    rig.assert_no_leak()


@pytest.mark.parametrize("geometry", [PAGED, PAGED_ENCRYPTED])
def test_a_failed_write_is_tried_again_alone(make_store: MakeStore, geometry: SlotGeometry) -> None:
    rig = make_store(geometry)
    rig.faults({"kind": "eio", "op": "write", "count": 1})
    rig.hold({0: 1, 1: 2, 2: 3})
    rig.commit({0: 1, 1: 2, 2: 3})
    assert results(rig, 3) == ({(0, 1), (1, 1), (2, 1)}, set())
    assert rig.files.engine.statistics()["fault_eio.0"] == 1
    rig.assert_no_leak()


def test_slots_that_others_have_by_now_are_not_written(make_store: MakeStore) -> None:
    rig = make_store()
    rig.files.health.writes_since = 5
    rig.hold({0: 1, 1: 2})
    rig.commit({0: 1}, epoch=4)
    rig.commit({1: 2}, epoch=5)
    assert results(rig, 2) == ({(1, 5)}, {(0, 4)})
    rig.assert_no_leak()


@pytest.mark.parametrize("seals", [False, True])
def test_a_slot_that_another_engine_gets_meanwhile_is_not_written(
    make_store: MakeStore, monkeypatch: pytest.MonkeyPatch, seals: bool
) -> None:
    """The other engine gets it while its header is made, or before the write is tried again."""
    rig = make_store()
    health, codec, engine = rig.files.health, type(rig.files.codec), type(rig.files.engine)
    seal: Any = codec.seal
    submit: Any = engine.submit
    written: list[Op] = []

    def sealed(*given: object) -> object:
        health.writes_since = 5 if seals else 0
        return seal(*given)

    def submitted(self: object, op: Op, *given: object) -> object:
        health.writes_since = 5
        written.append(op)
        return submit(self, op, *given)

    monkeypatch.setattr(codec, "seal", sealed)
    monkeypatch.setattr(engine, "submit", submitted)
    rig.faults({"kind": "eio", "op": "write", "count": 1})
    rig.hold({0: 1})
    rig.commit({0: 1}, epoch=4)
    assert results(rig, 1) == (set(), {(0, 4)})
    assert written == ([] if seals else [Op.WRITE])
    rig.assert_no_leak()


@pytest.mark.parametrize("kind", ["eio", "enospc", "short", "dead"])
def test_a_write_that_fails_twice_stays_held(
    make_store: MakeStore, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    rig = make_store()
    device = rig.device_of(1)
    names = {0: 10, 1: 11, 2: 12, 3: 13}
    rig.faults({"kind": kind, "device": device})
    rig.hold(names)
    with caplog.at_level(logging.ERROR):
        rig.commit(names)
        assert results(rig, 4) == ({(0, 1), (2, 1), (3, 1)}, {(1, 1)})
    assert state_of(rig, 1) is FrameState.HELD
    assert state_of(rig, 0) is FrameState.CLEAN
    np.testing.assert_array_equal(
        rig.page_view(rig.store.frames.frame_of(1)), content(rig.geometry, 11)
    )
    assert rig.paths[device] in caplog.text
    label = kind if kind in {"eio", "enospc", "short"} else "other"
    # A second try is no use where there is no room.
    tries = 1 if kind == "enospc" else 2
    assert rig.total("io_errors", device=rig.paths[device], kind=label) == tries
    # It is the only copy, so not even need evicts it; only a discard does.
    assert len(rig.store.reserve_frames(array(range(4, 32)), wait=False)) == 15
    assert state_of(rig, 1) is FrameState.HELD
    rig.store.abandon(array([1]))
    assert state_of(rig, 1) is None
    rig.faults()
    rig.assert_no_leak()


class Pause:
    """A device without room, whose writes are paused, on a clock that stands still."""

    def __init__(self, rig: StoreRig) -> None:
        self.rig, self.health = rig, rig.files.health
        self.now = 1000.0
        self.health.clock = lambda: self.now
        self.device = rig.device_of(1)
        rig.faults({"kind": "enospc", "op": "write", "device": self.device})
        slots = range(rig.files.placement.slots)
        self.slots = [slot for slot in slots if rig.device_of(slot) == self.device]
        self.others = [slot for slot in slots if slot not in self.slots]

    def write(self, *slots: int) -> None:
        names = {slot: slot + 10 for slot in slots}
        assert self.rig.hold(names) == list(slots)
        self.rig.commit(names)

    def tries(self) -> int:
        return self.rig.files.engine.statistics().get(f"fault_enospc.{self.device}", 0)


def test_writes_to_a_device_without_room_fail_unsent(make_store: MakeStore) -> None:
    """Until the pause is over; then the next block shows that there is room again."""
    rig = make_store()
    here = Pause(rig)
    here.write(*here.slots[:2], here.others[0])
    assert results(rig, 3)[0] == {(here.others[0], 1)}
    tries = here.tries()
    here.write(here.slots[2], here.others[1])
    assert results(rig, 2) == ({(here.others[1], 1)}, {(here.slots[2], 1)})
    assert here.tries() == tries
    rig.faults()
    here.now += 1.0
    rig.commit({slot: slot + 10 for slot in here.slots[:2]})
    assert results(rig, 2) == ({(slot, 1) for slot in here.slots[:2]}, set())
    assert here.health.writing(here.device) is WriteState.OPEN
    rig.store.abandon(array([here.slots[2]]))
    rig.assert_no_leak()


@pytest.mark.parametrize("geometry", [PAGED, PAGED_ENCRYPTED])
def test_kept_writes_wait_for_room(make_store: MakeStore, geometry: SlotGeometry) -> None:
    """In their frames; the first one that is tried again is alone."""
    rig = make_store(geometry, keeps=True)
    here = Pause(rig)
    here.write(*here.slots[:3], here.others[0])
    assert results(rig, 1) == ({(here.others[0], 1)}, set())
    assert rig.store._writer.pending() == 3
    tries = here.tries()
    here.now += 1.0
    here.write(here.others[1])
    assert results(rig, 1) == ({(here.others[1], 1)}, set())
    until(lambda: here.tries() == tries + 1, "a trial")
    until(lambda: here.health.writing(here.device) is WriteState.PAUSED, "its end")
    assert {state_of(rig, slot) for slot in here.slots[:3]} == {FrameState.HELD}
    assert all(rig.store._writer.writes(slot) for slot in here.slots[:3])
    rig.store.abandon(array([here.slots[0]]))  # its request has ended
    rig.faults()
    here.now += 2.0
    here.write(here.others[2])
    wanted = {(slot, 1) for slot in (*here.slots[1:3], here.others[2])}
    assert results(rig, 3) == (wanted, set())
    assert not rig.store._writer.pending()
    for slot in here.slots[1:3]:
        image = on_disk(rig, slot)
        assert decode(image, geometry, DIGEST, key=key_of(slot + 10), slot=slot, epoch=1, rank=RANK)
    rig.assert_no_leak()


@pytest.mark.parametrize("room", [True, False])
def test_kept_writes_are_tried_at_the_end(make_store: MakeStore, room: bool) -> None:
    rig = make_store(keeps=True)
    here = Pause(rig)
    here.write(*here.slots[:2], here.others[0])
    results(rig, 1)
    if room:
        rig.faults()
    assert rig.store._writer.close(PATIENCE_S)
    mine = {(slot, 1) for slot in here.slots[:2]}
    assert results(rig, 2) == ((mine, set()) if room else (set(), mine))


def test_a_held_frame_may_be_committed_again(make_store: MakeStore) -> None:
    rig = make_store()
    rig.faults({"kind": "eio", "device": rig.device_of(1), "op": "write"})
    rig.hold({1: 11})
    rig.commit({1: 11})
    assert results(rig, 1) == (set(), {(1, 1)})
    rig.faults()
    rig.commit({1: 11})
    assert results(rig, 1) == ({(1, 1)}, set())


def test_a_hung_device_fails_its_slots_and_no_others(make_store: MakeStore) -> None:
    rig = make_store(slots=64, frames=32)
    rig.deadline(SHORT_S)
    hung = rig.device_of(1)
    names = {slot: 100 + slot for slot in range(24)}
    mine = {slot for slot in names if rig.device_of(slot) == hung}
    assert 0 < len(mine) < len(names)
    rig.faults({"kind": "stall", "device": hung})
    rig.hold(names)
    rig.commit(names)
    durable, failed = results(rig, len(names))
    assert {slot for slot, _ in failed} == mine
    assert {slot for slot, _ in durable} == set(names) - mine
    # The I/O may still read the frames: they hold their bytes and cannot be used.
    assert {state_of(rig, slot) for slot in mine} == {FrameState.WRITING}
    for slot in mine:
        frame = rig.store.frames.frame_of(slot)
        np.testing.assert_array_equal(rig.page_view(frame), content(rig.geometry, names[slot]))
    rig.store.abandon(array(sorted(mine)))
    frames = rig.store.frames
    assert frames.count(FrameState.LOST) == len(mine)
    assert len(rig.store.reserve_frames(array(range(24, 64)), wait=False)) == 32 - len(mine)
    rig.faults()
    until(lambda: frames.count(FrameState.LOST) == 0, "the end of the stalled writes")
    rig.assert_no_leak()


ONE_HEAD = replace(SUMMED, heads=1)
"""Such slots are each on one device; those of several heads are on all."""


@pytest.mark.parametrize("geometry", [PAGED_ENCRYPTED, ONE_HEAD], ids=["encrypted", "tails"])
def test_late_writes_hold_their_images_only(make_store: MakeStore, geometry: SlotGeometry) -> None:
    """Encrypted slots, or tails, are written from pieces of memory, of which there are few."""
    rig = make_store(geometry, slots=64, frames=40)
    rig.deadline(SHORT_S)
    images = rig.store._writer._images
    assert images is not None
    assert images.pieces == 4
    hung = rig.device_of(1)
    names = {slot: 100 + slot for slot in range(24)}
    mine = {slot for slot in names if rig.device_of(slot) == hung}
    rig.faults({"kind": "stall", "device": hung})
    rig.hold(names)
    rig.commit(names)
    durable, failed = results(rig, len(names))
    assert {slot for slot, _ in failed} == mine
    assert {slot for slot, _ in durable} == set(names) - mine
    late = rig.store.frames.count(FrameState.WRITING)
    assert 0 < late <= 2
    assert images.free() == images.pieces - late
    rig.faults()
    until(lambda: images.free() == images.pieces, "the return of the images")
    rig.assert_no_leak()


def test_without_images_writes_fail_and_nothing_waits(
    make_store: MakeStore, caplog: pytest.LogCaptureFixture
) -> None:
    rig = make_store(PAGED_ENCRYPTED, devices=1)
    rig.deadline(SHORT_S)
    images = rig.store._writer._images
    assert images is not None
    rig.faults({"kind": "stall"})
    names = {slot: 100 + slot for slot in range(8)}
    rig.hold(names)
    rig.commit(names)
    assert results(rig, 8) == (set(), {(slot, 1) for slot in names})
    assert images.free() == 0
    assert "hold the memory for slots to be written" in caplog.text
    rig.faults()
    until(lambda: images.free() == images.pieces, "the return of the images")
    rig.assert_no_leak()


def test_after_a_hang_writes_to_the_device_fail_at_once(make_store: MakeStore) -> None:
    rig = make_store()
    rig.deadline(SHORT_S)
    rig.faults({"kind": "stall", "device": rig.device_of(1)})
    rig.hold({1: 11})
    rig.commit({1: 11})
    assert results(rig, 1) == (set(), {(1, 1)})
    # Its own old write is still in flight: a second one might land before it.
    rig.hold({1: 12, 5: 15, 2: 13})
    rig.commit({1: 12, 5: 15, 2: 13}, epoch=2)
    assert results(rig, 3) == ({(2, 2)}, {(1, 2), (5, 2)})
    assert state_of(rig, 1) is FrameState.HELD
    rig.faults()
    rig.assert_no_leak()


def gate(rig: StoreRig, device: int) -> None:
    rig.faults({"kind": "stall", "device": device})


def started(rig: StoreRig, requests: int, kind: str = "stall") -> None:
    """Wait until the engine has that many requests that a stall, or another fault, holds."""

    def held() -> bool:
        counts = rig.files.engine.statistics()
        return sum(n for name, n in counts.items() if name.startswith(f"fault_{kind}.")) >= requests

    until(held, "the start of a write")


@pytest.mark.parametrize("geometry", [PAGED, PAGED_ENCRYPTED])
def test_a_slot_given_anew_waits_for_its_older_write(
    make_store: MakeStore, geometry: SlotGeometry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two writes to one place may land in any order: the new one must not start before."""
    rig = make_store(geometry)
    gate(rig, rig.device_of(0))
    rig.hold({0: 1})
    rig.commit({0: 1}, epoch=1)
    started(rig, 1)
    rig.store.abandon(array([0]))
    rig.hold({0: 2})
    rig.commit({0: 2}, epoch=2)
    writer, looks = rig.store._writer, []
    next_items = writer._next_items

    def look() -> list[Pending]:
        looks.append(1)
        return next_items()

    monkeypatch.setattr(writer, "_next_items", look)
    until(lambda: len(looks) > 2, "some looks of the writer's thread")
    counts = rig.files.engine.statistics()
    assert counts[f"fault_stall.{rig.device_of(0)}"] == 1
    assert rig.store.frames.count(FrameState.LOST) == 1
    rig.faults()
    assert results(rig, 2) == ({(0, 1), (0, 2)}, set())
    decode(on_disk(rig, 0), rig.geometry, DIGEST, key=key_of(2), slot=0, epoch=2)
    np.testing.assert_array_equal(
        rig.page_view(rig.store.frames.frame_of(0)), content(rig.geometry, 2)
    )
    rig.assert_no_leak()


def test_queued_writes_are_discarded_without_a_report(make_store: MakeStore) -> None:
    rig = make_store()
    device = rig.device_of(0)
    gate(rig, device)
    first = [0, 4]  # two groups in flight, both on the stalled device
    for slot in first:
        rig.hold({slot: slot})
        rig.commit({slot: slot})
        started(rig, 1 + first.index(slot))
    rig.hold({1: 11, 2: 12, 3: 13})
    rig.commit({1: 11, 2: 12, 3: 13})
    assert rig.store.busy()
    rig.store.abandon(array([1, 3]))
    assert state_of(rig, 1) is None
    rig.faults()
    assert results(rig, 3) == ({(0, 1), (4, 1), (2, 1)}, set())
    assert not rig.store.busy()
    assert rig.total("bytes_written", device=rig.paths[rig.device_of(1)]) == 0
    rig.assert_no_leak()


def test_a_commit_without_a_frame_is_reported_as_failed(make_store: MakeStore) -> None:
    """Whatever took the frame away: the scheduler waits for an answer."""
    rig = make_store()
    rig.commit({7: 70})
    assert results(rig, 1) == (set(), {(7, 1)})


def test_what_cannot_be_submitted_is_reported_and_held(
    make_store: MakeStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rig = make_store()

    def refuse(*_: object) -> None:
        raise ValueError("the engine is closed")

    rig.hold({1: 11})
    with monkeypatch.context() as patch:
        patch.setattr(rig.files.engine, "submit", refuse)
        rig.commit({1: 11})
        assert results(rig, 1) == (set(), {(1, 1)})
    assert "the engine is closed" in caplog.text
    assert state_of(rig, 1) is FrameState.HELD
    rig.commit({1: 11})
    assert results(rig, 1) == ({(1, 1)}, set())


def test_a_write_that_hangs_does_not_hold_up_the_next(make_store: MakeStore) -> None:
    rig = make_store()
    gate(rig, rig.device_of(0))
    rig.hold({0: 1, 1: 2})
    rig.commit({0: 1})
    started(rig, 1)
    rig.commit({1: 2})
    assert results(rig, 1) == ({(1, 1)}, set())
    rig.faults()
    assert results(rig, 1) == ({(0, 1)}, set())


def test_drain_waits_for_every_outcome(make_store: MakeStore) -> None:
    rig = make_store()
    gate(rig, rig.device_of(0))
    rig.hold({0: 1})
    rig.commit({0: 1})
    assert not rig.store.drain(0.02)
    threading.Timer(0.05, rig.faults).start()
    assert rig.store.drain(PATIENCE_S)
    assert rig.store.take_write_results() == ([(0, 1)], [])


@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_random_lives_of_slots(make_store: MakeStore, data: st.DataObject) -> None:
    """Hold, commit and discard at random, with a device that fails now and then.

    In the end the devices hold the newest life of every slot reported as written, and no frame
    is missing.
    """
    rig = make_store(data.draw(st.sampled_from(ALL)), slots=12, frames=8)
    rig.faults(
        {"kind": "eio", "op": "write", "probability": 0.3, "seed": data.draw(st.integers(0, 99))},
        {"kind": "latency", "op": "write", "probability": 0.3, "seconds": 0.003},
    )
    epochs = itertools.count(1)
    names: dict[int, int] = {}  # slot to the epoch of its newest life
    committed: dict[tuple[int, int], int] = {}
    durable: set[tuple[int, int]] = set()
    failed: set[tuple[int, int]] = set()

    def collect() -> None:
        new = rig.store.take_write_results()
        durable.update(new[0])
        failed.update(new[1])

    for _ in range(data.draw(st.integers(5, 25))):
        slots = data.draw(st.sets(st.integers(0, 11), min_size=1, max_size=5))
        action = data.draw(st.sampled_from(["write", "write", "hold", "discard", "collect"]))
        if action == "discard":
            rig.store.abandon(array(sorted(slots)))
            for slot in slots:
                names.pop(slot, None)
        elif action == "collect":
            collect()
        else:
            epoch = next(epochs)
            # The scheduler hands a slot out again only after its last write was reported.
            busy = {slot for slot, e in committed if (slot, e) not in durable | failed}
            chosen = {slot: 100 * slot + epoch for slot in sorted(slots - busy)}
            held = rig.hold(chosen, wait=False)
            for slot in chosen:
                names.pop(slot, None)
            if action == "write" and held:
                rig.commit({slot: chosen[slot] for slot in held}, epoch)
                committed |= {(slot, epoch): chosen[slot] for slot in held}
                names |= dict.fromkeys(held, epoch)
    assert rig.store.drain(PATIENCE_S)
    collect()
    # A discarded slot may go without a report.
    assert durable | failed <= set(committed)
    assert {(s, e) for s, e in names.items()} <= durable | failed
    for slot, epoch in names.items():
        if (slot, epoch) in durable:
            name = committed[slot, epoch]
            image = on_disk(rig, slot)
            decode(image, rig.geometry, DIGEST, key=key_of(name), slot=slot, epoch=epoch)
    rig.faults()
    rig.assert_no_leak()
