"""Promises of the native engines beyond the protocol: order, affinity, forks."""

from __future__ import annotations

import errno
import fcntl
import gc
import os
import select
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.kit.waiting import until
from vllm_ssdkv import _io
from vllm_ssdkv.config.io_engine import EngineOptions
from vllm_ssdkv.store.io.engines.protocol import PENDING, Batch, Op

if TYPE_CHECKING:
    from tests.store.io.conftest import Rig, Submit

PAGE = 4096
MIB = 1 << 20
PATIENCE_S = 60.0
KALLSYMS = Path("/proc/kallsyms")


@pytest.fixture(params=["uring", "threads"])
def one_at_a_time(request: pytest.FixtureRequest) -> EngineOptions:
    return EngineOptions(engine=request.param, queue_depth=1)


def io_threads() -> list[Path]:
    """Folders of this process's I/O threads."""
    found = []
    for task in Path("/proc/self/task").iterdir():
        try:
            if task.joinpath("comm").read_text().startswith(("ssdkv-io-", "ssdkv-uring-")):
                found.append(task)
        except OSError:
            continue  # it has ended
    return found


def tasks() -> set[str]:
    return set(os.listdir("/proc/self/task"))


def gone(started: set[str]) -> bool:
    """Whether threads that were joined are out of the kernel's list, which takes it a moment."""
    deadline = time.monotonic() + PATIENCE_S
    while started & tasks():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.001)
    return True


# A queue this long lasts much longer than the call that submits the next request.
LONG = 600

ATTEMPTS = 8
"""A machine that stands still between two calls lets even such a queue run empty."""


def waiting(batch: Batch) -> int:
    """Requests that have not ended."""
    return int((batch.results() == PENDING).sum())


@pytest.fixture
def old_and_new(rig: Rig) -> Callable[[], None]:
    """Have "old" at the begin of the device, and "new" in the memory that is written there."""
    rig.add_device(bytes(4 * MIB))

    def reset() -> None:
        os.pwrite(rig.fds[0], b"old", 0)
        rig.memory[MIB : MIB + 3] = list(b"new")

    return reset


QUEUE = [(0, MIB + i % 3 * MIB, MIB, 0) for i in range(LONG)]


def test_reads_overtake_writes_that_wait(
    rig: Rig, submit: Submit, one_at_a_time: EngineOptions, old_and_new: Callable[[], None]
) -> None:
    engine = rig.open(one_at_a_time)
    for _ in range(ATTEMPTS):
        old_and_new()
        writes = submit(engine, Op.WRITE, *QUEUE, (0, 0, PAGE, MIB))
        read = submit(engine, Op.READ, (0, 0, PAGE, 2 * MIB))
        overtaken = waiting(writes)
        assert read.wait(PATIENCE_S)
        assert writes.wait(PATIENCE_S)
        assert os.pread(rig.fds[0], 3, 0) == b"new"
        if overtaken > 2:
            break
    assert overtaken > 2
    assert bytes(rig.memory[2 * MIB : 2 * MIB + 3]) == b"old"


def test_writes_do_not_wait_for_ever(
    rig: Rig, submit: Submit, one_at_a_time: EngineOptions, old_and_new: Callable[[], None]
) -> None:
    engine = rig.open(one_at_a_time)
    for _ in range(ATTEMPTS):
        old_and_new()
        reads = submit(engine, Op.READ, *QUEUE, (0, 0, PAGE, 2 * MIB))
        write = submit(engine, Op.WRITE, (0, 0, PAGE, MIB))
        overtaken = waiting(reads)
        assert write.wait(PATIENCE_S)
        assert reads.wait(PATIENCE_S)
        if overtaken > 64:  # twice the reads that may overtake a write
            break
    assert overtaken > 64
    assert bytes(rig.memory[2 * MIB : 2 * MIB + 3]) == b"new"


