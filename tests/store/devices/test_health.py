"""Condemnation of devices: causes, counts and log."""

from __future__ import annotations

import errno
import logging

import numpy as np
import pytest

from vllm_ssdkv.base.metrics import Counters
from vllm_ssdkv.store.devices.health import (
    FAILURES_TO_QUARANTINE,
    RIGHT_PER_WRONG,
    WRONG_TO_QUARANTINE,
    DeviceHealth,
)
from vllm_ssdkv.store.io.engines.protocol import PENDING

PATHS = ("/ssd0", "/ssd1", "/ssd2")
WANTED = 8192


@pytest.fixture
def counters() -> Counters:
    return Counters()


@pytest.fixture
def health(counters: Counters) -> DeviceHealth:
    return DeviceHealth(PATHS, 2.5, counters)


def judge(health: DeviceHealth, *requests: tuple[int, int]) -> list[bool]:
    """Pairs of device and result; all wanted the same number of bytes."""
    devices, results = zip(*requests, strict=True)
    wanted = np.full(len(requests), WANTED, dtype=np.uint32)
    return health.judge(
        np.array(devices, dtype=np.uint16), np.array(results, dtype=np.int32), wanted, "read"
    ).tolist()


def test_success_is_all_bytes(health: DeviceHealth, counters: Counters) -> None:
    assert judge(health, (0, WANTED), (1, WANTED - 4096), (1, 0), (2, -errno.EIO)) == [
        True,
        False,
        False,
        False,
    ]
    assert counters.total("io_errors", device="/ssd1", kind="short") == 2
    assert counters.total("io_errors", device="/ssd2", kind="eio") == 1
    assert counters.total("io_errors", device="/ssd0", kind="eio") == 0
    assert health.quarantined == frozenset()


@pytest.mark.parametrize(
    ("result", "kind", "text"),
    [
        (-errno.EIO, "eio", "Input/output error"),
        (-errno.ENOSPC, "enospc", "No space left"),
        (-errno.ENODEV, "other", "No such device"),
        (4096, "short", "fewer bytes"),
    ],
)
def test_failures_in_a_row_condemn_a_device(
    health: DeviceHealth,
    counters: Counters,
    caplog: pytest.LogCaptureFixture,
    result: int,
    kind: str,
    text: str,
) -> None:
    for _ in range(FAILURES_TO_QUARANTINE - 1):
        judge(health, (1, result), (0, WANTED))
        assert health.quarantined == frozenset()
    judge(health, (1, WANTED))  # it answers
    for number in range(FAILURES_TO_QUARANTINE):
        assert (health.quarantined == {1}) == (number == FAILURES_TO_QUARANTINE)
        judge(health, (1, result), (1, result))
    assert health.quarantined == {1}
    assert counters.total("device_lost", device="/ssd1") == 1
    assert counters.total("io_errors", device="/ssd1", kind=kind) == 3 * 3 - 1
    (line,) = [r.getMessage() for r in caplog.records if "out of use" in r.getMessage()]
    assert "/ssd1" in line
    assert text in line


def test_a_device_that_does_something_is_not_condemned(health: DeviceHealth) -> None:
    for _ in range(4 * FAILURES_TO_QUARANTINE):
        judge(health, (1, -errno.EIO), (1, WANTED), (1, -errno.EIO))
    assert health.quarantined == frozenset()


def test_a_missed_deadline_condemns_at_once(
    health: DeviceHealth, counters: Counters, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR):
        judge(health, (0, WANTED), (2, PENDING), (2, WANTED), (2, -errno.EIO), (2, PENDING))
    assert health.quarantined == {2}
    assert health.out_of_use(np.array([2, 0, 2], dtype=np.uint16)).tolist() == [True, False, True]
    assert counters.total("io_deadline_exceeded") == 1
    assert counters.total("io_errors", device="/ssd2", kind="deadline") == 2
    assert counters.total("io_errors", device="/ssd2", kind="eio") == 1
    lines = [r.getMessage() for r in caplog.records]
    assert any("/ssd2 is out of use" in line and "within 2.5 s" in line for line in lines)


def test_batches_that_nobody_waited_for_missed_no_deadline(
    health: DeviceHealth, counters: Counters
) -> None:
    """They were in flight when another one condemned the device."""
    for _ in range(3):
        judge(health, (2, PENDING))
    assert counters.total("io_deadline_exceeded") == 1
    assert counters.total("io_errors", device="/ssd2", kind="deadline") == 3


def test_a_device_is_lost_once(health: DeviceHealth, counters: Counters) -> None:
    for _ in range(3):
        health.quarantine(1, "of a test")
        judge(health, (1, PENDING))
    assert counters.total("device_lost", device="/ssd1") == 1
    assert health.drain_events() == [1]
    assert health.drain_events() == []
    health.quarantine(0, "of a test")
    assert health.drain_events() == [0]


def content(health: DeviceHealth, right: list[int], wrong: list[int]) -> frozenset[int]:
    health.judge_content(np.array(right, dtype=np.intp), np.array(wrong, dtype=np.intp))
    return health.quarantined


def test_a_device_that_garbles_is_condemned(
    health: DeviceHealth, counters: Counters, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(WRONG_TO_QUARANTINE):
        assert content(health, [0, 0, 2], [1]) == frozenset(), number
        if number == WRONG_TO_QUARANTINE // 2:
            assert content(health, [1] * RIGHT_PER_WRONG, []) == frozenset()
    assert content(health, [], [1]) == {1}
    assert counters.total("device_lost", device="/ssd1") == 1
    assert "/ssd1 is out of use until restart: what it returns" in caplog.text


def test_a_few_flipped_bits_do_not_condemn(health: DeviceHealth) -> None:
    for _ in range(5 * WRONG_TO_QUARANTINE):
        assert content(health, [1] * RIGHT_PER_WRONG, [1]) == frozenset()


def test_a_device_of_a_node_comes_back(counters: Counters) -> None:
    health = DeviceHealth(PATHS, 2.5, counters, returning=True)
    health.quarantine(1, "its node is gone")
    assert health.any_out_of_use
    assert health.restore(1)
    assert not health.any_out_of_use
    assert not health.restore(1)
    assert (health.drain_events(), health.drain_returns()) == ([1], [1])
    assert counters.total("device_returned", device="/ssd1") == 1
    # Lost again before anybody asked: it is not told as back.
    health.quarantine(2, "its node is gone")
    health.restore(2)
    health.quarantine(2, "its node is gone")
    assert (health.drain_events(), health.drain_returns()) == ([2, 2], [])


def test_a_device_that_garbles_does_not_come_back(counters: Counters) -> None:
    health = DeviceHealth(PATHS, 2.5, counters, returning=True)
    wrong = np.zeros(WRONG_TO_QUARANTINE, dtype=np.intp)
    health.judge_content(np.zeros(0, dtype=np.intp), wrong)
    assert health.quarantined == {0}
    assert not health.restore(0)
    assert health.quarantined == {0}
