"""Promises of the io_uring engine alone: rings, registration, requests that hang in the kernel."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.kit.waiting import until
from tests.store.io.conftest import skip_if_absent
from vllm_ssdkv.config.io_engine import EngineOptions
from vllm_ssdkv.store.io.engines.protocol import PENDING, Op
from vllm_ssdkv.store.io.engines.uring import UringEngine
from vllm_ssdkv.store.memory.arena import Arena

if TYPE_CHECKING:
    from tests.store.io.conftest import Rig, Submit

PAGE = 4096
PATIENCE_S = 60.0
CHUNK = 64 << 20
MIB = 1 << 20
HERE = Path(__file__).parent
KALLSYMS = Path("/proc/kallsyms")


@pytest.fixture(autouse=True)
def uring() -> None:
    skip_if_absent("uring")


def script(name: str, argument: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(HERE / name), argument],
        cwd=HERE,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def add_pipe(rig: Rig, flags: int = 0) -> int:
    """A device whose reads hang until the returned descriptor is written to."""
    reader, writer = os.pipe2(os.O_CLOEXEC | flags)
    rig.paths.append(Path(f"pipe{reader}"))
    rig.fds.append(reader)
    return writer


def rings() -> int:
    names = []
    for task in Path("/proc/self/task").iterdir():
        try:
            names.append(task.joinpath("comm").read_text())
        except OSError:
            continue  # it has ended
    return sum(name.startswith("ssdkv-uring-") for name in names)


@pytest.mark.parametrize(("devices", "expected"), [(1, 1), (8, 1), (9, 2), (17, 3)])
def test_eight_devices_share_a_ring(rig: Rig, submit: Submit, devices: int, expected: int) -> None:
    for device in range(devices):
        rig.add_device(bytes([device + 1]) * 2 * PAGE)
    engine = rig.open(EngineOptions(engine="uring", queue_depth=2))
    assert rings() == expected
    batch = submit(engine, Op.READ, *[(d, PAGE, PAGE, d * PAGE) for d in range(devices)] * 5)
    assert batch.wait(PATIENCE_S)
    assert (batch.results() == PAGE).all()
    for device in range(devices):
        assert (rig.memory[device * PAGE : (device + 1) * PAGE] == device + 1).all()
    statistics = engine.statistics()
    assert [statistics[f"read_requests.{device}"] for device in range(devices)] == [5] * devices
    assert all(statistics[f"ring_enters.{ring}"] >= 1 for ring in range(expected))
    assert f"ring_enters.{expected}" not in statistics
    assert engine.close(PATIENCE_S)
    until(lambda: not rings())


def test_no_more_in_flight_than_the_depth(rig: Rig, submit: Submit) -> None:
    writer = add_pipe(rig)
    rig.add_device(bytes(PAGE))
    engine = rig.open(EngineOptions(engine="uring", queue_depth=5))
    hung = submit(engine, Op.READ, *[(0, 0, PAGE, i * PAGE) for i in range(12)])
    other = submit(engine, Op.READ, *[(1, 0, PAGE, 20 * PAGE)] * 3)
    assert other.wait(PATIENCE_S)
    statistics = engine.statistics()
    assert statistics["in_flight_max.0"] == 5
    assert 1 <= statistics["in_flight_max.1"] <= 3
    assert (hung.results() == PENDING).all()
    for _ in range(12):
        os.write(writer, b"x" * PAGE)
    assert hung.wait(PATIENCE_S)
    assert (hung.results() == PAGE).all()
    assert engine.statistics()["in_flight_max.0"] == 5
    os.close(writer)


def test_many_hung_requests_delay_no_other_device(rig: Rig, submit: Submit) -> None:
    """With this many in flight the thread waits for several completions at once."""
    writer = add_pipe(rig)
    rig.add_device(b"y" * PAGE)
    engine = rig.open(EngineOptions(engine="uring", queue_depth=256))
    hung = submit(engine, Op.READ, *[(0, 0, PAGE, i * PAGE) for i in range(256)])
    for _ in range(20):
        one = submit(engine, Op.READ, (1, 0, PAGE, 512 * PAGE))
        assert one.wait(PATIENCE_S)
        assert one.results().tolist() == [PAGE]
    assert not hung.done()
    assert not engine.close(0.0)
    for _ in range(256):
        os.write(writer, b"x" * PAGE)
    assert hung.wait(PATIENCE_S)
    os.close(writer)


def test_parts_that_trickle_in_are_joined(rig: Rig, submit: Submit) -> None:
    writer = add_pipe(rig)
    engine = rig.open(EngineOptions(engine="uring"))
    batch = submit(engine, Op.READ, (0, 0, PAGE, 0))
    content = np.random.default_rng(3).integers(0, 256, PAGE, dtype=np.uint8).tobytes()
    for part, (start, stop) in enumerate(((0, 1), (1, 1000), (1000, 4000), (4000, PAGE))):
        until(lambda part=part: engine.statistics()["ring_retries.0"] == part, "the part before")  # type: ignore[misc]
        assert not batch.done()
        os.write(writer, content[start:stop])
    assert batch.wait(PATIENCE_S)
    assert batch.results().tolist() == [PAGE]
    assert rig.memory[:PAGE].tobytes() == content
    assert engine.statistics()["ring_retries.0"] == 3
    os.close(writer)


@pytest.mark.skipif(not KALLSYMS.exists(), reason="the kernel shows no file that blocks")
@pytest.mark.parametrize("ending", ["recovered", "failed"])
def test_a_request_that_the_kernel_cannot_start_is_tried_for_a_second(ending: str) -> None:
    done = script("no_workers.py", ending)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["waits", ending]


def test_memory_in_use_is_registered_in_parts() -> None:
    """Part by part, when as much was moved; a request may lie in two parts."""
    arena, device = Arena(CHUNK + (2 << 20)), os.memfd_create("device")
    content = np.random.default_rng(4).integers(0, 256, MIB, dtype=np.uint8)
    os.write(device, content)
    engine = UringEngine([device], arena, 4)

    def move(op: Op, offset: int, *places: int) -> None:
        n = len(places)
        batch = engine.submit(
            op,
            np.zeros(n, np.uint16),
            np.full(n, offset, np.uint64),
            np.full(n, MIB, np.uint32),
            np.array(places, np.uint64),
        )
        assert batch.wait(PATIENCE_S)
        assert (batch.results() == MIB).all()

    across = CHUNK - MIB // 2
    expected = [0, 1, 2, 2]
    loads = [[0] * 63, [0], [CHUNK + MIB] * 2, [across, across]]
    for registered, places in zip(expected, loads, strict=True):
        arena.view(0, MIB)[:] = 0
        move(Op.READ, 0, *places)
        assert engine.statistics()["ring_registered.0"] == registered
        for place in {0, *places} if 0 in places else places:
            np.testing.assert_array_equal(arena.view(place, MIB), content)
        move(Op.WRITE, MIB, places[0])
        assert os.pread(device, MIB, MIB) == content.tobytes()
        os.ftruncate(device, MIB)
    assert engine.statistics()["ring_refused.0"] == 0
    assert engine.close(PATIENCE_S)
    arena.close()
    os.close(device)


def test_random_load_of_many_threads_matches_a_model(rig: Rig, submit: Submit) -> None:
    """Each thread owns pages of every device and of the arena; all share the queues."""
    threads, devices, pages = 4, 3, 24
    for _ in range(devices):
        rig.add_device(bytes(threads * pages * PAGE))
    engine = rig.open(EngineOptions(engine="uring", queue_depth=6))
    wrong: list[str] = []

    def work(number: int) -> None:
        random = np.random.default_rng(number)
        model = np.zeros((devices, pages), np.uint8)
        first = number * pages
        for _ in range(60):
            # Runs of pages, disjoint on each device and in the arena.
            cuts = np.sort(random.choice(np.arange(1, pages), int(random.integers(1, 9)), False))
            runs = list(zip([0, *cuts], [*cuts, pages], strict=True))
            owner = random.integers(0, devices, len(runs))
            op = Op(int(random.integers(2)))
            for (start, stop), device in zip(runs, owner, strict=True):
                memory = rig.memory[(first + start) * PAGE : (first + stop) * PAGE]
                values = random.integers(1, 256, stop - start, dtype=np.uint8)
                memory[:] = np.repeat(values, PAGE)
                if op is Op.WRITE:
                    model[device, start:stop] = values
            batch = submit(
                engine,
                op,
                *[
                    (device, (first + start) * PAGE, (stop - start) * PAGE, (first + start) * PAGE)
                    for (start, stop), device in zip(runs, owner, strict=True)
                ],
            )
            if not batch.wait(PATIENCE_S):
                wrong.append("not done")
            if batch.results().tolist() != [(stop - start) * PAGE for start, stop in runs]:
                wrong.append(f"results {batch.results()}")
            if op is Op.READ:
                for (start, stop), device in zip(runs, owner, strict=True):
                    memory = rig.memory[(first + start) * PAGE : (first + stop) * PAGE]
                    if not np.array_equal(memory, np.repeat(model[device, start:stop], PAGE)):
                        wrong.append("other bytes")
        for device in range(devices):
            stored = os.pread(rig.fds[device], pages * PAGE, first * PAGE)
            if stored != np.repeat(model[device], PAGE).tobytes():
                wrong.append("other bytes on the device")

    workers = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(PATIENCE_S)
        assert not worker.is_alive()
    assert wrong == []
    statistics = engine.statistics()
    for device in range(devices):
        assert statistics[f"in_flight_max.{device}"] <= 6
        for op in ("read", "write"):
            submitted = statistics[f"{op}_submitted.{device}"]
            assert statistics[f"{op}_requests.{device}"] == submitted


def test_close_while_others_submit(rig: Rig, submit: Submit) -> None:
    rig.add_device(bytes(64 * PAGE))
    engine = rig.open(EngineOptions(engine="uring", queue_depth=2))
    batches = []

    def work() -> None:
        while True:
            try:
                batches.append(submit(engine, Op.READ, *[(0, i * PAGE, PAGE, 0) for i in range(9)]))
            except ValueError:
                return

    workers = [threading.Thread(target=work) for _ in range(4)]
    for worker in workers:
        worker.start()
    until(lambda: batches)
    time.sleep(0.01)
    engine.close(0.0)
    for worker in workers:
        worker.join(PATIENCE_S)
        assert not worker.is_alive()
    assert batches
    for batch in batches:
        assert batch.wait(PATIENCE_S)
        assert set(batch.results().tolist()) <= {PAGE, -errno.ECANCELED}
    assert engine.close(PATIENCE_S)


@pytest.mark.parametrize("ending", ["close", "forget", "interrupt"])
def test_a_request_that_hangs_in_the_kernel_is_given_up(ending: str) -> None:
    done = script("stuck_pipe.py", ending)
    codes = {-signal.SIGINT, 128 + signal.SIGINT} if ending == "interrupt" else {0}
    assert done.returncode in codes, done.stderr
    assert "Fatal" not in done.stderr
    assert done.stdout.split() == ["isolated", "abandoned"]


def test_a_request_that_comes_back_finds_everything_in_place() -> None:
    done = script("stuck_pipe.py", "recover")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["isolated", "abandoned", "recovered"]


@pytest.mark.parametrize(("error", "why"), [("EPERM", "seccomp profile"), ("ENOSYS", "Linux 5.13")])
def test_without_io_uring_threads_serve(error: str, why: str) -> None:
    done = script("no_uring.py", error)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "threads"
    assert "I/O engine uring cannot run here" in done.stdout
    assert why in done.stdout


def test_memory_that_may_not_be_locked_is_used_as_it_is() -> None:
    done = script("no_uring.py", "memlock")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "uring(unregistered)"
    assert done.stdout.count("not all memory will be registered") == 1
    assert "RLIMIT_MEMLOCK is 1048576 bytes, it needs 4194304" in done.stdout
    assert "1 part refused" in done.stdout
