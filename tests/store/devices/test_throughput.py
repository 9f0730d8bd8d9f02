"""Slow devices: found when they are, not when they are not; and new slots then avoid them."""

from __future__ import annotations

import itertools
import logging
import math
import time

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.kit.clock import Clock
from tests.store.conftest import PATIENCE_S, MakeStore, array, key_of
from vllm_ssdkv.base.metrics import Counters
from vllm_ssdkv.config.io_engine import ThrottleRule
from vllm_ssdkv.store.devices.throughput import (
    BLUR,
    LEAST_SHARE,
    SPARED,
    TOLERANCE,
    WINDOW_S,
    WINDOWS,
    BatchWatch,
    Moment,
    Part,
    ThroughputEstimator,
)
from vllm_ssdkv.store.format.segment import Segment
from vllm_ssdkv.store.format.slot_geometry import SlotGeometry
from vllm_ssdkv.store.index.slot_index import SlotIndex
from vllm_ssdkv.store.io import slot_io, slot_request
from vllm_ssdkv.store.io.engines.protocol import PENDING, U16, U32
from vllm_ssdkv.store.io.testing import throttled
from vllm_ssdkv.store.placement import segments as dividing
from vllm_ssdkv.store.placement.lanes import lanes_for
from vllm_ssdkv.store.placement.placement import Placement
from vllm_ssdkv.store.placement.rebalancer import Rebalancer
from vllm_ssdkv.store.placement.segments import arrange

PATHS = ("/a", "/b", "/c", "/d")
MB = 1 << 20


