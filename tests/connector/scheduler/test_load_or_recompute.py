"""Load or compute, on a made-up machine and a clock that the test moves."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from vllm_ssdkv.base.metrics import Counters
from vllm_ssdkv.connector.messages import PROBE, PROMOTION, LoadTime, RankReport
from vllm_ssdkv.connector.scheduler.cost_model import pairs
from vllm_ssdkv.connector.scheduler.load_or_recompute import (
    PROBE_BLOCKS,
    PROBE_INTERVAL_S,
    HitConstraints,
    LoadOrRecompute,
)

BLOCK = 16
CHUNK = 512
STEP, TOKEN, PAIR = 1e-3, 1e-4, 1e-8


class Machine:
    """Computes and loads at known speeds, and tells the choice what it took."""

    def __init__(self, read_s: float, *, ranks: int = 1, frames: int = 0, always: bool = False):
        """``read_s``: seconds per token from the devices."""
        self.now = 1000.0
        self.read_s = read_s
        self.copy_s = 1e-6
        self.way_s = 0.002
        self.ranks = ranks
        self.counters = Counters()
        self.choice = LoadOrRecompute(
            always=always,
            block_tokens=BLOCK,
            chunk_tokens=CHUNK,
            ranks=ranks,
            counters=self.counters,
            clock=lambda: self.now,
        )
        self.steps = 0
        for rank in range(ranks):
            self.choice.reported(rank, RankReport(frames=frames + rank))

    def compute_s(self, start: int, stop: int) -> float:
        return TOKEN * (stop - start) + PAIR * pairs(start, stop)

    def step(self, *rows: tuple[int, int]) -> bool:
        """A step; whether it was timed."""
        self.steps += 1
        timed = self.choice.step(self.steps, rows)
        seconds = STEP + sum(self.compute_s(c, c + n) for c, n in rows)
        self.now += seconds
        report = RankReport(steps=[(self.steps, seconds)] if timed else [])
        assert not self.choice.reported(0, report)
        return timed

    def prefill(self, length: int) -> None:
        for start in range(0, length, CHUNK):
            self.step((start, min(CHUNK, length - start)))

    def ask(
        self, hit: int, *, computed: int = 0, own: int = 1, running: Iterable[tuple[int, int]] = ()
    ) -> int:
        """Blocks to load of ``hit`` blocks."""
        total = computed + hit * BLOCK + own
        return self.choice.blocks("r", slots(hit), computed, total, running)

    def load(self, name: str, which: NDArray[np.int64], *, dram: int = 0, queued: float = 0) -> int:
        """A load of so many slots, ``dram`` of them from DRAM; how often the probe was over."""
        self.choice.planned(name, which)
        return self.end(name, len(which), dram, queued)

    def end(self, name: str, count: int, dram: int = 0, queued: float = 0.0) -> int:
        read, copied = (count - dram) * BLOCK * self.read_s, dram * BLOCK * self.copy_s
        self.now += self.way_s + read + copied + queued
        over = 0
        for rank in range(self.ranks):
            # Later ranks are faster: the slowest counts.
            time = LoadTime(
                name, dram * BLOCK, (count - dram) * BLOCK, queued, copied, read / (rank + 1)
            )
            over += len(self.choice.reported(rank, RankReport(loads=[time])))
        self.choice.ended(name)
        return over

    def learn(self) -> None:
        """Measure both."""
        for length in (64, 2048, 512):
            self.prefill(length)
        self.step((2048, 1))
        for size in (64, 4, 16):
            self.load("learning", 9000 + slots(size))


def slots(count: int, first: int = 0) -> NDArray[np.int64]:
    return np.arange(first, first + count, dtype=np.int64)


FAST, SLOW = TOKEN / 50, TOKEN * 50


def test_before_anything_is_known_hits_are_loaded() -> None:
    machine = Machine(SLOW)
    assert machine.ask(64) == 64
    machine.prefill(1000)
    assert machine.ask(64) == 64, "no load was measured"
    other = Machine(SLOW)
    other.load("r", slots(64))
    assert other.ask(64) == 64, "no prefill was measured"


@pytest.mark.parametrize("hit", [8, 16, 64, 500])
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_faster_way_is_taken(hit: int, ranks: int) -> None:
    fast, slow = Machine(FAST, ranks=ranks), Machine(SLOW, ranks=ranks)
    fast.learn()
    slow.learn()
    assert (fast.ask(hit), slow.ask(hit)) == (hit, 0)


def test_a_short_hit_is_not_worth_the_way() -> None:
    machine = Machine(FAST)
    machine.way_s = 0.05
    machine.learn()
    assert [machine.ask(hit) for hit in (1, 4, 64, 256)] == [0, 0, 64, 256]


def test_long_contexts_are_loaded_where_short_ones_are_computed() -> None:
    """Computing a token costs the more, the more there are before it."""
    machine = Machine(TOKEN * 1.3)
    machine.learn()
    assert machine.ask(64) == 0
    assert machine.ask(6000) == 6000
    assert machine.ask(64, computed=100_000) == 64


def test_always_means_always() -> None:
    machine = Machine(SLOW, always=True)
    machine.learn()
    assert machine.ask(100) == 100
    assert not machine.step((0, 100)), "nothing has to be timed"
    assert machine.choice.admitted("r") is None


def test_no_hit_is_no_question() -> None:
    machine = Machine(SLOW)
    machine.learn()
    assert machine.ask(0) == 0
    assert machine.choice.admitted("r") is None
    assert machine.counters.total("hit_tokens_computed") == 0


# ---- queues ----


def test_loads_under_way_are_waited_for() -> None:
    machine = Machine(TOKEN / 2)
    machine.learn()
    assert machine.ask(64) == 64
    machine.choice.planned("a", slots(2000, 100))
    assert machine.ask(64) == 0, "the load before it takes a second and a half"
    machine.now += 1.6
    # It should be over by now: the devices have turned slow, it may take as long again.
    assert machine.ask(64) == 0
    machine.end("a", 2000)
    assert machine.ask(64) == 64


def test_prompts_before_it_make_a_request_load() -> None:
    machine = Machine(TOKEN * 5)
    machine.learn()
    assert machine.ask(64) == 0
    assert machine.ask(64, running=[(0, 9000)]) == 64
    assert machine.ask(64, running=[(8999, 9000)] * 8) == 0, "who decodes is in nobody's way"


# ---- tiers ----


def test_what_is_in_dram_is_loaded_although_the_devices_are_slow() -> None:
    machine = Machine(SLOW, frames=64)
    machine.learn()
    machine.choice.saved(slots(32).tolist())
    assert machine.ask(32) == 32
    machine.load("r", slots(32), dram=32)
    assert machine.ask(32) == 32
    # Of two ranks the smaller DRAM counts, of which a part is in use otherwise.
    machine.choice.saved(range(500, 530))
    assert machine.ask(8) == 0


def test_a_head_in_dram_is_loaded_and_its_tail_computed() -> None:
    machine = Machine(SLOW, frames=64)
    machine.learn()
    machine.load("r", slots(4), dram=4)
    machine.choice.saved(range(100, 110))
    which = np.concatenate([slots(10, 100), slots(30, 200)])
    assert machine.choice.blocks("r", which, 0, 40 * BLOCK + 1, []) == 10
    assert machine.choice.admitted("r") is None
    assert machine.counters.total("hit_tokens_computed") == 30 * BLOCK


@given(
    st.floats(-3, 3),
    st.lists(st.booleans(), min_size=1, max_size=40),
    st.integers(0, 200),
    st.floats(0, 0.1),
)
@settings(max_examples=60, deadline=None)
def test_no_other_part_is_better(
    slower: float, in_dram: list[bool], before: int, way: float
) -> None:
    """What is chosen is as good as the best of all prefixes, by the estimates themselves."""
    machine = Machine(TOKEN * 10**slower, frames=200)
    machine.way_s = way
    machine.learn()
    machine.load("learning", slots(4, 8000), dram=4)
    machine.choice.saved(np.flatnonzero(in_dram).tolist())
    hits = len(in_dram)
    computed, total = before * BLOCK, (before + hits) * BLOCK + 1
    chosen = machine.choice.blocks("r", slots(hits), computed, total, [])
    cost, prefill = machine.choice.load, machine.choice.prefill

    def seconds(count: int) -> float:
        dram = sum(in_dram[:count]) * BLOCK
        loading = cost.way + cost.service(dram, count * BLOCK - dram) if count else 0.0
        return loading + prefill.seconds(computed + count * BLOCK, total - 1, 1)

    assert seconds(chosen) <= min(seconds(count) for count in range(hits + 1)) + 1e-9


# ---- learning again ----


def test_a_drive_that_turns_slow_is_noticed_after_two_loads() -> None:
    machine = Machine(FAST)
    machine.learn()
    machine.read_s = SLOW
    taken = []
    for _ in range(5):
        taken.append(machine.ask(64))
        if taken[-1]:
            machine.load("r", slots(64))
        machine.choice.admitted("r")
    assert taken == [64, 64, 0, 0, 0]


def test_a_drive_that_is_fast_again_is_found_by_probes() -> None:
    machine = Machine(SLOW)
    machine.learn()
    probes = []
    for _ in range(40):
        machine.now += 1.0
        if machine.ask(64, computed=80):
            break
        blocks = machine.choice.admitted("r")
        if blocks is not None:
            probes.append((machine.now, blocks))
            assert machine.load(PROBE, slots(len(blocks), blocks.start)) == 1
            machine.read_s = FAST
    assert machine.ask(64) == 64
    # The first is still slow, and one fast one may be an exception.
    assert len(probes) == machine.counters.total("load_probes") == 3
    times = np.diff([when for when, _ in probes])
    assert (times >= PROBE_INTERVAL_S).all()
    for _, blocks in probes:
        assert blocks.start == 80 // BLOCK, "the hit's first block, counted from the request's"
        assert 1 <= len(blocks) <= PROBE_BLOCKS


def test_a_probe_of_a_slow_drive_is_small() -> None:
    machine = Machine(1.0)
    machine.prefill(1000)
    machine.load("learning", slots(2))
    machine.now += PROBE_INTERVAL_S
    assert machine.ask(64) == 0
    assert machine.choice.admitted("r") == range(1)


def test_one_probe_at_a_time_and_on_all_ranks() -> None:
    machine = Machine(SLOW, ranks=2)
    machine.learn()
    machine.now += PROBE_INTERVAL_S
    machine.ask(64)
    assert machine.choice.admitted("r")
    machine.choice.planned(PROBE, slots(4))
    machine.now += 5 * PROBE_INTERVAL_S
    machine.ask(64)
    assert machine.choice.admitted("r") is None
    time = LoadTime(PROBE, 0, 64, 0.0, 0.0, 0.1)
    assert not machine.choice.reported(1, RankReport(loads=[time]))
    assert machine.choice.reported(0, RankReport(loads=[time])) == [PROBE]
    machine.choice.ended(PROBE)


def test_promotions_say_nothing_of_hits_but_hits_wait_for_them() -> None:
    machine = Machine(FAST)
    machine.learn()
    known = machine.choice.load.tokens_per_second
    machine.choice.planned(PROMOTION, slots(4))
    assert machine.choice._queue() > 0
    time = LoadTime(PROMOTION, 0, 64, 0.0, 0.0, 100.0)
    assert machine.choice.reported(0, RankReport(loads=[time])) == [PROMOTION]
    machine.choice.ended(PROMOTION)
    assert machine.choice._queue() == 0
    assert machine.choice.load.tokens_per_second == known


def test_blocks_in_dram_are_no_probe() -> None:
    machine = Machine(SLOW, frames=64)
    machine.learn()
    machine.copy_s = SLOW
    for _ in range(3):
        machine.load("r", slots(32), dram=32)
    machine.now += PROBE_INTERVAL_S
    assert machine.ask(32) == 0
    assert machine.choice.admitted("r") is None


# ---- numbers ----


def test_what_was_saved_and_lost_is_counted() -> None:
    machine = Machine(FAST)
    machine.learn()
    machine.ask(64)
    machine.load("r", slots(64))
    total = machine.counters.total
    computing = machine.compute_s(0, 1024) + 2 * STEP
    loading = machine.way_s + 1024 * FAST
    assert total("seconds_saved", by="loading") == pytest.approx(computing - loading, rel=0.2)
    machine.read_s = SLOW
    machine.ask(64)
    machine.load("r", slots(64))
    assert total("seconds_lost") == pytest.approx(machine.way_s + 1024 * SLOW - computing, rel=0.1)
    machine.ask(64)
    machine.load("r", slots(64))
    assert machine.ask(64) == 0
    machine.choice.admitted("r")
    assert total("hit_tokens_computed") == 1024
    assert total("seconds_saved", by="computing") == pytest.approx(1024 * SLOW - computing, rel=0.1)


def test_a_failed_load_teaches_nothing() -> None:
    machine = Machine(FAST)
    machine.prefill(1000)
    machine.choice.planned("r", slots(64))
    machine.choice.reported(0, RankReport(loads=[LoadTime("r", 0, 0, 0.0, 0.0, 9.0)]))
    machine.choice.ended("r")
    assert not machine.choice.load.known


def test_a_load_that_failed_on_any_rank_is_one_failure() -> None:
    """Nor has it saved anything."""
    machine = Machine(FAST, ranks=3)
    machine.learn()
    for tokens in ((0, 1024, 0), (1024, 1024, 1024)):
        saved = machine.counters.total("seconds_saved", by="loading")
        machine.ask(64)
        machine.choice.planned("r", slots(64))
        for rank, found in enumerate(tokens):
            time = LoadTime("r", 0, found, 0.0, 0.0, 1e-3 if found else 0.0)
            machine.choice.reported(rank, RankReport(loads=[time]))
        machine.choice.ended("r")
        more = machine.counters.total("seconds_saved", by="loading") - saved
        assert (more > 0) is (0 not in tokens)
        assert machine.counters.total("load_failures") == 1


def test_a_sample_of_decode_steps_is_timed() -> None:
    machine = Machine(FAST)
    assert machine.step((0, 100), (50, 1))
    assert sum(machine.step((100 + i, 1)) for i in range(160)) == 10


def test_steps_that_are_never_reported_are_forgotten() -> None:
    machine = Machine(FAST)
    for number in range(1000):
        machine.choice.step(number, [(0, 100)])
    assert len(machine.choice._steps) < 100


def test_gauges_say_what_is_believed() -> None:
    machine = Machine(TOKEN)
    machine.choice.update_gauges()
    assert not machine.counters.take_gauges().keys() & {"estimated_load_latency_seconds"}
    machine.learn()
    machine.choice.update_gauges()
    seen = machine.counters.take_gauges()
    rate = CHUNK / (STEP + machine.compute_s(0, CHUNK))
    assert seen["estimated_prefill_tokens_per_second"] == pytest.approx(rate, rel=0.3)
    assert seen["estimated_load_tokens_per_second"] == pytest.approx(1 / TOKEN, rel=0.3)
    assert seen["estimated_load_latency_seconds"] == pytest.approx(0.002, abs=0.002)


def test_what_a_hit_brings_with_it_counts() -> None:
    """Windows of other layers."""
    machine = Machine(TOKEN / 2)
    machine.learn()
    total = 64 * BLOCK + 1

    def ask(beside: int) -> int:
        besides = HitConstraints(slots(beside, 5000), 0, lambda count: True)
        return machine.choice.blocks("r", slots(64), 0, total, (), besides)

    assert (ask(0), ask(16), ask(640)) == (64, 64, 0)


def test_no_part_is_loaded_that_some_layers_could_not_go_on_from() -> None:
    machine = Machine(SLOW, frames=100)
    machine.learn()
    machine.load("warm", slots(50))
    total = 80 * BLOCK + 1

    def ask(ends: set[int]) -> int:
        besides = HitConstraints(slots(0), 0, ends.__contains__)
        return machine.choice.blocks("r", slots(80), 0, total, (), besides)

    assert machine.ask(80) == 50, "the head is in DRAM"
    assert (ask({50}), ask({80})) == (50, 0)


def test_what_is_behind_the_window_of_all_layers_costs_nothing() -> None:
    """Such a hit has no parts."""
    machine = Machine(TOKEN * 2, frames=100)
    machine.learn()
    total = 64 * BLOCK + 1

    def ask(behind: int) -> int:
        besides = HitConstraints(slots(0), behind, lambda count: True)
        return machine.choice.blocks("r", slots(64), 0, total, (), besides)

    assert (ask(0), ask(56)) == (0, 64)
    machine.load("warm", slots(50))
    assert (ask(0), ask(4)) == (50, 64)
