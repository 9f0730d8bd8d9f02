"""``ssdkv pool``: files that are refused, other machines, Kubernetes, and what is printed."""

from __future__ import annotations

import json
import os
import stat
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner, Result

from vllm_ssdkv.base.errors import ConfigError
from vllm_ssdkv.cli.main import app
from vllm_ssdkv.config.pool import PoolConfig


def pool(verb: str, content: object, *arguments: str) -> Result:
    text = content if isinstance(content, str) else json.dumps(content)
    return CliRunner().invoke(app, ["pool", verb, "-", *arguments], input=text)


def hosts(folder: Path, **more: object) -> dict[str, Any]:
    """A pool of one node that does not run."""
    options = {"listen": [f"unix://{folder}/a.sock"], "devices": [str(folder)]}
    return {"directory": str(folder / "pool"), "nodes": [{"name": "a", "options": options}]} | more


def command(folder: Path, name: str, text: str) -> Path:
    """A program of a test."""
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


NODES: list[dict[str, object]] = [
    {"name": "a", "options": {"listen": ["unix:///a"], "devices": ["/d"]}}
]
WRONG: dict[str, tuple[dict[str, object], str]] = {
    "no name": ({"directory": "/d", "nodes": [{}]}, "nodes[0].name"),
    "a bad name": ({"directory": "/d", "nodes": [{"name": "../a"}]}, "up to 32 of a-z"),
    "one name twice": ({"directory": "/d", "nodes": NODES * 2}, "two have one name"),
    "a host that is an option": (
        {"directory": "/d", "nodes": [{**NODES[0], "host": "-oProxyCommand=x"}]},
        "nodes[0].host",
    ),
    "no nodes": ({"directory": "/d"}, "nodes: none"),
    "no directory": ({"nodes": NODES}, "directory: missing"),
    "an unknown option": ({"directory": "/d", "nodes": NODES, "node": 1}, "did you mean nodes?"),
    "an unknown option of a node": (
        {"directory": "/d", "options": {"devcies": []}, "nodes": NODES},
        "node a:\n  devcies: unknown option; did you mean devices?",
    ),
    "a folder whose sockets have too long names": (
        {"directory": f"/{'d' * 200}", "nodes": NODES},
        "longer than 107",
    ),
    "Kubernetes without manifests": ({"runner": "kubernetes"}, "give it manifests"),
    "Kubernetes with nodes": (
        {"runner": "kubernetes", "kubernetes": {"manifests": "/m"}, "nodes": NODES},
        "leave out nodes",
    ),
    "hosts with manifests": (
        {"directory": "/d", "nodes": NODES, "kubernetes": {"manifests": "/m"}},
        "has no effect",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_pool_is_refused_with_the_way_out(case: str) -> None:
    content, said = WRONG[case]
    with pytest.raises(ConfigError) as caught:
        PoolConfig.from_options(content)
    assert said in str(caught.value)
    result = pool("status", content)
    assert (result.exit_code, result.stdout) == (2, "")
    assert said in result.stderr


@pytest.mark.parametrize("text", ["[]", "a: [", "7"])
def test_a_file_without_a_pool_is_refused(text: str) -> None:
    result = pool("up", text)
    assert result.exit_code == 2
    assert result.stderr.startswith("-: ")


def test_nodes_that_do_not_run_are_told(tmp_path: Path) -> None:
    result = pool("status", yaml.safe_dump(hosts(tmp_path)))
    assert result.exit_code == 1
    assert result.stdout.startswith("a  local  stopped  unix://")
    result = pool("status", hosts(tmp_path), "--json")
    (found,) = json.loads(result.stdout)["nodes"]
    assert (found["name"], found["state"], found["pid"]) == ("a", "stopped", None)
    for verb in ("drain", "down"):
        assert pool(verb, hosts(tmp_path)).exit_code == 0, "nothing is left to end"


def test_a_name_that_no_node_has_is_refused(tmp_path: Path) -> None:
    result = pool("drain", hosts(tmp_path), "a", "z")
    assert result.exit_code == 1
    assert result.stderr == "no node is called z: a\n"


def test_a_host_is_asked_by_ssh_for_its_own_node(tmp_path: Path) -> None:
    """Arguments of ssh: host, one command as the other shell reads it, and the pool of one node."""
    answer = {"name": "a", "host": "local", "state": "serves", "pid": 7, "addresses": ["unix:///x"]}
    ssh = command(
        tmp_path,
        "ssh",
        f'echo "$@" > {tmp_path}/arguments; cat > {tmp_path}/input\n'
        f"echo '{json.dumps({'nodes': [{**answer, 'problem': ''}]})}'",
    )
    content = hosts(tmp_path, ssh=[str(ssh), "-p", "2222"], options={"dram_gib": 2})
    content["nodes"][0]["host"] = "user@10.0.0.2"
    result = pool("up", content, "--patience", "5")
    assert (result.exit_code, result.stdout) == (0, "a  user@10.0.0.2  serves  unix:///x\n")
    arguments = (tmp_path / "arguments").read_text().strip()
    assert arguments == "-p 2222 user@10.0.0.2 ssdkv pool up - --json --patience 5.0"
    sent = PoolConfig.from_options(json.loads((tmp_path / "input").read_text()))
    (node,) = sent.nodes
    assert (node.name, node.host) == ("a", "local")
    assert sent.options_of(node)["dram_gib"] == 2


@pytest.mark.slow
def test_nodes_of_other_hosts_come_and_go(tmp_path: Path) -> None:
    """Real nodes; in place of ssh a shell of this machine, as another machine's would be."""
    ssh = command(tmp_path, "ssh", 'shift; exec sh -c "$*"')
    with tempfile.TemporaryDirectory(prefix="pool-") as folder:
        content = hosts(
            Path(folder),
            ssh=[str(ssh)],
            program=str(Path(sys.executable).with_name("ssdkv")),
            options={"dram_gib": 0.1},
        )
        (first,) = content["nodes"]
        listen = {"listen": [f"unix://{folder}/b.sock"], "devices": [f"{folder}/b"]}
        content["nodes"] = [
            {**first, "host": "10.0.0.1"},
            {"name": "b", "host": "10.0.0.2", "options": listen},
        ]
        Path(folder, "b").mkdir()
        try:
            result = pool("up", content)
            assert result.exit_code == 0, result.output
            assert [line.split()[:3] for line in result.stdout.splitlines()] == [
                ["a", "10.0.0.1", "serves"],
                ["b", "10.0.0.2", "serves"],
            ]
            assert pool("status", content).exit_code == 0
            assert pool("drain", content, "b").exit_code == 0
            result = pool("status", content)
            assert result.exit_code == 1
            assert [line.split()[2] for line in result.stdout.splitlines()] == ["serves", "stopped"]
        finally:
            result = pool("down", content)
        assert result.exit_code == 0, result.output


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("echo 'ssh: no route to host' >&2; exit 255", "no route to host"),
        ("exit 255", "ended with 255"),
        ("echo '{}'", "ended with 0"),
        ('echo \'{"nodes": [{"name": 1}]}\'; echo older >&2', "older"),
    ],
)
def test_a_host_that_cannot_be_asked_is_told(tmp_path: Path, script: str, said: str) -> None:
    content = hosts(tmp_path, ssh=[str(command(tmp_path, "ssh", script))])
    content["nodes"][0]["host"] = "10.0.0.2"
    result = pool("status", content)
    assert result.exit_code == 1
    assert result.stdout == "a  10.0.0.2  unknown\n"
    assert said in result.stderr


