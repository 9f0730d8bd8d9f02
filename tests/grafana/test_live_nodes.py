"""A real Prometheus scrapes a node's collector and an engine's page: panels, alerts, pictures."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from wsgiref.simple_server import WSGIServer

import pytest
from typer.testing import CliRunner

from tests.cli.metric_pages import count, node_collector, page, served
from tests.grafana.conftest import SCRAPE_S, Alerts, quick_rules, scraping, wait_for, without_data
from tests.grafana.nodes import ENGINE, NODE, PATH, QWEN, STORES
from vllm_ssdkv.base.metrics import Counters
from vllm_ssdkv.cli.main import app
from vllm_ssdkv.grafana.board import NAMES, read_board
from vllm_ssdkv.grafana.prometheus import Prometheus
from vllm_ssdkv.grafana.render import Period
from vllm_ssdkv.node.server.node_metrics import serve_metrics

pytestmark = pytest.mark.timeout(300)
RATE_INTERVAL_S = 10 * SCRAPE_S


@dataclasses.dataclass
class Watched:
    """A node and an engine under the eyes of a Prometheus.

    Attributes:
        url: Of the Prometheus.
        own: The node's counters.
        store: Those of one of its stores.
        engine: What the engine shows.
        server: Of the node's metrics.
    """

    url: str
    own: Counters
    store: Counters
    engine: dict[str, Any]
    server: WSGIServer

    def period(self) -> Period:
        """Period that Prometheus has seen until now."""
        return Period(time.time() - 60, time.time(), RATE_INTERVAL_S)


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    scratch = tmp_path_factory.mktemp("nodes")
    (scratch / "alerts.yml").write_text(quick_rules())
    collector, own, stores = node_collector(NODE, STORES)
    engine = dict(ENGINE)
    server, port = serve_metrics("127.0.0.1:0", collector, Counters())
    try:
        with served(lambda: page(engine)) as url:
            jobs = {"vllm": url.removeprefix("http://"), "ssdkv-node": f"127.0.0.1:{port}"}
            with scraping(scratch, jobs) as prometheus:
                yield Watched(prometheus, own, stores[QWEN], engine, server)
    finally:
        server.shutdown()
        server.server_close()


def test_every_panel_of_nodes_has_data(watched: Watched) -> None:
    prometheus = Prometheus(watched.url)
    panels = [panel for panel in read_board("nodes").panels if panel.kind != "row"]

    def seen() -> bool:
        now = watched.period()
        return not [panel.title for panel in panels if without_data(prometheus, panel, now)]

    wait_for("data in every panel", seen, lambda: count(watched.own, NODE))


def test_no_alert_of_a_sound_node(watched: Watched) -> None:
    assert Alerts(Prometheus(watched.url)).firing() == {}


def test_a_picture_of_the_dashboard_of_nodes(watched: Watched, tmp_path: Path) -> None:
    arguments = ["--prometheus", watched.url, "--out", str(tmp_path), "--minutes", "1"]
    arguments += ["--scrape-interval", str(RATE_INTERVAL_S / 4)]
    done = CliRunner().invoke(app, ["dashboard", "render", *arguments])
    assert done.exit_code == 0, done.output
    (line,) = [line for line in done.output.splitlines() if "nodes.png" in line]
    assert "without data" not in line
    for name in NAMES:
        assert (tmp_path / f"{name}.png").stat().st_size > 20_000, "also where there are no data"


def test_alerts_of_nodes(watched: Watched) -> None:
    """A node refuses an engine, its drive fails, the engine loses it, and it is gone."""
    alerts = Alerts(Prometheus(watched.url))
    alerts.wait({"SSDKVNodeRefusals"}, lambda: watched.own.add("node_refusals", 1, cause="keys"))
    assert alerts.firing().keys() == {"SSDKVNodeRefusals"}
    watched.store.set("device_state", 0, device=PATH)
    watched.engine["node_connected"] = {(): 0}
    alerts.wait({"SSDKVDeviceFailed", "SSDKVNodeUnreachable"})
    assert alerts.firing()["SSDKVDeviceFailed"]["store"] == QWEN[1]
    assert "SSDKVNodeDown" not in alerts.firing()
    watched.server.shutdown()
    watched.server.server_close()
    alerts.wait({"SSDKVNodeDown"})
