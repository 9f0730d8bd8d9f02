"""Promises of every engine, tried on each engine and each twin."""

from __future__ import annotations

import errno
import operator
import os
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from numpy.typing import NDArray

from vllm_ssdkv.config.io_engine import EngineOptions, FaultRule, ThrottleRule
from vllm_ssdkv.store.io.engines.protocol import (
    DEPTH_BOUNDS,
    LATENCY_BOUNDS,
    PENDING,
    Batch,
    IoEngine,
    Op,
    depth_bound,
    latency_bound,
    zero_totals,
)

if TYPE_CHECKING:
    from tests.store.io.conftest import Rig, Submit

PAGE = 4096
PATIENCE_S = 60.0
DEVICES = 3
DEVICE_BYTES = 1 << 20

THREADS = EngineOptions(engine="threads", queue_depth=3)
FAST = ThrottleRule(bandwidth=1e12, iops=1e9, latency_s=1e-4)
LATE = FaultRule(kind="latency", seconds=0.001)

MOVING = {
    "auto": EngineOptions(),
    "uring": EngineOptions(engine="uring", queue_depth=3),
    "uring, one at a time": EngineOptions(engine="uring", queue_depth=1),
    "throttled(uring)": EngineOptions(engine="uring", throttle=(FAST,)),
    "faulty(uring) that delays": EngineOptions(engine="uring", faults=(LATE,)),
    "threads": THREADS,
    "threads, one at a time": EngineOptions(engine="threads", queue_depth=1),
    "kvikio": EngineOptions(engine="kvikio", queue_depth=3),
    "aiofiles": EngineOptions(engine="aiofiles", queue_depth=3),
    "throttled(threads)": EngineOptions(engine="threads", throttle=(FAST,)),
    "faulty(threads) without a fault": EngineOptions(
        engine="threads", faults=(FaultRule(kind="eio", after=10**9),)
    ),
    "faulty(threads) that delays": EngineOptions(engine="threads", faults=(LATE,)),
    "faulty(throttled(threads))": EngineOptions(
        engine="threads", faults=(LATE,), throttle=(FAST,), queue_depth=2
    ),
}
ALL = {
    **MOVING,
    "noop": EngineOptions(engine="noop"),
    "throttled(noop)": EngineOptions(engine="noop", throttle=(FAST,)),
    "faulty(noop)": EngineOptions(engine="noop", faults=(LATE,)),
}


