"""Images and the compose file: what runs as whom, what it may write, what fits together."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest
from compose_spec import PyCompose
from packaging.requirements import Requirement
from typer.testing import CliRunner

from tests.deploy.manifests import (
    DEPLOY,
    as_list,
    compose,
    containerfile,
    environment,
    of_stage,
    ours,
    read,
)
from vllm_ssdkv.cli.main import app
from vllm_ssdkv.config.engine import SSDKVConfig
from vllm_ssdkv.config.node import NodeConfig, options_in

ROOT = DEPLOY.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]


def node_options() -> NodeConfig:
    return NodeConfig.from_options(options_in(DEPLOY / "node.yaml"))


def test_the_image_of_a_node_runs_as_nobody_in_particular() -> None:
    """By number: Kubernetes cannot tell whether a name is root's."""
    (user,) = of_stage("node", "USER")
    assert re.fullmatch(r"([1-9]\d{3,}):\1", user)
    (made,) = (one for one in of_stage("node", "RUN") if "useradd" in one)
    uid = user.partition(":")[0]
    assert f"--uid {uid}" in made
    (volumes,) = of_stage("node", "VOLUME")
    assert f"install -d -o {uid} -g {uid} -m 0750 {' '.join(as_list(volumes))}" in made
    order = [word for word, _ in containerfile()["node"]]
    assert order.index("USER") > order.index("RUN")


def test_the_image_of_a_node_has_neither_compiler_nor_sources() -> None:
    steps = containerfile()["node"]
    assert [rest for word, rest in steps if word == "COPY"] == [
        "--from=build /opt/ssdkv /opt/ssdkv"
    ]
    (installed,) = (rest for _, rest in steps if "apt-get" in rest)
    assert "install -y --no-install-recommends libgomp1 &&" in " ".join(installed.split())
    (base,) = of_stage("build", "FROM")
    assert of_stage("node", "FROM") == [base], "what is built for one C library runs on it"
    assert re.fullmatch(r"docker\.io/library/python:3\.\d+-slim-\w+", base)


def test_images_are_of_versions_that_we_support() -> None:
    (base,) = of_stage("build", "FROM")
    python = re.search(r"python:([\d.]+)", base)
    assert python is not None
    assert Requirement(f"python{PROJECT['requires-python']}").specifier.contains(python[1])
    (engine,) = of_stage("engine", "FROM")
    version = re.fullmatch(r"vllm/vllm-openai:v([\d.]+)", engine)
    assert version is not None
    (wanted,) = (
        one
        for one in map(Requirement, PROJECT["optional-dependencies"]["gpu"])
        if one.name == "vllm"
    )
    assert wanted.specifier.contains(version[1])


def test_what_a_build_copies_is_what_it_needs() -> None:
    lines = (DEPLOY / "Containerfile.dockerignore").read_text().splitlines()
    patterns = [line for line in lines if line and not line.startswith("#")]
    assert patterns[0] == "*", "nothing but what is named"
    named = [line.removeprefix("!") for line in patterns if line.startswith("!")]
    assert all((ROOT / name).exists() for name in named)
    packages = PYPROJECT["tool"]["scikit-build"]["wheel"]["packages"].values()
    backend = PYPROJECT["build-system"]
    (folder,) = backend["backend-path"]
    needed = {*packages, f"{folder}/{backend['build-backend']}.py", "README.md", "CMakeLists.txt"}
    assert needed <= set(named)
    for file in PROJECT["license-files"]:
        assert file in named or file.partition("/")[0] in named


def test_the_command_of_an_image_is_one() -> None:
    (entry,), (rest,) = of_stage("node", "ENTRYPOINT"), of_stage("node", "CMD")
    assert as_list(entry) == ["ssdkv", "node"]
    name, option, file = as_list(rest)
    assert environment("node")["PATH"].split(":")[0] == "/opt/ssdkv/bin"
    help_text = CliRunner().invoke(app, ["node", name, "--help"]).output
    assert option in help_text
    assert of_stage("node", "STOPSIGNAL") == ["SIGTERM"]
    assert f"./node.yaml:{file}:ro" in compose()["services"]["node"]["volumes"]


