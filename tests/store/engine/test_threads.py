"""What only the native thread engine promises: order, affinity, descriptors, threads that hang."""

from __future__ import annotations

import errno
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from vllm_ssdkv.store.engine.open import EngineOptions
from vllm_ssdkv.store.engine.protocol import Op

if TYPE_CHECKING:
    from tests.store.engine.conftest import Rig, Submit

PAGE = 4096
MIB = 1 << 20
PATIENCE_S = 20.0
ONE_AT_A_TIME = EngineOptions(engine="threads", queue_depth=1)
KALLSYMS = Path("/proc/kallsyms")
STUCK = Path(__file__).with_name("stuck_memory.py")


def io_threads() -> list[Path]:
    """Folders of this process's I/O threads."""
    found = []
    for task in Path("/proc/self/task").iterdir():
        try:
            if task.joinpath("comm").read_text().startswith("ssdkv-io-"):
                found.append(task)
        except OSError:
            continue  # it has ended
    return found


def tasks() -> set[str]:
    return set(os.listdir("/proc/self/task"))


# A queue this long lasts much longer than the call that submits the next request.
LONG = 600


def test_reads_overtake_writes_that_wait(rig: Rig, submit: Submit) -> None:
    rig.add_device(b"old" + bytes(4 * MIB))
    engine = rig.open(ONE_AT_A_TIME)
    rig.memory[MIB : MIB + 3] = list(b"new")
    queue = [(0, MIB + i % 3 * MIB, MIB, 0) for i in range(LONG)]
    writes = submit(engine, Op.WRITE, *queue, (0, 0, PAGE, MIB))
    read = submit(engine, Op.READ, (0, 0, PAGE, 2 * MIB))
    assert read.wait(PATIENCE_S)
    assert writes.wait(PATIENCE_S)
    assert bytes(rig.memory[2 * MIB : 2 * MIB + 3]) == b"old"
    assert os.pread(rig.fds[0], 3, 0) == b"new"


def test_writes_do_not_wait_for_ever(rig: Rig, submit: Submit) -> None:
    rig.add_device(b"old" + bytes(4 * MIB))
    engine = rig.open(ONE_AT_A_TIME)
    rig.memory[MIB : MIB + 3] = list(b"new")
    queue = [(0, MIB + i % 3 * MIB, MIB, 0) for i in range(LONG)]
    reads = submit(engine, Op.READ, *queue, (0, 0, PAGE, 2 * MIB))
    write = submit(engine, Op.WRITE, (0, 0, PAGE, MIB))
    assert write.wait(PATIENCE_S)
    assert reads.wait(PATIENCE_S)
    assert bytes(rig.memory[2 * MIB : 2 * MIB + 3]) == b"new"


@pytest.mark.skipif(
    os.cpu_count() == 1, reason="with one CPU every thread runs on it whatever we do"
)
def test_threads_leave_the_core_of_their_parent(rig: Rig) -> None:
    rig.add_device(b"")
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    try:
        rig.open(ONE_AT_A_TIME)
    finally:
        os.sched_setaffinity(0, allowed)
    deadline = time.monotonic() + PATIENCE_S
    while not io_threads():  # a thread names itself after it has moved
        assert time.monotonic() < deadline
    for task in io_threads():
        assert len(os.sched_getaffinity(int(task.name))) > 1


def test_every_device_has_its_own_threads_and_close_ends_them(rig: Rig) -> None:
    for _ in range(3):
        rig.add_device(b"")
    before = tasks()
    engine = rig.open(EngineOptions(engine="threads", queue_depth=5))
    started = tasks() - before
    assert len(started) == 15
    assert engine.close(PATIENCE_S)
    assert not started & tasks()


def test_a_forgotten_engine_ends_its_threads_and_descriptors(rig: Rig, submit: Submit) -> None:
    rig.add_device(bytes(PAGE))
    before, descriptors = tasks(), len(os.listdir("/proc/self/fd"))
    engine = rig.open(ONE_AT_A_TIME)
    started = tasks() - before
    batch = submit(engine, Op.READ, *[(0, 0, PAGE, 0)] * 50)
    rig.engines.clear()
    del engine
    gc.collect()
    assert started
    assert not started & tasks()
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert (batch.results() == PAGE).all()  # the handle outlives the engine


