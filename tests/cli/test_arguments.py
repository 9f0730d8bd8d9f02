"""Paths, sizes and lists mean the same in all commands, and JSON is alone on the output."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
import typer
from typer.testing import CliRunner

from vllm_ssdkv.cli import arguments
from vllm_ssdkv.cli.main import app

READERS = {
    arguments.place,
    arguments.directory,
    arguments.directory_to_write,
    arguments.file_to_read,
    arguments.file_to_write,
}


def callbacks(app: typer.Typer) -> Iterator[Callable[..., object]]:
    """The functions behind all commands."""
    yield from (command.callback for command in app.registered_commands if command.callback)
    for group in app.registered_groups:
        assert group.typer_instance is not None
        yield from callbacks(group.typer_instance)


def test_every_path_is_read_in_one_way() -> None:
    """What a command takes as a path is given to one of these functions."""
    read = 0
    for callback in callbacks(app):
        for name, hint in get_type_hints(callback, include_extras=True).items():
            inner = [hint, *get_args(hint)]
            if not any("Path" in str(part) for part in inner):
                continue
            (parser,) = [part.parser for part in inner if hasattr(part, "parser")]
            assert parser in READERS, f"{callback.__name__}: {name}"
            read += 1
    assert read > 15


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "home" / "ssd").mkdir(parents=True)
    (tmp_path / "now" / "ssd").mkdir(parents=True)
    (tmp_path / "now" / "file").touch()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path / "now")
    return tmp_path


def test_paths_may_be_relative_or_at_home(here: Path) -> None:
    for reader in READERS - {arguments.file_to_read, arguments.file_to_write}:
        assert reader("ssd") == reader("./x/../ssd/") == here / "now" / "ssd"
        assert reader("~/ssd") == here / "home" / "ssd"
        assert reader(str(here / "home")) == here / "home"
    assert arguments.file_to_read("file") == arguments.file_to_write("file") == Path.cwd() / "file"
    assert arguments.file_to_write("~/new") == here / "home" / "new"
    assert arguments.place("new/er") == here / "now" / "new" / "er"


def test_a_working_directory_that_is_gone_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(typer.BadParameter, match="x: the working directory was removed"):
        arguments.place("x")
    assert arguments.place("/x") == Path("/x")


@pytest.mark.parametrize(
    ("reader", "text", "reason"),
    [
        (arguments.place, "~no-such-user/x", "there is no such user"),
        (arguments.directory, "missing", "/now/missing is not a directory"),
        (arguments.directory, "file", "/now/file is not a directory"),
        (arguments.file_to_read, "missing", "/now/missing does not exist"),
        (arguments.file_to_read, "ssd", "/now/ssd is a directory"),
        (arguments.file_to_write, "missing/x", "/now/missing is not a directory"),
        (arguments.file_to_write, "ssd", "/now/ssd is a directory"),
        (arguments.size, "64Gb", "'64Gb': 'Gb' may mean bits"),
    ],
)
def test_what_cannot_be_is_said_before_the_work(
    here: Path, reader: object, text: str, reason: str
) -> None:
    assert callable(reader)
    with pytest.raises(typer.BadParameter, match=reason):
        reader(text)


@pytest.mark.parametrize("where", ["ssd", "~/ssd", "."])
def test_commands_take_such_paths(where: str, here: Path) -> None:
    for command in (["ls", where], ["quota", where]):
        result = CliRunner().invoke(app, command)
        assert (result.exit_code, result.stdout) == (0, "no stores\n")
    result = CliRunner().invoke(app, ["inspect", where])
    assert result.exit_code == 1
    assert f"no store.json in {Path(where).expanduser().absolute()}" in result.stderr


def test_what_engines_print_does_not_mix_with_results() -> None:
    program = """
import subprocess
from vllm_ssdkv.cli import arguments
print("before")
with arguments.output_for_results():
    print("from Python")
    subprocess.run(["echo", "from a child"])
arguments.print_json({"a": 1})
"""
    done = subprocess.run(
        [sys.executable, "-P", "-c", program],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stdout == 'before\n{\n  "a": 1\n}\n'
    assert sorted(done.stderr.splitlines()) == ["from Python", "from a child"]


def test_lists_are_read_in_one_way() -> None:
    assert arguments.numbers("--n", "2,0.5", 0.5, 2) == [2, 0.5]
    assert arguments.whole_numbers("--n", "8,1,8", 1, 8) == [1, 8]
    assert arguments.names("--n", "b,a,b", ("a", "b")) == ["b", "a"]
    for text in ("", "1,", "x", "0", "9", "nan"):
        with pytest.raises(typer.BadParameter, match="numbers from 1 to 8"):
            arguments.numbers("--n", text, 1, 8)
    with pytest.raises(typer.BadParameter, match="whole numbers from 1 to 8"):
        arguments.whole_numbers("--n", "1.5", 1, 8)
    for text in ("", "a,", "c"):
        with pytest.raises(typer.BadParameter, match="any of a, b"):
            arguments.names("--n", text, ("a", "b"))
