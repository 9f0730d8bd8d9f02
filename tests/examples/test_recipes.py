"""Pages of recipes: the commands of each, in their order, with the demo's model."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.kit.commands import blocks, commands
from tests.kit.forks import Program
from tests.kit.server import Running, server
from tests.kit.waiting import until
from vllm_ssdkv.cli.main import app
from vllm_ssdkv.profiling.recall import recall

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "docs" / "recipes"
MOST_WORDS = 1_000
"""Words of all recipes together; those of the guides are counted without them."""
BIN = Path(sys.executable).parent
BLOCK = 128
"""vLLM's own block size on a CPU."""
SHORT = {"500GiB": "1GiB", "--turns 6": "--turns 4", "examples/": f"{ROOT}/examples/"}
"""Texts of the pages, and those that are run in their place."""
SMALL = ["--kv-cache-memory-bytes", "6M", "--max-model-len", "3584"]
"""A KV cache of about 4,000 tokens: the agents' histories do not fit."""
RUN_S = 300.0

engine = pytest.mark.engine


def test_recipes_are_short() -> None:
    pages = sorted(RECIPES.glob("*.md"))
    assert sum(len(page.read_text().split()) for page in pages) <= MOST_WORDS
    listed = (RECIPES / "README.md").read_text()
    assert [page.name for page in pages if f"({page.name})" not in listed] == ["README.md"]


class Reader:
    """Follows a page: has its servers run, and gives the output of its other commands."""

    def __init__(self, page: str, place: Path, device: Path) -> None:
        text = (RECIPES / page).read_text()
        given = {"MODEL": recall.MODEL_DIR, "/mnt/nvme0/kv": device, "/run/ssdkv": device.parent}
        for name, there in {**given, **SHORT}.items():
            text = text.replace(name, str(there))
        self.blocks = [block for language, block in blocks(text) if language == "sh"]
        self.place = place
        self.variables = {
            **os.environ,
            "TORCH_COMPILE_DISABLE": "1",
            "PATH": f"{BIN}:{os.environ['PATH']}",
        }

    def shell(self, block: str) -> str:
        """Output of a block that must succeed."""
        ended = subprocess.run(
            ["bash", "-e"],
            input=block,
            env=self.variables,
            cwd=self.place,
            capture_output=True,
            text=True,
            timeout=RUN_S,
            check=False,
        )
        assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-4000:]
        return ended.stdout

    @contextlib.contextmanager
    def server(self, block: str) -> Iterator[Running]:
        """The server of a block, forked, with a small KV cache; clients find it."""
        (words,) = (words for words in commands(block) if "serve" in words)
        if words[0] == "ssdkv":
            words = shlex.split(CliRunner().invoke(app, words[1:]).stdout)
        config = json.loads(words.pop())
        # With `load: auto` a busy machine may compute again what is stored.
        config.setdefault("kv_connector_extra_config", {})["load"] = "always"
        command = [str(BIN / "vllm"), *words[1:], json.dumps(config), *SMALL]
        log = self.place / "server.log"
        with server(command, self.variables, self.place, log, Program) as running:
            self.variables["OPENAI_BASE_URL"] = f"{running.url}/v1"
            yield running


@pytest.fixture
def follow(
    tmp_path: Path, tmp_devices: Callable[[int], list[Path]], monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], Reader]:
    """A reader of a page."""
    monkeypatch.setattr("os.execv", lambda *_: None)
    (device,) = tmp_devices(1)
    return lambda page: Reader(page, tmp_path, device)


def found(output: str) -> tuple[int, int]:
    """Tokens of prompts that were not computed, and all of them."""
    (match,) = re.findall(r"^(\d+) of (\d+) tokens found", output, re.MULTILINE)
    return int(match[0]), int(match[1])


@engine
def test_documents(follow: Callable[[str], Reader]) -> None:
    reader = follow("documents.md")
    serve, warm, ask = reader.blocks
    (reader.place / "documents").mkdir()
    words = recall.text(recall.ask("multikey", 2048, 0).prompt[1:])
    (reader.place / "documents" / "a.txt").write_text(words)
    with reader.server(serve):
        assert "1 of 1 prompts warmed" in reader.shell(warm)
        tokens, _ = found(reader.shell(ask))
    assert tokens >= 2048 // BLOCK * BLOCK - BLOCK


@engine
def test_an_agents_loop(follow: Callable[[str], Reader]) -> None:
    """Four histories of 2,400 tokens do not fit into the KV cache: the store gives them back."""
    reader = follow("agent.md")
    serve, loop = reader.blocks
    with reader.server(serve):
        tokens, of = found(reader.shell(loop))
    assert tokens > 0.5 * of


@engine
def test_chats(follow: Callable[[str], Reader]) -> None:
    reader = follow("chats.md")
    serve, talk, more = reader.blocks
    with reader.server(serve):
        first, _ = found(reader.shell(talk))
    with reader.server(serve):
        tokens, of = found(reader.shell(more))
    assert tokens > 0.5 * of
    assert tokens > first


@engine
def test_a_nightly_batch(follow: Callable[[str], Reader]) -> None:
    reader = follow("nightly-batch.md")
    (night,) = reader.blocks
    requests = (ROOT / "examples" / "batch.jsonl").read_text()
    lines = requests.replace('"model": "demo"', f'"model": "{recall.MODEL_DIR}"')
    (reader.place / "tonight.jsonl").write_text(lines)
    (command,) = commands(night)
    program = [str(BIN / command[0]), *command[1:], *SMALL]
    log = reader.place / "batch.log"
    assert Program(program, reader.variables, reader.place, log).wait(RUN_S) == 0, log.read_text()
    assert len((reader.place / "answers.jsonl").read_text().splitlines()) == 4
    assert re.search(r"4 requests answered; \d+ of \d+ prompt tokens saved", log.read_text())


@engine
def test_two_engines(follow: Callable[[str], Reader]) -> None:
    """One after the other here, which takes the memory of one."""
    reader = follow("two-engines.md")
    node, first, second, talk = reader.blocks
    words = next(words for words in commands(node) if words[0] == "ssdkv")
    listen = Path(words[words.index("--listen") + 1].removeprefix("unix://"))
    process = subprocess.Popen([str(BIN / "ssdkv"), *words[1:]], env=reader.variables)
    outputs = []
    try:
        until(listen.exists, "the node does not listen")
        for serve, line in zip((first, second), talk.splitlines(), strict=True):
            with reader.server(serve) as running:
                outputs.append(reader.shell(re.sub(r"http://localhost:\d+", running.url, line)))
    finally:
        process.terminate()
        assert process.wait(60) == 0
    (alone, _), (shared, of) = map(found, outputs)
    assert shared > 0.8 * of
    assert shared > alone