def parametrised(engines: dict[str, EngineOptions]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("options", engines.values(), ids=engines.keys())


def content(device: int, nbytes: int = DEVICE_BYTES) -> NDArray[np.uint8]:
    return np.random.default_rng(device).integers(0, 256, nbytes, dtype=np.uint8)


@pytest.fixture
def devices(rig: Rig) -> Rig:
    for device in range(DEVICES):
        rig.add_device(content(device).tobytes())
    return rig


def finished(batch: Batch) -> NDArray[np.int32]:
    assert batch.wait(PATIENCE_S)
    assert batch.done()
    assert batch.wait(0.0)
    results = batch.results()
    assert results.dtype == np.int32
    return results


def total(engine: IoEngine, name: str) -> int:
    return sum(engine.statistics().get(f"{name}.{device}", 0) for device in range(DEVICES))


@parametrised(ALL)
def test_an_empty_batch_is_done(devices: Rig, submit: Submit, options: EngineOptions) -> None:
    batch = submit(devices.open(options), Op.READ)
    assert batch.done()
    assert finished(batch).shape == (0,)


@parametrised(ALL)
def test_results_say_what_was_asked(devices: Rig, submit: Submit, options: EngineOptions) -> None:
    engine = devices.open(options)
    requests = [(0, 0, PAGE, 0), (2, 8 * PAGE, 3 * PAGE, PAGE), (1, PAGE, 2 * PAGE, 8 * PAGE)]
    for op in (Op.READ, Op.WRITE):
        assert finished(submit(engine, op, *requests)).tolist() == [PAGE, 3 * PAGE, 2 * PAGE]
    for direction in ("read", "write"):
        assert total(engine, f"{direction}_submitted") == 3
        assert total(engine, f"{direction}_requests") == 3
        assert total(engine, f"{direction}_bytes") == 6 * PAGE
        assert total(engine, f"{direction}_errors") == 0
    assert engine.statistics()["read_bytes.2"] == 3 * PAGE


@parametrised(MOVING)
def test_reads_bring_exactly_their_bytes(
    devices: Rig, submit: Submit, options: EngineOptions
) -> None:
    """Random sizes, devices and places, many at once, in no order; nothing else is touched."""
    engine, random = devices.open(options), np.random.default_rng(7)
    on_device = [content(device) for device in range(DEVICES)]
    for size in (1, 2, 40, 150):
        memory = devices.memory
        memory[:] = 0xEE
        want = memory.copy()
        pages = random.integers(1, 7, size)
        # Disjoint places in the arena, in random order.
        starts = np.concatenate([[0], np.cumsum(pages + random.integers(0, 2, size))])[:-1] * PAGE
        requests = []
        for buffer, length in zip(starts, pages * PAGE, strict=True):
            device = int(random.integers(DEVICES))
            offset = int(random.integers((DEVICE_BYTES - length) // PAGE + 1)) * PAGE
            requests.append((device, offset, int(length), int(buffer)))
            want[buffer : buffer + length] = on_device[device][offset : offset + length]
        order = random.permutation(size)
        requests = [requests[index] for index in order]
        assert finished(submit(engine, Op.READ, *requests)).tolist() == [r[2] for r in requests]
        np.testing.assert_array_equal(memory, want)


@parametrised(MOVING)
def test_writes_put_exactly_their_bytes(
    devices: Rig, submit: Submit, options: EngineOptions
) -> None:
    engine, random = devices.open(options), np.random.default_rng(8)
    devices.memory[:] = random.integers(0, 256, devices.memory.size, dtype=np.uint8)
    want = [content(device) for device in range(DEVICES)]
    requests = []
    for page in random.permutation(DEVICE_BYTES // PAGE)[:90]:
        device, buffer = int(random.integers(DEVICES)), int(random.integers(1000)) * PAGE
        requests.append((device, int(page) * PAGE, PAGE, buffer))
        want[device][page * PAGE : (page + 1) * PAGE] = devices.memory[buffer : buffer + PAGE]
    assert (finished(submit(engine, Op.WRITE, *requests)) == PAGE).all()
    for path, expected in zip(devices.paths, want, strict=True):
        np.testing.assert_array_equal(np.fromfile(path, np.uint8), expected)


@parametrised(MOVING)
def test_the_whole_device_in_one_request(
    devices: Rig, submit: Submit, options: EngineOptions
) -> None:
    batch = submit(devices.open(options), Op.READ, (1, 0, DEVICE_BYTES, 0))
    assert finished(batch).tolist() == [DEVICE_BYTES]
    np.testing.assert_array_equal(devices.memory[:DEVICE_BYTES], content(1))


@parametrised(ALL)
def test_arrays_may_be_reused_at_once(devices: Rig, options: EngineOptions) -> None:
    engine = devices.open(options)
    device, offset = np.array([1], np.uint16), np.array([PAGE], np.uint64)
    length, buffer = np.array([2 * PAGE], np.uint32), np.array([0], np.uint64)
    batch = engine.submit(Op.READ, device, offset, length, buffer)
    for array in (device, offset, length, buffer):
        array[:] = 1
    assert finished(batch).tolist() == [2 * PAGE]
    if "noop" not in engine.name:
        np.testing.assert_array_equal(devices.memory[: 2 * PAGE], content(1)[PAGE : 3 * PAGE])


@parametrised(ALL)
def test_arrays_need_not_be_contiguous(devices: Rig, options: EngineOptions) -> None:
    engine, table = devices.open(options), np.array([[0, 9], [PAGE, 9], [2 * PAGE, 9]], np.uint64)
    batch = engine.submit(
        Op.READ,
        np.zeros((3, 2), np.uint16)[:, 0],
        table[:, 0],
        np.full((3, 2), PAGE, np.uint32)[:, 0],
        table[:, 0],
    )
    assert finished(batch).tolist() == [PAGE] * 3


BAD: dict[str, tuple[int, int, int, int]] = {
    "no such device": (DEVICES, 0, PAGE, 0),
    "behind the arena": (0, 0, PAGE, 4 << 20),
    "across the arena's end": (0, 0, 2 * PAGE, (4 << 20) - PAGE),
    "a buffer that wraps": (0, 0, PAGE, 2**63 - PAGE),
    "an offset that wraps": (0, 2**63 - PAGE, PAGE, 0),
    "no bytes": (0, 0, 0, 0),
    "an odd length": (0, 0, PAGE + 512, 0),
    "an odd offset": (0, 512, PAGE, 0),
    "an odd buffer": (0, 0, PAGE, 8),
}


@parametrised(ALL)
@pytest.mark.parametrize("bad", BAD.values(), ids=BAD.keys())
def test_one_bad_request_refuses_the_batch(
    devices: Rig, submit: Submit, options: EngineOptions, bad: tuple[int, int, int, int]
) -> None:
    engine = devices.open(options)
    devices.memory[:] = 0xEE
    with pytest.raises(ValueError, match="request 1: "):
        submit(engine, Op.READ, (0, 0, PAGE, 0), bad)
    assert total(engine, "read_submitted") == 0
    assert (devices.memory[:PAGE] == 0xEE).all()
    assert finished(submit(engine, Op.READ, (0, 0, PAGE, 0))).tolist() == [PAGE]


@parametrised(ALL)
def test_wrong_arrays_are_refused(devices: Rig, options: EngineOptions) -> None:
    engine = devices.open(options)
    good: dict[str, Any] = {
        "device": np.zeros(2, np.uint16),
        "offset": np.zeros(2, np.uint64),
        "length": np.full(2, PAGE, np.uint32),
        "buffer": np.array([0, PAGE], np.uint64),
    }
    for name, array in good.items():
        with pytest.raises(ValueError, match="differ in length"):
            engine.submit(Op.READ, **{**good, name: array[:1]})
        with pytest.raises(TypeError):
            engine.submit(Op.READ, **{**good, name: array.astype(np.int16)})


@parametrised(MOVING)
def test_the_end_of_the_file_is_a_short_result(
    rig: Rig, submit: Submit, options: EngineOptions
) -> None:
    bytes_on_device = 2 * PAGE + 904  # not even a whole sector
    rig.add_device(content(5, bytes_on_device).tobytes())
    rig.add_device(b"")
    rig.memory[:] = 0xEE
    batch = submit(
        rig.open(options),
        Op.READ,
        (0, 0, 8 * PAGE, 0),
        (0, 2 * PAGE, PAGE, 8 * PAGE),
        (0, 3 * PAGE, PAGE, 9 * PAGE),
        (1, 0, PAGE, 10 * PAGE),
    )
    assert finished(batch).tolist() == [bytes_on_device, 904, 0, 0]
    np.testing.assert_array_equal(rig.memory[:bytes_on_device], content(5, bytes_on_device))
    assert (rig.memory[9 * PAGE :] == 0xEE).all()


@parametrised(MOVING)
def test_errors_are_results_of_their_request_only(
    devices: Rig, submit: Submit, options: EngineOptions
) -> None:
    read_only = devices.add_device(content(9).tobytes(), os.O_RDONLY)
    devices.paths.append(devices.folder)
    devices.fds.append(os.open(devices.folder, os.O_RDONLY))
    engine = devices.open(options)
    writes = [(0, 0, PAGE, 0), (read_only, 0, PAGE, 0), (1, 0, PAGE, 0)]
    assert finished(submit(engine, Op.WRITE, *writes)).tolist() == [PAGE, -errno.EBADF, PAGE]
    reads = [(read_only, 0, PAGE, 0), (read_only + 1, 0, PAGE, PAGE)]
    assert finished(submit(engine, Op.READ, *reads)).tolist() == [PAGE, -errno.EISDIR]
    statistics = engine.statistics()
    assert statistics[f"write_errors.{read_only}"] == 1
    assert statistics["write_errors.0"] == 0
    assert statistics[f"read_errors.{read_only + 1}"] == 1
    np.testing.assert_array_equal(np.fromfile(devices.paths[read_only], np.uint8), content(9))


@parametrised(MOVING)
def test_every_request_is_in_one_bucket(
    devices: Rig, submit: Submit, options: EngineOptions
) -> None:
    engine = devices.open(options)
    assert zero_totals(DEVICES).keys() <= engine.statistics().keys()
    for op in (Op.WRITE, Op.READ):
        finished(submit(engine, op, *((1, n * PAGE, PAGE, n * PAGE) for n in range(12))))
    statistics = engine.statistics()
    for device, requests in ((0, 0), (1, 12)):
        for direction in ("read", "write"):
            counts = [statistics[f"{direction}_latency_{b}.{device}"] for b in LATENCY_BOUNDS]
            assert sum(counts) == requests
            spent = statistics[f"{direction}_nanoseconds.{device}"]
            lower = [0, *map(int, LATENCY_BOUNDS[:-1])]
            assert sum(map(operator.mul, counts, lower)) <= spent
            # Without those over the highest bound, of which the mean is not known.
            if not counts[-1]:
                assert spent <= sum(map(operator.mul, counts[:-1], lower[1:]))
        counts = [statistics[f"depth_{bound}.{device}"] for bound in DEPTH_BOUNDS]
        assert sum(counts) == 2 * requests
        assert sum(counts) <= statistics[f"depth_sum.{device}"] <= 2 * requests * 12


def test_bounds_of_buckets() -> None:
    assert [latency_bound(n) for n in (0, 50_000, 50_001, 5 * 10**9)] == [
        *("50000", "50000", "100000", "5000000000")
    ]
    assert latency_bound(5 * 10**9 + 1) == "inf"
    assert [depth_bound(n) for n in (1, 2, 3, 256, 257)] == ["1", "2", "4", "256", "inf"]


@parametrised(MOVING)
def test_any_thread_may_submit_and_wait(
    devices: Rig, submit: Submit, options: EngineOptions
) -> None:
    engine = devices.open(options)
    wrong: list[str] = []
    share = devices.memory.size // 4

    def work(number: int) -> None:
        random = np.random.default_rng(number)
        for _ in range(10):
            places = [number * share + i * PAGE for i in range(12)]
            reads = [
                (int(random.integers(DEVICES)), int(random.integers(256)) * PAGE, PAGE, place)
                for place in places
            ]
            batch = submit(engine, Op.READ, *reads)
            if not batch.wait(PATIENCE_S) or (batch.results() != PAGE).any():
                wrong.append("not done")
            for device, offset, _, place in reads:
                expected = content(device)[offset : offset + PAGE]
                if not np.array_equal(devices.memory[place : place + PAGE], expected):
                    wrong.append("other bytes")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
    assert wrong == []
    assert total(engine, "read_requests") == 4 * 10 * 12


@parametrised(ALL)
def test_close_ends_what_is_queued_and_refuses_more(
    devices: Rig, submit: Submit, options: EngineOptions
) -> None:
    engine = devices.open(options)
    batch = submit(engine, Op.READ, *[(0, i * PAGE, PAGE, i * PAGE) for i in range(200)])
    assert engine.close(PATIENCE_S)
    assert (finished(batch) == PAGE).all()
    assert engine.close(0.0)
    with pytest.raises(ValueError, match="closed"):
        submit(engine, Op.READ, (0, 0, PAGE, 0))
    assert total(engine, "read_requests") == 200
    os.fstat(devices.fds[0])  # the descriptors are still the caller's


@parametrised(ALL)
def test_an_idle_engine_closes_without_patience(devices: Rig, options: EngineOptions) -> None:
    assert devices.open(options).close(0.0)


@parametrised(MOVING)
def test_the_arena_may_be_closed_with_reads_in_flight(
    devices: Rig, submit: Submit, options: EngineOptions
) -> None:
    engine = devices.open(options)
    batch = submit(engine, Op.READ, *[(1, i * PAGE, PAGE, i * PAGE) for i in range(200)])
    devices.arena.close()
    assert (finished(batch) == PAGE).all()


@parametrised(MOVING)
def test_descriptors_may_be_closed_under_the_engine(
    devices: Rig, submit: Submit, options: EngineOptions
) -> None:
    engine = devices.open(options)
    os.close(devices.fds[0])
    devices.fds[0] = os.open(os.devnull, os.O_RDWR)  # takes the number
    assert finished(submit(engine, Op.READ, (0, 0, PAGE, 0))).tolist() == [PAGE]
    np.testing.assert_array_equal(devices.memory[:PAGE], content(0)[:PAGE])


def held(options: EngineOptions) -> EngineOptions:
    stall = FaultRule(kind="stall", device=0)
    return EngineOptions(
        engine=options.engine, queue_depth=1, faults=(stall,), throttle=options.throttle
    )


@parametrised(
    {name: ALL[name] for name in ("uring", "threads", "aiofiles", "throttled(threads)", "noop")}
)
def test_a_hung_device_delays_no_other(
    devices: Rig, submit: Submit, options: EngineOptions
) -> None:
    engine = devices.open(held(options))
    both = submit(engine, Op.READ, (0, 0, PAGE, 0), (1, 0, PAGE, PAGE))
    others = submit(engine, Op.READ, *[(1 + i % 2, 0, PAGE, 2 * PAGE) for i in range(50)])
    assert (finished(others) == PAGE).all()
    assert not both.wait(0.02)
    assert not both.done()
    assert both.results()[0] == PENDING
    assert not engine.close(0.02)
    assert not both.done()


Wait = Callable[[Batch], bool]
WAITS: dict[str, Wait] = {
    "zero": lambda batch: batch.wait(0.0),
    "negative": lambda batch: batch.wait(-1.0),
    "short": lambda batch: batch.wait(0.01),
}


@parametrised({name: ALL[name] for name in ("uring", "threads", "aiofiles")})
@pytest.mark.parametrize("wait", WAITS.values(), ids=WAITS.keys())
def test_a_wait_ends_at_its_time(
    devices: Rig, submit: Submit, options: EngineOptions, wait: Wait
) -> None:
    batch = submit(devices.open(held(options)), Op.READ, (0, 0, PAGE, 0))
    assert not wait(batch)


@parametrised(ALL)
def test_a_wait_may_have_no_limit(devices: Rig, submit: Submit, options: EngineOptions) -> None:
    batch = submit(devices.open(options), Op.READ, (0, 0, PAGE, 0))
    assert batch.wait(float("inf"))
