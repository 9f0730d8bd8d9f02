"""The page of commands, completion, and the command as a module."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from vllm_ssdkv import __version__
from vllm_ssdkv.cli.docs.command_page import commands_page
from vllm_ssdkv.cli.main import MOVED, app


def leaves(command: Any, name: str) -> dict[str, Any]:  # noqa: ANN401 - click's, or typer's copy
    children = getattr(command, "commands", None)
    if children is None:
        return {name: command}
    found: dict[str, Any] = {}
    for child, inner in children.items():
        found |= leaves(inner, f"{name} {child}")
    return found


def test_every_command_has_its_section_and_every_option_its_item() -> None:
    sections = re.split(r"^## `(.*)`$", commands_page(), flags=re.MULTILINE)
    found = dict(zip(sections[1::2], sections[2::2], strict=True))
    commands = leaves(typer.main.get_command(app), "ssdkv")
    assert list(found) == list(commands)
    assert {"ssdkv top", "ssdkv quota", "ssdkv lab bench ttft", "ssdkv config schema"} <= set(found)
    for name, command in commands.items():
        _, *rows = (" ".join(item.split()) for item in found[name].split("\n- "))
        options = [option for option in command.params if "--help" not in option.opts]
        assert len(rows) == len(options), name
        assert command.help.splitlines()[0] in found[name]
        for option, row in zip(options, rows, strict=True):
            told = option.help in row or row == "`--json`"
            assert told, f"{name} {option.name}: its help is missing"
            assert option.param_type_name == "argument" or option.opts[0] in row


def test_the_page_tells_defaults() -> None:
    page = commands_page()
    assert "- `--interval INTERVAL` (default: `2.0`): Seconds between two samples.\n" in page
    assert "- `--model MODEL` (required): Model, as vLLM takes it.\n" in page
    assert "`OPENAI_API_KEY`" in page
    assert (
        "- `--latency LATENCY` (default: `0.02`): Latency of the slowed drive, in seconds." in page
    )


def test_everything_that_prints_results_prints_json() -> None:
    """The others print JSON anyway, one plain value, or write files."""
    without = {
        name
        for name, command in leaves(typer.main.get_command(app), "ssdkv").items()
        if not any("--json" in option.opts for option in command.params)
    }
    assert without == {
        *("ssdkv batch show", "ssdkv batch cancel", "ssdkv config schema"),
        *("ssdkv lab demo-model", "ssdkv node run", "ssdkv serve"),
        *("ssdkv dashboard render", "ssdkv lab docs write", "ssdkv lab docs check"),
    }


def test_json_is_asked_for_in_one_way() -> None:
    for name, command in leaves(typer.main.get_command(app), "ssdkv").items():
        for option in command.params:
            assert "--json" not in option.opts or option.is_flag, name


def test_help_is_behind_every_command() -> None:
    """Both flags by turns: a group has them, and what is in it has them from there."""
    commands = list(leaves(typer.main.get_command(app), "ssdkv"))
    groups = sorted({name.rpartition(" ")[0] for name in commands})
    flags = [(name, flag) for name in groups for flag in ("-h", "--help")]
    flags += zip(commands, itertools.cycle(("-h", "--help")), strict=False)
    for name, flag in flags:
        result = CliRunner().invoke(app, [*name.split()[1:], flag])
        assert (result.exit_code, result.stderr) == (0, ""), name
        assert f"Usage: {name}" in result.stdout


def test_commands_of_users_are_at_the_top() -> None:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]  # a group
    assert [name for name in commands if name in MOVED] == []
    assert set(commands["lab"].commands) == MOVED


@pytest.mark.parametrize("name", sorted(MOVED))
def test_the_old_name_of_a_command_works_and_says_the_new_one(name: str) -> None:
    result = CliRunner().invoke(app, [name, "--help"])
    assert (result.exit_code, result.stderr.count("\n")) == (0, 1)
    assert f"ssdkv {name} is now ssdkv lab {name}" in result.stderr
    new = CliRunner().invoke(app, ["lab", name, "--help"])
    assert result.stdout.split("\n", 2)[2] == new.stdout.split("\n", 2)[2]


def complete(words: str) -> set[str]:
    """What bash would offer at the end of these words."""
    variables = {
        "_SSDKV_COMPLETE": "complete_bash",
        "COMP_WORDS": words,
        "COMP_CWORD": str(words.count(" ")),
    }
    result = CliRunner().invoke(app, [], prog_name="ssdkv", env=variables)
    assert result.exit_code == 0, result.output
    return set(result.output.split())


def test_shells_complete_commands_and_options() -> None:
    assert complete("ssdkv q") == {"quota"}
    names = {"io", "accuracy", "clusters", "decode", "mlperf-kv", "offload", "ttft"}
    assert complete("ssdkv lab bench ") == names
    assert "--interval" in complete("ssdkv top --i")


def test_completion_can_be_installed() -> None:
    options = {opt for param in typer.main.get_command(app).params for opt in param.opts}
    assert {"--install-completion", "--show-completion"} <= options


@pytest.mark.parametrize("module", ["vllm_ssdkv.cli.main"])
def test_it_runs_as_a_module(module: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-m", module, "--version"],
        cwd=tmp_path,
        env=dict(os.environ),
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stdout == f"{__version__}\n"
