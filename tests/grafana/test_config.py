"""Prometheus's configuration and alert rules, and the files that start it all in containers."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.grafana.conftest import GRAFANA
from vllm_ssdkv.config import SSDKVConfig

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


def test_every_alert_is_tested_and_has_its_cure_in_the_docs() -> None:
    alerts = {rule["alert"] for group in read("alerts.yml")["groups"] for rule in group["rules"]}
    cases = (Path(__file__).parent / "alerts_test.yml").read_text()
    page = (DOCS / "monitoring.md").read_text()
    assert alerts
    assert {name for name in alerts if f"alertname: {name}" not in cases} == set()
    assert set(re.findall(r"^### `(\w+)`", page, re.MULTILINE)) == alerts


def test_containers_mount_what_is_there() -> None:
    services = read("compose.yml")["services"]
    assert set(services) == {"vllm", "prometheus", "grafana"}
    volumes = [volume for service in services.values() for volume in service["volumes"]]
    mounted = [volume.partition(":")[0] for volume in volumes if volume.startswith("./")]
    assert len(mounted) == 4
    for place in mounted:
        assert (GRAFANA / place).exists()
    dashboards = services["grafana"]["volumes"][1].split(":")[1]
    (provider,) = read("provisioning/dashboards/ssdkv.yml")["providers"]
    assert provider["options"]["path"] == dashboards
    (source,) = read("provisioning/datasources/prometheus.yml")["datasources"]
    assert source["url"] == "http://prometheus:9090"
    ((job,),) = [job["static_configs"] for job in read("prometheus.yml")["scrape_configs"]]
    assert job["targets"] == ["vllm:8000"]


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
