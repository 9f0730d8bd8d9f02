"""Every example as a user runs it: real engines, KV in the default directory or on named ones.

Processes of Python programs are forked from one that has imported vLLM. `offline.py` compiles the
model as vLLM does by default; for the others that takes a minute each and shows nothing more.
"""

from __future__ import annotations

import json
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.kit.commands import check_vllm
from tests.kit.forks import Program
from tests.kit.server import server, started
from tests.kit.waiting import until
from vllm_ssdkv.cli.main import app
from vllm_ssdkv.profiling.recall import recall
from vllm_ssdkv.store.format.journal_record import HEADER_BYTES, RECORD_BYTES

EXAMPLES = Path(__file__).parents[2] / "examples"
RUN_S = 600.0
BLOCK = 128
"""vLLM's own block size on a CPU."""
PROMPTS = 100
"""Prompts of the file that `ssdkv warm` sends, each of its own."""
BLOCKS_WARMED = 12
"""Whole blocks of each."""
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


def planned(arguments: list[str]) -> list[str]:
    """The command that `ssdkv plan` prints."""
    result = CliRunner().invoke(app, ["plan", *arguments])
    assert result.exit_code == 0, result.stderr
    return shlex.split(result.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    "arguments",
    [
        ["llama-3.1-70b", "--weights", "fp8", "--kv-dtype", "fp8", "--prompt", "128K"],
        ["llama-3.1-70b", "--prompt", "64K", "--selectors", "adaptive"],
    ],
)
def test_the_commands_of_plans_are_valid(arguments: list[str], tmp_path: Path) -> None:
    """A limit of writes and 8 bits; page mode with a selector and a small chunk."""
    drives = "{kind: pm9a3, count: 2, endurance_bytes: 1.4e+15, paths: [/a, /b]}"
    machine = tmp_path / "machine.yaml"
    machine.write_text(f"gpu: h100-80\ngpus: 2\ndram: 256GiB\ndrives: [{drives}]\n")
    command = planned([*arguments, "--machine", str(machine), "--at-a-time", "2"])
    check_vllm(command[2:])
    assert command[2] == "meta-llama/Llama-3.1-70B"
    assert ("daily_write_budget" in command[-1]) == ("fp8" in arguments)


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


def test_serve_and_client(
    variables: dict[str, str], tmp_path: Path, tmp_devices: Callable[[int], list[Path]]
) -> None:
    """`ssdkv serve` as a plan has it, then the plan's own command, which finds what was stored."""
    binaries = Path(sys.executable).parent
    (place,) = tmp_devices(1)
    requests = ["--prompt", "4200", "--output", "200", "--at-a-time", "1", "--selectors", "exact"]
    _, *words = planned([str(recall.MODEL_DIR), "--device", str(place), *requests])
    *theirs, _, config = words[2:]
    (device,) = json.loads(config)["kv_connector_extra_config"]["devices"]
    theirs.append("--enable-prompt-tokens-details")
    # With `load: auto` a busy machine may compute again what is stored.
    transfer = json.loads(config)
    transfer["kv_connector_extra_config"]["load"] = "always"
    words = [*words[:2], *theirs, "--kv-transfer-config", json.dumps(transfer)]
    prompts = prompts_to_warm(tmp_path / "prompts.jsonl")
    ours = ["--device", device["path"], "--capacity", str(device["capacity"]), "--", *theirs]
    command = [str(binaries / "ssdkv"), "serve", str(recall.MODEL_DIR), *ours]
    start: Callable[..., Any] = started
    question = recall.ask("multikey", 4096, 0)
    # A first hit is verified: its last block is computed.
    for number, expected in enumerate((0, FOUND - BLOCK)):
        log = tmp_path / f"serve{number}.log"
        with server(command, variables, tmp_path, log, start) as running:
            if number == 0:
                process = Path(f"/proc/{running.session}/cmdline").read_bytes().split(b"\0")
                assert str(binaries / "vllm").encode() in process, "it became another program"
                assert log.read_text().startswith("vllm serve "), "it says what it becomes"
                command, start = [str(binaries / "vllm"), *words], Program
            client = [
                sys.executable,
                str(EXAMPLES / "serve_client.py"),
                "--url",
                f"{running.url}/v1",
            ]
            assert f"\nanswer: {recall.text(question.answer)}\n" in run(client, variables, tmp_path)
            assert metric(running.url, r"vllm:ssdkv_hit_tokens_total\{.*ssd") == expected
            warm = [str(binaries / "ssdkv"), "warm", str(prompts), "--url", f"{running.url}/v1"]
            if number == 0:
                warmed_with_a_break(warm, running.url, variables, tmp_path)
                # vLLM ends its engine at once: what is to be found again must be journalled.
                blocks = FOUND // BLOCK + PROMPTS * BLOCKS_WARMED
                wait_for_journal(Path(device["path"]) / "journal", blocks)
            else:
                told = json.loads(run([*warm, "--json"], variables, tmp_path))
                assert told["warmed"] == told["prompts"] == PROMPTS
                # Few hits are verified, and compute a block for that.
                stored = PROMPTS * BLOCKS_WARMED * BLOCK
                assert stored - 8 * BLOCK <= told["found"] <= stored


def prompts_to_warm(file: Path) -> Path:
    """A file of prompts that have nothing in common, as a batch has them."""
    draw = random.Random(0)
    lines = []
    for number in range(PROMPTS):
        tokens = [draw.randrange(16, 200) for _ in range(BLOCKS_WARMED * BLOCK + 9)]
        body = {"prompt": tokens, "max_tokens": 50, "n": 2}
        line = {"custom_id": str(number), "method": "POST", "url": "/v1/completions", "body": body}
        lines.append(json.dumps(line) + "\n")
    file.write_text("".join(lines))
    return file


def warmed_with_a_break(command: list[str], url: str, variables: dict[str, str], cwd: Path) -> None:
    """Have a server warm the prompts: Ctrl-C, a line that vLLM refuses, then all of them."""
    answered = r"vllm:request_success_total"
    before = metric(url, answered)
    first = subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, text=True)
    until(lambda: metric(url, answered) >= before + 5, "no prompt was warmed")
    first.send_signal(signal.SIGINT)
    text, _ = first.communicate(timeout=RUN_S)
    assert first.returncode == 130
    match = re.search(rf"(\d+) of {PROMPTS} prompts warmed", text)
    assert match is not None
    assert 0 < int(match[1]) < PROMPTS

    long = cwd / "long.jsonl"
    body = {"prompt": [16] * 9000}
    line = {"custom_id": "long", "method": "POST", "url": "/v1/completions", "body": body}
    long.write_text("\n" + json.dumps(line))
    refused = [*command[:2], str(long), *command[3:]]
    ended = subprocess.run(
        refused, env=variables, capture_output=True, text=True, timeout=RUN_S, check=False
    )
    assert ended.returncode == 1
    assert f"{long}:2: " in ended.stderr.replace("\n", "")
    assert "400" in ended.stderr

    told = json.loads(run([*command, "--json"], variables, cwd))
    assert told["warmed"] == told["prompts"] == PROMPTS
    assert told["prompt_tokens"] == PROMPTS * (BLOCKS_WARMED * BLOCK + 9)
    assert told["found"] > 0, "what was answered before the break is in HBM"


def wait_for_journal(journal: Path, blocks: int) -> None:
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
