"""The two hooks by which wrong options end a start in its first process, before an engine core."""

from __future__ import annotations

import copy
import json
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import vllm.plugins
from vllm import LLM
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

from tests.connector.kinds import make
from vllm_ssdkv.base.errors import ConfigError, UnsupportedError
from vllm_ssdkv.connector.connector import SSDKVConnector
from vllm_ssdkv.connector.front_end import WRONG_ARGUMENTS, check_command_line
from vllm_ssdkv.connector.names import CONNECTOR, CONNECTOR_MODULE
from vllm_ssdkv.plugin import register

WRONG = 'mode: got "pge"; allowed: "reuse" or "page"'
SECONDS = 3.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("model"), "llama")


def transfer(**options: object) -> dict[str, Any]:
    return {
        "kv_connector": CONNECTOR,
        "kv_role": "kv_both",
        "kv_connector_extra_config": options,
    }


def as_child(**options: object) -> dict[str, Any]:
    multi = transfer(connectors=[transfer(**options)])
    return {**multi, "kv_connector": "MultiConnector"}


def create(model: Path, given: dict[str, Any], **arguments: Any) -> VllmConfig:  # noqa: ANN401 - options of vLLM
    """What every front end does before it starts an engine core."""
    return EngineArgs(
        model=str(model), skip_tokenizer_init=True, kv_transfer_config=given, **arguments
    ).create_engine_config()


# --- the command line


def yaml_file(directory: Path) -> list[str]:
    file = directory / "serve.yaml"
    text = {"port": 1234, "kv-transfer-config": transfer(mode="pge")}
    file.write_text(json.dumps(text))  # which is YAML
    return ["--config", str(file)]


FORMS: dict[str, Callable[[Path], list[str]]] = {
    "json": lambda _: ["--kv-transfer-config", json.dumps(transfer(mode="pge"))],
    "equals": lambda _: [f"--kv-transfer-config={json.dumps(transfer(mode='pge'))}"],
    "underscores": lambda _: ["--kv_transfer_config", json.dumps(transfer(mode="pge"))],
    "dots": lambda _: [
        "--kv-transfer-config.kv_connector",
        CONNECTOR,
        "--kv-transfer-config.kv_role=kv_both",
        "--kv-transfer-config.kv_connector_extra_config.mode",
        "pge",
    ],
    "file": yaml_file,
    "child": lambda _: ["--kv-transfer-config", json.dumps(as_child(mode="pge"))],
}


