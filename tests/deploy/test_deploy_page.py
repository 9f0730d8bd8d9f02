"""``docs/shared-cache.md``: its pools and commands are valid."""

from __future__ import annotations

import json
import re
import shlex

import pytest
import yaml
from typer.testing import CliRunner

from tests.deploy.manifests import DEPLOY, EXTRA
from vllm_ssdkv.cli.main import app
from vllm_ssdkv.config.engine import SSDKVConfig
from vllm_ssdkv.config.node import NodeConfig
from vllm_ssdkv.config.pool import PoolConfig

TEXT = (DEPLOY.parent / "docs" / "shared-cache.md").read_text()
POOLS = re.findall(r"```yaml\n(# \w+\.yaml)\n(.*?)```", TEXT, re.DOTALL)
COMMANDS = [
    line
    for block in re.findall(r"```sh\n(.*?)```", TEXT, re.DOTALL)
    for line in block.replace("\\\n", " ").splitlines()
]


@pytest.mark.parametrize(("name", "text"), POOLS, ids=[name for name, _ in POOLS])
def test_pools_of_the_page_are_valid(name: str, text: str) -> None:
    PoolConfig.from_options(yaml.safe_load(text), name)


def test_there_is_a_pool_for_each_runner() -> None:
    runners = {PoolConfig.from_options(yaml.safe_load(text)).runner for _, text in POOLS}
    assert runners == {"hosts", "kubernetes", "ray"}


def test_commands_of_the_page_exist() -> None:
    ours = [shlex.split(line, comments=True) for line in COMMANDS if line.startswith("ssdkv ")]
    assert len(ours) >= 6
    for _, group, command, *_ in ours:
        result = CliRunner().invoke(app, [group, command, "--help"])
        assert result.exit_code == 0, (group, command)


@pytest.mark.parametrize("line", [line for line in COMMANDS if line.startswith("ssdkv node run")])
def test_commands_of_nodes_have_valid_options(line: str) -> None:
    words = shlex.split(line)[3:]
    found: dict[str, list[str]] = {"--listen": [], "--device": [], "--keys": []}
    for name, value in zip(words[::2], words[1::2], strict=True):
        found[name].append(value)
    options: dict[str, object] = {"listen": found["--listen"], "devices": found["--device"]}
    if found["--keys"]:
        (options["keys"],) = found["--keys"]
    NodeConfig.from_options(options)


def test_engines_of_the_page_have_valid_options() -> None:
    found = [shlex.split(line) for line in COMMANDS if line.startswith("vllm serve")]
    assert len(found) == 2
    for words in found:
        pairs = dict(zip(words[3::2], words[4::2], strict=True))
        options = {name.removeprefix(EXTRA): v for name, v in pairs.items() if EXTRA in name}
        config = SSDKVConfig.from_extra_config(
            {name: json.loads(v) if v[0] == "[" else v for name, v in options.items()}
        )
        assert len(config.nodes) == 1
