"""``ssdkv warm``: what it refuses before it sends, and a server that is not there. It warms in
``tests/examples``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from tests.kit.server import free_port
from vllm_ssdkv.cli.main import app

GOOD = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}


def warm(file: Path, *arguments: str) -> Result:
    return CliRunner().invoke(app, ["warm", str(file), *arguments])


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "line 3: "),
        (json.dumps({**GOOD, "body": None}), "line 3: "),
        (
            json.dumps({**GOOD, "url": "/v1/embeddings", "body": {"input": "x"}}),
            "line 3: embeddings leave no KV; leave the line out",
        ),
    ],
)
def test_a_bad_line_ends_it_before_anything_is_sent(line: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(f"{json.dumps(GOOD)}\n\n{line}\n")
    result = warm(file, "--url", "http://127.0.0.1:1/v1")
    assert result.exit_code == 1
    assert f"{file}: {said}" in result.stderr
    assert "cannot be reached" not in result.stderr


def test_without_a_server_the_way_out_is_told_once(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({**GOOD, "custom_id": str(i)}) + "\n" for i in range(9)))
    result = warm(file, "--url", f"http://127.0.0.1:{free_port()}/v1")
    assert result.exit_code == 1
    stderr = " ".join(result.stderr.split())
    assert stderr.count("start the server, or name another with --url") == 1
    assert "0 of 9 prompts warmed" in result.stdout
