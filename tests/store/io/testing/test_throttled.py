"""The device model, on a clock that the test moves."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.kit.clock import Clock
from vllm_ssdkv.base.errors import ConfigError
from vllm_ssdkv.config.io_engine import ThrottleRule
from vllm_ssdkv.store.io.engines.protocol import PENDING, Batch, Op
from vllm_ssdkv.store.io.testing.noop import NoopEngine
from vllm_ssdkv.store.io.testing.throttled import ThrottledEngine
from vllm_ssdkv.store.memory.arena import Arena

if TYPE_CHECKING:
    from tests.store.io.conftest import Submit

PAGE = 4096
SECOND = PAGE * 100  # bytes that a device of BANDWIDTH moves in a second
BANDWIDTH = float(SECOND)


def engine(*rules: ThrottleRule, devices: int = 2) -> tuple[ThrottledEngine, Clock]:
    clock = Clock()
    inner = NoopEngine(range(devices), Arena(16 * PAGE + 4 * SECOND), 16)
    return ThrottledEngine(inner, devices, rules, clock), clock


def seconds_until_done(batch: Batch, clock: Clock) -> float:
    """Smallest step, in milliseconds of model time, after which the batch is done."""
    begin = clock.now
    for step in range(100_000):
        clock.now = begin + step / 1000 + 1e-9
        if batch.done():
            clock.now = begin
            return step / 1000
    raise AssertionError("never done")


def test_bandwidth_bounds_large_requests(submit: Submit) -> None:
    slow, clock = engine(ThrottleRule(bandwidth=BANDWIDTH, iops=1e6))
    batch = submit(slow, Op.READ, (0, 0, SECOND, 0))
    assert seconds_until_done(batch, clock) == pytest.approx(1.0, abs=0.002)


def test_a_device_becomes_slow_and_fast_again(submit: Submit) -> None:
    fast = ThrottleRule(bandwidth=BANDWIDTH)
    twin, clock = engine(fast)
    for slow in (1.0, 5.0, 1.0):
        twin.change([ThrottleRule(device=0, bandwidth=BANDWIDTH, dilation=slow), fast])
        clock.now += 100.0
        batch = submit(twin, Op.READ, (0, 0, SECOND, 0))
        assert seconds_until_done(batch, clock) == pytest.approx(slow, abs=0.002)
    with pytest.raises(ConfigError, match="device 2 of 2"):
        twin.change([ThrottleRule(device=2)])


def test_iops_bound_small_requests(submit: Submit) -> None:
    slow, clock = engine(ThrottleRule(bandwidth=1e12, iops=50))
    batch = submit(slow, Op.READ, *[(0, 0, PAGE, 0)] * 100)
    assert seconds_until_done(batch, clock) == pytest.approx(2.0, abs=0.002)


def test_latency_overlaps_between_requests(submit: Submit) -> None:
    slow, clock = engine(ThrottleRule(iops=1000, latency_s=0.5))
    batch = submit(slow, Op.READ, *[(0, 0, PAGE, 0)] * 100)
    assert seconds_until_done(batch, clock) == pytest.approx(0.6, abs=0.002)


def test_devices_work_in_parallel_and_batches_queue(submit: Submit) -> None:
    slow, clock = engine(ThrottleRule(bandwidth=BANDWIDTH))
    first = submit(slow, Op.READ, (0, 0, SECOND, 0), (1, 0, SECOND, SECOND))
    second = submit(slow, Op.WRITE, (0, 0, SECOND, 0))
    assert seconds_until_done(first, clock) == pytest.approx(1.0, abs=0.002)
    assert seconds_until_done(second, clock) == pytest.approx(2.0, abs=0.002)


def test_idle_time_is_not_saved_up(submit: Submit) -> None:
    slow, clock = engine(ThrottleRule(bandwidth=BANDWIDTH))
    submit(slow, Op.READ, (0, 0, SECOND, 0))
    clock.now += 50
    batch = submit(slow, Op.READ, (0, 0, SECOND, 0))
    assert seconds_until_done(batch, clock) == pytest.approx(1.0, abs=0.002)


def test_one_device_may_be_slower(submit: Submit) -> None:
    slow, clock = engine(
        ThrottleRule(device=1, bandwidth=BANDWIDTH / 5), ThrottleRule(bandwidth=BANDWIDTH)
    )
    batch = submit(slow, Op.READ, (0, 0, SECOND, 0), (1, 0, SECOND, SECOND))
    clock.now += 1.001
    assert batch.results().tolist() == [SECOND, PENDING]
    assert not batch.done()
    clock.now += 4.0
    assert batch.results().tolist() == [SECOND, SECOND]
    assert batch.done()


def test_dilation_keeps_ratios(submit: Submit) -> None:
    rule = {"bandwidth": 47 * BANDWIDTH, "iops": 47 * 50.0, "latency_s": 0.1 / 47}
    slow, clock = engine(ThrottleRule(**rule, dilation=47))
    large, small = (SECOND, 1), (PAGE, 50)
    for length, count in (large, small):
        batch = submit(slow, Op.READ, *[(0, 0, length, 0)] * count)
        assert seconds_until_done(batch, clock) == pytest.approx(1.1, abs=0.002)
        clock.now += 10


@given(lengths=st.lists(st.integers(1, 20), min_size=1, max_size=20), split=st.integers(0, 20))
def test_batching_does_not_change_the_model(lengths: list[int], split: int) -> None:
    rule = ThrottleRule(bandwidth=BANDWIDTH, iops=30, latency_s=0.01)
    ends = []
    for parts in ([lengths], [lengths[:split], lengths[split:]]):
        slow, clock = engine(rule, devices=1)
        batches = []
        for part in parts:
            n = len(part)
            batches.append(
                slow.submit(
                    Op.READ,
                    np.zeros(n, np.uint16),
                    np.zeros(n, np.uint64),
                    np.array(part, np.uint32) * np.uint32(PAGE),
                    np.zeros(n, np.uint64),
                )
            )
        total = sum(max(pages * PAGE / BANDWIDTH, 1 / 30) for pages in lengths) + 0.01
        clock.now += total - 1e-6
        assert not all(batch.done() for batch in batches)
        clock.now += 2e-6
        assert all(batch.done() for batch in batches)
        ends.append(clock.now)
    assert ends[0] == pytest.approx(ends[1])


def test_a_wait_lasts_as_long_as_the_model(submit: Submit) -> None:
    arena = Arena(16 * PAGE)
    slow = ThrottledEngine(NoopEngine([0], arena, 16), 1, [ThrottleRule(latency_s=0.1)])
    begin = time.monotonic()
    batch = submit(slow, Op.READ, (0, 0, PAGE, 0))
    assert batch.wait(20.0)
    assert time.monotonic() - begin >= 0.1
    assert slow.close(0.0)


def test_a_wait_ends_before_the_model_does(submit: Submit) -> None:
    slow, _ = engine(ThrottleRule(latency_s=0.1))
    assert not submit(slow, Op.READ, (0, 0, PAGE, 0)).wait(0.01)


def test_rules_without_meaning_are_refused() -> None:
    bad: list[dict[str, Any]] = [
        {"bandwidth": 0},
        {"iops": -1},
        {"latency_s": -0.1},
        {"latency_s": float("inf")},
        {"dilation": 0},
        {"bandwidth": float("nan")},
        {"device": -1},
    ]
    for fields in bad:
        with pytest.raises(ConfigError, match="throttle rule"):
            ThrottleRule(**fields)
    with pytest.raises(ConfigError, match="device 2 of 2"):
        engine(ThrottleRule(device=2))


def test_it_tells_what_each_device_was_given_to_do(submit: Submit) -> None:
    slow, clock = engine(ThrottleRule(bandwidth=BANDWIDTH, iops=10, latency_s=5.0))
    assert slow.busy_s().tolist() == [0.0, 0.0]
    # A page takes as long as any request may, a whole second's bytes a second.
    submit(slow, Op.READ, (0, 0, PAGE, 0), (0, PAGE, PAGE, PAGE), (1, 0, SECOND, 0))
    assert slow.busy_s() == pytest.approx([0.2, 1.0])
    clock.now += 60
    submit(slow, Op.READ, (0, 0, PAGE, 0))
    assert slow.busy_s() == pytest.approx([0.3, 1.0])
