"""The rule that shares work by what steps took: as fast as the best share, whatever the machine."""

from __future__ import annotations

import logging
import random
import re
from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_ssdkv.base.metrics import Counters
from vllm_ssdkv.offload.share_rule import (
    MOST_CHANGE,
    Attended,
    FixedShare,
    MeasuredShare,
    ShareRule,
    Way,
)
from vllm_ssdkv.offload.sharing import KindShare, Sharing

NBYTES = 1000.0


@dataclass(frozen=True)
class Machine:
    """Seconds that attention takes: of so many bytes per second, beside a constant time.

    Attributes:
        step, device: Bytes per second.
        window, call: Constant seconds of step and device.
        slower: Factor of both while both attend.
        noise: Of each time, relative.
    """

    step: float
    device: float
    window: float = 0.0
    call: float = 0.0
    slower: float = 1.0
    noise: float = 0.0

    def attend(self, share: float, draw: random.Random | None = None) -> Attended:
        def noisy(seconds: float) -> float:
            return seconds * (1 if draw is None else draw.lognormvariate(0.0, self.noise))

        factor = self.slower if 0 < share < 1 else 1.0
        step = noisy(self.window + factor * NBYTES * (1 - share) / self.step)
        device = noisy(self.call + factor * NBYTES * share / self.device) if share else 0.0
        return Attended(NBYTES, NBYTES * share, max(step, device), step, device)

    def best(self) -> float:
        return min(self.attend(share / 400).seconds for share in range(401))


def seconds(rule: ShareRule, machine: Machine, steps: int, seed: int = 0) -> float:
    """Seconds of a step, the mean."""
    draw, total = random.Random(seed), 0.0
    for _ in range(steps):
        attended = machine.attend(rule.share, draw)
        total += attended.seconds
        rule.learn(attended)
    return total / steps


@pytest.mark.parametrize("ratio", [4.0, 1.0, 1 / 4])
@pytest.mark.parametrize("window", [0.0, 20.0])
@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_as_fast_as_the_best_share(ratio: float, window: float, noise: float) -> None:
    """With all that is tried meanwhile; links of 4, 1 and 1/4 of the host's bandwidth."""
    machine = Machine(10 * ratio, 10.0, window=window, noise=noise)
    rule = MeasuredShare()
    seconds(rule, machine, 30)
    best = min(seconds(FixedShare(s / 40), machine, 400) for s in range(41))
    assert seconds(rule, machine, 3000) <= best / 0.95


machines = st.builds(
    Machine,
    st.floats(1.0, 30.0),
    st.floats(1.0, 30.0),
    st.floats(0.0, 100.0),
    st.floats(0.0, 100.0),
    st.floats(1.0, 2.0),
    st.sampled_from([0.0, 0.02, 0.05]),
)


@given(machine=machines, seed=st.integers(0, 1000))
def test_on_any_machine(machine: Machine, seed: int) -> None:
    rule = MeasuredShare()
    seconds(rule, machine, 200, seed)
    best = min(seconds(FixedShare(s / 40), machine, 200, seed) for s in range(41))
    alone = min(seconds(FixedShare(s), machine, 200, seed) for s in (0.0, 1.0))
    found = seconds(rule, machine, 2000, seed)
    assert found <= best / 0.93
    assert found <= alone / 0.93


@given(before=machines, after=machines)
def test_conditions_that_change_are_noticed(before: Machine, after: Machine) -> None:
    rule = MeasuredShare()
    before, after = replace(before, noise=0.0), replace(after, noise=0.0)
    seconds(rule, before, 500)
    seconds(rule, after, 5000)
    assert seconds(rule, after, 2000) <= after.best() / 0.93


@pytest.mark.parametrize("splits", [True, False])
def test_either_comes_back(splits: bool) -> None:
    """The one that was out of use for long is found to be the faster one now."""
    rule = MeasuredShare(splits)
    for step, device, way in (
        (30.0, 1.0, Way.STEP),
        (1.0, 30.0, Way.DEVICE),
        (30.0, 1.0, Way.STEP),
    ):
        machine = Machine(step, device, slower=1.5)
        seconds(rule, machine, 16000)
        assert rule.way is way
        assert seconds(rule, machine, 500) <= machine.best() / 0.95


