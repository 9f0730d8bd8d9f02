"""``ssdkv node run`` and ``ssdkv node status``."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.kit.node import NodeProcess
from tests.kit.server import free_port
from vllm_ssdkv.cli.main import app

RUN = CliRunner()


@pytest.fixture(scope="module")
def port() -> int:
    return free_port()


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory, port: int) -> Iterator[NodeProcess]:
    root = tmp_path_factory.mktemp("node")
    with NodeProcess(root, metrics=f"127.0.0.1:{port}") as node:
        yield node


def test_status_says_how_a_node_is(node: NodeProcess) -> None:
    found = RUN.invoke(app, ["node", "status", node.address])
    assert found.exit_code == 0
    assert "no store is open" in found.output
    found = RUN.invoke(app, ["node", "status", node.address, "--json"])
    assert found.exit_code == 0
    said = json.loads(found.output)
    assert (said["draining"], said["stores"]) == (False, [])
    assert [session["role"] for session in said["sessions"]] == ["status"]


def test_metrics_are_served(node: NodeProcess, port: int) -> None:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    assert 'vllm:ssdkv_node_calls_total{call="Lookup"} 0.0' in text
    assert 'vllm:ssdkv_node_sessions{role="worker"} 0.0' in text
    assert "vllm:ssdkv_node_stores 0.0" in text


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["unix:///no/such/socket"], "nobody answers"),
        (["http://x"], "is no address of a node"),
        (["tcp://192.0.2.1:1"], "there are no keys"),
    ],
)
def test_status_fails_where_there_is_no_node(arguments: list[str], text: str) -> None:
    found = RUN.invoke(app, ["node", "status", *arguments, "--timeout", "1"])
    assert found.exit_code == 1
    assert text in found.output


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--device", "/tmp"], "listen: missing"),
        (["--device", "/tmp", "--listen", "http://x"], "is no address of a node"),
        (["--device", "/tmp", "--listen", "tcp://0.0.0.0:1"], "there are no keys"),
        (["--device", "/tmp", "--listen", "tcp://127.0.0.1:0", "--metrics", "x"], "no host:port"),
    ],
)
def test_what_cannot_run_does_not_start(options: list[str], text: str) -> None:
    found = RUN.invoke(app, ["node", "run", *options])
    assert found.exit_code == 1
    assert text in found.output


def test_sigterm_ends_it_in_order(tmp_path: Path) -> None:
    node = NodeProcess(tmp_path)
    node.start()
    assert node.end() == 0
    assert "ended" in node.log()
    assert not (tmp_path / "node.sock").exists()
