"""The unit for systemd: systemd takes it, its command is one, and it stops in the right order."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
from vllm.engine.arg_utils import EngineArgs

from vllm_ssdkv.config.engine import SSDKVConfig
from vllm_ssdkv.connector.front_end import WRONG_ARGUMENTS

UNIT = Path(__file__).parents[2] / "examples" / "vllm-ssdkv.service"
EXTRA = "kv_transfer_config.kv_connector_extra_config."


@pytest.fixture(scope="module")
def settings() -> dict[str, str]:
    """Every setting of the unit, continued lines in one."""
    text = UNIT.read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line and line[0] not in "#[;"]
    return dict(line.split("=", 1) for line in lines)


@pytest.fixture(scope="module")
def flags(settings: dict[str, str]) -> dict[str, str]:
    """The flags of its command, with underscores."""
    program, command, model, *given = shlex.split(settings["ExecStart"])
    assert (Path(program).name, command, model) == ("vllm", "serve", "${MODEL}")
    names = [name.removeprefix("--").replace("-", "_") for name in given[::2]]
    return dict(zip(names, given[1::2], strict=True))


def test_systemd_takes_it(tmp_path: Path) -> None:
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("no systemd-analyze")
    copy = tmp_path / UNIT.name
    copy.write_text(UNIT.read_text().replace("/opt/vllm/bin/vllm", sys.executable))
    done = subprocess.run(
        [analyze, "verify", str(copy)], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_its_command_names_valid_options(flags: dict[str, str]) -> None:
    known = {field.name for field in fields(EngineArgs)}
    assert {name.partition(".")[0] for name in flags} <= known
    options = {name.removeprefix(EXTRA): v for name, v in flags.items() if EXTRA in name}
    assert options
    config = SSDKVConfig.from_extra_config({n: json.loads(v) for n, v in options.items()})
    assert len(config.devices) == 2


def test_the_drives_are_there_before_it_starts(
    settings: dict[str, str], flags: dict[str, str]
) -> None:
    mounts = settings["RequiresMountsFor"].split()
    devices = json.loads(flags[f"{EXTRA}devices"])
    for device in devices:
        assert any(Path(mount) in Path(device).parents for mount in mounts)


def test_it_has_time_to_stop_in(settings: dict[str, str], flags: dict[str, str]) -> None:
    """The engine's time, and half a minute for the rest; workers are told by their parent."""
    assert int(flags["shutdown_timeout"]) > 0
    assert int(settings["TimeoutStopSec"]) >= int(flags["shutdown_timeout"]) + 30
    assert settings["KillMode"] == "mixed"


def test_wrong_options_are_not_tried_again(settings: dict[str, str]) -> None:
    assert settings["Restart"] == "on-failure"
    assert settings["RestartPreventExitStatus"] == str(WRONG_ARGUMENTS)


def test_docs_have_the_same_numbers(settings: dict[str, str], flags: dict[str, str]) -> None:
    page = (UNIT.parents[1] / "docs" / "operations.md").read_text()
    assert f"`--shutdown-timeout {flags['shutdown_timeout']}`" in page
    for name in ("TimeoutStopSec", "KillMode"):
        assert re.search(rf"`{name}={settings[name]}`", page)