@pytest.mark.skipif(
    len(os.sched_getaffinity(0)) == 1,
    reason="with one CPU every thread runs on it whatever we do",
)
def test_threads_leave_the_core_of_their_parent(rig: Rig, one_at_a_time: EngineOptions) -> None:
    rig.add_device(b"")
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    try:
        rig.open(one_at_a_time)
    finally:
        os.sched_setaffinity(0, allowed)
    until(io_threads)
    for task in io_threads():
        assert len(os.sched_getaffinity(int(task.name))) > 1


def test_a_forgotten_engine_ends_its_threads_and_descriptors(
    rig: Rig, submit: Submit, one_at_a_time: EngineOptions
) -> None:
    rig.add_device(bytes(PAGE))
    gc.collect()  # what earlier tests left behind must not go now
    before, descriptors = tasks(), len(os.listdir("/proc/self/fd"))
    engine = rig.open(one_at_a_time)
    started = tasks() - before
    batch = submit(engine, Op.READ, *[(0, 0, PAGE, 0)] * 50)
    rig.engines.clear()
    del engine
    gc.collect()
    assert started
    assert gone(started)
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert (batch.results() == PAGE).all()  # the handle outlives the engine


def test_a_forked_child_neither_hangs_nor_submits(
    rig: Rig, submit: Submit, one_at_a_time: EngineOptions
) -> None:
    rig.add_device(bytes(4 * MIB))
    engine = rig.open(one_at_a_time)
    batch = submit(engine, Op.READ, *[(0, i % 4 * MIB, MIB, 0) for i in range(100)])
    child = os.fork()
    if child == 0:
        signal.alarm(int(PATIENCE_S))
        code = 1
        try:
            submit(engine, Op.READ, (0, 0, PAGE, 0))
        except ValueError:
            code = 0 if engine.close(PATIENCE_S) else 2
        del engine, rig
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert batch.wait(PATIENCE_S)
    assert (batch.results() == MIB).all()
    assert engine.close(PATIENCE_S)


def test_close_cancels_what_it_has_no_time_for(
    rig: Rig, submit: Submit, one_at_a_time: EngineOptions
) -> None:
    rig.add_device(bytes(4 * MIB))
    for _ in range(ATTEMPTS):
        engine = rig.open(one_at_a_time)
        batch = submit(engine, Op.WRITE, *[(0, i % 4 * MIB, MIB, 0) for i in range(LONG)])
        engine.close(0.0)
        assert batch.wait(PATIENCE_S)
        results = batch.results()
        assert set(results.tolist()) <= {MIB, -errno.ECANCELED}
        cancelled = int((results == -errno.ECANCELED).sum())
        assert engine.statistics()["write_errors.0"] == cancelled
        assert engine.close(PATIENCE_S)  # the one in flight has ended since
        if cancelled:
            break
    assert cancelled


def test_waiting_leaves_the_interpreter_to_other_threads(
    rig: Rig, submit: Submit, one_at_a_time: EngineOptions
) -> None:
    rig.add_device(bytes(4 * MIB))
    engine, turns, stop = rig.open(one_at_a_time), [0], threading.Event()

    def count() -> None:
        while not stop.wait(0.001):
            turns[0] += 1

    thread = threading.Thread(target=count)
    thread.start()
    most = 0
    for doubling in range(5):  # a busy machine needs longer waits; with the lock held all see one
        writes = LONG << doubling
        batch = submit(engine, Op.WRITE, *[(0, i % 4 * MIB, MIB, 0) for i in range(writes)])
        before = turns[0]
        assert batch.wait(PATIENCE_S)
        most = max(most, turns[0] - before)
        if most >= 8:
            break
    stop.set()
    thread.join()
    assert most >= 8


