"""``ssdkv serve``: the command that it prints is the one that it becomes; errors come before."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from vllm_ssdkv.cli.main import app
from vllm_ssdkv.connector.names import transfer_config


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["serve", *arguments])


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Programs that this process would have become, each with its words; no GPU is near."""
    programs: list[list[str]] = []
    monkeypatch.setattr("os.execv", lambda path, words: programs.append([str(path), *words]))
    monkeypatch.setenv("PATH", str(tmp_path))
    return programs


@pytest.mark.parametrize(
    ("arguments", "theirs", "ours"),
    [
        ([], [], {}),
        (["--page"], [], {"mode": "page"}),
        (
            ["--page", "--selector", "codes", "--", "--port", "1", "-tp", "2"],
            ["--port", "1", "-tp", "2"],
            {"mode": "page", "selector": "codes"},
        ),
        (
            ["--device", "/a", "--device", "/b", "--", "--served-model-name", "--page"],
            ["--served-model-name", "--page"],
            {"devices": [{"path": "/a"}, {"path": "/b"}]},
        ),
        (
            ["--device", "/a", "--capacity", "1GiB", "--device", "/b", "--capacity", "2TB"],
            [],
            {"devices": [{"path": "/a", "capacity": "1GiB"}, {"path": "/b", "capacity": "2TB"}]},
        ),
    ],
)
def test_it_becomes_the_command_that_it_prints(
    started: list[list[str]], arguments: list[str], theirs: list[str], ours: dict[str, Any]
) -> None:
    result = run("some/model", *arguments)
    assert result.exit_code == 0, result.stderr
    ((program, *words),) = started
    assert program == str(Path(sys.executable).with_name("vllm"))
    assert shlex.split(result.stdout) == words
    assert words[:-2] == ["vllm", "serve", "some/model", *theirs]
    assert words[-2] == "--kv-transfer-config"
    assert json.loads(words[-1]) == transfer_config(ours)


def test_page_mode_on_a_gpu_names_its_attention_backend(
    started: list[list[str]], tmp_path: Path
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    for arguments in (["--page"], ["--page", "--", "--attention_backend=CUSTOM"], []):
        run("m", *arguments)
    named = [[word for word in words if "attention" in word] for words in started]
    assert named == [["--attention-backend"], ["--attention_backend=CUSTOM"], []]
    assert started[0][started[0].index("--attention-backend") + 1] == "CUSTOM"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--selector", "codes"], "--selector: it chooses pages, which mode reuse has not; give"),
        (["--page", "--selector", "kodes"], '  selector: got "kodes"; allowed: "exact" or '),
        (["--device", "/a", "--device", "/b", "--capacity", "1GiB"], "--capacity: 1 given, --dev"),
        (["--capacity", "1GiB"], "--capacity: 1 given, --device: 0; "),
        (
            ["--device", "/a", "--capacity", "many"],
            '  devices[0].capacity: got "many"; not a number ',
        ),
        (["--device", "/a", "--device", "/a"], "  devices[1].path: "),
        (["--", "--kv-transfer-config", "{}"], "--kv-transfer-config: ssdkv serve writes "),
        (["--", "--kv_transfer_config.kv_role=x"], "--kv-transfer-config: ssdkv serve writes "),
        (["--", "--kv-transfer", "{}"], "--kv-transfer: ssdkv serve writes "),
    ],
)
def test_an_error_is_the_last_line_and_nothing_starts(
    started: list[list[str]], arguments: list[str], told: str
) -> None:
    result = run("some/model", *arguments)
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr.splitlines()[-1].removeprefix("ssdkv serve: ").startswith(told)
    assert started == []


def test_an_environment_without_vllm_is_told(
    started: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    result = run("some/model")
    assert result.exit_code == 1
    assert result.stderr.startswith("ssdkv serve: vLLM is not installed in this environment")
    assert started == []
