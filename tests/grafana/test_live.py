"""A real Prometheus scrapes a real server: panels have data, alerts fire, pictures are drawn."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.grafana.conftest import (
    CROWD,
    GRAFANA,
    LENGTH,
    PATIENCE_S,
    SCRAPE_S,
    Alerts,
    Server,
    with_shared_prefixes,
    without_data,
)
from tests.kit.server import Footprint
from vllm_ssdkv.base.metrics import BATCH_METRICS, METRICS
from vllm_ssdkv.cli.main import app
from vllm_ssdkv.cli.monitor.metrics_scrape import fetch, page_url
from vllm_ssdkv.grafana.board import NAMES, Panel, read_board
from vllm_ssdkv.grafana.prometheus import Prometheus
from vllm_ssdkv.grafana.render import Period
from vllm_ssdkv.profiling.recall import recall

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]
RATE_INTERVAL_S = 10 * SCRAPE_S
SEEDS = (1, 2, 3)
MEASURED = {
    "estimated_prefill_tokens_per_second",
    "estimated_load_tokens_per_second",
    "estimated_load_latency_seconds",
}
"""Appear with the first request that can be timed."""
OFFLOADED = {"offload_in_use", "offload_share", "offload_rate", "x_cache_share"}
"""Appear where a device attends to contexts, which it does not here: ``tests/offload``."""
OF_NODES = {"node_connected"}
"""Appear in engines that use a node: ``tests/e2e/test_node.py``."""
SPARE_BYTES = 24 << 20
"""Heaps of three interpreters breathe by about that much."""
SPARE_FILES = SPARE_THREADS = 8
"""Connections and workers of pools that come and go."""
BOARDS = {name: read_board(name) for name in NAMES if name != "nodes"}
"""Boards of a server; ``test_live_nodes.py`` has the other one."""


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
        batch = serving.batch(SEEDS)
        serving.forget(batch)
        counts = batch.request_counts
        assert counts is not None
        assert (counts.completed, counts.failed) == (len(SEEDS), 1)

    deadline = time.monotonic() + PATIENCE_S
    while True:
        work()
        now = Period(begin, time.time(), RATE_INTERVAL_S)
        empty = [panel.title for panel in panels() if without_data(server, panel, now)]
        if not empty or time.monotonic() > deadline:
            return now  # the panels' own tests say which of them are empty


def panels() -> list[Panel]:
    return [panel for board in BOARDS.values() for panel in board.panels if panel.kind != "row"]


@pytest.mark.parametrize("panel", panels(), ids=lambda panel: panel.title)
def test_every_panel_has_data(prometheus: str, period: Period, panel: Panel) -> None:
    assert not without_data(Prometheus(prometheus), panel, period)


def test_sixty_requests_with_shared_prefixes(
    serving: Server, prometheus: str, period: Period
) -> None:
    """A batch is answered as each request is by itself, and seen in every panel and metric."""
    bodies = with_shared_prefixes(6, 10)
    with ThreadPoolExecutor(4) as pool:
        alone = list(pool.map(serving.answer_to, bodies))
    begin = time.time() - RATE_INTERVAL_S
    batch, answers = serving.batch_of(bodies)
    assert batch.request_counts is not None
    assert (batch.request_counts.completed, batch.request_counts.failed) == (60, 0)
    assert [answer["choices"][0]["text"] for answer in answers] == alone
    assert len(set(alone)) == 6, "the prefixes have different answers"
    assert batch.model_extra is not None
    assert batch.model_extra["ordering"]["shared_prefix_share"] > 0.7
    server, now = Prometheus(prometheus), Period(begin, time.time(), RATE_INTERVAL_S)
    batches = [panel for panel in BOARDS["batch"].panels if panel.kind != "row"]
    assert not [panel.title for panel in batches if without_data(server, panel, now)]


def test_every_documented_metric_is_scraped(prometheus: str, period: Period) -> None:
    names = set(Prometheus(prometheus).get("label/__name__/values"))
    parts = {"histogram": ("_bucket", "_count", "_sum")}
    missing = {
        metric.name
        for metric in (*METRICS, *BATCH_METRICS)
        for part in parts.get(metric.kind, ("",))
        if metric.exposed_name + part not in names
    }
    assert missing <= MEASURED | OFFLOADED | OF_NODES


def test_every_metric_that_docs_name_is_scraped(prometheus: str, period: Period) -> None:
    page = (GRAFANA.parent / "docs" / "monitoring.md").read_text()
    named = set(re.findall(r"vllm:\w+", page))
    assert len(named) > 20
    assert named <= set(Prometheus(prometheus).get("label/__name__/values"))


def test_top_shows_this_server(serving: Server, period: Period) -> None:
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(serving.ask, SEEDS[0])
        arguments = ["top", serving.url, "--once", "--interval", "2"]
        table = CliRunner(env={"COLUMNS": "160"}).invoke(app, arguments)
        asked.result()
    assert table.exit_code == 0, table.output
    assert "page, faulty(" in table.stdout
    sample = json.loads(CliRunner().invoke(app, [*arguments, "--json"]).stdout)
    assert {device["device"] for device in sample["devices"]} == set(map(str, serving.devices))
    assert all(device["in_service"] for device in sample["devices"])
    assert sum(sample["restored_tokens"].values()) > 0
    assert not any(sample["troubles"].values())
    assert sample["slots"] == sample["slots_ready"] + sample["slots_free"]


CHOICES: list[tuple[object, dict[str, object]]] = [
    ({"selector": "exact"}, {"selector": "exact"}),
    ({"selector": "bounds", "budget": 1.0}, {"selector": "bounds", "budget": 1.0}),
    ({"selector": "window", "budget_tokens": 256}, {"selector": "window", "budget_tokens": 256}),
    ({"budget": 0.75}, {"selector": "bounds", "budget": 0.75}),
    ({"selector": "sparf"}, {"selector": "exact", "error": "not what this engine's store"}),
    ("sparf", {"selector": "exact", "error": "object"}),
]
"""What a request asks for, and what its answer says that it got."""


def check_choices(answers: list[dict[str, Any]], right: list[int]) -> None:
    """Of :data:`CHOICES`: served as they say, and with the tokens of such attention."""
    tokens = []
    for (_, wanted), answer in zip(CHOICES, answers, strict=True):
        served = dict(answer["kv_transfer_params"]["ssdkv"])
        assert wanted.get("error", "") in served.pop("error", "")
        assert served == {name: value for name, value in wanted.items() if name != "error"}
        tokens.append(answer["choices"][0]["token_ids"])
    exact, everything, window, _, refused, malformed = tokens
    assert exact == everything == refused == malformed == right
    assert window != right, "the answer is far back in the prompt"


def test_requests_choose_their_selector(serving: Server) -> None:
    """Alone and as a batch, all of them at once."""
    seed = SEEDS[1]
    right = list(recall.ask("single", LENGTH, seed).answer)
    refused, chosen = (
        "vllm:ssdkv_sparse_requests_refused_total",
        "vllm:ssdkv_sparse_selections_total",
    )
    page = page_url(serving.url)
    before = fetch(page)
    check_choices([serving.choosing(seed, own) for own, _ in CHOICES], right)
    middle = fetch(page)
    assert middle.total(refused) - before.total(refused) == 2
    assert middle.total(chosen) > before.total(chosen)
    serving.choosing(seed, {"selector": "exact"})
    assert fetch(page).total(chosen) == middle.total(chosen), "exact attention chooses nothing"
    check_choices(serving.batch_choosing(seed, [own for own, _ in CHOICES]), right)
    assert fetch(page).total(refused) - middle.total(refused) == 2


def test_a_picture_of_each_dashboard(prometheus: str, period: Period, tmp_path: Path) -> None:
    """What is in it was looked at by hand."""
    minutes = (time.time() - period.start) / 60
    arguments = ["--prometheus", prometheus, "--out", str(tmp_path), "--minutes", str(minutes)]
    arguments += ["--scrape-interval", str(RATE_INTERVAL_S / 4)]
    done = CliRunner().invoke(app, ["dashboard", "render", *arguments])
    assert done.exit_code == 0, done.output
    (nodes,) = [line for line in done.output.splitlines() if "without data" in line]
    assert "nodes.png" in nodes, "this server has none"
    for name in NAMES:
        picture = (tmp_path / f"{name}.png").read_bytes()
        assert picture.startswith(b"\x89PNG")
        assert len(picture) > 20_000


@pytest.mark.rounds
@pytest.mark.timeout(7200)
def test_memory_files_and_series_do_not_grow(
    serving: Server, period: Period, memory_seconds: float
) -> None:
    """While it serves, runs batches, and is scraped."""
    end = time.monotonic() + memory_seconds
    held: list[Footprint] = []
    fresh = itertools.count(10_000)
    while len(held) < 9 or time.monotonic() < end:
        serving.ask(next(fresh) if len(held) % 9 == 8 else SEEDS[0])
        batch = serving.batch(SEEDS[:1])
        for file in (batch.input_file_id, batch.output_file_id, batch.error_file_id):
            assert file is not None
            serving.client().files.delete(file)
        held.append(serving.running.footprint())
    third = len(held) // 3
    before, after = held[:third], held[-third:]
    print([f.memory >> 20 for f in held], held[0], held[-1])
    assert {f.series for f in held} == {held[0].series}
    assert max(f.threads for f in after) <= max(f.threads for f in before) + SPARE_THREADS
    assert max(f.descriptors for f in after) <= max(f.descriptors for f in before) + SPARE_FILES
    memory = [statistics.median(f.memory for f in part) for part in (before, after)]
    assert memory[1] <= memory[0] + SPARE_BYTES


# Every alert fires from a real cause. All faults have passed before the next test, but for the last
# one's; what stays is the endurance that was used, and the half hour that the hit rate looks at.


@pytest.fixture
def alerts(prometheus: str, period: Period) -> Alerts:
    return Alerts(Prometheus(prometheus))


def test_no_alert_fires_without_a_fault(alerts: Alerts) -> None:
    assert alerts.firing() == {}


@pytest.mark.soak
def test_batches_that_do_not_go_on(serving: Server, alerts: Alerts) -> None:
    serving.batch(SEEDS[:1])
    reader = serving.reader()
    os.kill(reader, signal.SIGSTOP)
    try:
        batch = serving.start(serving.upload(SEEDS))
        alerts.wait({"SSDKVBatchStalled"})
        assert set(alerts.firing()) == {"SSDKVBatchStalled"}
    finally:
        os.kill(reader, signal.SIGCONT)
    counts = serving.ended(batch).request_counts
    assert counts is not None
    assert counts.completed == len(SEEDS)


@pytest.mark.soak
def test_batches_whose_files_cannot_be_read(serving: Server, alerts: Alerts) -> None:
    files, aside = serving.jobs / "files", serving.jobs / "aside"
    batch = serving.start(serving.upload(SEEDS))
    files.rename(aside)
    files.touch()  # not a directory
    try:
        alerts.wait({"SSDKVBatchErrors"})
    finally:
        files.unlink()
        aside.rename(files)
    counts = serving.ended(batch).request_counts
    assert counts is not None
    assert counts.completed == len(SEEDS)


@pytest.mark.soak
def test_a_crowd_of_new_prompts_on_slow_drives(serving: Server, alerts: Alerts) -> None:
    """Too little of everything: slots, bounds of pages, speed, endurance, and no hits."""
    fresh = itertools.count(1000)
    serving.faults({"kind": "latency", "op": "write", "seconds": 0.2})
    alerts.wait(
        {
            "SSDKVStoreFull",
            "SSDKVSummariesFull",
            "SSDKVWriteStall",
            "SSDKVHitRateCollapse",
            "SSDKVWearNearTBW",
        },
        lambda: serving.crowd(itertools.islice(fresh, CROWD)),
    )
    assert not {"SSDKVDeviceErrors", "SSDKVDeviceFailed"} & set(alerts.firing())


def test_drives_that_fail(serving: Server, alerts: Alerts) -> None:
    def work() -> None:
        for seed in SEEDS:
            serving.ask(seed)

    serving.faults({"kind": "eio", "device": 0, "op": "read", "count": 1})
    alerts.wait({"SSDKVDeviceErrors"}, work)
    gone = {"SSDKVChecksumErrors", "SSDKVDeviceFailed", "SSDKVNotDurable"}
    assert not gone & set(alerts.firing())
    # What is left of the drives is striped anew, but the manifest cannot be saved.
    # Requests wait for slots until it can.
    obstacle = serving.devices[0] / "store.json.tmp"
    obstacle.mkdir()
    serving.faults({"kind": "corrupt", "device": 1})
    alerts.wait(gone, work, seen=obstacle.rmdir)
    assert alerts.firing()["SSDKVDeviceFailed"]["device"] == str(serving.devices[1])
