"""Every example as a user runs it: real engines, KV in the default directory or on named ones.

Processes of Python programs are forked from one that has imported vLLM. `offline.py` compiles the
model as vLLM does by default; for the others that takes a minute each and shows nothing more.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.kit.forks import Program
from tests.kit.server import server, started
from tests.kit.waiting import until
from vllm_ssdkv.cli.main import app
from vllm_ssdkv.config.engine import SSDKVConfig
from vllm_ssdkv.profiling.recall import recall
from vllm_ssdkv.store.format.journal_record import HEADER_BYTES, RECORD_BYTES

EXAMPLES = Path(__file__).parents[2] / "examples"
RUN_S = 600.0
BLOCK = 128
"""vLLM's own block size on a CPU."""
FOUND = 4095 // BLOCK * BLOCK
"""Tokens of a prompt of 4096 that a second run finds: whole blocks, without the last token."""

pytestmark = [pytest.mark.engine, pytest.mark.timeout(2000)]


@pytest.fixture
def variables(tmp_devices: Callable[[int], list[Path]]) -> dict[str, str]:
    """Environment of an example: own cache directory, little memory, this Python's commands."""
    (cache,) = tmp_devices(1)
    return {
        **os.environ,
        "XDG_CACHE_HOME": str(cache),
        "TORCH_COMPILE_DISABLE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }


def run(command: list[str], variables: dict[str, str], cwd: Path) -> str:
    """Standard output of a command that must succeed."""
    ended = subprocess.run(
        command, env=variables, cwd=cwd, capture_output=True, text=True, timeout=RUN_S, check=False
    )
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-4000:]
    return ended.stdout


def printed(command: list[str], variables: dict[str, str], cwd: Path) -> str:
    """Output of a program of Python that must succeed."""
    log = cwd / "program.log"
    status = Program(command, variables, cwd, log).wait(RUN_S)
    text = log.read_text()
    assert status == 0, text[-8000:]
    return text


def metric(url: str, pattern: str) -> float:
    """Sum of the metrics whose line matches."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=60) as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if re.match(pattern, line))


def commands(page: Path) -> list[list[str]]:
    """The commands of a page that serve, in order, as the shell would split them."""
    text = page.read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if re.match(r"(vllm|ssdkv) serve", line)]
    return [shlex.split(line) for line in lines]


PAGES = [
    EXAMPLES / "README.md",
    EXAMPLES.parent / "docs" / "quickstart.md",
    EXAMPLES.parent / "README.md",
]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: f"{page.parent.name}/{page.name}")
def test_the_commands_on_the_pages_are_valid(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's own parser takes them, and our check of options."""
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    monkeypatch.setattr("os.execv", lambda *_: None)
    found = commands(page)
    assert found
    for program, *words in found:
        if program == "ssdkv":
            result = CliRunner().invoke(app, words)
            assert result.exit_code == 0, result.stderr
            words = shlex.split(result.stdout)[1:]  # noqa: PLW2901
        given = make_arg_parser(FlexibleArgumentParser()).parse_args(words[1:])
        validate_parsed_serve_args(given)
        config = given.kv_transfer_config
        assert (config.kv_connector, config.kv_role) == ("SSDKVConnector", "kv_both")
        SSDKVConfig.from_extra_config(config.kv_connector_extra_config)


OUTPUT = re.compile(r"(\d+) tokens, (\d+) from the store, first token after \S+ s: (.*)")


@pytest.mark.parametrize("mode", ["reuse", "page"])
def test_offline(
    mode: str,
    variables: dict[str, str],
    tmp_path: Path,
    tmp_devices: Callable[[int], list[Path]],
) -> None:
    command = [str(EXAMPLES / "offline.py")]
    if mode == "page":
        command.append("--page")
        for device in tmp_devices(2):
            command += ["--device", str(device)]
    del variables["TORCH_COMPILE_DISABLE"]
    # What is found after a restart, the next test sees, and in page mode the demo's.
    found = [match.groups() for match in OUTPUT.finditer(printed(command, variables, tmp_path))]
    assert [(tokens, int(stored)) for tokens, stored, _ in found] == [("4096", 0)] * 4
    for (_, _, text), task in zip(found, recall.TASKS, strict=True):
        assert text.strip().startswith(recall.text(recall.ask(task, 4096, 0).answer))
    if mode == "reuse":
        assert (Path(variables["XDG_CACHE_HOME"]) / "ssdkv").is_dir()


