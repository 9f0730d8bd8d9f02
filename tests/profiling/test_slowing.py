"""Devices that become slow under load, or are added: what the bench sees of it, on twins."""

from __future__ import annotations

from pathlib import Path

import pytest

from vllm_ssdkv.base.sizes import MIB
from vllm_ssdkv.profiling.bench_io.model import DeviceModel
from vllm_ssdkv.profiling.bench_ssds.setup import make_setup
from vllm_ssdkv.profiling.bench_ssds.slowing import Plan, Trace, slowing
from vllm_ssdkv.store.format.slot_geometry import SlotGeometry

PLAN = Plan(
    geometry=SlotGeometry("opaque", 1, 1, 1, 130_000),
    capacity=16 * MIB,
    dram=24 * MIB,
    writes=128,
    reads=96,
    before_s=0.2,
    slow_s=0.6,
    rest_s=0.2,
    again_s=0.2,
    window_s=0.2,
)


def test_a_trace_tells_when_a_rate_was_reached() -> None:
    trace = Trace()
    for step in range(41):
        at = step / 4
        trace.add(at, 10 * min(at, 4.0) + 90 * max(0.0, at - 4.0))
    assert trace.rate(0.0, 2.0) == pytest.approx(10)
    assert trace.rate(6.0, 8.0) == pytest.approx(90)
    assert trace.reached(90 - 1e-6, 1.0) == pytest.approx(4.0)
    assert trace.reached(50, 1.0) == pytest.approx(3.5)
    assert trace.reached(91, 1.0) is None
    assert Trace().reached(1.0, 1.0) is None


def test_a_whole_run_on_twins(tmp_path: Path) -> None:
    model = DeviceModel(bandwidth=40e6, latency_s=1e-3, iops=1e6, dilation=1.0)
    with make_setup("twin", 4, model, tmp_path) as setup:
        courses = slowing(setup, PLAN)
        assert len(setup.rules) == 1
    what = ("writes", "reads of what was there, one copy", "reads of what was there, two copies")
    wanted = {(load, when) for load in what for when in ("equal", "one slow", "equal again")}
    wanted.add(("reads of what was written since", "one slow"))
    added = "reads of what was there, a drive is added"
    wanted |= {(added, "equal"), (added, "one more")}
    assert {(course.load, course.when) for course in courses} == wanted
    for course in courses:
        devices = 3.2 if course.when == "one slow" else 4.0
        if course.load == added:
            devices = 3.0 if course.when == "one more" else 2.0
        assert course.best == pytest.approx(40e6 * devices, rel=1e-3)
        assert course.steady >= 0
    assert list(tmp_path.iterdir()) == []
