"""``ssdkv pool`` on a real cluster of Ray: two of its machines are addresses of this one."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.kit.server import free_port
from tests.kit.waiting import until

REQUIREMENTS = ("ray==2.60.0", "msgpack")
"""What our environment lacks of it. No dependency of ours: users of Ray have it."""
OTHER = "127.0.0.2"
MEMORY = "--object-store-memory=80000000"

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1200)]

Pool = Callable[..., dict[str, dict[str, Any]]]


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """With a short path, for sockets."""
    with tempfile.TemporaryDirectory(prefix="ray-") as made:
        yield Path(made)


@pytest.fixture(scope="module")
def environment(folder: Path) -> dict[str, str]:
    port = free_port()
    site = folder / "site"
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--target",
        str(site),
    ]
    subprocess.run([*command, *REQUIREMENTS], check=True, timeout=600)
    added = {"PYTHONPATH": str(site), "RAY_ADDRESS": f"127.0.0.1:{port}"}
    return os.environ | added | {"RAY_USAGE_STATS_ENABLED": "0"}


@pytest.fixture(scope="module")
def cluster(folder: Path, environment: dict[str, str]) -> Iterator[None]:
    """Of a head and another machine. Each ends its own processes, and no other Ray's."""
    _, _, port = environment["RAY_ADDRESS"].partition(":")
    head = ("--head", f"--port={port}", "--include-dashboard=false", f"--temp-dir={folder}/ray")
    other = (f"--address=127.0.0.1:{port}", f"--node-ip-address={OTHER}")
    running = []
    try:
        for place in (head, other):
            command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", *place]
            running.append(subprocess.Popen([*command, "--num-cpus=1", MEMORY], env=environment))
            until(lambda: reachable(int(port)), "Ray listens", 120)
        yield
    finally:
        for process in reversed(running):
            process.terminate()
            process.wait(60)


def reachable(port: int) -> bool:
    with socket.socket() as tried:
        return not tried.connect_ex(("127.0.0.1", port))


@pytest.fixture(scope="module")
def machines(cluster: None, environment: dict[str, str]) -> list[str]:
    """Addresses of the cluster's machines."""
    del cluster
    asks = "import json, ray; ray.init('auto', log_to_driver=False)\n"
    asks += "print(json.dumps([one['NodeManagerAddress'] for one in ray.nodes()]))"

    def both() -> list[str]:
        command = [sys.executable, "-c", asks]
        answer = subprocess.run(
            command, env=environment, stdout=subprocess.PIPE, text=True, check=False, timeout=180
        )
        found: list[str] = json.loads(answer.stdout or "[]")
        return found if len(found) == 2 else []

    return sorted(until(both, "two machines", 180), key=OTHER.__eq__)


@pytest.fixture
def pool(folder: Path, machines: list[str], environment: dict[str, str]) -> Iterator[Pool]:
    """The command's answer, by name of a node."""
    file = folder / "pool.yaml"
    nodes = [
        {
            "name": name,
            "host": host,
            "options": {
                "listen": [f"unix://{folder}/{name}.sock"],
                "devices": [{"path": str(folder / f"kv-{name}"), "capacity": "64MiB"}],
            },
        }
        for name, host in zip("abc", [*machines, "127.0.0.9"], strict=True)
    ]
    content = {"runner": "ray", "directory": str(folder / "pool"), "nodes": nodes}
    file.write_text(yaml.safe_dump(content | {"options": {"dram_gib": 0.1}}))

    def run(verb: str, *names: str) -> dict[str, dict[str, Any]]:
        ended = subprocess.run(
            ["ssdkv", "pool", verb, str(file), *names, "--json"],
            env=environment | {"PATH": f"{Path(sys.executable).parent}:{environment['PATH']}"},
            stdout=subprocess.PIPE,
            text=True,
            check=False,
            timeout=300,
        )
        return {node["name"]: node for node in json.loads(ended.stdout)["nodes"]}

    yield run
    run("down", "a", "b")


def ancestors(pid: int) -> list[str]:
    """Command lines of the processes above one."""
    found = []
    while pid > 1:
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        found.append(Path(f"/proc/{pid}/cmdline").read_text())
    return found


def test_nodes_start_where_they_belong_drain_and_start_again(
    pool: Pool, machines: list[str]
) -> None:
    both = "a", "b"
    up = pool("up", *both)
    assert [(up[name]["state"], up[name]["host"]) for name in both] == [
        ("serves", host) for host in machines
    ]
    for name, host in zip(both, machines, strict=True):
        above = "\0".join(ancestors(up[name]["pid"]))
        assert f"node_ip_address={host}" in above or f"node-ip-address={host}" in above
    assert pool("up", *both) == up, "they run already"
    os.kill(up["b"]["pid"], signal.SIGKILL)
    again = pool("up", *both)
    assert again["a"] == up["a"]
    assert (again["b"]["state"], again["b"]["pid"] != up["b"]["pid"]) == ("serves", True)
    assert {node["state"] for node in pool("drain", *both).values()} == {"stopped"}
    assert {node["state"] for node in pool("status", *both).values()} == {"stopped"}
    assert {node["state"] for node in pool("up", *both).values()} == {"serves"}


def test_a_host_that_is_none_is_named_and_others_start(pool: Pool) -> None:
    up = pool("up")
    assert [up[name]["state"] for name in "abc"] == ["serves", "serves", "unknown"]
    assert "no machine of the Ray cluster has the address 127.0.0.9" in up["c"]["problem"]