@pytest.mark.parametrize("form", FORMS)
def test_options_are_read_however_they_are_given(
    form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["serve", "some/model", "--port", "1", *FORMS[form](tmp_path), "--no-such-flag"]
    with pytest.raises(SystemExit) as caught:
        check_command_line(arguments)
    assert caught.value.code == WRONG_ARGUMENTS
    assert capsys.readouterr().err == f"kv_connector_extra_config:\n  {WRONG}\n"


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["serve", "some/model"],
        ["serve", "some/model", "--kv-transfer-config", json.dumps(transfer(mode="page"))],
        ["serve", "some/model", "--kv-transfer-config", '{"kv_connector": "NixlConnector"}'],
        ["serve", "some/model", "--kv-transfer-config", "{"],
        ["serve", "some/model", "--kv-transfer-config"],
        ["serve", "some/model", "--kv-transfer-config", "[]"],
        ["serve", "some/model", "--config", "/no/such/file.yaml"],
        ["serve", "some/model", "--config", "no-yaml"],
        ["serve", "some/model", "--config"],
        ["serve", "some/model", "--kv-transfer-config.kv_connector"],
        ["serve", "--model", "some/model", "--kv-transfer-config", "{}"],
        ["serve", "some/model", "--config", "list.yaml"],
        ["serve", "some/model", "--config", "broken.yaml"],
    ],
)
def test_what_is_right_or_not_ours_is_left_to_vllm(
    arguments: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """It reads the same line next, and says then what is wrong with it: once."""
    monkeypatch.chdir(tmp_path)
    Path("list.yaml").write_text("- no mapping\n")
    Path("broken.yaml").write_text("a: [\n")
    check_command_line(arguments)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("child", [False, True])
def test_a_wrong_entry_of_a_tier_ends_the_start(
    child: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """vLLM itself makes no tier of it, and says nothing."""
    entry = {"type": "SSDKVTier", "module_path": "vllm_ssdkv.secondary_tier"}
    given: dict[str, object] = {
        "kv_connector": "OffloadingConnector",
        "kv_connector_extra_config": {"cpu_bytes_to_use": 1, "secondary_tiers": [entry]},
    }
    if child:
        children = {"connectors": [given]}
        given = {"kv_connector": "MultiConnector", "kv_connector_extra_config": children}
    with pytest.raises(SystemExit) as caught:
        check_command_line(["serve", "m", "--kv-transfer-config", json.dumps(given)])
    assert caught.value.code == WRONG_ARGUMENTS
    assert "spec_name: got null" in capsys.readouterr().err


def test_children_do_not_look_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spawned processes have the command line of the first."""
    monkeypatch.setattr(multiprocessing, "parent_process", object)
    check_command_line(["serve", "m", *FORMS["json"](Path())])


def test_plugins_are_loaded_before_the_command_line_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And what a plugin raises then is not caught: it is the end of the process."""
    monkeypatch.setattr(sys, "argv", ["vllm", "serve", "m", *FORMS["json"](Path())])
    monkeypatch.setattr(vllm.plugins, "plugins_loaded", False)
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    with pytest.raises(SystemExit, match=str(WRONG_ARGUMENTS)):
        AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())


# --- a configuration that is made


def test_the_class_is_looked_up_where_the_check_is() -> None:
    register()
    assert CONNECTOR_MODULE == "vllm_ssdkv.connector.front_end"
    assert KVConnectorFactory.get_connector_class_by_name(CONNECTOR) is SSDKVConnector


@pytest.mark.parametrize("given", [transfer(mode="pge"), as_child(mode="pge")])
def test_wrong_options_are_refused_in_our_words(given: dict[str, Any], model: Path) -> None:
    """The error is not wrapped: pydantic would do that with a ValueError."""
    with pytest.raises(ConfigError) as caught:
        create(model, given)
    assert str(caught.value) == f"kv_connector_extra_config:\n  {WRONG}"


def test_settings_that_do_not_go_together_are_refused(model: Path) -> None:
    with pytest.raises(UnsupportedError, match="--pipeline-parallel-size must be 1 in mode page"):
        create(model, transfer(mode="page"), pipeline_parallel_size=2)


def test_what_is_not_known_yet_is_not_refused(model: Path) -> None:
    """Attention backends may change the size of a block."""
    create(model, transfer(mode="page", hbm_window_tokens=64), block_size=128)


@pytest.mark.parametrize("wrapped", [transfer, as_child])
def test_workers_are_given_absolute_paths(
    wrapped: Callable[..., dict[str, Any]],
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    options = {"devices": ["kv", {"path": "~/b"}], "state_dir": "state"}
    config = create(model, wrapped(**copy.deepcopy(options)))
    assert config.kv_transfer_config is not None
    found = config.kv_transfer_config.kv_connector_extra_config
    found = found["connectors"][0]["kv_connector_extra_config"] if "connectors" in found else found
    home = os.path.expanduser("~")
    assert found == {
        "devices": [f"{tmp_path}/kv", {"path": f"{home}/b"}],
        "state_dir": f"{tmp_path}/state",
    }


def test_llm_refuses_before_there_is_a_process(model: Path) -> None:
    began = time.monotonic()
    with pytest.raises(ConfigError, match="did you mean devices") as caught:
        LLM(str(model), skip_tokenizer_init=True, kv_transfer_config=transfer(devcies=[]))
    assert time.monotonic() - began < SECONDS
    assert str(caught.value).startswith("kv_connector_extra_config:")
    assert multiprocessing.active_children() == []


def test_vllm_refuses_segments_that_move(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As docs/operations.md says; under the variable's newer name it does not look."""
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    create(model, transfer())
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    with pytest.raises(ValueError, match="KV connector SSDKVConnector is incompatible with"):
        create(model, transfer())


# --- a real server

SERVER = """
import sys, time
import vllm.entrypoints.cli.main as program
import vllm.entrypoints.cli.benchmark.main, vllm.entrypoints.cli.collect_env
import vllm.entrypoints.cli.download_kernels, vllm.entrypoints.cli.launch
import vllm.entrypoints.cli.openai, vllm.entrypoints.cli.preload
import vllm.entrypoints.cli.run_batch, vllm.entrypoints.cli.serve, vllm.entrypoints.cli.snapshot
began = time.monotonic()
try:
    program.main()
finally:
    print(time.monotonic() - began, flush=True)
"""
"""As the command ``vllm``, whose imports alone may take longer than :data:`SECONDS`."""


def test_vllm_serve_ends_at_once_with_the_reason_as_its_last_line(model: Path) -> None:
    flag = FORMS["json"](Path())
    done = subprocess.run(
        [sys.executable, "-P", "-c", SERVER, "serve", str(model), *flag],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == WRONG_ARGUMENTS
    assert done.stderr.rstrip().endswith(f"kv_connector_extra_config:\n  {WRONG}")
    assert "Traceback" not in done.stderr
    assert float(done.stdout.splitlines()[-1]) < SECONDS
