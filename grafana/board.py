"""The dashboards as they are in their JSON: panels, and what each of them asks Prometheus."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any, Final

import vllm_ssdkv.grafana

NAMES: Final = ("overview", "devices", "sparse", "batch", "nodes")
EVERYTHING: Final = {
    "model_name": ".*",
    "engine": ".+",
    "device": ".*",
    "instance": ".*",
    "node": ".*",
}
"""Grafana's variables, and what each of them is when everything is chosen. Stores of nodes have no
engine: what both show, such as `slots_stored`, is of the engines where only those are asked for."""


@dataclass(frozen=True, slots=True)
class Query:
    """What one target of a panel asks.

    Attributes:
        expression: PromQL, with Grafana's variables.
        legend: Name of each series, with ``{{label}}``.
    """

    expression: str
    legend: str

    def name(self, labels: Mapping[str, str]) -> str:
        """Legend of the series with these labels."""
        text = self.legend
        for label, value in labels.items():
            text = text.replace("{{" + label + "}}", value)
        return text


@dataclass(frozen=True, slots=True)
class Limit:
    """A value, and Grafana's name of the colour of what reaches it."""

    value: float
    color: str


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel; ``x``, ``y``, ``width`` and ``height`` are on Grafana's grid of 24 columns.

    ``limits`` ascend.
    """

    title: str
    kind: str
    unit: str
    stacked: bool
    named: bool
    limits: tuple[Limit, ...]
    x: int
    y: int
    width: int
    height: int
    queries: tuple[Query, ...]


@dataclass(frozen=True, slots=True)
class Board:
    """One dashboard: its panels, and its rows' headings as panels without queries."""

    title: str
    panels: tuple[Panel, ...]


def read_board(name: str) -> Board:
    """The dashboard of that name, one of :data:`NAMES`.

    Raises:
        FileNotFoundError: there is none.
    """
    file = resources.files(vllm_ssdkv.grafana) / "dashboards" / f"{name}.json"
    plain = json.loads(file.read_text(encoding="utf-8"))
    return Board(plain["title"], tuple(_panel(panel) for panel in plain["panels"]))


def _panel(plain: Mapping[str, Any]) -> Panel:
    place = plain["gridPos"]
    defaults = plain.get("fieldConfig", {}).get("defaults", {})
    stacking = defaults.get("custom", {}).get("stacking", {})
    steps = defaults.get("thresholds", {}).get("steps", [])[1:]
    return Panel(
        title=plain["title"],
        kind=plain["type"],
        unit=defaults.get("unit", ""),
        stacked=stacking.get("mode") == "normal",
        named=(plain.get("options") or {}).get("textMode") == "name",
        limits=tuple(Limit(step["value"], step["color"]) for step in steps),
        x=place["x"],
        y=place["y"],
        width=place["w"],
        height=place["h"],
        queries=tuple(
            Query(target["expr"], target["legendFormat"]) for target in plain.get("targets", [])
        ),
    )


def fill_in(expression: str, rate_interval_s: float) -> str:
    """The expression with a value for each of Grafana's variables: everything they choose from."""
    text = expression.replace("$__rate_interval", f"{round(rate_interval_s * 1000)}ms")
    for variable, everything in EVERYTHING.items():
        text = text.replace(f"${variable}", everything)
    return text
