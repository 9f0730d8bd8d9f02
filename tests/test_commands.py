"""Commands of the documents: each is taken by the parser of its program, or is in a list with a
test that runs it, or with the reason why none does."""

from __future__ import annotations

import argparse
import functools
import re
import runpy
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.core import TyperCommand
from typer.testing import CliRunner

from tests.kit.commands import blocks, check_connector, check_vllm, commands
from vllm_ssdkv.cli.main import app
from vllm_ssdkv.profiling.recall.recall import MODEL_DIR

ROOT = Path(__file__).parent.parent
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "examples/README.md")),
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "docs" / "recipes").glob("*.md")),
]
FILES = (
    *("A.txt", "B.py", "documents.jsonl", "in.jsonl", "machine.yaml", "pool.yaml"),
    "tonight.jsonl",
)
FOLDERS = ("DIR", "MODEL", "build/text-model", "etc/ssdkv/keys", "mnt/nvme0", "mnt/nvme1", "texts")
"""What is there before a command that names it: by the reader, or by a command before it."""

COMMAND: Any = typer.main.get_command(app)

RUN = {
    "examples/pool/run.sh": "tests/examples/test_examples.py::test_a_pool_of_nodes",
    "examples/run_batch.sh": "tests/examples/test_examples.py::test_a_batch_of_a_file",
    "python -": "tests/examples/test_recipes.py::test_documents",
    "scripts/gpu/run.sh --rehearse": (
        "tests/profiling/test_gpu_pack.py::test_engines_of_vllm_give_the_tokens_of_stock"
    ),
    "python examples/offline.py": "tests/examples/test_examples.py::test_offline",
}
"""Commands that no parser takes here, by how they begin, and the tests that run them."""
NOT_RUN = {
    ".venv/bin/pre-commit install": "writes into the checkout's .git",
    "docker compose": "no container runtime; tests/deploy/test_images.py checks the file",
    "kubectl apply": "no cluster; tests/deploy/test_kubernetes.py checks the manifests",
    "mkdir": "the system's",
    "openssl rand": "the system's; tests/store/format reads such a key",
    "pip install": "the package index",
    "scripts/gpu/pack.sh": "downloads vLLM's wheel for GPUs",
    "scripts/gpu/run.sh --out": "a GPU",
    "sudo install": "root",
    "umask": "the shell's",
}
"""Commands that no test runs, by how they begin, and the reason."""


FOUND = [
    (str(page.relative_to(ROOT)), command)
    for page in PAGES
    for language, block in blocks(page.read_text())
    if language == "sh"
    for command in commands(block)
]


def listed(command: list[str]) -> bool:
    text = " ".join(command)
    return any(text.startswith(known) for known in [*RUN, *NOT_RUN])


def identity(part: str | list[str]) -> str:
    return part if isinstance(part, str) else " ".join(part)[:60]


class Taken(BaseException):
    """The program's own parser took its arguments."""


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A working directory with the files that the commands name; programs end after parsing."""
    monkeypatch.chdir(tmp_path)
    for name in FILES:
        Path(name).touch()
    for name in FOLDERS:
        Path(name).mkdir(parents=True)
    monkeypatch.syspath_prepend(ROOT / "examples" / "guests")
    monkeypatch.setattr("os.execv", lambda *_: None)


def check_ssdkv(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the command line take the words; a server's are checked as vLLM's are."""
    with monkeypatch.context() as patch:
        if words[0] != "serve":
            patch.setattr(TyperCommand, "invoke", lambda *_: None)
        result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    if words[0] == "serve":
        check_vllm(shlex.split(result.stdout)[2:])
    elif words[:2] == ["batch", "run"]:
        from vllm.entrypoints.launchers.run_batch import make_arg_parser
        from vllm.utils.argparse_utils import FlexibleArgumentParser

        given = make_arg_parser(FlexibleArgumentParser()).parse_args(
            ["-i", words[2], "-o", words[3], *words[4:]]
        )
        check_connector(given.kv_transfer_config)


def check_python(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a program of ours read its arguments, and no more."""
    given = argparse.ArgumentParser.parse_args

    def parse(*arguments: Any, **names: Any) -> None:  # noqa: ANN401
        given(*arguments, **names)
        raise Taken

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse)
    name, *rest = (word for word in words if word not in {"-P", "-m"})
    monkeypatch.setattr("sys.argv", [name, *rest])
    module = functools.partial(runpy.run_module, name)
    program = module if "-m" in words else functools.partial(runpy.run_path, str(ROOT / name))
    with pytest.raises(Taken):
        program(run_name="__main__")


@pytest.mark.parametrize(("page", "command"), FOUND, ids=identity)
def test_a_command_is_taken(page: str, command: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [word.replace("$(ssdkv lab demo-model)", str(MODEL_DIR)) for word in command]
    words = [re.sub("^/(?=mnt/|etc/)", "", text) for text in texts]
    match words:
        case _ if listed(words):
            pass
        case ["ssdkv" | ".venv/bin/ssdkv", *rest]:
            check_ssdkv(rest, monkeypatch)
        case ["vllm", "serve", *rest]:
            check_vllm(rest)
        case ["python", *rest]:
            check_python(rest, monkeypatch)
        case ["make", target]:
            assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
        case _:
            pytest.fail(f"{page}: no test takes it, and no list says why")


def test_no_block_hides_what_it_is() -> None:
    """A block without a language would be looked over."""
    unnamed = [page for page in PAGES if any(not name for name, _ in blocks(page.read_text()))]
    assert unnamed == []
    assert len(FOUND) > 80


def test_the_lists_are_of_today() -> None:
    texts = [" ".join(command) for _, command in FOUND]
    for known in [*RUN, *NOT_RUN]:
        assert any(text.startswith(known) for text in texts), known
    for test in RUN.values():
        file, _, name = test.partition("::")
        assert f"def {name}(" in (ROOT / file).read_text()


def lost(span: str) -> set[str]:
    """Words of a command within a sentence that are no command or option of ours."""
    command = COMMAND
    context = command.make_context("ssdkv", [], resilient_parsing=True)
    words = span.split()[1:]
    while words and hasattr(command, "commands"):
        found = command.get_command(context, words[0])
        if found is None:
            break
        command, words = found, words[1:]
    known = {name for parameter in command.get_params(context) for name in parameter.opts}
    options = {word.partition("=")[0] for word in words if word.startswith("--")}
    stray = {words[0]} - options if words and hasattr(command, "commands") else set()
    return (options - known) | stray


def test_commands_in_sentences_exist() -> None:
    found = [
        (page.name, span)
        for page in PAGES
        for span in re.findall(r"`(ssdkv (?!node: )[^`]+)`", page.read_text())
    ]
    assert len(found) > 100
    assert [(page, span, words) for page, span in found if (words := lost(span))] == []


def test_lost_words_and_all_commands_of_a_block_are_seen() -> None:
    assert lost("ssdkv fsck --repair DIR") == lost("ssdkv lab bench io") == set()
    assert lost("ssdkv fsk --repair DIR") == {"fsk", "--repair"}
    block = "a='b  c'\n$a -d 'e\nf' > g & h # i\nJ=1 k - <<'L'\nm\nL\n(n; o \\\n p)\n"
    assert list(commands(block)) == [["b", "c", "-d", "e\nf"], ["h"], ["k", "-"], ["n"], ["o", "p"]]
