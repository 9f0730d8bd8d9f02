"""Predictions beside published figures: closed forms, and what calibrates is not counted."""

from __future__ import annotations

import pytest

from vllm_ssdkv.profiling.offload import published
from vllm_ssdkv.profiling.offload.published import SpillCurve, Step, figures


def test_every_figure_has_a_prediction() -> None:
    found = {figure.published.name: figure for figure in figures()}
    assert found.keys() == published.predictions().keys()
    assert {name for name, figure in found.items() if figure.reproduced} == {
        *("P3", "P4 dense", "P5", "P16", "P17", "P18 near storage", "P18 X-cache")
    }
    assert [name for name, figure in found.items() if figure.published.calibrates] == [
        "P6",
        "P18 write-back",
    ]


@pytest.mark.parametrize(("tokens", "ratio"), [(1, 1), (2047, 1024), (32767, 16384)])
def test_traffic_falls_by_half_of_the_tokens(tokens: int, ratio: float) -> None:
    assert published.link_ratio(tokens) == ratio


def test_both_ways_of_x_end_together() -> None:
    for internal, link in ((3.0, 1.0), (48.0, 16.0), (10.0, 2.0), (2.0, 2.0)):
        share = published.x_share(internal, link)
        assert (1 - share / 2) / internal == pytest.approx(share / 2 / link)
    assert published.x_share(3, 1) == 0.5
    assert published.x_share(1, 9) == 1
    assert published.x_gain(3, 1) == pytest.approx(4 / 3)


def test_the_curve_of_writes_goes_through_both_published_ratios() -> None:
    curve = SpillCurve.calibrated()
    assert curve.time(1) / curve.time(16) == pytest.approx(1.32)
    assert curve.time(64) / curve.time(16) == pytest.approx(1.30)
    assert curve.write > 0 < curve.waiting


def test_a_step_on_more_drives_has_the_same_rest() -> None:
    one, ten = (Step.instinfer(256, drives, sparse=True) for drives in (1, 10))
    assert ten.kv == pytest.approx(one.kv / 10)
    assert ten.rest == one.rest > 0
    assert one.kv < Step.instinfer(256, 1).kv