def test_a_pool_of_nodes(variables: dict[str, str], tmp_path: Path) -> None:
    """The second engine finds everything, with a node less."""
    variables["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # a process less of each engine
    text = run([str(EXAMPLES / "pool" / "run.sh"), str(tmp_path / "pool")], variables, tmp_path)
    found = [int(match.group(2)) for match in OUTPUT.finditer(text)]
    assert found[:4] == [0] * 4
    # First hits are verified, until one was found right: their last block is computed.
    assert found[4] == FOUND - BLOCK
    assert set(found[4:]) <= {FOUND - BLOCK, FOUND}
    assert len(found) == 8
    assert re.search(r"^b\b.*stopped", text, re.MULTILINE)


def test_serve_and_client(variables: dict[str, str], tmp_path: Path) -> None:
    """No option: reuse mode, default directory; found again by the command that was printed."""
    binaries = Path(sys.executable).parent
    assert commands(EXAMPLES / "README.md")[0] == ["ssdkv", "serve", "$(ssdkv demo-model)"]
    command = [str(binaries / "ssdkv"), "serve", str(recall.MODEL_DIR), "--"]
    start: Callable[..., Any] = started
    question = recall.ask("multikey", 4096, 0)
    # A first hit is verified: its last block is computed.
    for number, expected in enumerate((0, FOUND - BLOCK)):
        log = tmp_path / f"serve{number}.log"
        with server(command, variables, tmp_path, log, start) as running:
            if number == 0:
                process = Path(f"/proc/{running.session}/cmdline").read_bytes().split(b"\0")
                assert str(binaries / "vllm").encode() in process, "it became another program"
                _, *words = shlex.split(log.read_text().splitlines()[0])
                command, start = [str(binaries / "vllm"), *words], Program
            client = [
                sys.executable,
                str(EXAMPLES / "serve_client.py"),
                "--url",
                f"{running.url}/v1",
            ]
            assert f"\nanswer: {recall.text(question.answer)}\n" in run(client, variables, tmp_path)
            assert metric(running.url, r"vllm:ssdkv_hit_tokens_total\{.*ssd") == expected
            if number == 0:
                # vLLM ends its engine at once: what is to be found again must be journalled.
                wait_for_journal(Path(variables["XDG_CACHE_HOME"]), FOUND // BLOCK)


def wait_for_journal(cache: Path, blocks: int) -> None:
    (journal,) = cache.glob("ssdkv/*/journal")
    until(
        lambda: journal.stat().st_size >= HEADER_BYTES + blocks * RECORD_BYTES,
        "the blocks were not journalled",
    )


def test_a_batch_of_a_file(variables: dict[str, str], tmp_path: Path) -> None:
    results = tmp_path / "results.jsonl"
    run([str(EXAMPLES / "run_batch.sh"), str(results)], variables, tmp_path)
    requests = [json.loads(line) for line in (EXAMPLES / "batch.jsonl").read_text().splitlines()]
    answers = {
        line["custom_id"]: line["response"]["body"]["choices"][0]["message"]["content"]
        for line in map(json.loads, results.read_text().splitlines())
    }
    assert len(requests) == len(answers) == 4
    for request in requests:
        prompt = request["body"]["messages"][0]["content"]
        document, _, key = prompt.rpartition(" ? ")
        (value,) = re.findall(rf"\b{re.escape(key)} (\w+ \w+ \w+ \w+ ;)", document)
        assert answers[request["custom_id"]].strip() == value