def test_the_compose_file_keeps_to_its_specification() -> None:
    whole = compose()
    found = PyCompose.from_json(json.dumps(whole))
    found.validate()
    assert sorted(whole["services"]) == ["engine0", "engine1", "node"]


def test_a_file_that_does_not_is_refused() -> None:
    whole = compose()
    whole["services"]["node"]["privileges"] = True
    with pytest.raises(ValueError, match="privileges"):
        PyCompose.from_json(json.dumps(whole))


def test_the_node_may_write_to_its_volumes_only() -> None:
    node = compose()["services"]["node"]
    assert node["read_only"] is True
    assert node["cap_drop"] == ["ALL"]
    assert node["security_opt"] == ["no-new-privileges:true"]
    assert "privileged" not in node
    mounted = {volume.split(":")[1] for volume in node["volumes"] if not volume.endswith(":ro")}
    (volumes,) = of_stage("node", "VOLUME")
    assert mounted == set(as_list(volumes))
    assert node["tmpfs"] == [environment("node")["HOME"]]


def test_the_node_finds_drives_and_engines_find_the_node() -> None:
    options, services = node_options(), compose()["services"]
    (address,) = options.listen
    folder = Path(address.removeprefix("unix://")).parent
    assert f"socket:{folder}" in services["node"]["volumes"]
    assert [device.path for device in options.devices] == ["/var/lib/ssdkv"]
    assert services["node"]["healthcheck"]["test"] == ["CMD", "ssdkv", "node", "status", address]
    for name in ("engine0", "engine1"):
        engine = services[name]
        config = SSDKVConfig.from_extra_config(ours(engine["command"]))
        assert list(config.nodes) == [address]
        assert f"socket:{folder}" in engine["volumes"]
        assert engine["depends_on"] == {"node": {"condition": "service_healthy"}}
        assert engine["group_add"] == [of_stage("node", "USER")[0].partition(":")[2]]
        assert "ipc" not in engine
    assert int(options.socket_mode, 8) & 0o060 == 0o060, "who is in its group may ask it"


def test_engines_have_ports_and_gpus_of_their_own() -> None:
    services = compose()["services"]
    ports, gpus = set(), set()
    for name in ("engine0", "engine1"):
        (port,) = services[name]["ports"]
        ports.add(port.partition(":")[0])
        (device,) = services[name]["deploy"]["resources"]["reservations"]["devices"]
        gpus |= set(device["device_ids"])
    assert len(ports) == len(gpus) == 2


def test_a_stop_waits_longer_than_a_drain() -> None:
    grace = compose()["services"]["node"]["stop_grace_period"]
    assert int(grace.removesuffix("s")) >= node_options().drain + 30


def test_metrics_are_for_this_machine() -> None:
    options = node_options()
    assert options.metrics is not None
    port = options.metrics.rpartition(":")[2]
    assert compose()["services"]["node"]["ports"] == [f"127.0.0.1:{port}:{port}"]
    assert port in of_stage("node", "EXPOSE")[0].split()


def test_what_the_user_must_say_is_said_at_the_top() -> None:
    text = (DEPLOY / "compose.yaml").read_text()
    top = text[: text.index("x-engine:")]
    needed = set(re.findall(r"\$\{(\w+):\?[^}]+\}", text))
    assert needed == set(re.findall(r"^# +([A-Z]+)\b", top, re.MULTILINE))


def test_what_nobody_built_or_ran_says_so() -> None:
    assert "Nobody has built the engine's" in (DEPLOY / "Containerfile").read_text()
    assert "Never run" in (DEPLOY / "compose.yaml").read_text()
    assert read(DEPLOY / "node.yaml")
