"""Prometheus's configuration and alert rules, and the files that start it all in containers."""

from __future__ import annotations

import json
import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement

from tests.grafana.conftest import GRAFANA
from vllm_ssdkv.config.engine import SSDKVConfig

DOCS = GRAFANA.parent / "docs"


def run(*command: str | Path) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def read(name: str) -> Any:  # noqa: ANN401
    return yaml.safe_load((GRAFANA / name).read_text())


def test_prometheus_accepts_its_configuration_and_rules(promtool: str) -> None:
    run(promtool, "check", "config", GRAFANA / "prometheus.yml")
    run(promtool, "check", "rules", "--lint=all", "--lint-fatal", GRAFANA / "alerts.yml")


def test_alerts_fire_when_they_should_and_not_before(promtool: str) -> None:
    run(promtool, "test", "rules", Path(__file__).parent / "alerts_test.yml")


OF_LATER_RUNS = {"SSDKVStoreSuspended"}
"""Alerts that no fault brings about in a server that runs; tests/e2e has their metrics."""


def test_every_alert_is_tested_and_has_its_cure_in_the_docs() -> None:
    alerts = {rule["alert"] for group in read("alerts.yml")["groups"] for rule in group["rules"]}
    here = Path(__file__).parent
    cases = (here / "alerts_test.yml").read_text()
    live = "".join((here / name).read_text() for name in ("test_live.py", "test_live_nodes.py"))
    page = (DOCS / "monitoring.md").read_text()
    assert alerts
    assert {name for name in alerts if f"alertname: {name}" not in cases} == set()
    assert {name for name in alerts if f'"{name}"' not in live} == OF_LATER_RUNS
    assert set(re.findall(r"^### `(\w+)`", page, re.MULTILINE)) == alerts


def test_the_alert_of_nodes_knows_the_job_of_the_docs() -> None:
    example = re.search(r"```yaml\n(.*?)```", (DOCS / "monitoring.md").read_text(), re.DOTALL)
    assert example is not None
    jobs = {job["job_name"]: job for job in yaml.safe_load(example[1])["scrape_configs"]}
    (rule,) = (
        rule
        for group in read("alerts.yml")["groups"]
        for rule in group["rules"]
        if rule["alert"] == "SSDKVNodeDown"
    )
    named = re.search(r'job="([^"]*)"', rule["expr"])
    assert named is not None
    assert jobs[named[1]]["static_configs"] == [{"targets": ["HOST:9400"]}]


SERVICE = {"build", "command", "depends_on", "deploy", "environment", "healthcheck", "image"} | {
    "ipc",
    "ports",
    "security_opt",
    "ulimits",
    "volumes",
}
"""Fields of a service that Compose's specification has, as far as they are used."""
LISTENS = {"vllm": 8000, "prometheus": 9090, "grafana": 3000}


def services() -> dict[str, Any]:
    found: dict[str, Any] = read("compose.yml")["services"]
    return found


def test_containers_have_fields_that_compose_knows() -> None:
    whole = read("compose.yml")
    assert set(whole) == {"services", "volumes"}
    assert set(services()) == set(LISTENS)
    for name, service in services().items():
        assert set(service) <= SERVICE, name
        assert ("image" in service) != ("build" in service), name
        assert set(service.get("depends_on", ())) <= set(services())
    build = services()["vllm"]["build"]
    assert set(build) == {"context", "dockerfile_inline"}
    assert (GRAFANA / build["context"] / "pyproject.toml").exists()


def test_containers_mount_what_is_there() -> None:
    """From here, from a volume that is declared, or from where the user must say."""
    declared = set(read("compose.yml")["volumes"])
    used: set[str] = set()
    here = 0
    for service in services().values():
        for volume in service["volumes"]:
            source, _, target = re.sub(r"\$\{\w+:\?[^}]*\}", "$", volume).partition(":")
            assert target.startswith("/"), volume
            if source.startswith("./"):
                assert (GRAFANA / source).exists(), volume
                assert target.endswith(":ro"), volume
                here += 1
            elif source != "$":
                used.add(source)
    assert used == declared
    assert here == 4


