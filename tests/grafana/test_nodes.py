"""Queries of the dashboard ``nodes`` against the pages of a node and an engine, no Prometheus."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from tests.cli.metric_pages import node_page, page
from tests.grafana.nodes import ENGINE, NODE, STORES
from vllm_ssdkv.cli.monitor.metrics_scrape import Scrape, parse
from vllm_ssdkv.grafana.board import NAMES, fill_in, read_board

SELECTOR = re.compile(r"(vllm:\w+)\{([^}]*)\}")
MATCHER = re.compile(r'(\w+)(=~|!=|=)"([^"]*)"')
PAGES = {
    "node:9400": parse(node_page(NODE, STORES), 0.0, "http://node:9400/metrics"),
    "vllm:8000": parse(page(ENGINE), 0.0, "http://vllm:8000/metrics"),
}


def selected(text: str) -> list[tuple[str, dict[str, str]]]:
    """Series of all pages that a selector takes, as Prometheus does: where and labels."""
    found = SELECTOR.fullmatch(text)
    assert found is not None, text
    name, matchers = found[1], MATCHER.findall(found[2])
    return [
        (instance, labels)
        for instance, scrape in PAGES.items()
        for labels in all_series(scrape, name, instance)
        if all(matches(labels.get(label, ""), how, wanted) for label, how, wanted in matchers)
    ]


def all_series(scrape: Scrape, name: str, instance: str) -> Iterator[dict[str, str]]:
    for labels, _ in scrape.series(name):
        yield {**labels, "instance": instance}


def matches(value: str, how: str, wanted: str) -> bool:
    if how == "=~":
        return re.fullmatch(wanted, value) is not None
    return (value == wanted) == (how == "=")


def selectors(name: str) -> dict[str, str]:
    """Every selector of a dashboard, filled in, and a query that it is in."""
    return {
        found[0]: query.expression
        for panel in read_board(name).panels
        for query in panel.queries
        for found in SELECTOR.finditer(fill_in(query.expression, 1.0))
    }


@pytest.mark.parametrize("selector", selectors("nodes"))
def test_every_query_finds_what_it_is_about(selector: str) -> None:
    """Nodes' own numbers and those of their stores at the node, the rest at the engine."""
    found = selected(selector)
    assert found
    of_engine = "model_name=~" in selector
    assert {instance for instance, _ in found} == {"vllm:8000" if of_engine else "node:9400"}


def test_series_have_the_labels_that_they_are_added_up_by() -> None:
    checked = 0
    for panel in read_board("nodes").panels:
        for query in panel.queries:
            expression = fill_in(query.expression, 1.0)
            by = {
                label
                for labels in re.findall(r"by \(([^)]*)\)", expression)
                for label in labels.split(", ")
            }
            named = set(re.findall(r"\{\{(\w+)\}\}", query.legend))
            assert named == by - {"le"}, panel.title
            for selector in SELECTOR.finditer(expression):
                assert all(by <= set(labels) for _, labels in selected(selector[0])), panel.title
                checked += 1
    assert checked > 40


@pytest.mark.parametrize("name", sorted({*NAMES} - {"nodes"}))
def test_the_other_dashboards_count_stores_of_nodes_once(name: str) -> None:
    """The overview, in what only their owner shows; a metric of both is of the engines there."""
    shown: dict[str, set[str]] = {}
    for selector in selectors(name):
        whole = 'engine=~".+|"' in selector
        for instance, _ in selected(selector):
            assert instance == "vllm:8000" or whole, selector
            shown.setdefault(selector, set()).add(instance)
    assert all(len(instances) == 1 for instances in shown.values())
    of_nodes = [selector for selector, instances in shown.items() if "node:9400" in instances]
    assert len(of_nodes) == (9 if name == "overview" else 0)