class Batches:
    """Batches over all devices, one after the other, each device with a rate in bytes a second and
    a latency. Pieces are of 128 KiB. Nobody looked for the part ``unseen`` of the time that each
    takes, before it was seen to have ended."""

    unseen = 0.0

    def __init__(self, weights: list[float], latency: float = 0.0):
        self.speed = ThroughputEstimator(PATHS[: len(weights)], weights)
        self.now = 100.0
        self.latency = latency

    def run(self, seconds: float, rates: list[float], parts: list[int]) -> dict[int, float]:
        end = self.now + seconds
        while self.now < end:
            took = [p / rate + self.latency for p, rate in zip(parts, rates, strict=True)]
            told = set(self.speed.telling(np.array(parts, dtype=np.float64)).tolist())
            for device in np.argsort(took).tolist():
                if device in told:
                    first = min(parts[device], MB // 8)
                    at = self.now + first / rates[device] + self.latency
                    ends = (self.now, at, self.now + took[device])
                    begin, at_first, at_end = (
                        Moment(t - self.unseen * (t - self.now), t) for t in ends
                    )
                    self.speed.record_completion(
                        device, Part(parts[device], begin, at_first, first, at_end)
                    )
            self.now += max(took) + 1e-4
        return dict(self.speed.drain_events())


SLOW_ENOUGH = (WINDOWS + 2) * WINDOW_S


def test_equal_devices_are_left_alone() -> None:
    clock = Batches([1.0] * 4)
    assert clock.run(20.0, [100.0 * MB, 90.0 * MB, 110.0 * MB, 80.0 * MB], [4 * MB] * 4) == {}


@pytest.mark.parametrize("unseen", [0.1, 0.2, 0.3, 0.6, 0.9])
def test_ends_that_are_seen_late_lead_to_no_wrong_verdict(unseen: float) -> None:
    clock = Batches([1.0] * 4)
    clock.unseen = unseen
    equal, slow = [100.0 * MB] * 4, [100.0 * MB, 100.0 * MB, 20.0 * MB, 100.0 * MB]
    assert clock.run(10.0, equal, [4 * MB] * 4) == {}
    found = clock.run(SLOW_ENOUGH, slow, [4 * MB] * 4)
    if unseen <= 0.3:
        assert found[2] < 0.5
    assert set(found) <= {2}
    assert clock.run(10.0, slow, [4 * MB] * 4) == {}
    clock.unseen = 0.1
    assert clock.run(SLOW_ENOUGH, equal, [4 * MB] * 4) == ({2: 1.0} if found else {})


def test_a_slow_device_is_found_beside_others_that_are_done_at_once() -> None:
    """Only the slow one is seen at work: it must not be compared with itself."""
    speed = ThroughputEstimator(PATHS[:3], [1.0] * 3)
    for turn in range(100):
        at = Moment(turn * 0.2, turn * 0.2)
        for device, seconds in ((0, 0.01), (2, 0.01), (1, 0.1)):
            end = Moment(at.latest + seconds, at.latest + seconds)
            begun = Moment(at.latest + 0.01, at.latest + 0.01)
            speed.record_completion(
                device, Part(MB, at, begun, MB // 10 if device == 1 else MB, end)
            )
    assert [device for device, _ in speed.drain_events()] == [1]


# The slow one alone is seen at work; and nothing is known of it but that it is slow.
@example([0.0625, 0.03125, 0.125, 0.125, 0.25, 0.25, 0.25, 0.0625, 0.21875], 0.1, 1, 4 * MB)
@example([0.125, 0.03125, 0.0625, 0.25], 0.3, 1, 4 * MB)
@given(
    st.sampled_from([0.001, 0.03, 0.3]).flatmap(
        lambda most: st.lists(st.floats(0.0002, most), min_size=1, max_size=60)
    ),
    st.sampled_from([0.1, 0.3, 1.0]),
    st.integers(1, 3),
    st.sampled_from([MB // 4, MB, 4 * MB]),
)
def test_whenever_somebody_looks_what_is_said_is_true(
    pauses: list[float], slow: float, in_flight: int, part: int
) -> None:
    """Batches over three devices, up to three at a time; looks at any times."""
    speed = ThroughputEstimator(PATHS[:3], [1.0] * 3)
    rates = np.array([100.0, 100.0 * slow, 100.0]) * MB
    pieces = 8
    devices = np.repeat(np.arange(3, dtype=np.uint16), pieces)
    lengths = np.full(3 * pieces, part // pieces, dtype=np.uint32)
    free, now, verdicts = np.zeros(3), 0.0, []
    looks = itertools.cycle(pauses)
    for _ in range(400 // in_flight):
        batches = []
        for _ in range(in_flight):
            begin = Moment(now, now)
            start = np.maximum(free, now)
            ends = start[devices] + (np.tile(np.arange(pieces), 3) + 1) * lengths / rates[devices]
            free = start + part / rates
            batches.append((BatchWatch(speed, asked(devices, lengths, 3), begin), ends))
        while batches:
            now += next(looks)
            for watch, ends in batches:
                results = Results(len(ends))
                results.values[ends <= now] = lengths[0]
                if not watch.done:
                    watch.look(results, devices, lengths, now)
            batches = [(watch, ends) for watch, ends in batches if ends.max() > now]
        verdicts += speed.drain_events()
    # It never recovers, and gets no more than it is worth, however late somebody looks; and no less
    # but for blur, what is spared and steps, where it is known how fast the others are.
    for device, share in verdicts:
        assert (device, slow < 1) == (1, True)
        assert LEAST_SHARE <= share <= slow
        if max(pauses) < BLUR / 2 * part / rates[0]:
            assert slow / math.sqrt(TOLERANCE) * (1 - SPARED) - LEAST_SHARE <= share
    falls = [share for _, share in verdicts]
    assert falls == sorted(falls, reverse=True)


def test_a_slow_device_is_found_and_forgiven(caplog: pytest.LogCaptureFixture) -> None:
    clock = Batches([1.0] * 4)
    rates = [100.0 * MB, 100.0 * MB, 20.0 * MB, 100.0 * MB]
    with caplog.at_level(logging.INFO):
        assert clock.run(SLOW_ENOUGH, rates, [4 * MB] * 4) == {2: pytest.approx(0.15)}
        # With less to do it is as slow as before, and nothing is said again.
        assert clock.run(10.0, rates, [5 * MB, 5 * MB, MB, 5 * MB]) == {}
        assert clock.run(10.0, rates, [4 * MB] * 4) == {}
        assert [r.getMessage() for r in caplog.records if "/c is slow: 0.20" in r.getMessage()]
        assert caplog.text.rstrip().endswith("it gets 0.15 of its share")
        assert len(caplog.records) == 1
        rates[2] = 100.0 * MB
        assert clock.run(SLOW_ENOUGH, rates, [5 * MB, 5 * MB, MB, 5 * MB]) == {2: 1.0}
    assert "/c is as fast again" in caplog.text


def test_latency_is_no_slowness() -> None:
    """The time that a device with little to do spends on it says nothing of its bandwidth."""
    clock = Batches([1.0] * 3, latency=0.02)
    assert clock.run(10.0, [100.0 * MB] * 3, [8 * MB, 8 * MB, 5 * MB // 8]) == {}
    assert clock.speed.rates().tolist() == pytest.approx([1.0] * 3)
    found = clock.run(SLOW_ENOUGH, [100.0 * MB, 100.0 * MB, 20.0 * MB], [4 * MB] * 3)
    assert found == {2: pytest.approx(0.15)}


@pytest.mark.parametrize("part", [MB // 4, MB // 2])
def test_a_slow_device_with_little_to_do_is_seen_to_recover(part: int) -> None:
    """Parts that are one piece are little more than latency: no reason to believe it slower."""
    clock, parts = Batches([1.0] * 3, latency=0.004), [4 * MB, 4 * MB, part]
    rates = [100.0 * MB, 100.0 * MB, 20.0 * MB]
    assert clock.run(SLOW_ENOUGH, rates, [4 * MB] * 3) == {2: pytest.approx(0.15)}
    assert clock.run(10.0, rates, parts) == {}
    assert clock.speed.rates()[2] >= 0.2 - 1e-9
    assert clock.run(SLOW_ENOUGH, [100.0 * MB] * 3, parts)[2] > 0.2


def test_reads_follow_the_latest_window() -> None:
    clock = Batches([1.0] * 3)
    slow = [100.0 * MB, 100.0 * MB, 20.0 * MB]
    assert clock.run(2 * WINDOW_S, slow, [4 * MB] * 3) == {}  # nothing is said yet
    assert clock.speed.rates().tolist() == pytest.approx([1.0, 1.0, 0.2])
    # Who gets nothing any more is given something again, or it would stay so for ever.
    clock.run(20.0, [100.0 * MB] * 3, [4 * MB, 4 * MB, 0])
    assert clock.speed.rates().tolist() == pytest.approx([1.0] * 3)


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (0.51, 0.45),
        (0.26, 0.2),
        (0.235, 0.15),
        (0.21, 0.15),
        (0.185, 0.1),
        (0.09, 0.05),
        (0.01, 0.05),
        (0.7, None),
    ],
)
def test_a_slow_device_gets_too_little_rather_than_too_much(
    found: float, said: float | None, caplog: pytest.LogCaptureFixture
) -> None:
    """In steps, and never all that it can do: with a moment's surplus, all others wait for it."""
    clock = Batches([1.0] * 3)
    news = clock.run(SLOW_ENOUGH * 4, [100.0 * MB, 100.0 * MB, found * 100 * MB], [MB] * 3)
    assert news == ({} if said is None else {2: pytest.approx(said)})
    assert len(caplog.records) == (said is not None)  # nor is it said again and again


def test_where_bounds_are_far_apart_a_slow_device_gets_no_more_than_the_lower_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """All would wait for it."""
    clock = Batches([1.0] * 3)
    clock.unseen = 0.22  # so that it is worth 0.16 to 0.26
    found = clock.run(SLOW_ENOUGH, [100.0 * MB, 100.0 * MB, 20.0 * MB], [4 * MB] * 3)
    assert found == {2: pytest.approx(0.15)}
    assert "/c is slow: 0.20 of" in caplog.text


def test_weights_are_what_devices_are_compared_with() -> None:
    clock = Batches([4.0, 1.0])
    assert clock.run(10.0, [400.0 * MB, 100.0 * MB], [4 * MB, MB]) == {}
    assert clock.run(SLOW_ENOUGH, [400.0 * MB, 51.0 * MB], [4 * MB, MB]) == {1: pytest.approx(0.45)}


def test_a_short_pause_is_no_slowness() -> None:
    clock = Batches([1.0] * 2)
    for _ in range(6):
        assert clock.run((WINDOWS - 2) * WINDOW_S, [100.0 * MB, 10.0 * MB], [MB] * 2) == {}
        assert clock.run(4 * WINDOW_S, [100.0 * MB] * 2, [MB] * 2) == {}


def test_waiting_behind_the_batch_before_is_not_the_device_s_time() -> None:
    """Two batches in flight: the second one's part begins when the first one's has ended."""
    speed = ThroughputEstimator(PATHS[:2], [1.0, 1.0])
    for turn in range(200):
        begin = turn * 0.05
        for batch in range(2):
            for device in range(2):
                end = begin + (batch + 1) * 0.02
                at = begin + 0.001 * batch
                begun = Moment(at, at)
                speed.record_completion(device, Part(2 * MB, begun, begun, 0, Moment(end, end)))
    assert speed.drain_events() == []
    # A window has at most its own length of busy time.
    assert speed._most_s.max() <= WINDOW_S


class Results:
    """A batch whose requests end one after the other."""

    def __init__(self, count: int):
        self.values = np.full(count, PENDING, dtype=np.int32)

    def results(self) -> np.ndarray:
        return self.values


def asked(devices: U16, lengths: U32, count: int) -> NDArray[np.float64]:
    """Bytes of requests, [n], per device."""
    return np.bincount(devices, lengths, count).astype(np.float64)


def test_parts_count_only_if_somebody_looked_in_time() -> None:
    devices = np.array([0, 1, 0, 1], dtype=np.uint16)
    lengths = np.array([MB] * 4, dtype=np.uint32)
    seen: list[tuple[int, Part]] = []

    class Spy(ThroughputEstimator):
        def record_completion(self, device: int, part: Part, *, counts: bool = True) -> None:
            if counts:
                seen.append((device, part))

    speed = Spy(PATHS[:2], [1.0, 1.0])
    begin = Moment(9.9, 10.0)
    late, watch = Results(4), BatchWatch(speed, asked(devices, lengths, 2), begin)
    late.values[:] = MB
    watch.look(late, devices, lengths, 11.0)
    assert watch.done
    assert seen == []

    good, watch = Results(4), BatchWatch(speed, asked(devices, lengths, 2), begin)
    for now, ended in ((10.1, []), (10.2, [0, 2]), (10.3, [1]), (10.9, []), (11.0, [3])):
        good.values[ended] = MB
        watch.look(good, devices, lengths, now)
    # Of the first one, no piece was seen to end before the last.
    assert seen == [
        (0, Part(2 * MB, begin, Moment(10.1, 10.2), 2 * MB, Moment(10.1, 10.2))),
        (1, Part(2 * MB, begin, Moment(10.2, 10.3), MB, Moment(10.9, 11.0))),
    ]
    # A part that is too small, and then one device alone, tell nothing.
    small = np.array([MB, 4096, MB, 4096], dtype=np.uint32)
    assert BatchWatch(speed, asked(devices, small, 2), begin).done


class SavedAtOnce:
    def put(self, segments: list[Segment]) -> None: ...

    def saved(self) -> bool:
        return True

    def error(self) -> str:
        return ""

    def wait(self, timeout_s: float) -> bool:
        return True

    def close(self, timeout_s: float) -> bool:
        return True


@pytest.mark.parametrize("devices", [2, 4, 8])
def test_new_slots_soon_use_the_devices_as_they_are(
    make_store: MakeStore, monkeypatch: pytest.MonkeyPatch, devices: int
) -> None:
    """One device at a fifth of its speed, a full store: bytes per device approach the optimum."""
    Clock().govern(monkeypatch, slot_io, slot_request, throttled)
    geometry = SlotGeometry("opaque", 1, 1, 1, 130_000)
    speeds = [1.0] * devices
    speeds[1] = 0.2
    # Eight segments of ten rows, of the lanes that they will have.
    monkeypatch.setattr(dividing, "SEGMENTS", 8)
    ends = [8 * 10 * len(lanes_for(speeds)) // devices] * devices
    found = arrange(geometry, [], [1.0] * devices, ends)
    worker, owner = (Placement(geometry, found.segments, devices) for _ in range(2))
    rate = 120e6 / devices
    rig = make_store(
        geometry,
        slots=found.numbers,
        frames=64,
        devices=devices,
        placement=worker,
        throttle=[ThrottleRule(device=d, bandwidth=rate * s) for d, s in enumerate(speeds)],
    )
    index = SlotIndex(found.numbers, None)
    index.unpin(index.allocate(found.numbers))
    rebalancer = Rebalancer(index, owner, [1.0] * devices, SavedAtOnce(), Counters())
    names = 0
    written = np.zeros(devices)

    def turn(batch: int) -> None:
        nonlocal names
        rebalancer.step()
        segments = rebalancer.take_segments()
        if segments is not None:
            worker.change(segments)
        slots = index.allocate(batch)
        before = [rig.total("bytes_written", device=p) for p in rig.paths]
        rig.write(dict.fromkeys(slots.tolist(), 0))
        for slot in slots.tolist():
            index.publish(slot, key_of(names))
            names += 1
        index.unpin(slots)
        after = [rig.total("bytes_written", device=p) for p in rig.paths]
        written[:] += np.array(after) - np.array(before)

    def efficiency() -> float:
        """Of the time that these bytes need, the part that the best division would need."""
        times = written / np.array(speeds)
        return float(written.sum() / sum(speeds) / times.max())

    for _ in range(2):
        turn(64)
    news: dict[int, float] = dict(rig.files.speed.drain_events())
    end = time.monotonic() + PATIENCE_S
    while not news:
        assert time.monotonic() < end, "nobody noticed"
        turn(64)
        news |= dict(rig.files.speed.drain_events())
    assert list(news) == [1]
    assert news[1] == pytest.approx(0.2, abs=0.051)
    rebalancer.reweigh([news.get(d, 1.0) for d in range(devices)])
    rebalancer.step()  # which empties a segment
    written[:] = 0
    share = len(lanes_for(speeds)) * 2
    for _ in range(6):
        turn(share)
    assert efficiency() >= 0.9
    lost = rebalancer.placement.slots - index.gauges()["ready"] - index.gauges()["free"]
    assert lost == 0


def test_reads_with_two_copies_soon_use_the_devices_as_they_are(
    make_store: MakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What lies there stays where it is: of each piece, the copy is read that is there sooner."""
    Clock().govern(monkeypatch, slot_io, slot_request, throttled)
    speeds = np.array([1.0, 0.2, 1.0, 1.0])
    rig = make_store(
        SlotGeometry("opaque", 1, 1, 1, 130_000),
        slots=128,
        frames=64,
        replicas=2,
        throttle=[ThrottleRule(device=d, bandwidth=30e6 * s) for d, s in enumerate(speeds)],
    )
    names = {slot: slot for slot in range(128)}
    for first in range(0, 128, 64):
        rig.write({slot: slot for slot in range(first, first + 64)})

    def read(times: int) -> np.ndarray:
        before = np.array([rig.total("bytes_read", device=p) for p in rig.paths])
        for _ in range(times):
            assert rig.load(names, [slot + 1 for slot in names]).complete
        return np.array([rig.total("bytes_read", device=p) for p in rig.paths]) - before

    read(3)
    shares = read(6)
    assert shares.sum() / speeds.sum() / (shares / speeds).max() >= 0.85
    assert shares[1] > 0  # or nobody would see it recover


def test_small_reads_are_not_watched(make_store: MakeStore) -> None:
    rig = make_store()
    rig.write({0: 1, 1: 2})
    batch = rig.files.submit(0, array([0, 1]), 0, 4096, np.array([0, 4096], dtype=np.uint64))  # type: ignore[arg-type]
    assert batch.watch.done
    assert batch.wait().all()
