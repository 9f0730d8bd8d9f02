"""Nodes of this machine: found by the lock on their options, and ended one way or another."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.kit.waiting import until
from vllm_ssdkv.cli.pool.local_nodes import LocalNodes
from vllm_ssdkv.cli.pool.node_state import NodeState
from vllm_ssdkv.config.pool import PoolConfig

STAND_IN = (sys.executable, "-P", str(Path(__file__).with_name("stand_in.py")))
PATIENCE_S = 60.0

pytestmark = pytest.mark.slow


def pool_in(folder: Path, **options: object) -> PoolConfig:
    return PoolConfig.from_options(
        {
            "directory": str(folder / "pool"),
            "options": {"dram_gib": 0.1, **options},
            "nodes": [
                {
                    "name": name,
                    "options": {
                        "listen": [f"unix://{folder}/{name}.sock"],
                        "devices": [str(folder / f"kv-{name}")],
                    },
                }
                for name in ("a", "b")
            ],
        }
    )


@pytest.fixture
def folder() -> Iterator[Path]:
    """With a short path, for sockets."""
    with tempfile.TemporaryDirectory(prefix="pool-") as made:
        yield Path(made)


@pytest.fixture
def nodes(folder: Path) -> Iterator[LocalNodes]:
    """Two nodes that do not run; killed at the end."""
    pool = pool_in(folder)
    made = LocalNodes(pool, pool.nodes)
    yield made
    made.down(0)


@pytest.fixture
def misbehaving(folder: Path) -> Iterator[LocalNodes]:
    """The same, of stand-ins."""
    pool = pool_in(folder)
    made = LocalNodes(pool, pool.nodes, STAND_IN)
    yield made
    made.down(0)


def states(found: list[NodeState]) -> list[str]:
    return [state.state for state in found]


def log_of(folder: Path, name: str) -> Path:
    return folder / "pool" / name / "node.log"


def test_up_status_drain(nodes: LocalNodes, folder: Path) -> None:
    assert states(nodes.status()) == ["stopped", "stopped"]
    up = nodes.up(PATIENCE_S)
    assert [state.problem for state in up] == ["", ""]
    assert states(up) == ["serves", "serves"]
    pids = [state.pid for state in up]
    assert len({*pids, None}) == 3
    assert up[0].addresses == (
        f"unix://{folder}/a.sock",
        f"unix://{folder}/pool/a/node.sock",
    )
    assert [state.pid for state in nodes.up(PATIENCE_S)] == pids, "they run already"
    assert states(nodes.drain(PATIENCE_S)) == ["stopped", "stopped"]
    assert states(nodes.status()) == ["stopped", "stopped"]


def test_a_killed_node_is_known_to_be_gone_and_started_again(nodes: LocalNodes) -> None:
    first, other = nodes.up(PATIENCE_S)
    assert first.pid is not None
    os.kill(first.pid, signal.SIGKILL)
    until(lambda: nodes.status()[0].state == "stopped")
    again = nodes.up(PATIENCE_S)
    assert states(again) == ["serves", "serves"]
    assert again[0].pid != first.pid
    assert again[1].pid == other.pid


def test_options_do_not_change_under_a_node(nodes: LocalNodes, folder: Path) -> None:
    nodes.up(PATIENCE_S)
    changed = pool_in(folder, lease=3)
    others = LocalNodes(changed, changed.nodes)
    found = others.up(PATIENCE_S)
    assert all("runs with other options: ssdkv pool drain" in state.problem for state in found)
    assert states(found) == ["serves", "serves"]
    file = folder / "pool" / "a" / "shared" / "node.yaml"
    assert "lease" not in yaml.safe_load(file.read_text())
    others.drain(PATIENCE_S)
    assert states(others.up(PATIENCE_S)) == ["serves", "serves"]
    assert yaml.safe_load(file.read_text())["lease"] == 3


def test_a_node_that_ends_is_told_with_its_last_words(
    misbehaving: LocalNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BEHAVIOUR", "doomed")
    for state in misbehaving.up(PATIENCE_S):
        assert state.state == "stopped"
        assert state.problem == "it ended: \nnode: begins\nnode: no drive"


def test_a_node_that_does_not_answer_in_time_is_told_and_left(
    misbehaving: LocalNodes, monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    monkeypatch.setenv("BEHAVIOUR", "mute")
    for state in misbehaving.up(0.5):
        assert state.state == "silent"
        assert state.problem == f"it does not answer in time: see {log_of(folder, state.name)}"
    await_words(folder)
    assert states(misbehaving.drain(PATIENCE_S)) == ["stopped", "stopped"]


def test_only_down_kills(
    misbehaving: LocalNodes, monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    monkeypatch.setenv("BEHAVIOUR", "stubborn")
    misbehaving.up(0)
    await_words(folder)
    for state in misbehaving.drain(0.5):
        assert state.state == "silent"
        assert "not ended in time" in state.problem
    ended = misbehaving.down(0.5)
    assert [(state.state, state.problem) for state in ended] == [("stopped", "")] * 2


def await_words(folder: Path) -> None:
    """Until both have begun: before, any signal ends them."""
    until(lambda: all(log_of(folder, name).read_text() for name in ("a", "b")))


def test_a_long_log_is_put_aside(
    misbehaving: LocalNodes, monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    monkeypatch.setenv("BEHAVIOUR", "doomed")
    log = log_of(folder, "a")
    log.parent.mkdir(parents=True)
    with log.open("wb") as file:
        file.truncate(17 << 20)
    misbehaving.up(PATIENCE_S)
    assert log.with_name("node.log.1").stat().st_size == 17 << 20
    assert log.read_text() == "node: begins\nnode: no drive\n"
