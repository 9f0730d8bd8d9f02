"""Costs of computing and loading, learnt on a made-up machine."""

from __future__ import annotations

import random

import pytest

from vllm_ssdkv.connector.messages import LoadTime
from vllm_ssdkv.connector.scheduler.cost_model import LoadCost, PrefillCost, StepShape, pairs

CHUNK = 512
STEP, TOKEN, PAIR, DECODE = 2e-3, 1e-4, 1e-8, 1e-6


def machine(rows: list[tuple[int, int]]) -> float:
    """Seconds of a step."""
    prefill = sum(pairs(c, c + n) for c, n in rows if n > 1)
    decode = sum(c for c, n in rows if n == 1)
    return STEP + TOKEN * sum(n for _, n in rows) + PAIR * prefill + DECODE * decode


def learnt(mixed: bool, seed: int = 0) -> PrefillCost:
    """What is learnt from prompts in chunks, with and without others that decode."""
    source, cost = random.Random(seed), PrefillCost(CHUNK)
    for _ in range(12):
        others = [(source.randrange(100, 8000), 1) for _ in range(source.randrange(8))]
        length = source.choice([100, 700, 3000, 9000])
        for start in range(0, length, CHUNK):
            rows = [(start, min(CHUNK, length - start)), *(others if mixed else ())]
            cost.observe(StepShape.of(rows), machine(rows) * source.uniform(0.95, 1.05))
        if mixed and others:
            cost.observe(StepShape.of(others), machine(others))
    return cost


def test_the_shape_of_a_step() -> None:
    shape = StepShape.of([(100, 1), (0, 4), (50, 1), (10, 2)])
    assert (shape.tokens, shape.decode, shape.prefill) == (8, 150, 8.0 + 22.0)
    assert StepShape.of([]).tokens == 0


def test_pairs_add_up() -> None:
    assert pairs(0, 1000) == pairs(0, 300) + pairs(300, 1000) == 500_000


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize(("start", "stop"), [(0, 512), (0, 4096), (4096, 8192), (1000, 1064)])
def test_prefill_is_learnt_from_steps(mixed: bool, start: int, stop: int) -> None:
    cost = learnt(mixed)
    right = TOKEN * (stop - start) + PAIR * pairs(start, stop) + STEP * ((stop - start) // CHUNK)
    assert cost.seconds(start, stop) == pytest.approx(right, rel=0.3)


def test_steps_are_counted_only_where_they_are_more() -> None:
    cost = learnt(mixed=True)
    # 64 tokens more fit in the step that the last token needs in any case.
    alone, beside = cost.seconds(0, 64), cost.seconds(0, 64, after=1)
    assert alone - beside == pytest.approx(STEP, rel=0.5)
    assert cost.seconds(0, CHUNK, after=1) > cost.seconds(0, CHUNK - 1, after=1) + STEP / 2


def test_a_backlog_is_computed_in_one_batch() -> None:
    cost = learnt(mixed=True)
    assert cost.backlog([]) == 0
    decoding = cost.backlog([(1000 + i, 1001 + i) for i in range(8)])
    assert decoding < STEP
    waiting = cost.backlog([(0, 256), (0, 256)])
    assert waiting == pytest.approx(STEP + TOKEN * 512, rel=0.3)


def test_unknown_until_a_prompt_was_computed() -> None:
    cost = PrefillCost(CHUNK)
    cost.observe(StepShape.of([(100, 1)]), 0.002)
    assert not cost.known
    assert cost.tokens_per_second == 0
    cost.observe(StepShape.of([(0, 100)]), 0.012)
    assert cost.known


def load(dram: int, ssd: int, queued: float = 0.0) -> LoadTime:
    return LoadTime("r", dram, ssd, queued, dram * 1e-6, 0.01 + ssd * 1e-4 if ssd else 0.0)


def test_loads_are_learnt_by_tier() -> None:
    cost = LoadCost()
    assert not cost.known
    for dram, ssd in ((64, 0), (0, 64), (512, 512), (0, 4096), (1024, 0)):
        time = load(dram, ssd)
        cost.observe(time, time.loading_s + 0.003)
    assert cost.known
    assert cost.service(0, 1000) == pytest.approx(0.11, rel=0.2)
    assert cost.service(1000, 0) == pytest.approx(1e-3, rel=0.2)
    assert cost.way == pytest.approx(0.003, rel=0.1)
    assert cost.latency == pytest.approx(0.013, rel=0.3)
    assert cost.tokens_per_second == pytest.approx(1e4, rel=0.3)


def test_what_was_queued_counts_for_those_ahead() -> None:
    cost = LoadCost()
    time = load(0, 100, queued=5.0)
    cost.observe(time, 5.0 + time.ssd_s + 0.002)
    assert cost.way == pytest.approx(0.002, rel=0.1)
    assert cost.service(0, 100) == pytest.approx(time.ssd_s, rel=0.1)


def test_a_tier_never_measured_is_worth_a_try() -> None:
    cost = LoadCost()
    cost.observe(load(64, 0), 0.002)
    assert cost.service(0, 4096) == 0


def test_a_probe_says_nothing_about_the_way() -> None:
    cost = LoadCost()
    cost.observe(load(0, 64), None)
    assert cost.known
    assert cost.way == 0
