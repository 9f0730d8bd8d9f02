"""Kubernetes manifests: published schemas, and names, ports, users and times that fit together."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from tests.deploy.manifests import DEPLOY, MANIFESTS, as_list, manifest, of_stage, ours, read
from vllm_ssdkv.base.sizes import GIB, parse_size
from vllm_ssdkv.cli.pool.kubernetes_nodes import LABEL, STATEFUL_SET
from vllm_ssdkv.config.engine import SSDKVConfig
from vllm_ssdkv.config.node import NodeConfig

OLDEST, NEWEST = "1.29", kubernetes_validate.latest_version()
"""ReadWriteOncePod is stable since the first of them."""


def pod() -> dict[str, Any]:
    found: dict[str, Any] = manifest("statefulset")["spec"]["template"]["spec"]
    return found


def container() -> dict[str, Any]:
    (found,) = pod()["containers"]
    assert isinstance(found, dict)
    return found


def node_options() -> NodeConfig:
    return NodeConfig.from_options(yaml.safe_load(manifest("configmap")["data"]["node.yaml"]))


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.stem)
@pytest.mark.parametrize("version", [OLDEST, NEWEST])
def test_the_published_schemas_take_it(path: Path, version: str) -> None:
    kubernetes_validate.validate(read(path), version, strict=True)


def test_the_published_schemas_refuse_a_slip() -> None:
    wrong = manifest("statefulset")
    wrong["spec"]["template"]["spec"]["containers"][0]["readOnlyRootFilesystem"] = True
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, NEWEST, strict=True)


def test_the_kustomization_names_every_file_but_the_example() -> None:
    named = read(DEPLOY / "kubernetes" / "kustomization.yaml")["resources"]
    assert sorted(named) == [path.name for path in MANIFESTS if path.name != "engine.yaml"]


def test_kubectl_reads_the_kustomization() -> None:
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("no kubectl")
    done = subprocess.run(
        [kubectl, "kustomize", str(DEPLOY / "kubernetes")],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    kinds = sorted(found["kind"] for found in yaml.safe_load_all(done.stdout))
    assert kinds == [
        *("ConfigMap", "NetworkPolicy", "PodDisruptionBudget", "Service", "StatefulSet")
    ]


def test_one_label_holds_it_together() -> None:
    name, _, value = LABEL.partition("=")
    label = {name: value}
    whole = manifest("statefulset")
    assert whole["spec"]["template"]["metadata"]["labels"] == label
    assert whole["spec"]["selector"]["matchLabels"] == label
    assert manifest("service")["spec"]["selector"] == label
    assert manifest("poddisruptionbudget")["spec"]["selector"]["matchLabels"] == label
    assert manifest("networkpolicy")["spec"]["podSelector"]["matchLabels"] == label
    assert f"statefulset/{whole['metadata']['name']}" == STATEFUL_SET
    assert whole["spec"]["serviceName"] == manifest("service")["metadata"]["name"]
    assert manifest("service")["spec"]["clusterIP"] == "None"


def test_ports_are_those_that_the_node_listens_on() -> None:
    options = node_options()
    (tcp,) = (address for address in options.listen if address.startswith("tcp://"))
    listens = {"node": int(tcp.rpartition(":")[2])}
    assert options.metrics is not None
    listens["metrics"] = int(options.metrics.rpartition(":")[2])
    assert {port["name"]: port["containerPort"] for port in container()["ports"]} == listens
    assert {
        port["targetPort"]: port["port"] for port in manifest("service")["spec"]["ports"]
    } == listens
    ingress = manifest("networkpolicy")["spec"]["ingress"]
    assert [port["port"] for rule in ingress for port in rule["ports"]] == [*listens]
    assert set(map(str, listens.values())) == set(of_stage("node", "EXPOSE")[0].split())


def test_it_runs_as_the_user_of_the_image_and_may_write_to_its_volumes_only() -> None:
    uid = int(of_stage("node", "USER")[0].partition(":")[0])
    security = pod()["securityContext"]
    assert security["runAsNonRoot"] is True
    assert {security["runAsUser"], security["runAsGroup"], security["fsGroup"]} == {uid}
    assert security["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container()["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert pod()["automountServiceAccountToken"] is False
    assert not {"hostNetwork", "hostIPC", "hostPID"} & set(pod())
    writable = {
        mount["mountPath"] for mount in container()["volumeMounts"] if not mount.get("readOnly")
    }
    (volumes,) = of_stage("node", "VOLUME")
    assert writable == {*as_list(volumes), "/tmp"}


def test_every_mount_has_its_volume() -> None:
    declared = {volume["name"] for volume in pod()["volumes"]}
    declared |= {
        claim["metadata"]["name"]
        for claim in manifest("statefulset")["spec"]["volumeClaimTemplates"]
    }
    assert {mount["name"] for mount in container()["volumeMounts"]} == declared
    places = {mount["name"]: mount["mountPath"] for mount in container()["volumeMounts"]}
    options = node_options()
    assert options.keys == places["keys"]
    assert [device.path for device in options.devices] == [places["kv"]]
    assert places["config"] == container()["args"][-1]
    (cmd,) = of_stage("node", "CMD")
    assert container()["args"] == as_list(cmd)


def test_keys_come_from_a_secret_and_are_for_the_node_alone() -> None:
    (secret,) = (volume["secret"] for volume in pod()["volumes"] if "secret" in volume)
    assert secret["defaultMode"] & 0o337 == 0, "others may not read them, nobody may write"
    made = (DEPLOY / "kubernetes" / "kustomization.yaml").read_text()
    assert f"secret generic {secret['secretName']} " in made
    assert not any(read(path)["kind"] == "Secret" for path in MANIFESTS)
    for side in ("node", "engine"):
        for file in ("authority.pem", f"{side}.pem", f"{side}-key.pem"):
            assert f"--from-file=keys/{file}" in made


def test_probes_ask_the_node_without_keys() -> None:
    (socket,) = (address for address in node_options().listen if address.startswith("unix://"))
    for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
        probe = container()[kind]
        assert probe["exec"]["command"] == ["ssdkv", "node", "status", socket]
        assert probe["timeoutSeconds"] < probe["periodSeconds"] * probe["failureThreshold"]


def test_a_stop_waits_longer_than_a_drain_and_memory_is_more_than_its_dram() -> None:
    options = node_options()
    assert pod()["terminationGracePeriodSeconds"] >= options.drain + 30
    resources = container()["resources"]
    for kind in ("requests", "limits"):
        assert parse_size(resources[kind]["memory"] + "B") >= options.dram_bytes() + 2 * GIB


def test_a_drained_machine_takes_one_node_at_a_time() -> None:
    assert manifest("poddisruptionbudget")["spec"]["maxUnavailable"] == 1


def test_a_node_calls_nobody_and_is_called_by_engines_and_prometheus() -> None:
    policy = manifest("networkpolicy")["spec"]
    assert policy["egress"] == []
    assert policy["policyTypes"] == ["Ingress", "Egress"]
    engines = policy["ingress"][0]["from"][0]["podSelector"]["matchLabels"]
    labels = manifest("engine")["spec"]["template"]["metadata"]["labels"]
    assert engines.items() <= labels.items()


def test_the_example_of_an_engine_names_a_node_and_has_keys() -> None:
    spec = manifest("engine")["spec"]["template"]["spec"]
    (engine,) = spec["containers"]
    config = SSDKVConfig.from_extra_config(ours(engine["args"]))
    service = manifest("service")
    (node,) = config.nodes
    port = service["spec"]["ports"][0]["port"]
    set_name = manifest("statefulset")["metadata"]["name"]
    assert node == f"tcp://{set_name}-0.{service['metadata']['name']}:{port}"
    (keys,) = (m["mountPath"] for m in engine["volumeMounts"] if m["name"] == "keys")
    assert config.node_keys == keys
    image = re.search(r"AS (\w+)", (DEPLOY / "Containerfile").read_text().split("vllm-openai")[1])
    assert image is not None
    assert engine["image"].startswith(f"ssdkv-{image[1]}:")


def test_nothing_is_said_to_have_run() -> None:
    assert "Never run" in (DEPLOY / "kubernetes" / "kustomization.yaml").read_text()