def test_containers_find_each_other() -> None:
    dashboards = services()["grafana"]["volumes"][1].split(":")[1]
    (provider,) = read("provisioning/dashboards/ssdkv.yml")["providers"]
    assert provider["options"]["path"] == dashboards
    (source,) = read("provisioning/datasources/prometheus.yml")["datasources"]
    assert source["url"] == f"http://prometheus:{LISTENS['prometheus']}"
    boards = [json.loads(path.read_text()) for path in (GRAFANA / "dashboards").glob("*.json")]
    asked = {panel["datasource"]["uid"] for board in boards for panel in _asking(board["panels"])}
    assert asked <= {source["uid"], "${datasource}"}
    ((job,),) = [job["static_configs"] for job in read("prometheus.yml")["scrape_configs"]]
    assert job["targets"] == [f"vllm:{LISTENS['vllm']}"]


def _asking(panels: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [panel for panel in panels if "datasource" in panel]


def test_containers_are_reached_and_watched_on_the_port_that_they_listen_on() -> None:
    for name, service in services().items():
        (port,) = service["ports"]
        *address, outside, inside = port.split(":")
        assert (int(outside), int(inside)) == (LISTENS[name], LISTENS[name])
        # Prometheus has no password.
        assert address == (["127.0.0.1"] if name == "prometheus" else [])
        check = service["healthcheck"]
        assert set(check) == {"test", "start_period"}
        assert check["test"][0] == "CMD", "as a list, without a shell"
        assert f"http://127.0.0.1:{LISTENS[name]}/" in " ".join(check["test"])


def test_what_the_user_must_say_is_said_at_the_top() -> None:
    text = (GRAFANA / "compose.yml").read_text()
    top = text[: text.index("services:")]
    needed = set(re.findall(r"\$\{(\w+):\?[^}]+\}", text))
    assert needed == set(re.findall(r"^# +([A-Z_]+)\b", top, re.MULTILINE))
    assert len(re.findall(r"\$\{", text)) == len(needed), "each once, and none may be missing"


def test_prometheus_has_its_files_where_the_container_has_them(
    promtool: str, tmp_path: Path
) -> None:
    """The mounts, as the container sees them, without what else lies beside the files."""
    for volume in services()["prometheus"]["volumes"]:
        source, _, target = volume.removesuffix(":ro").partition(":")
        if source.startswith("./"):
            place = tmp_path / target.removeprefix("/")
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text((GRAFANA / source).read_text())
    run(promtool, "check", "config", tmp_path / "etc" / "prometheus" / "prometheus.yml")


def test_the_image_of_vllm_is_of_a_version_that_we_support() -> None:
    dockerfile = services()["vllm"]["build"]["dockerfile_inline"]
    found = re.search(r"^FROM vllm/vllm-openai:v([\d.]+)$", dockerfile, re.MULTILINE)
    assert found is not None
    project = tomllib.loads((GRAFANA.parent / "pyproject.toml").read_text())["project"]
    (wanted,) = (
        one
        for one in map(Requirement, project["optional-dependencies"]["gpu"])
        if one.name == "vllm"
    )
    assert wanted.specifier.contains(found[1])


def test_the_container_of_vllm_has_valid_options() -> None:
    command = read("compose.yml")["services"]["vllm"]["command"]
    prefix = "--kv-transfer-config.kv_connector_extra_config."
    given = dict(zip(command[1::2], command[2::2], strict=True))
    ours = {
        name.removeprefix(prefix): yaml.safe_load(value)
        for name, value in given.items()
        if name.startswith(prefix)
    }
    assert SSDKVConfig.from_extra_config(ours).devices
    assert given["--kv-transfer-config.kv_connector"] == "SSDKVConnector"


@pytest.mark.parametrize("name", ["compose.yml", "prometheus.yml", "alerts.yml"])
def test_no_latest_images_and_no_tabs(name: str) -> None:
    text = (GRAFANA / name).read_text()
    assert "\t" not in text
    images = re.findall(r"(?:image:|FROM) (\S+)", text)
    assert all(re.search(r":v?\d+\.\d+", image) for image in images)
