"""Budget of devices until more is asked for, on a clock that the test moves."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tests.kit.clock import Clock
from vllm_ssdkv.store.read.prefetch_budget import PrefetchBudget


def load(*pages: int) -> NDArray[np.int64]:
    return np.array(pages, dtype=np.int64)


NOTHING = load(0, 0, 0)


def fetch(idle: PrefetchBudget, clock: Clock, pages: NDArray[np.int64], *, waits: float) -> None:
    idle.asked(pages)
    clock.now += waits
    idle.arrived()


def test_devices_are_levelled_before_anything_is_known() -> None:
    idle = PrefetchBudget(Clock())
    assert idle.spare(NOTHING[:0]).tolist() == []
    idle.asked(load(5, 2, 0))
    assert idle.spare(NOTHING).tolist() == [0, 3, 5]
    # What they read ahead in any case is theirs to do; nobody can do less than nothing.
    assert idle.spare(load(4, 1, 7)).tolist() == [0, 2, 0]


def test_the_shortest_pause_is_used_at_the_pace_of_late() -> None:
    clock = Clock()
    idle = PrefetchBudget(clock)
    for pause in (0.5, 0.25, 1.0):  # 10 pages in 1 s: 0.1 s each
        fetch(idle, clock, load(10, 4, 0), waits=1.0)
        clock.now += pause + 0.01
    idle.asked(load(3, 1, 0))
    assert idle.spare(NOTHING).tolist() == [2, 4, 5]
    # Fetches that find everything in DRAM say nothing of the devices, and leave them the pause.
    idle.arrived()
    clock.now += 0.26
    idle.asked(NOTHING)
    assert min(idle.spare(NOTHING)) > 0


def test_attention_after_a_look_up_is_a_pause() -> None:
    """The budget hears of it when the layer has ended, with the time at which the look-up ended."""
    clock = Clock()
    idle = PrefetchBudget(clock)
    fetch(idle, clock, load(10, 0, 0), waits=1.0)
    clock.now += 1.0
    looked_up = clock.now
    clock.now += 2.0
    idle.passed(NOTHING, looked_up)
    clock.now += 0.01
    idle.asked(NOTHING)
    assert idle.spare(NOTHING).tolist() == [10, 10, 10]  # the pause of 1 s is the shortest


def test_what_was_long_ago_is_forgotten() -> None:
    clock = Clock()
    idle = PrefetchBudget(clock)
    fetch(idle, clock, load(1, 0, 0), waits=100.0)
    for _ in range(9):
        clock.now += 1.5
        fetch(idle, clock, load(10, 0, 0), waits=1.0)
    clock.now += 1.5
    idle.asked(NOTHING)
    assert idle.spare(NOTHING).tolist() == [15, 15, 15]