def test_signals_disturb_no_request(rig: Rig, submit: Submit, one_at_a_time: EngineOptions) -> None:
    rig.add_device(bytes(PAGE))
    engine = rig.open(one_at_a_time)
    ticks = [0]

    def tick(*_: object) -> None:
        ticks[0] += 1

    before = signal.signal(signal.SIGALRM, tick)
    signal.setitimer(signal.ITIMER_REAL, 0.005, 0.005)
    try:
        while ticks[0] < 20:
            batch = submit(engine, Op.READ, *[(0, 0, PAGE, 0)] * 20)
            assert batch.wait(PATIENCE_S)
            assert (batch.results() == PAGE).all()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_the_end_of_a_file_is_where_it_ends_now(
    rig: Rig, submit: Submit, one_at_a_time: EngineOptions
) -> None:
    rig.add_device(bytes(3 * PAGE))
    engine = rig.open(one_at_a_time)
    for pages in (3, 4):
        batch = submit(engine, Op.READ, (0, 0, 4 * PAGE, 0))
        assert batch.wait(PATIENCE_S)
        assert batch.results().tolist() == [pages * PAGE]
        with rig.paths[0].open("ab") as file:
            file.write(bytes(PAGE))


@pytest.mark.skipif(not KALLSYMS.exists(), reason="the kernel shows no long generated file")
def test_short_transfers_are_continued(
    rig: Rig, submit: Submit, one_at_a_time: EngineOptions
) -> None:
    """Generated files give less than a page per call, and at odd places."""
    rig.paths.append(KALLSYMS)
    rig.fds.append(os.open(KALLSYMS, os.O_RDONLY))
    assert len(os.pread(rig.fds[0], 8 * PAGE, PAGE)) < 8 * PAGE
    batch = submit(rig.open(one_at_a_time), Op.READ, (0, PAGE, 8 * PAGE, 0))
    assert batch.wait(PATIENCE_S)
    assert batch.results().tolist() == [8 * PAGE]
    with KALLSYMS.open("rb") as file:
        assert file.read(9 * PAGE)[PAGE:] == rig.memory[: 8 * PAGE].tobytes()


def test_direct_reads_end_inside_a_block(
    rig: Rig, submit: Submit, one_at_a_time: EngineOptions
) -> None:
    try:
        rig.add_device(b"z" * (PAGE + 904), os.O_RDWR | os.O_DIRECT)
    except OSError as error:
        pytest.skip(f"this file system has no O_DIRECT: {error}")
    batch = submit(rig.open(one_at_a_time), Op.READ, (0, 0, 4 * PAGE, 0), (0, PAGE, PAGE, 4 * PAGE))
    assert batch.wait(PATIENCE_S)
    assert batch.results().tolist() == [PAGE + 904, 904]


def test_a_notice_comes_when_all_is_done(
    rig: Rig, submit: Submit, one_at_a_time: EngineOptions
) -> None:
    rig.add_device(bytes(4 * MIB))
    engine, eventfd = rig.open(one_at_a_time), os.eventfd(0)
    batch = submit(engine, Op.WRITE, *[(0, i % 4 * MIB, MIB, 0) for i in range(50)])
    assert isinstance(batch, _io.Batch)
    batch.notify(eventfd)
    assert select.select([eventfd], [], [], PATIENCE_S)[0]
    assert batch.done()
    assert os.eventfd_read(eventfd) == 1

    late = submit(engine, Op.READ, (0, 0, PAGE, 0))
    assert isinstance(late, _io.Batch)
    assert late.wait(PATIENCE_S)
    late.notify(eventfd)  # also when it is over already
    assert os.eventfd_read(eventfd) == 1
    with pytest.raises(ValueError, match="already"):
        late.notify(eventfd)
    os.close(eventfd)
    with pytest.raises(RuntimeError, match="descriptor"):
        submit(engine, Op.READ, (0, 0, PAGE, 0)).notify(eventfd)  # type: ignore[attr-defined]


def test_the_lock_ends_with_the_engine(
    rig: Rig, submit: Submit, one_at_a_time: EngineOptions
) -> None:
    """Not earlier, though the caller's descriptor is closed, and not later."""
    rig.add_device(bytes(MIB))
    fcntl.flock(rig.fds[0], fcntl.LOCK_EX | fcntl.LOCK_NB)
    engine = rig.open(one_at_a_time)
    other = os.open(rig.paths[0], os.O_RDONLY)
    os.close(rig.fds.pop())
    assert submit(engine, Op.READ, *[(0, 0, PAGE, 0)] * 20).wait(PATIENCE_S)
    with pytest.raises(BlockingIOError):
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert engine.close(PATIENCE_S)
    fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(other)
