"""The papers' figures beside ours."""

from __future__ import annotations

import pytest

from vllm_ssdkv.fpga_offload.figures import Figure, figures
from vllm_ssdkv.fpga_offload.results import Cells

CORES = [Cells("core", "xcup", 128, group, 40_000 * group, 30_000, 73 * group) for group in (1, 5)]


def find(found: list[Figure], name: str) -> Figure:
    (one,) = [figure for figure in found if figure.name == name]
    return one


def test_what_was_not_synthesised_claims_nothing() -> None:
    found = figures([])
    assert len(found) > 10
    assert {one.ours for one in found} == {one.ratio for one in found} == {None}


def test_increments_are_of_a_query_head() -> None:
    found = figures(CORES)
    assert find(found, "DSP of a query head more").ours == 73
    assert find(found, "DSP of a query head more").published == pytest.approx((547 - 198) / 4)
    assert find(found, "LUT of core, G = 1").ratio == pytest.approx(40 / 203)
    assert find(found, "LUT of core, G = 4").ours is None
    assert find(found, "LUT of attention").ours is None, "xcup is not the family of a Zynq 7045"
