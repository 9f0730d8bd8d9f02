"""Files of ``deploy/`` as tests read them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import yaml

DEPLOY = Path(__file__).parents[2] / "deploy"
EXTRA = "--kv-transfer-config.kv_connector_extra_config."
KUBERNETES = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
MANIFESTS = [path for path in KUBERNETES if path.name != "kustomization.yaml"]


def read(path: Path) -> dict[str, Any]:
    """The one document of a file."""
    (found,) = yaml.safe_load_all(path.read_text())
    assert isinstance(found, dict)
    return found


def manifest(name: str) -> dict[str, Any]:
    return read(DEPLOY / "kubernetes" / f"{name}.yaml")


def compose() -> dict[str, Any]:
    """The compose file with a value for each thing that a user must say."""
    text = (DEPLOY / "compose.yaml").read_text()
    found = yaml.safe_load(re.sub(r"\$\{(\w+):\?[^}]*\}", r"/\1", text))
    assert isinstance(found, dict)
    return found


def containerfile() -> dict[str, list[tuple[str, str]]]:
    """By stage, instructions and what follows them; continued lines are joined."""
    text = (DEPLOY / "Containerfile").read_text().replace("\\\n", " ")
    stages: dict[str, list[tuple[str, str]]] = {}
    name = ""
    for line in text.splitlines():
        if not line or line.startswith("#"):
            continue
        word, _, rest = line.partition(" ")
        if word == "FROM":
            base, name = rest.split(" AS ")
            stages[name] = [("FROM", base)]
        else:
            stages[name].append((word, " ".join(rest.split())))
    return stages


def of_stage(stage: str, word: str) -> list[str]:
    return [rest for one, rest in containerfile()[stage] if one == word]


def environment(stage: str) -> dict[str, str]:
    """Variables that an image sets."""
    (text,) = of_stage(stage, "ENV")
    return dict(part.split("=", 1) for part in text.split())


def as_list(text: str) -> list[str]:
    found = json.loads(text)
    assert isinstance(found, list)
    return found


def ours(command: list[str]) -> dict[str, Any]:
    """Options of the connector in the arguments of `vllm serve`, after the model."""
    given = dict(zip(command[1::2], command[2::2], strict=True))
    assert given["--kv-transfer-config.kv_connector"] == "SSDKVConnector"
    return {
        name.removeprefix(EXTRA): yaml.safe_load(value)
        for name, value in given.items()
        if name.startswith(EXTRA)
    }
