"""A real Prometheus scrapes a real server: panels have data, alerts fire, pictures are drawn."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.grafana.conftest import SCRAPE_S, Server, wait_for
from vllm_ssdkv.cli.main import app
from vllm_ssdkv.grafana.board import NAMES, Panel, read_board
from vllm_ssdkv.grafana.prometheus import Prometheus
from vllm_ssdkv.grafana.render import Period, ask
from vllm_ssdkv.metrics import BATCH_METRICS, METRICS

pytestmark = pytest.mark.timeout(900)
RATE_INTERVAL_S = 10 * SCRAPE_S
SEEDS = (1, 2, 3)
MEASURED = {
    "estimated_prefill_tokens_per_second",
    "estimated_load_tokens_per_second",
    "estimated_load_latency_seconds",
}
"""Appear with the first request that can be timed."""
BOARDS = {name: read_board(name) for name in NAMES}


@pytest.fixture(scope="module")
def period(serving: Server, prometheus: str) -> Period:
    """From before a workload to after it, in what Prometheus has scraped."""
    begin = time.time() - RATE_INTERVAL_S
    server = Prometheus(prometheus)
    answers: dict[int, str] = {}

    def work() -> None:
        for seed in SEEDS:
            answer = serving.ask(seed)
            assert answers.setdefault(seed, answer) == answer
        counts = serving.batch(SEEDS).request_counts
        assert counts is not None
        assert (counts.completed, counts.failed) == (len(SEEDS), 1)

    def complete() -> bool:
        now = Period(begin, time.time(), RATE_INTERVAL_S)
        return not any(without_data(server, panel, now) for panel in panels())

    work()
    wait_for("every panel to have data", complete, work)
    return Period(begin, time.time(), RATE_INTERVAL_S)


def panels() -> list[Panel]:
    return [panel for board in BOARDS.values() for panel in board.panels if panel.kind != "row"]


def without_data(server: Prometheus, panel: Panel, period: Period) -> bool:
    """Whether one of its queries has none."""
    return any(
        not ask(server, dataclasses.replace(panel, queries=(query,)), period)
        for query in panel.queries
    )


@pytest.mark.parametrize("panel", panels(), ids=lambda panel: panel.title)
def test_every_panel_has_data(prometheus: str, period: Period, panel: Panel) -> None:
    assert not without_data(Prometheus(prometheus), panel, period)


def test_every_documented_metric_is_scraped(prometheus: str, period: Period) -> None:
    names = set(Prometheus(prometheus).get("label/__name__/values"))
    parts = {"histogram": ("_bucket", "_count", "_sum")}
    missing = {
        metric.name
        for metric in (*METRICS, *BATCH_METRICS)
        for part in parts.get(metric.kind, ("",))
        if metric.exposed_name + part not in names
    }
    assert missing <= MEASURED


def test_a_picture_of_each_dashboard(prometheus: str, period: Period, tmp_path: Path) -> None:
    """What is in it was looked at by hand."""
    minutes = (time.time() - period.start) / 60
    arguments = ["--prometheus", prometheus, "--out", str(tmp_path), "--minutes", str(minutes)]
    arguments += ["--scrape-interval", str(RATE_INTERVAL_S / 4)]
    done = CliRunner().invoke(app, ["dashboard", "render", *arguments])
    assert done.exit_code == 0, done.output
    assert "without data" not in done.output
    for name in NAMES:
        picture = (tmp_path / f"{name}.png").read_bytes()
        assert picture.startswith(b"\x89PNG")
        assert len(picture) > 20_000


def test_faults_fire_their_alerts(serving: Server, prometheus: str, period: Period) -> None:
    server = Prometheus(prometheus)

    def firing() -> set[str]:
        alerts = server.get("alerts")["alerts"]
        return {alert["labels"]["alertname"] for alert in alerts if alert["state"] == "firing"}

    def work() -> None:
        for seed in SEEDS:
            serving.ask(seed)

    assert firing() == set()
    serving.faults({"kind": "eio", "device": 0, "op": "read", "count": 1})
    wait_for("the alert", lambda: "SSDKVDeviceErrors" in firing(), work)
    assert firing() == {"SSDKVDeviceErrors"}
    serving.faults({"kind": "corrupt", "device": 1})
    wait_for("the alerts", lambda: {"SSDKVChecksumErrors", "SSDKVDeviceFailed"} <= firing(), work)
    (alert,) = (
        alert
        for alert in server.get("alerts")["alerts"]
        if alert["labels"]["alertname"] == "SSDKVDeviceFailed"
    )
    assert alert["labels"]["device"] == str(serving.devices[1])
    assert "SSDKVStoreFull" not in firing()