def pods(*ready: str) -> str:
    items = [
        {
            "metadata": {"name": f"ssdkv-node-{number}"},
            "spec": {"nodeName": f"worker-{number}"},
            "status": {"phase": "Running", "conditions": [{"type": "Ready", "status": value}]},
        }
        for number, value in enumerate(ready)
    ]
    return json.dumps({"items": items})


@pytest.fixture
def kubectl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Has a log of its calls, and answers `get` with a file."""
    text = f'echo "$@" >> {tmp_path}/calls\ncase "$*" in *" get "*) cat {tmp_path}/pods;; esac'
    command(tmp_path, "kubectl", text)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return tmp_path


def cluster(**options: str) -> dict[str, object]:
    return {"runner": "kubernetes", "kubernetes": {"manifests": "/m", **options}}


def test_kubernetes_gets_manifests_and_is_asked_for_pods(kubectl: Path) -> None:
    (kubectl / "pods").write_text(pods("True", "False"))
    result = pool("up", cluster(context="there", namespace="kv"), "--patience", "30")
    assert result.exit_code == 1, "one is not ready"
    assert result.stdout.splitlines() == [
        "ssdkv-node-0  worker-0  serves  tcp://ssdkv-node-0.ssdkv-node:7070",
        "ssdkv-node-1  worker-1  silent  tcp://ssdkv-node-1.ssdkv-node:7070",
    ]
    assert result.stderr == "ssdkv-node-1: Running: kubectl describe pod ssdkv-node-1\n"
    where = "--namespace kv --context there"
    assert (kubectl / "calls").read_text().splitlines() == [
        f"{where} apply -k /m",
        f"{where} rollout status statefulset/ssdkv-node --timeout=30s",
        f"{where} get pods -l app.kubernetes.io/name=ssdkv-node -o json",
    ]


def test_kubernetes_is_asked_to_have_none(kubectl: Path) -> None:
    (kubectl / "pods").write_text(pods())
    assert pool("drain", cluster()).exit_code == 0
    assert pool("down", cluster()).exit_code == 0
    calls = (kubectl / "calls").read_text()
    assert "scale statefulset/ssdkv-node --replicas=0" in calls
    assert "wait pods -l app.kubernetes.io/name=ssdkv-node --for=delete --timeout=60s" in calls
    assert "delete -k /m --ignore-not-found --wait --timeout=60s" in calls
    result = pool("drain", cluster(), "ssdkv-node-0")
    assert result.exit_code == 1
    assert "leave them out" in result.stderr


def test_what_kubectl_says_is_passed_on(kubectl: Path) -> None:
    command(kubectl, "kubectl", "echo 'error: no such context' >&2; exit 1")
    result = pool("status", cluster())
    assert result.exit_code == 1
    assert result.stderr == "kubectl get: error: no such context\n"


def test_without_kubectl_or_ray_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = pool("status", hosts(tmp_path, runner="ray"))
    assert result.exit_code == 1
    assert "Ray" in result.stderr or "ray" in result.stderr
    monkeypatch.setenv("PATH", str(tmp_path))
    result = pool("status", cluster())
    assert result.exit_code == 1
    assert "no kubectl in the PATH: install it" in result.stderr
