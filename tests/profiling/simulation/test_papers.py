"""Rows of papers: the simulator against closed forms, and verdicts that say what they should."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest

from tests.oracles import cluster_reads
from tests.profiling.clusters.synthetic import trace
from vllm_ssdkv.base.errors import BenchError
from vllm_ssdkv.profiling.clusters.lab import Settings, activated_clusters
from vllm_ssdkv.profiling.offload import published as closed
from vllm_ssdkv.profiling.simulation import systems
from vllm_ssdkv.profiling.simulation.hardware import (
    Drive,
    FlexGenCosts,
    find,
)
from vllm_ssdkv.profiling.simulation.model_shape import find_model
from vllm_ssdkv.profiling.simulation.papers import (
    flexgen,
    hilos,
    instinfer,
    swarm,
    swarm_traces,
)
from vllm_ssdkv.profiling.simulation.papers.curves import CURVES
from vllm_ssdkv.profiling.simulation.papers.reproduce import (
    CALIBRATIONS,
    ROWS,
    document,
    results,
    summary,
    tables,
    verdicts,
)
from vllm_ssdkv.profiling.simulation.papers.result import Result, Target, verdict_of


def ours(name: str) -> float:
    found = {one.name: one.ours for one in results()}[name]
    assert found is not None
    return found


def test_every_row_is_there_with_source_and_verdict() -> None:
    assert tuple(verdicts()) == ROWS
    names = [one.name for one in results()]
    assert len(names) == len(set(names))
    for one in results():
        assert one.source
        assert one.note or one.verdict == "pass", f"{one.name}: a reason"


def test_verdicts_of_this_version() -> None:
    """A row that comes in or goes out is looked at, and the page says so."""
    found = {row: verdict for row, verdict in verdicts().items() if verdict != "pass"}
    assert found == {
        "P6": "calibrated",
        **dict.fromkeys(("P10", "P12", "P14", "P15"), "report"),
        **dict.fromkeys(("P11", "P19", "P21", "P22", "P25"), "miss"),
    }
    assert summary().startswith("Of 21 rows that are to be predicted 16 are inside")
    assert len(CALIBRATIONS | swarm.FOLLOWS_NOT) == len(ROWS) - 21


@pytest.mark.parametrize(
    ("name", "closed_form", "tolerance"),
    [
        # Devices share the time between jobs, which the closed form counts as the host's.
        ("P4 dense", closed.predictions()["P4 dense"], 0.05),
        ("P4 sparse", closed.predictions()["P4 sparse"], 0.05),
        ("P5", closed.predictions()["P5"], 0.02),
        ("P18 X-cache", closed.predictions()["P18 X-cache"], 0.02),
    ],
)
def test_the_simulator_agrees_with_closed_forms(
    name: str, closed_form: float, tolerance: float
) -> None:
    assert ours(name) == pytest.approx(closed_form, rel=tolerance)


def test_traffic_for_any_length() -> None:
    for tokens in (1, 64, 2047):
        assert instinfer.traffic_ratio(tokens) == pytest.approx((tokens + 1) / 2)


def test_flexgen_on_the_chassis_is_as_much_slower_as_its_authors_rivals_say() -> None:
    """Not one of the rows, and nothing was fitted to it: HILOS prints 0.64 to 0.94."""
    ratio = hilos.flexgen().seconds / hilos.flexgen_in_chassis().seconds
    assert 0.64 <= ratio <= 0.94
    assert hilos.price_ratio() > hilos.chassis_ratio() > 1


def test_figures_of_traces_stand_in_for_those_on_record() -> None:
    known = swarm_traces.recorded()
    other = replace(known, dedup_gain=1.25, schedule_gain=2.5, rule_nine=1.2, min_diff=1.1)
    assert verdicts(other)["P11"] == "pass"
    assert verdicts(other)["P13"] == "miss"
    assert "17 are inside" not in summary(other)
    assert verdicts() == verdicts(known)
    assert known.in_order
    assert not other.in_order


def test_the_lab_makes_the_figures_of_traces() -> None:
    traces = [trace("a", tokens=1024), trace("b", seed=1, tokens=1024)]
    found = swarm_traces.measure(traces)
    gains = [
        cluster_reads.gains(*activated_clusters(one, one.adjacent_heads(8), Settings()), drives=8)
        for one in traces
    ]
    schedule, dedup = (sum(of) / 2 for of in zip(*gains, strict=True))
    assert (found.schedule_gain, found.dedup_gain) == pytest.approx((schedule, dedup))
    assert "a, b" in found.source
    rules = found.rule_nine, found.min_diff, found.min_size
    assert (found.in_order is None) == (None in rules)
    unknown = replace(swarm_traces.recorded(), rule_nine=None)
    assert verdicts(unknown)["P13"] == "not measured"
    with pytest.raises(BenchError, match="traces: none"):
        swarm_traces.measure([])


def test_sparq_on_mapped_files_reads_nearly_every_page() -> None:
    """Single tokens on pages of 16: an eighth of the numbers, most of the bytes."""
    sparse = systems.flexgen_sparq()
    assert 0.5 < sparse.read_share < 1
    assert systems.flexgen_sparq(tokens_share=1.0).read_share == 1
    assert sparse.rest_s == systems.flexgen().rest_s


def test_the_share_of_x_by_the_closed_form_is_the_best_of_tenths() -> None:
    best = min(range(11), key=lambda tenths: hilos.near(share=tenths / 10).seconds)
    assert best / 10 == hilos.share_of_x() == 0.5


def test_entries_that_are_large_reach_the_drives_bandwidth() -> None:
    """A drive of 1 GB/s and 100,000 requests a second: entries of 10,000 bytes take both."""
    drive = find(Drive, "pm9a3").with_figures(read_bandwidth=1e9, iops=1e5)
    for entry, rate in ((4000, 0.4e9), (20000, 1e9)):
        for count in (1, 8):
            assert swarm.entry_bandwidth(drive, count, entry) == pytest.approx(count * rate)


def test_the_cost_model_of_flexgen() -> None:
    costs = find(FlexGenCosts, "t4")
    model, policy = find_model("opt-30b"), flexgen.PUBLISHED_POLICY
    base = flexgen.throughput(model, policy, costs, 512, 32)
    assert base == pytest.approx(7.14, abs=0.01)
    for field in ("to_gpu", "prefill_flops", "cpu_flops"):
        faster = costs.with_figures(**{field: 2 * getattr(costs, field)})
        assert flexgen.throughput(model, policy, faster, 512, 32) > base
    # Of a small batch, the processor has less of its best.
    narrow = flexgen.Policy(0.2, 0.0, 0.0, 144, 8)
    assert flexgen.throughput(model, narrow, costs, 512, 32) < base


def test_targets() -> None:
    near = Result("P1", "", "w", Target.near(10, 0.1), 10.9, source="s")
    assert (near.verdict, near.deviation) == ("pass", pytest.approx(0.09))
    assert Result("P1", "", "w", Target.near(10, 0.1), 8.9, source="s").verdict == "miss"
    exact = Target.near(16, 0)
    assert Result("P1", "", "w", exact, 16.0, source="s").verdict == "pass"
    assert Result("P1", "", "w", exact, 16.001, source="s").verdict == "miss"
    band = Result("P1", "", "w", Target.band(5, 8, 0.1), 4.4, source="s")
    assert (band.verdict, band.deviation) == ("miss", pytest.approx(4.4 / 4.5 - 1))
    above = Target.above(20, "32x")
    assert Result("P1", "", "w", above, 20.0, source="s").verdict == "miss"
    assert Result("P1", "", "w", above, 20.1, source="s").deviation is None
    unknown = Result("P1", "", "w", exact, None, source="s")
    assert (unknown.verdict, unknown.deviation) == ("not measured", None)
    made = Result("P1", "", "w", exact, 3.0, source="s", basis="calibrated")
    assert made.verdict == verdict_of([made]) == "calibrated"
    assert verdict_of([made, near]) == "pass"
    assert verdict_of([near, unknown]) == "not measured"
    assert verdict_of([near, band, unknown]) == "miss"


def test_tables_and_document_have_the_same_rows() -> None:
    shown = tables(["P8", "P17"])
    assert [row[0] for row in shown[0].rows] == ["P8 memory", "P8 cliff", "P17"]
    found = document(["P8", "P17"])["results"]
    assert [one["row"] for one in found] == ["P8", "P8", "P17"]
    assert found[2]["verdict"] == "pass"
    assert found[2]["good_path"] < found[2]["simulated"]
    for row in tables()[-1].rows:
        assert re.search(r"P\d", str(row[2])), "which rows a constant serves"


@pytest.mark.parametrize("name", CURVES)
def test_figures_have_points(name: str) -> None:
    curves = CURVES[name]()
    assert curves.ours
    for points in curves.ours.values():
        assert len(points) >= 4
        assert all(math.isfinite(y) and y > 0 for _, y in points)
