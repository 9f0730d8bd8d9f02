"""``ssdkv top`` with the address of a node's metrics."""

from __future__ import annotations

import dataclasses
import io
import json
import urllib.request
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from tests.cli.metric_pages import node_collector, node_page, page, served
from vllm_ssdkv.base.metrics import BY_NAME, Counters
from vllm_ssdkv.cli.main import app
from vllm_ssdkv.cli.monitor.metrics_scrape import parse
from vllm_ssdkv.cli.monitor.node_sample import (
    NODE_TROUBLES,
    NodeSample,
    StoreSample,
    compare_node,
    is_node,
)
from vllm_ssdkv.cli.monitor.screen import screen
from vllm_ssdkv.node.server.node_metrics import serve_metrics

URL = "http://host:9400/metrics"
QWEN, LLAMA = ("Qwen/Qwen3-8B", "0123456789abcdef"), ("some/llama", "fedcba9876543210")

OWN: dict[str, Any] = {
    "node_sessions": {("scheduler",): 2, ("worker",): 3},
    "node_stores": {(): 2},
    "node_pins": {(): 7},
    "node_claims": {(): 5},
    "node_calls": {("Lookup",): 1000, ("Save",): 10},
    "node_bytes": {("saved",): 1 << 20, ("loaded",): 1 << 30},
}
OWN_LATER: dict[str, Any] = {
    **OWN,
    "node_calls": {("Lookup",): 1400, ("Save",): 10, ("Pin",): 20},
    "node_bytes": {("saved",): (1 << 20) + 8_000_000, ("loaded",): 3 << 30},
    "node_refusals": {("keys",): 3, ("closing",): 1},
    "node_sessions_ended": {("gone",): 4},
    "node_pins_released": {(): 6},
}