def test_a_forked_child_neither_hangs_nor_submits(rig: Rig, submit: Submit) -> None:
    rig.add_device(bytes(4 * MIB))
    engine = rig.open(ONE_AT_A_TIME)
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


def test_close_cancels_what_it_has_no_time_for(rig: Rig, submit: Submit) -> None:
    rig.add_device(bytes(4 * MIB))
    engine = rig.open(ONE_AT_A_TIME)
    batch = submit(engine, Op.WRITE, *[(0, i % 4 * MIB, MIB, 0) for i in range(LONG)])
    engine.close(0.0)
    assert batch.wait(PATIENCE_S)
    results = batch.results()
    assert set(results.tolist()) <= {MIB, -errno.ECANCELED}
    assert (results == -errno.ECANCELED).any()
    assert engine.statistics()["write_errors.0"] == (results == -errno.ECANCELED).sum()
    assert engine.close(PATIENCE_S)  # the one in flight has ended since


def test_waiting_leaves_the_interpreter_to_other_threads(rig: Rig, submit: Submit) -> None:
    rig.add_device(bytes(4 * MIB))
    engine, turns, stop = rig.open(ONE_AT_A_TIME), [0], threading.Event()

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


def test_signals_disturb_no_request(rig: Rig, submit: Submit) -> None:
    rig.add_device(bytes(PAGE))
    engine = rig.open(ONE_AT_A_TIME)
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


def stuck(*arguments: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, str(STUCK), *arguments],
        cwd=STUCK.parent,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    if done.returncode == 77:
        pytest.skip(f"memory that hangs needs userfaultfd: {done.stdout}")
    return done


@pytest.mark.parametrize("ending", ["close", "forget", "interrupt"])
def test_a_thread_that_hangs_in_the_kernel_is_given_up(ending: str) -> None:
    done = stuck(ending)
    codes = {-signal.SIGINT, 128 + signal.SIGINT} if ending == "interrupt" else {0}
    assert done.returncode in codes, done.stderr
    assert "Fatal" not in done.stderr
    assert done.stdout.split() == ["isolated", "abandoned"]


def test_a_thread_that_comes_back_finds_everything_in_place() -> None:
    done = stuck("recover")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["isolated", "abandoned", "recovered"]


def test_the_end_of_a_file_is_where_it_ends_now(rig: Rig, submit: Submit) -> None:
    rig.add_device(bytes(3 * PAGE))
    engine = rig.open(ONE_AT_A_TIME)
    for pages in (3, 4):
        batch = submit(engine, Op.READ, (0, 0, 4 * PAGE, 0))
        assert batch.wait(PATIENCE_S)
        assert batch.results().tolist() == [pages * PAGE]
        with rig.paths[0].open("ab") as file:
            file.write(bytes(PAGE))


@pytest.mark.skipif(not KALLSYMS.exists(), reason="the kernel shows no long generated file")
def test_short_transfers_are_continued(rig: Rig, submit: Submit) -> None:
    """Generated files give less than a page per call, and at odd places."""
    rig.paths.append(KALLSYMS)
    rig.fds.append(os.open(KALLSYMS, os.O_RDONLY))
    assert len(os.pread(rig.fds[0], 8 * PAGE, PAGE)) < 8 * PAGE
    batch = submit(rig.open(ONE_AT_A_TIME), Op.READ, (0, PAGE, 8 * PAGE, 0))
    assert batch.wait(PATIENCE_S)
    assert batch.results().tolist() == [8 * PAGE]
    with KALLSYMS.open("rb") as file:
        assert file.read(9 * PAGE)[PAGE:] == rig.memory[: 8 * PAGE].tobytes()


def test_direct_reads_end_inside_a_block(rig: Rig, submit: Submit) -> None:
    try:
        rig.add_device(b"z" * (PAGE + 904), os.O_RDWR | os.O_DIRECT)
    except OSError as error:
        pytest.skip(f"this file system has no O_DIRECT: {error}")
    batch = submit(rig.open(ONE_AT_A_TIME), Op.READ, (0, 0, 4 * PAGE, 0), (0, PAGE, PAGE, 4 * PAGE))
    assert batch.wait(PATIENCE_S)
    assert batch.results().tolist() == [PAGE + 904, 904]
