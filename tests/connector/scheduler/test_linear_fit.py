"""Costs learnt from measurements: of lines, of lines with outliers, and of lines that change."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_ssdkv.connector.scheduler.linear_fit import LinearFit


def line(fit: LinearFit, seconds: tuple[float, float], sizes: list[int]) -> None:
    for size in sizes:
        fit.observe((1.0, size), seconds[0] + seconds[1] * size)


def fresh(keep: int = 16, half_life: float = 4.0) -> LinearFit:
    return LinearFit((1.0, 1.0), keep=keep, half_life=half_life)


def test_nothing_measured_costs_nothing() -> None:
    fit = fresh()
    assert (fit.count, fit.predict((1.0, 100.0))) == (0, 0.0)


@given(st.floats(1e-5, 10), st.floats(1e-7, 1e-2), st.integers(0, 99))
@settings(max_examples=50, deadline=None)
def test_a_line_is_found(first: float, each: float, seed: int) -> None:
    fit, source = fresh(), random.Random(seed)
    line(fit, (first, each), [16, 8192, *(source.randrange(16, 8192) for _ in range(8))])
    for size in (16, 1000, 8192):
        assert fit.predict((1.0, size)) == pytest.approx(first + each * size, rel=0.15)


def test_one_measurement_is_repeated() -> None:
    fit = fresh()
    line(fit, (0.01, 0.001), [500])
    assert fit.predict((1.0, 500)) == pytest.approx(0.51, rel=0.01)


def test_a_doubted_feature_gets_the_cost_last() -> None:
    fit = LinearFit((1.0, 0.01), keep=4, half_life=8)
    fit.observe((1.0, 500.0), 1.0)
    first, each = fit.weights()
    assert first < 0.05
    assert each * 500 > 0.95


@pytest.mark.parametrize("factor", [100.0, 0.01])
def test_an_outlier_changes_little(factor: float) -> None:
    fit = fresh(half_life=16)
    line(fit, (0.001, 1e-5), [64, 500, 1000, 2000])
    fit.observe((1.0, 500.0), 0.006 * factor)
    line(fit, (0.001, 1e-5), [100, 3000])
    assert fit.predict((1.0, 1000)) == pytest.approx(0.011, rel=0.2)


@pytest.mark.parametrize("factor", [1000.0, 5.0, 0.2, 0.001])
def test_a_change_is_believed_at_the_second_time(factor: float) -> None:
    fit = LinearFit((1.0, 1.0), keep=16, half_life=4.0, believe_after=2)
    line(fit, (0.001, 1e-5), [64, 500, 1000, 2000, 300, 4000, 64, 800])
    line(fit, (0.001 * factor, 1e-5 * factor), [500])
    assert fit.predict((1.0, 1000)) == pytest.approx(0.011, rel=0.3)
    line(fit, (0.001 * factor, 1e-5 * factor), [1000])
    assert fit.predict((1.0, 1000)) == pytest.approx(0.011 * factor, rel=0.1)


def test_few_of_many_measurements_are_solved_for() -> None:
    fit = fresh()
    solved = 0
    last = fit.weights()
    for number in range(1, 400):
        fit.observe((1.0, float(number)), 0.001 * number)
        now = fit.weights()
        solved += now is not last
        last = now
        assert fit._new < 16
    assert solved < 70
    assert fit.predict((1.0, 300.0)) == pytest.approx(0.3, rel=0.1)


def test_surprises_of_both_signs_are_no_change() -> None:
    fit = LinearFit((1.0, 1.0), keep=16, half_life=16, believe_after=2)
    line(fit, (0.001, 1e-5), [64, 500, 1000, 2000, 300, 4000])
    for factor in (50.0, 0.02):
        fit.observe((1.0, 1000.0), 0.011 * factor)
    assert fit.predict((1.0, 1000)) == pytest.approx(0.011, rel=0.2)


def test_many_of_one_kind_do_not_drown_another() -> None:
    fit = LinearFit((1.0, 0.01), keep=3, half_life=32)
    for size in (256, 512):
        fit.observe((1.0, size), 0.01 + 0.001 * size, "large")
    for _ in range(2000):
        fit.observe((1.0, 1.0), 0.011, "small")
    assert fit.count == 2002
    assert fit.predict((1.0, 512)) == pytest.approx(0.522, rel=0.1)


@given(st.lists(st.tuples(st.integers(1, 9999), st.floats(0, 100)), min_size=1, max_size=20))
@settings(max_examples=100, deadline=None)
def test_no_measurement_breaks_it(entries: list[tuple[int, float]]) -> None:
    fit = fresh()
    for size, seconds in entries:
        fit.observe((1.0, size), seconds)
    longest = max(seconds for _, seconds in entries)
    assert (fit.weights() >= 0).all()
    assert 0 <= fit.predict((1.0, max(size for size, _ in entries))) <= 100 * max(longest, 1e-6)