@given(machine=machines, seed=st.integers(0, 1000))
def test_a_share_moves_by_bounded_steps(machine: Machine, seed: int) -> None:
    draw, rule, before = random.Random(seed), MeasuredShare(), None
    for _ in range(300):
        assert 0 <= rule.share <= 1
        share = rule.share
        both = 0 < share < 1 and not rule.trying
        if both and before is not None:
            assert abs(share - before) <= MOST_CHANGE + 1e-9
        before = share if both else None
        rule.learn(machine.attend(share, draw))


@pytest.mark.parametrize(("slower", "way", "share"), [(1.0, Way.BOTH, 0.2), (2.0, Way.STEP, 0.0)])
def test_a_first_step_that_compiles_kernels_does_not_count(
    slower: float, way: Way, share: float
) -> None:
    machine, rule = Machine(40.0, 10.0, slower=slower), MeasuredShare()
    seen: set[float] = set()
    for _ in range(60):
        attended = machine.attend(rule.share)
        if rule.share not in seen and rule.share in {0.0, 1.0}:
            attended = replace(attended, seconds=1e4, step_s=1e4, device_s=1e4)
        seen.add(rule.share)
        rule.learn(attended)
    assert rule.way is way
    assert rule.share == pytest.approx(share, abs=0.01)


def test_steps_without_anything_to_attend_to_say_nothing() -> None:
    rule = MeasuredShare()
    for _ in range(10):
        rule.learn(Attended(0.0, 0.0, 0.0, 0.0, 0.0))
    assert rule.way is None
    assert rule.share == 0.0


def test_a_number_stays() -> None:
    for share, way in ((0.0, Way.STEP), (0.3, Way.BOTH), (1.0, Way.DEVICE)):
        rule = FixedShare(share)
        rule.learn(Machine(1000.0, 1.0).attend(share))
        assert (rule.share, rule.way, rule.trying) == (share, way, False)


# ---- what is told ----


def test_what_is_decided_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """Once, and when it has changed notably, at most once a minute."""
    caplog.set_level(logging.INFO, "vllm_ssdkv")
    now, counters = [0.0], Counters()
    sharing = Sharing("auto", counters, lambda: now[0])
    kind: KindShare = sharing.contexts

    def steps(machine: Machine, count: int, seconds_each: float) -> list[str]:
        caplog.clear()
        for _ in range(count):
            now[0] += seconds_each
            attended = machine.attend(kind.share)
            kind.note(attended)
            kind.note(attended)
            assert sharing.end_step() == (2 * attended.nbytes, 2 * attended.theirs)
        return [record.getMessage() for record in caplog.records]

    fast = Machine(4e9, 1e9)
    (line,) = steps(fast, 60, 1.0)
    assert "the device attends to 2" in line
    assert "% of contexts: step 3.7 GiB/s, device 953.7 MiB/s, both 4.7 GiB/s" in line
    assert steps(fast, 1000, 1.0) == []
    assert counters.total("offload_trials", of="contexts") > 9
    gauges = counters.take_gauges()
    assert gauges["offload_share|of=contexts"] == pytest.approx(0.2, abs=0.01)
    assert gauges["offload_rate|of=contexts,way=step"] == pytest.approx(4e9, rel=0.01)
    slow = Machine(1e9, 4e9)
    told = steps(slow, 1000, 0.01)
    assert len(told) <= 1
    lines = [*told, *steps(slow, 3000, 1.0)]
    assert re.search("the device attends to (79|80|81) % of contexts", lines[-1])
    assert sharing.end_step() == (0.0, 0.0)


def test_a_number_is_not_told(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "vllm_ssdkv")
    kind = KindShare("pages", FixedShare(1.0), counters := Counters())
    kind.note(Machine(1.0, 1.0).attend(1.0))
    assert kind.end_step() == (NBYTES, NBYTES)
    assert caplog.records == []
    assert counters.total("offload_trials", of="pages") == 0
