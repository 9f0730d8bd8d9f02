"""Rows of papers: the simulator against closed forms, and verdicts that say what they should."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pytest

from tests.oracles import cluster_reads
from tests.profiling.clusters.synthetic import trace
from vllm_ssdkv.base.errors import BenchError
from vllm_ssdkv.profiling.clusters.lab import Settings, activated_clusters
from vllm_ssdkv.profiling.clusters.trace import Manifest
from vllm_ssdkv.profiling.simulation import systems
from vllm_ssdkv.profiling.simulation.hardware import FlexGenCosts, find
from vllm_ssdkv.profiling.simulation.model_shape import find_model
from vllm_ssdkv.profiling.simulation.papers import (
    flexgen,
    hilos,
    instinfer,
    swarm_traces,
)
from vllm_ssdkv.profiling.simulation.papers.curves import CURVES
from vllm_ssdkv.profiling.simulation.papers.reproduce import (
    ROWS,
    document,
    results,
    summary,
    tables,
    verdicts,
)
from vllm_ssdkv.profiling.simulation.papers.result import Result, Target, verdict_of


def test_every_row_is_there_with_source_and_verdict() -> None:
    assert tuple(verdicts()) == ROWS
    names = [one.name for one in results()]
    assert len(names) == len(set(names))
    for one in results():
        assert one.source
        assert one.note or one.verdict == "pass", f"{one.name}: a reason"
        asks = one.target.text in ("so", "at every budget") or "power of two" in one.what
        assert one.margins or not asks, f"{one.name}: a margin"


def test_verdicts_of_this_version() -> None:
    """A row that comes in or goes out is looked at, and the page says so."""
    assert {row for row, verdict in verdicts().items() if verdict == "pass"} == {
        *("P1", "P2", "P3", "P4", "P5", "P6", "P9", "P16", "P20", "P23", "P24", "P26")
    }
    others = {row: verdict for row, verdict in verdicts().items() if verdict[:4] not in "pass miss"}
    assert others == {"P10": "report", "P12": "not measured", "P15": "report"}
    told = summary()
    assert told.startswith("Of 7 predicted rows 1 holds with all of its predicted parts: P4.")
    assert "Misses: P7, P8, P17, P18, P19, P22." in told


def test_traffic_for_any_length() -> None:
    for tokens in (1, 64, 2047):
        assert instinfer.traffic_ratio(tokens) == pytest.approx((tokens + 1) / 2)


def test_the_gain_of_mini_batches_is_what_decision_020_says() -> None:
    gains = {
        (batch, drives): instinfer.gain_in_turn(batch, drives)
        for batch in (4, 8, 16, 32, 64, 128, 256)
        for drives in (1, 2, 4, 8, 20)
    }
    assert sum(gain < 1.1 for gain in gains.values()) == 29
    assert max(gains.values()) == gains[8, 20] == pytest.approx(1.46, abs=0.005)
    assert min(gains, key=lambda one: gains[one]) == (4, 20)
    assert gains[4, 20] < 1 < gains[256, 1] + 1e-3


def test_flexgen_on_the_chassis_is_as_much_slower_as_its_authors_rivals_say() -> None:
    """Not one of the rows, and nothing was fitted to it: HILOS prints 0.64 to 0.94."""
    ratio = hilos.flexgen().seconds / hilos.flexgen_in_chassis().seconds
    assert 0.64 <= ratio <= 0.94
    assert hilos.price_ratio() > hilos.chassis_ratio() > 1


def test_figures_of_traces_stand_in_for_those_that_were_kept() -> None:
    known = swarm_traces.kept()
    other = replace(known, volume_gain=1.24, schedule_gain=2.5, rule_nine=1.012, min_diff=1.1)
    assert verdicts(other)["P11"] == verdicts(other)["P13"] == "pass"
    assert verdicts(replace(other, rule_nine=0.98))["P13"] == "miss"
    assert verdicts(replace(other, hits_more=0.01))["P14"] == "pass"
    assert verdicts(replace(other, rule_nine=None))["P13"] == "not measured"
    assert verdicts() == verdicts(known)
    assert "ssdkv lab profile" in known.source


def test_the_lab_makes_the_figures_of_traces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    traces = [trace(name, seed=i, tokens=1024, queries=112) for i, name in enumerate("ab")]
    found = swarm_traces.measure(traces)
    counted = [
        cluster_reads.totals(*activated_clusters(one, one.adjacent_heads(8), Settings()), drives=8)
        for one in traces
    ]
    three = "static", "no balance", "no dedup"
    time = fmean(fmean(one[name] for name in three) / one["full"] for one in counted)
    volume = fmean((2 * one["copies"] / one["pages"] + 1) / 3 for one in counted)
    assert (found.schedule_gain, found.volume_gain) == pytest.approx((time, volume))
    assert "a, b" in found.source
    parts = {one.name: one.write(tmp_path) for one in traces}
    settings = {"model": "m", "layers": [0, 1], "tokens": 1024}
    Manifest(settings, parts).write(tmp_path)
    monkeypatch.setattr(swarm_traces, "KEPT", tmp_path / "kept.json")
    swarm_traces.keep(tmp_path)
    asked = "`ssdkv lab profile DIR --document a --document b --layers 2 --tokens 1024`"
    assert swarm_traces.kept() == replace(found, source=f"the demo's model: {asked}")
    with pytest.raises(BenchError, match="traces: none"):
        swarm_traces.measure([])


def test_sparq_on_mapped_files_reads_nearly_every_page() -> None:
    """Single tokens on pages of 16: an eighth of the numbers, most of the bytes."""
    sparse = systems.flexgen_sparq()
    assert 0.5 < sparse.read_share < 1
    assert systems.flexgen_sparq(tokens_share=1.0).read_share == 1
    assert sparse.rest_s == systems.flexgen().rest_s


def test_the_share_of_x_by_the_closed_form_is_the_best_of_tenths() -> None:
    best = min(range(3, 8), key=lambda tenths: hilos.near(share=tenths / 10).seconds)
    assert best / 10 == hilos.share_of_x() == 0.5


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


def of(target: Target, ours: float | None) -> Result:
    return Result("P1", "", "w", target, ours, "s", "predicted")


def test_values_bands_and_bounds() -> None:
    near = of(Target.near(10, 0.1), 10.9)
    assert (near.verdict, near.distance, near.effect) == ("pass", pytest.approx(0.09), None)
    assert of(Target.near(10, 0.1), 8.9).verdict == "miss"
    exact = Target.near(16, 0)
    assert [of(exact, ours).verdict for ours in (16.0, 16.001)] == ["pass", "miss"]
    band = Target.band(5, 8)
    verdicts = [of(band, ours).verdict for ours in (4.99, 5, 8, 8.01)]
    assert verdicts == ["miss", "pass", "pass", "miss"]
    assert (of(band, 4).distance, of(band, 6).distance) == (pytest.approx(-0.2), 0)
    above = Target.above(20, "32x")
    assert [of(above, ours).verdict for ours in (20.0, 20.1)] == ["miss", "pass"]
    unknown, reported = of(exact, None), of(Target.report("?"), None)
    assert (unknown.verdict, unknown.distance) == ("not measured", None)
    assert verdict_of([reported, near]) == "pass"
    assert verdict_of([near, unknown]) == "not measured"
    assert verdict_of([near, of(band, 4), unknown]) == "miss"


def test_ratios_are_judged_by_their_effect() -> None:
    gain, loss = Target.times(3), Target.times(0.5)
    for target, ours, verdict in (
        *((gain, 2.6, "pass"), (gain, 3.5, "pass"), (gain, 2.59, "miss"), (gain, 3.51, "miss")),
        *((loss, 0.6, "pass"), (loss, 0.375, "pass"), (loss, 0.61, "miss"), (loss, 0.37, "miss")),
        # On the other side of 1, however near.
        *((Target.times(1.012), 0.999, "miss"), (Target.times(0.99), 1.001, "miss")),
    ):
        assert of(target, ours).verdict == verdict, (target, ours)
    assert of(gain, 2).effect == pytest.approx(0.5)
    assert of(gain, 2).distance == pytest.approx(-1 / 3)


def test_tables_and_document_have_the_same_rows() -> None:
    shown = tables(["P8", "P17"])
    assert [row[0] for row in shown[0].rows] == ["P8 memory", "P8 cliff", "P17", "P17 scaling"]
    found = document(["P8", "P17"])["results"]
    assert [one["row"] for one in found] == ["P8", "P8", "P17", "P17"]
    assert (found[2]["kind"], found[2]["verdict"]) == ("predicted", "miss")
    assert found[2]["good_path"] < found[2]["ours"]
    assert "hosts: hilos-host: dram_bandwidth" in found[2]["constants"]
    assert found[0]["margins"].keys() == {"FlexGen at 64", "FlexGen at 128", "InstInfer at 128"}
    served = {str(row[0]): (str(row[2]), str(row[3])) for row in shown[-1].rows}
    source, rows = served["paths: flexgen-memmap: drive_bandwidth"]
    assert source.endswith("; calibrated by P3, P5")
    assert rows == "P8"
    assert "Sources: InstInfer (arXiv 2409.04992): P8; HILOS (ASPLOS 2026): P17." in shown[0].note


@pytest.mark.parametrize("name", CURVES)
def test_figures_have_points(name: str) -> None:
    curves = CURVES[name]()
    assert curves.ours
    for points in curves.ours.values():
        assert len(points) >= 4
        assert all(math.isfinite(y) and y > 0 for _, y in points)
