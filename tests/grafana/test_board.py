"""The committed dashboards: what the code writes, and what the renderer reads."""

from __future__ import annotations

import json
import re

import pytest

from tests.grafana.conftest import GRAFANA
from vllm_ssdkv.base.metrics import BATCH_METRICS, METRICS
from vllm_ssdkv.grafana.board import NAMES, Query, fill_in, read_board
from vllm_ssdkv.grafana.write import dashboards


def test_the_committed_json_is_what_the_code_writes() -> None:
    """If not: make docs."""
    committed = {path.name: path.read_text() for path in (GRAFANA / "dashboards").iterdir()}
    assert committed == dashboards()
    assert {f"{name}.json" for name in NAMES} == set(committed)


@pytest.mark.parametrize("name", NAMES)
def test_panels_do_not_overlap(name: str) -> None:
    taken: set[tuple[int, int]] = set()
    for panel in read_board(name).panels:
        cells = {
            (x, y)
            for x in range(panel.x, panel.x + panel.width)
            for y in range(panel.y, panel.y + panel.height)
        }
        assert not cells & taken, panel.title
        assert panel.x + panel.width <= 24
        taken |= cells


@pytest.mark.parametrize("name", NAMES)
def test_panels_name_declared_metrics_and_explain_themselves(name: str) -> None:
    exposed = {
        metric.exposed_name + part
        for metric in (*METRICS, *BATCH_METRICS)
        for part in (("_bucket", "_sum", "_count") if metric.kind == "histogram" else ("",))
    }
    choice = 'instance=~"$instance"' if name == "batch" else 'engine=~"$engine"'
    plain = json.loads((GRAFANA / "dashboards" / f"{name}.json").read_text())
    assert choice.partition("=")[0] in {one["name"] for one in plain["templating"]["list"]}
    panels = [panel for panel in plain["panels"] if panel["type"] != "row"]
    assert len(panels) > 10
    for panel in panels:
        assert panel["description"].endswith(".")
        for target in panel["targets"]:
            selectors = re.findall(r"vllm:\w+\{([^}]*)\}", target["expr"])
            assert selectors
            assert all(choice in selector for selector in selectors), "the choice is for all panels"
            ours = set(re.findall(r"vllm:ssdkv_\w+", target["expr"]))
            assert ours <= exposed


@pytest.mark.parametrize("name", NAMES)
def test_a_device_is_told_from_those_of_the_same_path_elsewhere(name: str) -> None:
    """On another server, or on another machine of the same server: there the engine is another."""
    queries = [query for panel in read_board(name).panels for query in panel.queries]
    for query in queries:
        for labels in re.findall(r"by \(([^)]*)\)", query.expression):
            assert "device" not in labels or {"instance", "engine"} <= set(labels.split(", "))
        if "{{device}}" in query.legend:
            assert {"{{instance}}", "{{engine}}"} <= set(re.findall(r"\{\{\w+\}\}", query.legend))


def test_limits_are_those_of_the_alerts() -> None:
    """And no number is red because Grafana thinks that 80 is much."""
    rules = (GRAFANA / "alerts.yml").read_text()
    drawn = {
        panel.title: [limit.value for limit in panel.limits]
        for name in NAMES
        for panel in read_board(name).panels
        if panel.limits
    }
    assert drawn["Back-pressure"] == [0.1]
    assert "write_stall_seconds_total[5m])) > 0.1" in rules
    assert drawn["Endurance and budget used"] == [0.8, 1]
    assert "(vllm:ssdkv_wear_used) > 0.8" in rules
    assert drawn["Out of service"] == drawn["Devices out of service"] == [1]
    assert "vllm:ssdkv_device_state == 0" in rules
    for name in NAMES:
        plain = json.loads((GRAFANA / "dashboards" / f"{name}.json").read_text())
        for panel in plain["panels"]:
            if panel["type"] == "stat":
                assert panel["fieldConfig"]["defaults"]["thresholds"]["steps"][0]["color"] == "blue"


def test_every_metric_of_sparse_attention_and_batches_is_drawn() -> None:
    names = {metric.exposed_name for metric in METRICS if metric.name.startswith("sparse_")}
    names |= {metric.exposed_name for metric in BATCH_METRICS}
    panels = [panel for name in ("sparse", "batch") for panel in read_board(name).panels]
    queries = [query.expression for panel in panels for query in panel.queries]
    drawn = {name for text in queries for name in re.findall(r"vllm:ssdkv_\w+", text)}
    assert names - drawn == set()


def test_alerts_name_declared_metrics() -> None:
    exposed = {metric.exposed_name for metric in (*METRICS, *BATCH_METRICS)}
    named = set(re.findall(r"vllm:ssdkv_\w+", (GRAFANA / "alerts.yml").read_text()))
    assert len(named) > 5
    assert named <= exposed


def test_variables_and_legends_are_filled_in() -> None:
    text = 'rate(x{engine=~"$engine",device=~"$device"}[$__rate_interval])'
    assert fill_in(text, 1.5) == 'rate(x{engine=~".*",device=~".*"}[1500ms])'
    assert fill_in('x{instance=~"$instance"}', 1) == 'x{instance=~".*"}'
    query = Query("x", "{{device}} {{direction}}")
    assert query.name({"device": "/a", "direction": "read", "le": "1"}) == "/a read"
