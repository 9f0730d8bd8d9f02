"""The papers' figures beside ours."""

from __future__ import annotations

import dataclasses

import pytest

from vllm_ssdkv.fpga_offload.figures import Figure, figures
from vllm_ssdkv.fpga_offload.results import Cells, Cycles, read_cycles

LINE_RATE = [
    Cycles("attend", 128, group, "float16", tokens, tokens * 512, tokens * 8 + 30)
    for group in (1, 4, 5)
    for tokens in (128, 4096)
]
CORES = [Cells("core", "xcup", 128, group, 40_000 * group, 30_000, 73 * group) for group in (1, 5)]


def find(found: list[Figure], name: str) -> Figure:
    (one,) = [figure for figure in found if figure.name == name]
    return one


def test_p20_holds_at_line_rate_and_not_at_half_of_it() -> None:
    fast = [one for one in figures(LINE_RATE, []) if one.name.startswith("P20")]
    assert [one.holds for one in fast] == [True, True, True]
    assert {one.origin for one in fast} == {"calibrated"}
    slow = [dataclasses.replace(row, cycles=2 * row.cycles) for row in LINE_RATE]
    found = [one for one in figures(slow, []) if one.name.startswith("P20")]
    assert [one.holds for one in found] == [False, False, False]
    assert "by our kernel" in found[0].note


def test_what_was_not_simulated_or_synthesised_claims_nothing() -> None:
    found = figures([], [])
    assert len(found) > 10
    assert {one.ours for one in found} == {one.holds for one in found} == {None}


def test_increments_are_of_a_query_head() -> None:
    found = figures([], CORES)
    assert find(found, "DSP of a query head more").ours == 73
    assert find(found, "DSP of a query head more").published == pytest.approx((547 - 198) / 4)
    assert find(found, "LUT of core, G = 1").ratio == pytest.approx(40 / 203)
    assert find(found, "LUT of core, G = 4").ours is None
    assert find(found, "LUT of attention").ours is None, "xcup is not the family of a Zynq 7045"


def test_p20_holds_by_the_recorded_cycles() -> None:
    found = [one for one in figures(read_cycles().rows, []) if one.name.startswith("P20")]
    assert [one.holds for one in found] == [True, True, True]
