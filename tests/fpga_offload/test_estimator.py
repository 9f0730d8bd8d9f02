"""The estimator: laws of its times, P20, and the constants that others have too."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_ssdkv.base.errors import BenchError
from vllm_ssdkv.fpga_offload.cards import CARDS, Card, CardName, Constant
from vllm_ssdkv.fpga_offload.estimator import (
    DecodeStep,
    Estimate,
    KernelCycles,
    SparfReads,
    estimate,
    hilos_cycles,
    simulated_cycles,
    simulated_sparf,
)
from vllm_ssdkv.fpga_offload.results import Cycles
from vllm_ssdkv.offload.testing.drive_timing import DRIVES
from vllm_ssdkv.profiling.simulation.papers import instinfer

STEP = DecodeStep(layers=32, rows=4, kv_heads=8, group=4, head_size=128, tokens=32768)
LINE_RATE = KernelCycles("line rate", "simulated", 30, 1.0)

steps = st.builds(
    DecodeStep,
    layers=st.integers(1, 80),
    rows=st.integers(1, 64),
    kv_heads=st.integers(1, 16),
    group=st.sampled_from([1, 2, 4, 5, 8]),
    head_size=st.sampled_from([64, 128, 256]),
    tokens=st.integers(1, 1 << 20),
    sparf=st.none()
    | st.builds(
        SparfReads,
        channels=st.integers(1, 64),
        budget=st.floats(0.001, 1),
        page_channels=st.integers(2, 8),
        by_page=st.booleans(),
    ),
)
kernels = st.builds(
    KernelCycles,
    name=st.just("k"),
    origin=st.just("simulated"),
    job=st.floats(0, 1e4),
    beat=st.floats(1, 4),
)


def number(value: float) -> Constant:
    return Constant(value, "assumed", "a test")


cards = st.builds(
    Card,
    name=st.sampled_from(["smartssd", "flash-controller"]),
    flash=st.floats(1e8, 1e11).map(number),
    memory=st.none() | st.floats(1e9, 1e11).map(number),
    clock=st.floats(1e8, 1e9).map(number),
    start=st.floats(0, 1e-3).map(number),
    chunk_bytes=st.integers(1 << 12, 1 << 30),
    family=st.just("xcup"),
    fpga=st.just(CARDS["smartssd"].fpga),
)


@given(
    step=steps,
    card=cards,
    kernel=kernels,
    what=st.sampled_from(["flash", "memory", "clock"]),
    factor=st.floats(1, 100),
)
def test_more_bandwidth_is_never_slower(
    step: DecodeStep, card: Card, kernel: KernelCycles, what: str, factor: float
) -> None:
    present: Constant | None = getattr(card, what)
    faster = None if present is None else number(present.value * factor)
    better = dataclasses.replace(card, **{what: faster})
    before, after = estimate(step, card, kernel), estimate(step, better, kernel)
    assert after.total_s <= before.total_s * (1 + 1e-9)


@given(step=steps, card=cards, kernel=kernels)
def test_the_time_lies_between_full_overlap_and_none(
    step: DecodeStep, card: Card, kernel: KernelCycles
) -> None:
    found = estimate(step, card, kernel)
    attend = max(found.kernel_s, found.memory_s or 0.0)
    none = found.flash_s + attend + found.start_s
    assert max(found.flash_s, attend) + found.start_s <= found.total_s * (1 + 1e-9)
    assert found.total_s <= none * (1 + 1e-9)


@given(step=steps, card=cards, kernel=kernels, number_of=st.integers(1, 16))
def test_more_cards_and_fewer_tokens_are_never_slower(
    step: DecodeStep, card: Card, kernel: KernelCycles, number_of: int
) -> None:
    whole = estimate(step, card, kernel).total_s
    assert estimate(step, card, kernel, number_of).total_s <= whole * (1 + 1e-9)
    fewer = dataclasses.replace(step, tokens=max(1, step.tokens // 2))
    assert estimate(fewer, card, kernel).total_s <= whole * (1 + 1e-9)


@given(step=steps, kernel=kernels, card=cards)
def test_the_bound_is_the_slowest_part(step: DecodeStep, kernel: KernelCycles, card: Card) -> None:
    found = estimate(step, card, kernel)
    parts = {"flash": found.flash_s, "kernel": found.kernel_s, "memory": found.memory_s or 0.0}
    assert parts[found.bound] == max(parts.values())


def test_one_chunk_overlaps_with_nothing() -> None:
    card = dataclasses.replace(CARDS["smartssd"], chunk_bytes=STEP.nbytes, start=number(0.5))
    found = estimate(STEP, card, LINE_RATE)
    assert found.chunks == 1
    assert found.memory_s is not None
    attend = max(found.memory_s, found.kernel_s)
    assert found.total_s == pytest.approx(found.flash_s + attend + 0.5)


def test_memory_is_written_and_read() -> None:
    """1,000 tokens of 64 channels, K and V in 16 bit, are 256,000 bytes."""
    step = DecodeStep(layers=1, rows=1, kv_heads=1, group=1, head_size=64, tokens=1000)
    card = dataclasses.replace(CARDS["smartssd"], flash=number(256e6), memory=number(256e6))
    found = estimate(step, card, LINE_RATE)
    assert (found.flash_s, found.memory_s) == pytest.approx((1e-3, 2e-3))
    assert found.bound == "memory"


@pytest.mark.parametrize("name", ["smartssd", "flash-controller"])
def test_flash_bounds_both_cards(name: CardName) -> None:
    found = estimate(STEP, CARDS[name], LINE_RATE)
    assert found.bound == "flash"
    assert found.total_s == pytest.approx(STEP.nbytes / CARDS[name].flash.value, rel=0.01)


@pytest.mark.parametrize(("group", "gflops"), [(1, 11.9), (4, 46.8), (5, 56.3)])
def test_cycles_and_speeds_of_the_papers_kernels_agree(group: int, gflops: float) -> None:
    """Both are printed. A query head takes two operations for an element of 2 bytes."""
    bandwidth = hilos_cycles(group).bandwidth(296.05e6)
    assert group * bandwidth / 1e9 == pytest.approx(gflops, rel=0.005)


def test_the_twins_of_the_offload_bench_have_the_same_drives() -> None:
    assert CARDS["smartssd"].flash.value == DRIVES["smartssd"].read_bandwidth
    assert CARDS["flash-controller"].flash.value == instinfer.READ_INSIDE


def run(tokens: int, cycles: int, **other: str | int | float) -> Cycles:
    row = Cycles("attend", 128, 1, "float16", tokens, tokens * 512, cycles)
    return dataclasses.replace(row, **other)


def test_a_line_is_found_through_runs() -> None:
    rows = [run(tokens, 50 + tokens * 8 * 105 // 100) for tokens in (128, 512, 4096)]
    other = [
        run(128, 10**6, stalls=0.3),
        run(128, 10**6, group=4),
        run(128, 10**6, dtype="bfloat16"),
    ]
    line = simulated_cycles([*rows, *other], kernel="attend", head_size=128, group=1)
    assert line.beat == pytest.approx(1.05, rel=1e-3)
    assert line.job == pytest.approx(50, rel=0.02)
    assert line.error < 1e-3
    assert line.bandwidth(1e9) == pytest.approx(64 * 1e9 / 1.05, rel=1e-3)


def test_a_line_is_never_faster_than_the_bus() -> None:
    rows = [run(128, 2000), run(4096, 8 * 4096 + 10)]
    line = simulated_cycles(rows, kernel="attend", head_size=128, group=1)
    assert (line.beat, line.job >= 0) == (1.0, True)
    assert line.error > 0.03, "two runs that no line of a bus fits are told by the error"


def test_what_was_not_simulated_is_named() -> None:
    with pytest.raises(BenchError, match=r"d = 64, G = 1, float16 .*simulated: \(128, 1\)"):
        simulated_cycles([run(128, 1100)], kernel="attend", head_size=64, group=1)
    with pytest.raises(BenchError, match="groups of 2: 1, 4, 5"):
        hilos_cycles(2)


def test_sparf_reads_as_much_as_the_paper_says() -> None:
    # k = s/16 of random tokens touches 64 % of pages of 16 (papers: page granularity).
    random = SparfReads(channels=16, budget=1 / 16, page_channels=2)
    by_page = dataclasses.replace(random, by_page=True)
    first = 15 / 128  # of two channels a page one at least: 15/64, of K
    assert random.share(128) - first == pytest.approx(0.644, abs=0.001)
    assert by_page.share(128) == pytest.approx(first + 1 / 16)
    assert SparfReads(128, 1.0).share(128) == pytest.approx(1.5), "all of K twice, all of V"
    dense, sparse = (
        estimate(dataclasses.replace(STEP, sparf=sparf), CARDS["flash-controller"], LINE_RATE)
        for sparf in (None, by_page)
    )
    assert sparse.flash_s / dense.flash_s == pytest.approx(by_page.share(128))


def test_sparf_takes_cycles_for_each_token_and_for_each_page() -> None:
    rows = [
        Cycles(kernel, 128, 4, "float16", tokens, nbytes, cycles)
        for tokens in (1024, 4096)
        for kernel, nbytes, cycles in (
            ("sparf_first", tokens * 32, 500 + 6 * tokens),
            ("sparf_second", tokens * 64, 300 + tokens),
        )
    ]
    line = simulated_sparf(rows, head_size=128, group=4)
    assert (line.job, line.beat, line.token) == pytest.approx((800, 1, 6))
    step = dataclasses.replace(STEP, sparf=SparfReads(channels=16, budget=0.25, by_page=True))
    card = CARDS["flash-controller"]
    tokens = step.jobs * step.tokens
    cycles = 800 * step.jobs + 6 * tokens + step.nbytes / 4 / 64
    assert estimate(step, card, line).kernel_s == pytest.approx(cycles / card.clock.value)
    with pytest.raises(BenchError, match="sparf_first with d = 128, G = 4"):
        simulated_sparf(rows[1::2], head_size=128, group=4)


def test_no_card_is_refused() -> None:
    with pytest.raises(ValueError, match="0 cards"):
        estimate(STEP, CARDS["smartssd"], LINE_RATE, 0)


def test_an_estimate_without_memory_is_bound_by_flash_or_kernel() -> None:
    assert Estimate(1.0, None, 2.0, 0.0, 3.0, 1).bound == "kernel"