def store(path: str, read: int) -> dict[str, Any]:
    return {
        "slots": {(): 100},
        "slots_ready": {(): 60},
        "slots_free": {(): 25},
        "slots_pinned": {(): 7},
        "dram_frames": {(): 8},
        "dram_frames_used": {(): 6},
        "dram_frames_dirty": {(): 2},
        "device_state": {(path,): 1},
        "device_share": {(path,): 1},
        "bytes_read": {(path,): read},
        "io_requests": {(path, "read"): read / 1e6},
        "io_latency_seconds": {(path, "read"): [0.002] * (read // 1_000_000)},
        "io_errors": {(path, "eio"): 1},
        "checksum_failures": {(): 2},
    }


def stores(read: int) -> dict[tuple[str, str], dict[str, Any]]:
    gone = {**store("/b/f", 0), "device_state": {("/b/f",): 0}}
    return {QWEN: store("/a/0", read), LLAMA: gone}


PAGES = (node_page(OWN, stores(0)), node_page(OWN_LATER, stores(4_000_000)))


def sample() -> NodeSample:
    older, newer = (parse(text, 10.0 + 2 * i, URL) for i, text in enumerate(PAGES))
    return compare_node(older, newer, URL, 1e9)


def shown(found: NodeSample, problem: str = "", width: int = 120) -> str:
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(screen(found, problem))
    return console.export_text()


def top(*arguments: str) -> Result:
    runner = CliRunner(env={"COLUMNS": "120"})
    return runner.invoke(app, ["top", "--interval", "0.1", "--once", *arguments])


def test_a_node_is_told_from_an_engine() -> None:
    assert is_node(parse(PAGES[0], 0.0, URL))
    assert is_node(parse(node_page({}, {}), 0.0, URL)), "before any engine"
    assert not is_node(parse(page({"slots": {(): 1}, "node_connected": {(): 1}}), 0.0, URL))


def test_prometheus_gets_the_names_that_are_documented() -> None:
    """It asks for OpenMetrics, where prometheus_client has no colons in names."""
    server, port = serve_metrics("127.0.0.1:0", node_collector(OWN, stores(0))[0], Counters())
    try:
        asked = urllib.request.Request(
            f"http://127.0.0.1:{port}/metrics",
            headers={"Accept": "application/openmetrics-text;version=1.0.0,text/plain;q=0.5"},
        )
        with urllib.request.urlopen(asked, timeout=10) as answer:
            assert is_node(parse(answer.read().decode(), 0.0, URL))
    finally:
        server.shutdown()
        server.server_close()


def test_rates_of_a_node_are_differences_over_the_time_between() -> None:
    found = sample()
    assert (found.seconds, found.time, found.url) == (2.0, 1e9, URL)
    assert found.calls_per_s == {"Lookup": 200, "Pin": 10}
    assert found.bytes_per_s == {"saved": 4e6, "loaded": float(1 << 30), "attended": 0.0}


def test_a_nodes_state_is_that_of_the_later_page() -> None:
    found = sample()
    assert found.sessions == {"scheduler": 2, "worker": 3, "volume": 0, "status": 0}
    assert (found.pins, found.claims, found.pins_released) == (7, 5, 6)
    assert found.bytes_since_start["loaded"] == 3 << 30
    assert found.refusals == {"keys": 3}, "a node that ends refuses as well"
    assert found.sessions_ended == {"gone": 4, "refused": 0, "closing": 0}
    assert found.troubles["checksum_failures"] == 4, "of both stores"


def test_stores_and_drives_of_a_node() -> None:
    found = sample()
    assert found.stores == tuple(
        StoreSample(*named, 100, 60, 25, 7, 8, 6, 2) for named in (QWEN, LLAMA)
    )
    first, second = found.devices
    assert (first.device, first.in_service, second.device, second.in_service) == (
        *("/a/0", True),
        *("/b/f", False),
    )
    assert (first.read_bytes_per_s, first.reads_per_s) == (2e6, 2)
    assert first.read_latency_s == pytest.approx(0.002)
    assert (first.errors, first.new_errors) == (1, 0)


def test_a_node_without_stores_has_no_numbers_but_zero() -> None:
    empty = parse(node_page({}, {}), 1.0, URL)
    found = compare_node(empty, dataclasses.replace(empty, at=2.0), URL, 0)
    assert (found.stores, found.devices, found.calls_per_s, found.refusals) == ((), (), {}, {})
    text = shown(found)
    assert "node  0 engines, 0 stores" in text
    assert "no session since the start" in text
    assert "nobody since the start" in text
    assert "no failures since the start" in text


def test_a_node_for_people() -> None:
    with served(*PAGES) as url:
        result = top(url)
    assert result.exit_code == 0, result.output
    for text in (
        "node  2 engines, 2 stores",
        "2 scheduler, 3 worker, 0 status",
        "7 pins, 5 claims; 6 pins released",
        ", 3 GiB since the start",
        "4 gone",
        "3 keys",
        "checksum_failures 4",
    ):
        assert text in result.stdout
    rows = [line.split() for line in result.stdout.splitlines() if line.startswith(QWEN[0])]
    assert rows == [[*QWEN, "100", "75.0%", "7", "8", "75.0%", "2"]]
    states = [line.split()[1:3] for line in result.stdout.splitlines() if line.startswith("/")]
    assert [state[0] for state in states] == ["in", "OUT"]


def test_a_node_as_json() -> None:
    with served(*PAGES) as url:
        result = top(url, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert set(found) == {field.name for field in dataclasses.fields(NodeSample)}
    assert found["url"] == f"{url}/metrics"
    assert [one["model"] for one in found["stores"]] == [QWEN[0], LLAMA[0]]
    assert found["calls_per_s"]["Lookup"] == pytest.approx(400 / found["seconds"])


def test_a_page_of_neither_is_told() -> None:
    with served("up 1\n") as url:
        result = top(url)
    assert (result.exit_code, result.stdout) == (1, "")
    assert "is the page of neither an engine nor a node" in result.stderr
    assert "a node's option metrics" in result.stderr


def test_eighty_columns_are_enough_for_a_node() -> None:
    """Only names of models and paths are folded."""
    large = dataclasses.replace(
        sample().stores[0], slots=1_234_567, slots_ready=1_200_000, slots_free=34_567
    )
    text = shown(dataclasses.replace(sample(), stores=(large,)), "the node is away", width=80)
    assert "…" not in text
    assert "the node is away" in text
    (row,) = [line.split() for line in text.splitlines() if QWEN[1] in line]
    assert row == [QWEN[0], QWEN[1], "1,235k", "97.2%", "7", "8", "75.0%", "2"]


def test_names_from_a_node_are_no_markup() -> None:
    named = dataclasses.replace(sample().stores[0], model="[red]m")
    assert "[red]m" in shown(dataclasses.replace(sample(), stores=(named,)))


def test_a_nodes_troubles_are_counters() -> None:
    assert {BY_NAME[name].kind for name in NODE_TROUBLES} == {"counter"}
