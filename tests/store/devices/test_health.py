"""Condemnation of devices, pauses of writes, and the way back: causes, counts and log."""

from __future__ import annotations

import errno
import logging

import numpy as np
import pytest
from numpy.typing import NDArray

from vllm_ssdkv.base.metrics import Counters
from vllm_ssdkv.store.devices.health import (
    CONDEMN_S,
    FAILURES_TO_CONDEMN,
    FIRST_RETRY_S,
    LAST_RETRY_S,
    RIGHT_PER_WRONG,
    WRONG_TO_QUARANTINE,
    BackOff,
    DeviceHealth,
    WriteState,
)
from vllm_ssdkv.store.io.engines.protocol import I32, PENDING, Op

PATHS = ("/ssd0", "/ssd1", "/ssd2")
WANTED = 8192
EIO, ENOSPC = -errno.EIO, -errno.ENOSPC


class Ended:
    """A batch in flight, or one that is over."""

    def __init__(self) -> None:
        self.over = True

    def done(self) -> bool:
        return self.over

    def wait(self, timeout_s: float) -> bool:
        del timeout_s
        return self.over

    def results(self) -> I32:
        return np.zeros(0, dtype=np.int32)


class Rig:
    """Devices, their clock, and a batch that all requests are of."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.counters = Counters()
        self.health = DeviceHealth(PATHS, 2.5, self.counters, clock=lambda: self.now)
        self.batch = Ended()

    def _judge(self, op: Op, requests: tuple[tuple[int, int], ...], again: bool) -> list[bool]:
        devices, results = zip(*requests, strict=True)
        good: list[bool] = self.health.judge(
            op,
            np.array(devices, dtype=np.uint16),
            np.array(results, dtype=np.int32),
            np.full(len(requests), WANTED, dtype=np.uint32),
            self.batch,
            again=again,
        ).tolist()
        return good

    def read(self, *requests: tuple[int, int], again: bool = False) -> list[bool]:
        """Pairs of device and result."""
        return self._judge(Op.READ, requests, again)

    def write(self, *requests: tuple[int, int], again: bool = False) -> list[bool]:
        return self._judge(Op.WRITE, requests, again)

    def states(self) -> list[WriteState]:
        return [self.health.writing(device) for device in range(len(PATHS))]


@pytest.fixture
def rig() -> Rig:
    return Rig()


def lines(caplog: pytest.LogCaptureFixture, text: str) -> list[str]:
    return [r.getMessage() for r in caplog.records if text in r.getMessage()]


def test_success_is_all_bytes(rig: Rig) -> None:
    assert rig.read((0, WANTED), (1, WANTED - 4096), (1, 0), (2, EIO)) == [True, *[False] * 3]
    assert rig.counters.total("io_errors", device="/ssd1", kind="short") == 2
    assert rig.counters.total("io_errors", device="/ssd2", kind="eio") == 1
    assert rig.counters.total("io_errors", device="/ssd0", kind="eio") == 0
    assert rig.health.quarantined == frozenset()


@pytest.mark.parametrize(
    ("result", "kind", "text"),
    [
        (EIO, "eio", "Input/output error"),
        (-errno.ENODEV, "other", "No such device"),
        (4096, "short", "fewer bytes"),
    ],
)
def test_reads_that_fail_for_a_while_condemn_a_device(
    rig: Rig, caplog: pytest.LogCaptureFixture, result: int, kind: str, text: str
) -> None:
    for _ in range(50):  # many within no time are one bad moment
        rig.read((1, result), (0, WANTED))
    rig.now += CONDEMN_S - 0.01
    rig.read((1, result))
    assert rig.health.quarantined == frozenset()
    rig.now += 0.01
    rig.read((1, result), (1, result))
    assert rig.health.quarantined == {1}
    assert rig.counters.total("device_lost", device="/ssd1") == 1
    assert rig.counters.total("io_errors", device="/ssd1", kind=kind) == 53
    (line,) = lines(caplog, "out of use")
    assert "/ssd1" in line
    assert text in line


@pytest.mark.parametrize("answers", ["in another batch", "in the same batch"])
def test_a_device_that_does_something_is_not_condemned(rig: Rig, answers: str) -> None:
    for _ in range(40):
        rig.now += CONDEMN_S / 3
        if answers == "in the same batch":
            rig.read((1, EIO), (1, WANTED), (1, EIO))
        else:
            rig.read((1, EIO))
            rig.read((1, WANTED))
        assert rig.health.quarantined == frozenset()


def test_a_request_and_its_retries_count_once(rig: Rig) -> None:
    """Two requests of which each is tried many times are no more than two."""
    for _ in range(FAILURES_TO_CONDEMN - 1):
        rig.read((1, EIO))
        for _ in range(20):
            rig.now += CONDEMN_S
            rig.read((1, EIO), again=True)
    assert rig.health.quarantined == frozenset()
    rig.read((1, EIO))
    assert rig.health.quarantined == {1}


def test_reads_and_writes_are_judged_apart(rig: Rig) -> None:
    """Reads that succeed say nothing of writes, and a device whose writes fail is read."""
    for _ in range(FAILURES_TO_CONDEMN + 1):
        rig.now += CONDEMN_S / FAILURES_TO_CONDEMN + 0.01
        rig.write((1, EIO))
        rig.read((1, WANTED))
    assert rig.states() == [WriteState.OPEN, WriteState.PAUSED, WriteState.OPEN]
    assert rig.health.quarantined == frozenset()
    assert not rig.health.any_avoided(Op.READ)
    assert rig.health.avoided(Op.WRITE, np.array([1, 0], dtype=np.uint16)).tolist() == [True, False]
    assert rig.health.avoided(Op.READ, np.array([1, 0], dtype=np.uint16)).tolist() == [False, False]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EROFS])
def test_writes_without_room_pause_and_go_on(
    rig: Rig, caplog: pytest.LogCaptureFixture, code: int
) -> None:
    """At once, with pauses that double, said once; the device is none the worse for it."""
    caplog.set_level(logging.WARNING)
    rig.write((1, -code), (1, WANTED), (0, WANTED))
    pause_s, told = FIRST_RETRY_S, []
    for _ in range(10):
        assert rig.states() == [WriteState.OPEN, WriteState.PAUSED, WriteState.OPEN]
        told += rig.health.drain_writing()
        assert rig.health.next_trial_s() == pytest.approx(pause_s)
        rig.write((1, -code))  # what was on its way prolongs nothing
        rig.now += pause_s - 0.001
        assert rig.states()[1] is WriteState.PAUSED
        rig.now += 0.001
        assert rig.states()[1] is WriteState.TRIAL
        assert rig.health.next_trial_s() is None
        rig.write((1, -code))
        pause_s = min(LAST_RETRY_S, 2 * pause_s)
    assert told == [(1, pytest.approx(min(LAST_RETRY_S, 2.0**n))) for n in range(10)]
    assert len(lines(caplog, "are paused")) == len(lines(caplog, "write(s) failed")) == 1
    rig.health.drain_writing()
    rig.now += pause_s
    rig.write((1, WANTED))
    assert rig.states()[1] is WriteState.OPEN
    assert rig.health.drain_writing() == [(1, 0.0)]
    assert not rig.health.any_avoided(Op.WRITE)
    assert len(lines(caplog, "can be written again")) == 1
    assert rig.health.quarantined == frozenset()
    assert rig.counters.total("device_lost", device="/ssd1") == 0


def test_writes_that_fail_before_a_pause_are_said_once(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    """All of them count. After a success the next failure is news."""
    for series in (1, 2):
        for _ in range(6):
            rig.write((1, EIO), (1, EIO))
            rig.write((1, EIO), again=True)
            rig.now += CONDEMN_S / 5
        assert rig.states()[1] is not WriteState.OPEN
        assert len(lines(caplog, "write(s) failed")) == series
        assert len(lines(caplog, "are paused")) == series
        assert rig.counters.total("io_errors", device="/ssd1", kind="eio") == 18 * series
        rig.now += LAST_RETRY_S
        rig.write((1, WANTED))
        assert rig.states()[1] is WriteState.OPEN


def test_a_write_from_before_a_pause_does_not_end_it(rig: Rig) -> None:
    rig.write((1, ENOSPC))
    rig.write((1, WANTED))
    assert rig.states()[1] is WriteState.PAUSED


def test_pauses_grow_where_writes_succeed_now_and_then(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    """Slots that have their place can be written, new ones cannot: no line each second."""
    for _ in range(100):
        rig.write((1, ENOSPC))
        rig.now += rig.health.next_trial_s() or 0.0
        rig.write((1, WANTED))
    assert rig.now > 1000.0 + 90 * LAST_RETRY_S
    assert len(lines(caplog, "are paused")) == 100
    rig.now += 2 * LAST_RETRY_S
    rig.write((1, ENOSPC))
    assert rig.health.next_trial_s() == FIRST_RETRY_S


def test_the_last_chance_does_not_wait(rig: Rig) -> None:
    rig.write((1, ENOSPC))
    rig.health.try_writes_now()
    assert rig.states()[1] is WriteState.TRIAL


def test_pauses_begin_anew_after_a_good_while() -> None:
    tries = BackOff()
    tries.failed(5.0)
    assert tries.due == 5.0 + FIRST_RETRY_S
    tries.failed(tries.due)
    assert tries.due == 5.0 + 3 * FIRST_RETRY_S
    now = tries.due + LAST_RETRY_S + 1
    tries.failed(now)
    assert tries.due == now + FIRST_RETRY_S


def test_a_missed_deadline_takes_a_device_out_at_once(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR):
        rig.read((0, WANTED), (2, PENDING), (2, WANTED), (2, EIO), (2, PENDING))
    assert rig.health.quarantined == {2}
    mask = rig.health.out_of_use(np.array([2, 0, 2], dtype=np.uint16))
    assert mask.tolist() == [True, False, True]
    assert rig.counters.total("io_deadline_exceeded") == 1
    assert rig.counters.total("io_errors", device="/ssd2", kind="deadline") == 2
    assert rig.counters.total("io_errors", device="/ssd2", kind="eio") == 1
    assert any("within 2.5 s" in line for line in lines(caplog, "/ssd2 is out of use"))


def test_batches_that_nobody_waited_for_missed_no_deadline(rig: Rig) -> None:
    """They were in flight when another one condemned the device."""
    for _ in range(3):
        rig.read((2, PENDING))
    assert rig.counters.total("io_deadline_exceeded") == 1
    assert rig.counters.total("io_errors", device="/ssd2", kind="deadline") == 3


def test_a_hung_device_is_tried_when_nothing_hangs_in_it(rig: Rig) -> None:
    rig.batch.over = False
    rig.read((2, PENDING))
    rig.now += 10 * LAST_RETRY_S
    assert rig.health.to_probe() == ([], FIRST_RETRY_S)
    rig.batch.over = True
    assert rig.health.to_probe()[0] == [2]
    for pause_s in (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0):
        rig.health.probed(2, right=False)
        assert rig.health.to_probe() == ([], pause_s)
        rig.now += pause_s
    assert rig.health.restore(2)
    assert rig.health.to_probe() == ([], None)


def test_a_device_that_takes_no_writes_is_read_by_itself(rig: Rig) -> None:
    """Nobody may read it: of two copies the other one is taken. It may be dead."""
    rig.write((1, ENOSPC))
    assert rig.health.to_probe() == ([], FIRST_RETRY_S)
    for right in (True, False, True, *[False] * FAILURES_TO_CONDEMN):
        assert rig.health.quarantined == frozenset()
        rig.now += CONDEMN_S
        while not rig.health.to_probe()[0]:
            rig.now += 1.0
        rig.health.probed(1, right=right)
    assert rig.health.quarantined == {1}
    assert rig.health.drain_events() == [1]


def test_a_device_is_lost_once(rig: Rig) -> None:
    for _ in range(3):
        rig.health.quarantine(1, "of a test")
        rig.read((1, PENDING))
    assert rig.counters.total("device_lost", device="/ssd1") == 1
    assert rig.health.drain_events() == [1]
    assert rig.health.drain_events() == []
    rig.health.quarantine(0, "of a test")
    assert rig.health.drain_events() == [0]


def content(health: DeviceHealth, right: list[int], wrong: list[int]) -> frozenset[int]:
    health.judge_content(np.array(right, dtype=np.intp), np.array(wrong, dtype=np.intp))
    return health.quarantined


def test_a_device_that_garbles_is_condemned(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    health = rig.health
    for number in range(WRONG_TO_QUARANTINE):
        assert content(health, [0, 0, 2], [1]) == frozenset(), number
        if number == WRONG_TO_QUARANTINE // 2:
            assert content(health, [1] * RIGHT_PER_WRONG, []) == frozenset()
    assert content(health, [], [1]) == {1}
    assert rig.counters.total("device_lost", device="/ssd1") == 1
    assert "/ssd1 is out of use until restart: what it returns" in caplog.text


def test_a_few_flipped_bits_do_not_condemn(rig: Rig) -> None:
    for _ in range(5 * WRONG_TO_QUARANTINE):
        assert content(rig.health, [1] * RIGHT_PER_WRONG, [1]) == frozenset()


def test_a_device_comes_back(rig: Rig) -> None:
    health = rig.health
    health.quarantine(1, "it hangs")
    assert health.any_out_of_use
    assert health.restore(1)
    assert not health.any_out_of_use
    assert not health.restore(1)
    assert (health.drain_events(), health.drain_returns()) == ([1], [1])
    assert rig.counters.total("device_returned", device="/ssd1") == 1
    # Lost again before anybody asked: it is not told as back.
    health.quarantine(2, "it hangs")
    health.restore(2)
    health.quarantine(2, "it hangs")
    assert (health.drain_events(), health.drain_returns()) == ([2, 2], [])


@pytest.mark.parametrize("why", ["garbles", "garbles, and had hung before", "removed"])
def test_some_devices_do_not_come_back(rig: Rig, why: str) -> None:
    health = rig.health
    if why == "removed":
        health.quarantine(0, "its data file was removed", for_good=True)
    else:
        if "hung" in why:
            health.quarantine(0, "it hangs")
        content(health, [], [0] * WRONG_TO_QUARANTINE)
    rig.now += 10 * LAST_RETRY_S
    assert health.quarantined == {0}
    assert health.to_probe() == ([], None)
    assert not health.restore(0)
    assert health.quarantined == {0}


def give_up(health: DeviceHealth, *slots: int) -> list[bool]:
    """Bytes 100 to 200 of these could not be read."""
    found: list[bool] = health.give_up(*parts(100, 200, *slots)).tolist()
    return found


def parts(begin: int, end: int, *slots: int) -> NDArray[np.int64]:
    """Slots, and the same bytes of each, [3, n]."""
    return np.array([slots, [begin] * len(slots), [end] * len(slots)], dtype=np.int64)


def test_a_slot_is_given_up_when_it_cannot_be_read_for_a_while(rig: Rig) -> None:
    for _ in range(10):
        assert give_up(rig.health, 7, 8) == [False, False]
    rig.now += CONDEMN_S
    assert give_up(rig.health, 9, 7) == [False, True]
    assert give_up(rig.health, 7) == [False], "it begins anew"


@pytest.mark.parametrize(
    ("begin", "end", "over"), [(100, 200, True), (0, 300, True), (0, 199, False)]
)
def test_failures_of_a_slot_are_over_when_the_same_bytes_are_read(
    rig: Rig, begin: int, end: int, over: bool
) -> None:
    for _ in range(10):
        give_up(rig.health, 7)
    rig.health.readable(*parts(begin, end, 6, 7))
    assert rig.health.any_unreadable is not over
    rig.now += CONDEMN_S
    assert give_up(rig.health, 7) == [not over]


def test_slots_are_not_blamed_for_a_device_that_was_out_of_use(rig: Rig) -> None:
    for _ in range(10):
        give_up(rig.health, 7)
    rig.health.quarantine(1, "it fails")
    rig.now += CONDEMN_S
    assert rig.health.restore(1)
    assert give_up(rig.health, 7) == [False]


def test_parts_of_one_read_are_one_failure_of_a_slot(rig: Rig) -> None:
    assert give_up(rig.health, *[7] * 10) == [False] * 10
    rig.now += CONDEMN_S
    assert give_up(rig.health, 7) == [False]
