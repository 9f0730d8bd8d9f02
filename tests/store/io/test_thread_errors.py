"""Errors that nothing foresaw: threads go on, nobody waits for ever, and memory comes back."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest

from tests.kit.waiting import until
from tests.store.conftest import (
    PAGED,
    PAGED_ENCRYPTED,
    PATIENCE_S,
    SHORT_S,
    MakeStore,
    StoreRig,
    array,
)
from vllm_ssdkv.base.errors import StoreError
from vllm_ssdkv.base.metrics import Counters
from vllm_ssdkv.store.cache.frames import FrameState
from vllm_ssdkv.store.format.slot_geometry import SlotGeometry
from vllm_ssdkv.store.io import thread_errors
from vllm_ssdkv.store.io.engines.protocol import Op
from vllm_ssdkv.store.io.slot_request import SlotRequest
from vllm_ssdkv.store.io.thread_errors import ThreadErrors

Patch = pytest.MonkeyPatch


def broken(
    patch: Patch, name: str, op: Op, times: int = 1, *, after: bool = False, skip: int = 0
) -> list[int]:
    """Have a method of batches raise so often, but for the first ``skip`` calls; the calls that
    raised. ``after``: when it has done what it does."""
    real: Callable[..., Any] = getattr(SlotRequest, name)
    calls: list[int] = []
    raised: list[int] = []

    def method(batch: SlotRequest, *args: Any) -> Any:  # noqa: ANN401 - any method
        if batch.op is not op:
            return real(batch, *args)
        calls.append(1)
        if skip < len(calls) <= skip + times:
            if after:
                real(batch, *args)
            raised.append(1)
            raise RuntimeError("nobody thought of this")
        return real(batch, *args)

    patch.setattr(SlotRequest, name, method)
    return raised


def results(rig: StoreRig, count: int) -> tuple[set[int], set[int]]:
    """Slots written and failed, once so many have been reported."""
    durable: list[int] = []
    failed: list[int] = []

    def enough() -> bool:
        good, bad = rig.store.take_write_results()
        durable.extend(slot for slot, _ in good)
        failed.extend(slot for slot, _ in bad)
        return len(durable) + len(failed) >= count

    until(enough, f"{count} write results")
    assert len({*durable, *failed}) == count == len(durable) + len(failed)
    return set(durable), set(failed)


def counted(rig: StoreRig, thread: str) -> float:
    return rig.total("thread_errors", thread=thread)


# ---- the class ----


def test_errors_are_counted_and_logged_now_and_then(
    monkeypatch: Patch, caplog: pytest.LogCaptureFixture
) -> None:
    counters = Counters()
    errors = ThreadErrors(counters, "writer")
    now = [1000.0]
    monkeypatch.setattr(thread_errors.time, "monotonic", lambda: now[0])
    for _ in range(3):
        with errors.swallowed("it goes on"):
            raise ValueError("unforeseen")
    assert counters.total("thread_errors", thread="writer") == 3
    assert sum("it goes on" in message for message in caplog.messages) == 1
    assert "ValueError: unforeseen" in caplog.text
    now[0] += thread_errors.TELL_INTERVAL_S
    with errors.swallowed("it goes on"):
        raise ValueError("unforeseen")
    assert sum("it goes on" in message for message in caplog.messages) == 2


def test_what_ends_a_process_is_not_swallowed() -> None:
    counters = Counters()
    with pytest.raises(SystemExit), ThreadErrors(counters, "writer").swallowed("no"):
        raise SystemExit
    assert counters.total("thread_errors", thread="writer") == 0


# ---- the writer ----


@pytest.mark.parametrize("geometry", [PAGED, PAGED_ENCRYPTED])
@pytest.mark.parametrize("name", ["wait", "held", "over"])
def test_a_write_whose_end_raises_fails_and_the_next_one_is_written(
    make_store: MakeStore,
    geometry: SlotGeometry,
    name: str,
    monkeypatch: Patch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    rig = make_store(geometry)
    raised = broken(monkeypatch, name, Op.WRITE)
    rig.hold({0: 10, 1: 11, 2: 12})
    with caplog.at_level(logging.ERROR):
        rig.commit({0: 10, 1: 11, 2: 12})
        durable, failed = results(rig, 3)
    assert raised
    assert durable | failed == {0, 1, 2}
    if name == "wait":
        assert failed  # with images, in groups of fewer
    assert counted(rig, "writer") == 1
    assert "nobody thought of this" in caplog.text
    until(lambda: not rig.store.busy(), "the end of the writes")
    rig.hold({3: 13})
    rig.commit({3: 13})
    assert results(rig, 1) == ({3}, set())
    for slot in failed:  # the only copy stays, and may be written again
        frame = rig.store.frames.frame_of(slot)
        assert rig.store.frames.state(frame) is FrameState.HELD
    rig.commit({slot: 10 + slot for slot in failed})
    assert results(rig, len(failed)) == (failed, set())
    rig.assert_no_leak()


@pytest.mark.parametrize("geometry", [PAGED, PAGED_ENCRYPTED])
def test_memory_of_a_write_that_still_runs_is_not_given_away(
    make_store: MakeStore, geometry: SlotGeometry, monkeypatch: Patch
) -> None:
    rig = make_store(geometry)
    broken(monkeypatch, "over", Op.WRITE)
    broken(monkeypatch, "wait", Op.WRITE)
    rig.faults({"kind": "stall", "device": rig.device_of(0)})
    rig.hold({0: 10})
    rig.commit({0: 10})
    assert results(rig, 1) == (set(), {0})
    frames = rig.store.frames
    assert frames.state(frames.frame_of(0)) is FrameState.WRITING
    rig.store.abandon(array([0]))
    assert frames.count(FrameState.LOST) == 1
    rig.faults()
    until(lambda: frames.count(FrameState.LOST) == 0, "the return of the frame")
    rig.assert_no_leak()


def test_an_error_amid_second_attempts_costs_those_slots_only(
    make_store: MakeStore, monkeypatch: Patch
) -> None:
    rig = make_store()
    names = {0: 10, 1: 11, 2: 12, 3: 13}
    rig.faults({"kind": "eio", "device": rig.device_of(1), "op": "write", "count": 1})
    broken(monkeypatch, "wait", Op.WRITE, skip=1)  # the first is that of the group
    rig.hold(names)
    rig.commit(names)
    assert results(rig, 4) == ({0, 2, 3}, {1})
    assert counted(rig, "writer") == 1
    rig.commit({1: 11})
    assert results(rig, 1) == ({1}, set())
    rig.assert_no_leak()


def test_second_attempts_that_hang_are_overdue_once(
    make_store: MakeStore, monkeypatch: Patch
) -> None:
    """The I/O of a group and that of a second attempt end apart: who takes back a frame with the
    first one takes it from under the second."""
    rig = make_store(PAGED_ENCRYPTED, slots=8, frames=8)
    first, second = rig.device_of(0), rig.device_of(1)
    assert first != second
    rig.deadline(SHORT_S)
    hang = {"kind": "stall", "device": first}
    rig.faults(hang, {"kind": "eio", "device": second, "op": "write"})
    real = SlotRequest.out_of_reach

    def out_of_reach(batch: SlotRequest) -> Any:  # noqa: ANN401 - as there
        # From now on the second device hangs, too, and is not known to be out of use.
        rig.faults(hang, {"kind": "stall", "device": second})
        return real(batch)

    monkeypatch.setattr(SlotRequest, "out_of_reach", out_of_reach)
    rig.hold({0: 10, 1: 11})
    rig.commit({0: 10, 1: 11})
    assert results(rig, 2) == (set(), {0, 1})
    frames = rig.store.frames
    assert frames.count(FrameState.WRITING) == 2
    rig.faults({"kind": "stall", "device": second})  # the group's I/O ends
    until(lambda: frames.count(FrameState.WRITING) == 1, "the end of the group's I/O")
    assert frames.state(frames.frame_of(1)) is FrameState.WRITING
    rig.faults()
    until(lambda: frames.count(FrameState.WRITING) == 0, "the end of the second attempt")
    rig.store.abandon(array([0, 1]))
    rig.assert_no_leak()


def test_an_overdue_write_that_raises_is_looked_at_again(
    make_store: MakeStore, monkeypatch: Patch
) -> None:
    rig = make_store()
    rig.deadline(SHORT_S)
    rig.faults({"kind": "stall", "device": rig.device_of(0)})
    rig.hold({0: 10})
    rig.commit({0: 10})
    assert results(rig, 1) == (set(), {0})
    with monkeypatch.context() as patch:
        raised = broken(patch, "ended", Op.WRITE, times=1000)
        until(lambda: len(raised) > 2, "some looks at the overdue write")
    rig.store.abandon(array([0]))
    rig.faults()
    until(lambda: rig.store.frames.count(FrameState.LOST) == 0, "the return of the frame")
    assert counted(rig, "writer") >= 3
    rig.assert_no_leak()


def test_an_error_in_the_thread_itself_fails_what_is_queued(
    make_store: MakeStore, monkeypatch: Patch
) -> None:
    rig = make_store(PAGED_ENCRYPTED)
    images = rig.store._writer._images
    assert images is not None

    def fail() -> int:
        raise RuntimeError("nobody thought of this")

    rig.hold({0: 10, 1: 11})
    with monkeypatch.context() as patch:
        patch.setattr(images, "free", fail)
        rig.commit({0: 10, 1: 11})
        assert results(rig, 2) == (set(), {0, 1})
    rig.commit({0: 10, 1: 11})
    assert results(rig, 2) == ({0, 1}, set())
    rig.assert_no_leak()


def test_a_write_that_cannot_begin_as_foreseen_is_no_error_of_the_thread(
    make_store: MakeStore, monkeypatch: Patch
) -> None:
    rig = make_store()

    def refuse(*_: object) -> None:
        raise StoreError("the engine is closed")

    rig.hold({0: 10})
    with monkeypatch.context() as patch:
        patch.setattr(rig.files.engine, "submit", refuse)
        rig.commit({0: 10})
        assert results(rig, 1) == (set(), {0})
    assert counted(rig, "writer") == 0


def test_a_visit_that_raises_was_not_made(make_store: MakeStore) -> None:
    rig = make_store()

    def fail() -> None:
        raise RuntimeError("nobody thought of this")

    visit = rig.store._writer.visit
    assert not visit(5, fail, PATIENCE_S)
    assert counted(rig, "writer") == 1
    assert visit(5, lambda: None, PATIENCE_S)


# ---- the loader ----


@pytest.mark.parametrize("headers_only", [False, True])
@pytest.mark.parametrize("name", ["wait", "held"])
def test_a_read_whose_end_raises_fails_its_load_and_no_other(
    make_store: MakeStore, name: str, headers_only: bool, monkeypatch: Patch
) -> None:
    rig = make_store(slots=64)
    names = {slot: slot + 40 for slot in range(12)}
    rig.write(names)
    if headers_only:
        rig.hold(dict.fromkeys(range(40, 56), 0))
        rig.store.extend_context("x", 0, array(list(names)))
    blocks = [] if headers_only else range(1, 13)
    for _ in range(20):  # more than there is memory for headers, were it lost
        with monkeypatch.context() as patch:
            raised = broken(patch, name, Op.READ)
            rig.store.frames.forget(array(list(names)))
            outcome = rig.load(names, blocks)
            assert raised
            assert outcome.bad == []
            if name == "wait":
                assert not outcome.complete
        until(lambda: rig.store.frames.count(FrameState.LOST) == 0, "the return of the frames")
    assert counted(rig, "loader") >= 20
    assert rig.load(names, blocks).complete
    rig.assert_no_leak()


def test_a_second_read_that_raises_keeps_its_frame_until_it_ends(
    make_store: MakeStore, monkeypatch: Patch
) -> None:
    """Its frame would be read into by others otherwise."""
    rig = make_store(frames=8)
    rig.write({0: 10})
    rig.faults({"kind": "eio", "device": rig.device_of(0), "op": "read", "count": 1})
    real, frames = SlotRequest.wait, rig.store.frames
    waits: list[int] = []

    def wait(batch: SlotRequest, *args: Any) -> Any:  # noqa: ANN401 - as there
        waits.append(1)
        if len(waits) == 1:
            good = real(batch, *args)
            rig.faults({"kind": "stall", "device": rig.device_of(0)})
            return good
        raise RuntimeError("nobody thought of this")

    with monkeypatch.context() as patch:
        patch.setattr(SlotRequest, "wait", wait)
        assert not rig.load({0: 10}, [1]).complete
    assert len(waits) == 2
    assert frames.count(FrameState.LOST) == 1
    rig.faults()
    until(lambda: frames.count(FrameState.LOST) == 0, "the return of the frame")
    assert rig.load({0: 10}, [1]).complete
    rig.assert_no_leak()


def test_overdue_reads_that_raise_end_no_thread(make_store: MakeStore, monkeypatch: Patch) -> None:
    rig = make_store(slots=64)
    rig.write({0: 10, 1: 11})
    rig.deadline(SHORT_S)
    rig.faults({"kind": "stall", "device": rig.device_of(0)})
    assert not rig.load({0: 10}, [1]).complete
    frames = rig.store.frames
    assert frames.count(FrameState.LOST) == 1
    with monkeypatch.context() as patch:
        raised = broken(patch, "ended", Op.READ, times=1000)
        until(lambda: len(raised) > 2, "some looks at the overdue read")
        assert rig.load({1: 11}, [2]).complete
    assert counted(rig, "loader") >= 3
    rig.faults()
    until(lambda: frames.count(FrameState.LOST) == 0, "the return of the frame")
    rig.assert_no_leak()
