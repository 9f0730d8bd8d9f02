"""``ssdkv node keys``: files for two sides, and none that is there is touched."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from vllm_ssdkv.cli.main import app
from vllm_ssdkv.node.protocol.credentials import Credentials

FILES = ["authority.pem", "node.pem", "node-key.pem", "engine.pem", "engine-key.pem"]


def keys(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["node", "keys", *map(str, arguments)])


def test_keys_are_for_their_owner_and_fit_together(tmp_path: Path) -> None:
    directory = tmp_path / "new" / "keys"
    result = keys(directory)
    assert result.exit_code == 0, result.output
    assert result.stdout.split() == [str(directory / name) for name in FILES]
    assert {path.stat().st_mode & 0o777 for path in directory.iterdir()} == {0o600}
    assert directory.stat().st_mode & 0o777 == 0o700
    for side in ("node", "engine"):
        Credentials.load(directory, side)


def test_json_names_the_files(tmp_path: Path) -> None:
    result = keys(tmp_path, "--days", 7, "--json")
    assert json.loads(result.stdout) == {"files": [str(tmp_path / f) for f in FILES], "days": 7}


@pytest.mark.parametrize("there", FILES)
def test_keys_are_never_overwritten(tmp_path: Path, there: str) -> None:
    (tmp_path / there).write_text("mine")
    result = keys(tmp_path)
    assert result.exit_code == 1
    assert f"{there} is there already" in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == [there]
    assert (tmp_path / there).read_text() == "mine"


def test_a_directory_that_cannot_be_made_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    result = keys(tmp_path / "file" / "keys")
    assert result.exit_code == 1
    assert "cannot write keys to" in result.stderr
