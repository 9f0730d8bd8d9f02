"""The committed dashboards: what the code writes, and what the renderer reads."""

from __future__ import annotations

import json
import re

import pytest

from tests.grafana.conftest import GRAFANA
from vllm_ssdkv.base.metrics import BATCH_METRICS, METRICS
from vllm_ssdkv.base.metrics_node import NODE_METRICS, NODE_SERVER_METRICS
from vllm_ssdkv.grafana.board import EVERYTHING, NAMES, Query, fill_in, read_board
from vllm_ssdkv.grafana.write import dashboards

ALL_METRICS = (*METRICS, *BATCH_METRICS, *NODE_SERVER_METRICS)
ENGINES = 'engine=~"$engine"'
STORES = 'engine=~"$engine|"'
CHOICES = {
    "batch": ['instance=~"$instance"'],
    "nodes": [ENGINES, 'instance=~"$node"'],
    "overview": [ENGINES, STORES],
}
"""Labels by which one chooses whose series a panel shows."""


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
        for metric in ALL_METRICS
        for part in (("_bucket", "_sum", "_count") if metric.kind == "histogram" else ("",))
    }
    choices = CHOICES.get(name, [ENGINES])
    plain = json.loads((GRAFANA / "dashboards" / f"{name}.json").read_text())
    variables = {one["name"] for one in plain["templating"]["list"]}
    assert {choice.partition("$")[2].rstrip('|"') for choice in choices} <= variables
    panels = [panel for panel in plain["panels"] if panel["type"] != "row"]
    assert len(panels) > 10
    for panel in panels:
        assert panel["description"].endswith(".")
        for target in panel["targets"]:
            selectors = re.findall(r"vllm:\w+\{([^}]*)\}", target["expr"])
            assert selectors
            assert all(any(choice in selector for choice in choices) for selector in selectors), (
                "the choice is for all panels"
            )
            ours = set(re.findall(r"vllm:ssdkv_\w+", target["expr"]))
            assert ours <= exposed


@pytest.mark.parametrize("name", NAMES)
def test_a_device_is_told_from_those_of_the_same_path_elsewhere(name: str) -> None:
    """On another server, or on another machine of the same server: there the engine is another.

    A path on a node has the directory of its store.
    """
    whose = {"instance"} if name == "nodes" else {"instance", "engine"}
    queries = [query for panel in read_board(name).panels for query in panel.queries]
    for query in queries:
        for labels in re.findall(r"by \(([^)]*)\)", query.expression):
            assert "device" not in labels or whose <= set(labels.split(", "))
        if "{{device}}" in query.legend:
            assert whose <= set(re.findall(r"\{\{(\w+)\}\}", query.legend))


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
    assert drawn["Out of service on nodes"] == drawn["Drives of nodes out of service"] == [1]
    assert "vllm:ssdkv_device_state == 0" in rules
    assert drawn["Engines without a node"] == [1]
    assert "vllm:ssdkv_node_connected < 1" in rules
    assert drawn["Endurance of drives used"] == drawn["Endurance and budget used"]
    for name in NAMES:
        plain = json.loads((GRAFANA / "dashboards" / f"{name}.json").read_text())
        for panel in plain["panels"]:
            if panel["type"] == "stat":
                assert panel["fieldConfig"]["defaults"]["thresholds"]["steps"][0]["color"] == "blue"


SHOWN = {
    "sparse": [metric for metric in METRICS if metric.name.startswith("sparse_")],
    "batch": BATCH_METRICS,
    "nodes": (*NODE_SERVER_METRICS, *NODE_METRICS),
}


@pytest.mark.parametrize("name", SHOWN)
def test_every_metric_of_sparse_attention_batches_and_nodes_is_drawn(name: str) -> None:
    queries = [query.expression for panel in read_board(name).panels for query in panel.queries]
    drawn = {found for text in queries for found in re.findall(r"vllm:ssdkv_\w+", text)}
    assert {metric.exposed_name for metric in SHOWN[name]} - drawn == set()


def test_alerts_name_declared_metrics() -> None:
    exposed = {metric.exposed_name for metric in ALL_METRICS}
    named = set(re.findall(r"vllm:ssdkv_\w+", (GRAFANA / "alerts.yml").read_text()))
    assert len(named) > 5
    assert named <= exposed


@pytest.mark.parametrize("name", NAMES)
def test_everything_is_the_same_in_grafana_and_in_pictures(name: str) -> None:
    plain = json.loads((GRAFANA / "dashboards" / f"{name}.json").read_text())
    variables = plain["templating"]["list"]
    chosen = {one["name"]: one["allValue"] for one in variables if one["type"] == "query"}
    assert chosen
    assert chosen.items() <= EVERYTHING.items()


def test_variables_and_legends_are_filled_in() -> None:
    text = 'rate(x{engine=~"$engine",device=~"$device"}[$__rate_interval])'
    assert fill_in(text, 1.5) == 'rate(x{engine=~".+",device=~".*"}[1500ms])'
    assert fill_in('x{instance=~"$instance"}', 1) == 'x{instance=~".*"}'
    assert fill_in('x{instance=~"$node"}', 1) == 'x{instance=~".*"}'
    query = Query("x", "{{device}} {{direction}}")
    assert query.name({"device": "/a", "direction": "read", "le": "1"}) == "/a read"
